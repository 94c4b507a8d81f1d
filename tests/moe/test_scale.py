"""The formulas of the predictions against brute-force counts, and against published times."""

import dataclasses
import itertools

import numpy as np
import pytest

from deepinfer_moe import BalanceError, Layout, Plan, initial_plan
from deepinfer_moe.scale import DEVICES, MODEL, Model, Scenario, Traffic, simulate_sizes, time_layer
from deepinfer_moe.scale.formulas import (
    align_rows,
    distinct_devices,
    expected_active,
    noise_floor,
    tile_rows,
)
from deepinfer_moe.scale.layer_time import exchange_bytes
from deepinfer_moe.scale.sweep import draw_rows

pytestmark = pytest.mark.torchless


@pytest.mark.parametrize(
    ("experts", "k", "devices"), [(8, 3, 4), (12, 4, 3), (10, 2, 10), (9, 5, 1)]
)
def test_distinct_devices_equal_the_mean_over_all_choices(experts, k, devices):
    here = experts // devices
    choices = list(itertools.combinations(range(experts), k))
    total = sum(len({expert // here for expert in choice}) for choice in choices)
    assert distinct_devices(experts, k, devices) == pytest.approx(total / len(choices))


def test_distinct_devices_of_the_model_are_the_known_ones():
    got = [round(distinct_devices(384, 6, devices), 2) for devices in (4, 8, 16, 32, 64)]
    assert got == [3.30, 4.43, 5.17, 5.58, 5.81]


def test_wire_sizes_and_expert_bytes_of_the_model_are_the_known_ones():
    traffic = Traffic.of(MODEL)
    assert (traffic.dispatch_bytes, traffic.combine_bytes) == (5376, 10304)
    assert MODEL.expert_bytes == pytest.approx(18.8e6, rel=1e-3)


def test_exchanged_bytes_equal_counting_every_token_of_every_choice():
    """Each device has one token per choice of experts, so that means are exact."""
    model = Model(num_experts=8, experts_per_token=3, hidden_size=64, expert_size=32)
    traffic, devices, here = Traffic.of(model), 4, 2
    sent, received = np.zeros(devices), np.zeros(devices)
    back_out, back_in, rows = np.zeros(devices), np.zeros(devices), np.zeros(devices)
    choices = list(itertools.combinations(range(8), 3))
    for source, choice in itertools.product(range(devices), choices):
        for target in {expert // here for expert in choice} - {source}:
            sent[source] += traffic.dispatch_bytes
            received[target] += traffic.dispatch_bytes
        for expert in choice:
            rows[expert // here] += 1
            if expert // here != source:
                back_out[expert // here] += traffic.combine_bytes
                back_in[source] += traffic.combine_bytes
    predicted = exchange_bytes(rows, len(choices), model)
    for got, want in zip(predicted, (sent, received, back_out, back_in), strict=True):
        np.testing.assert_allclose(got, want)


def test_expected_active_slots_equal_the_mean_of_draws():
    mean = np.array([0.05, 0.5, 2.0, 8.0])
    drawn = np.random.default_rng(0).poisson(mean, (200_000, 4)) > 0
    # four deviations of a mean of 200 000 draws
    np.testing.assert_allclose(expected_active(mean), drawn.mean(axis=0), atol=0.0045)


def test_aligned_rows_equal_counting_tiles():
    rows = np.array([0.0, 1.0, 15.0, 16.0, 17.0, 100.0])
    counted = [16 * sum(1 for start in range(0, int(n), 16)) for n in rows]
    assert align_rows(rows, 16).tolist() == counted
    assert [tile_rows(mean) for mean in (1, 10, 11, 24, 25, 64, 65)] == [
        16,
        16,
        32,
        32,
        64,
        64,
        128,
    ]


@pytest.mark.parametrize(("devices", "mean"), [(64, 384), (64, 3072), (256, 768)])
def test_noise_floor_is_near_the_mean_of_draws(devices, mean):
    drawn = np.random.default_rng(1).poisson(mean, (2000, devices))
    excess = (drawn.max(axis=-1) / drawn.mean(axis=-1)).mean() - 1
    # the bound is for many devices; for these it is up to a quarter too high
    assert 0.75 * (noise_floor(devices, mean) - 1) < excess < noise_floor(devices, mean) - 1


def test_drawn_rows_sum_to_all_rows_and_follow_the_shares():
    plan = Plan(num_devices=2, phy2log=np.array([[0, 1, 0, 2]]), share=np.array([[0.2, 1, 0.8, 1]]))
    part = np.array([[0.5, 0.3, 0.2]])
    generator = np.random.default_rng(2)
    rows = np.stack([draw_rows(plan, part, 1000, generator)[0] for _ in range(200)])
    assert rows.sum(axis=-1).tolist() == [1000.0] * 200
    np.testing.assert_allclose(rows.mean(axis=0), [100, 300, 400, 200], rtol=0.02)


FLASH = Model(num_layers=1, num_experts=256, hidden_size=4096, expert_size=2048)


@pytest.mark.parametrize(
    ("tokens", "microseconds"), [(1, 56.5), (512, 146.5), (8192, 1283.0), (32768, 4856.0)]
)
def test_fused_layer_on_8_devices_is_within_15_percent_of_published_times(tokens, microseconds):
    """Times of the published fused kernel, 256 experts, 6 a token, 4096 x 2048."""
    rows = np.full((8, 32), tokens * 8 * 6 / 256)
    got = time_layer(rows, tokens, FLASH, DEVICES["sm100"]).total_g.max() * 1e6
    assert abs(got / microseconds - 1) < 0.15


@pytest.mark.parametrize(
    ("tokens", "microseconds"), [(1, 108.1), (512, 369.6), (8192, 2818.5), (32768, 10655.0)]
)
def test_a_model_that_nothing_was_fitted_to_is_within_30_percent(tokens, microseconds):
    """Times of the same kernel, 384 experts, 7168 x 3072."""
    model = Model(hidden_size=7168, expert_size=3072)
    rows = np.full((8, 48), tokens * 8 * 6 / 384)
    got = time_layer(rows, tokens, model, DEVICES["sm100"]).total_g.max() * 1e6
    assert abs(got / microseconds - 1) < 0.30


def test_a_layer_lasts_as_long_as_its_busiest_device():
    even = np.full((16, 4), 2000.0)
    hot = even.copy()
    hot[3, 0] *= 10
    device = DEVICES["sm90"]
    slow, fast = (time_layer(rows, 5333, MODEL, device).total_g for rows in (hot, even))
    assert int(slow.argmax()) == 3
    assert slow.max() > 1.2 * fast.max()
    assert slow[0] == pytest.approx(fast[0])


def test_slots_without_rows_are_not_read():
    rows = np.array([[1.0, 0.0], [1.0, 1.0]])
    times = time_layer(rows, 1, MODEL, DEVICES["sm90"]).gemm_g
    assert times[1] == pytest.approx(2 * times[0], rel=0.01)


def test_balancing_shortens_layers_and_their_tail_where_experts_are_hot():
    scenario = Scenario(num_tokens=512, num_layers=2, num_steps=4)
    points = list(simulate_sizes([64], ["none", "balanced"], scenario, DEVICES["sm90"]))
    none, ours = points
    assert ours.max_over_mean < none.max_over_mean
    assert ours.layer_us < none.layer_us
    assert ours.layer_p99_us < none.layer_p99_us
    assert ours.layer_us >= 0.99 * ours.even_us
    again = list(simulate_sizes([64], ["none", "balanced"], scenario, DEVICES["sm90"]))
    assert [dataclasses.asdict(p) for p in again] == [dataclasses.asdict(p) for p in points]


def test_more_devices_than_experts_can_be_simulated():
    scenario = Scenario(num_layers=1, num_steps=1)
    (point,) = simulate_sizes([512], ["balanced"], scenario, DEVICES["sm100"])
    assert point.num_slots == 1024


def test_sizes_without_meaning_are_refused():
    with pytest.raises(BalanceError, match="1 devices share nothing"):
        list(simulate_sizes([1], ["none"], Scenario(), DEVICES["sm90"]))
    with pytest.raises(BalanceError, match="at least 1"):
        list(simulate_sizes([8], ["none"], Scenario(num_tokens=0), DEVICES["sm90"]))


def test_the_first_layout_repeats_the_first_experts():
    plan = initial_plan(1, 4, Layout(num_slots=6, num_devices=2))
    assert plan.phy2log.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert plan.share.tolist() == [[0.5, 0.5, 1, 1, 0.5, 0.5]]
