"""The sampler against the plain version: tokens, log-probabilities, cuts, ties and faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.sampling import plain

from deepinfer.sampling import Sampler, Samples, SamplingTable
from deepinfer.sampling.device import sample_on_device
from deepinfer.sampling.truncation import keep_mask, scaled
from deepinfer.sampling_params import SamplingParams

INF, NAN = math.inf, math.nan


def sample(
    logits: np.ndarray | list[list[float]],
    params: list[SamplingParams],
    seeds: list[int],
    positions: list[int],
) -> Samples:
    l_rv = np.asarray(logits, np.float32)
    table = plain.table_of(params, seeds, l_rv.shape[1])
    count = np.arange(len(params))
    rows = table.rows(count + 1, np.array(positions), count)
    return Sampler(l_rv.shape[1])(torch.from_numpy(l_rv), rows)


def kept(logits: list[float], params: SamplingParams) -> list[int]:
    """Ids that truncation leaves."""
    l_rv = np.array([logits], np.float32)
    max_r, inv_r = l_rv.max(-1), np.array([1 / params.temperature], np.float32)
    top_k = params.top_k if params.top_k > 0 else l_rv.shape[1]
    e_rv = np.exp(scaled(l_rv, max_r, inv_r))
    cut = np.array([top_k]), np.array([params.top_p]), np.array([params.min_p], np.float32)
    return np.flatnonzero(keep_mask(l_rv, e_rv, max_r, inv_r, *cut)[0]).tolist()


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """Flat, peaked, with ties, and with tokens that are ruled out."""
    l_rv = rng.standard_normal((num_rows, vocab_size)) * rng.choice([0.01, 1, 4, 30], (num_rows, 1))
    for row in range(num_rows):
        if row % 3 == 0:
            l_rv[row] = np.round(l_rv[row])
        if row % 4 == 1:
            l_rv[row, rng.random(vocab_size) < 0.5] = -INF
            l_rv[row, rng.integers(vocab_size)] = 1.0
    return l_rv.astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 17, 63, 300])
def test_tokens_and_logprobs_equal_the_plain_version(vocab_size: int) -> None:
    """Float64 in Python: what rounding of float32 could turn around is left out, and is little."""
    rng = np.random.default_rng(vocab_size)
    left_out, count = 0, 60
    params, seeds = plain.random_params(rng, count), plain.random_seeds(rng, count)
    positions = rng.integers(0, 10**6, count).tolist()
    l_rv = random_logits(rng, count, vocab_size)
    samples = sample(l_rv, params, seeds, positions)
    for row, one in enumerate(params):
        logits = l_rv[row].tolist()
        want = plain.process(logits, one)
        want_token, lead = plain.token(want, seeds[row], positions[row])
        if want.is_near_cut or (lead < 1e-5 and not one.is_greedy):
            left_out += 1
            continue
        found = int(samples.token_ids[row])
        assert found == (want.order[0] if one.is_greedy else want_token)
        lps = want.logprobs if one.logprobs_mode == "processed" else plain.log_softmax(logits)
        lps = [max(x, plain.FLOOR) for x in lps]
        if one.logprobs is None:
            continue
        assert samples.logprobs is not None
        assert samples.logprobs[row].item() == pytest.approx(lps[found], rel=1e-6, abs=2e-6)
        if one.logprobs:
            assert samples.top_ids is not None
            assert samples.top_logprobs is not None
            some = min(one.logprobs, vocab_size)
            assert samples.top_ids[row, :some].tolist() == want.order[:some]
            assert samples.top_logprobs[row, :some].tolist() == pytest.approx(
                [lps[v] for v in want.order[:some]], rel=1e-6, abs=2e-6
            )
            assert (samples.top_ids[row, some:] == -1).all()
            assert (samples.top_logprobs[row, some:] == plain.FLOOR).all()
    assert left_out < count / 4


ADVERSARIAL = {
    "equal": lambda v: np.zeros(v),
    "two values": lambda v: np.arange(v) % 2 * 1.0,
    "normal": lambda v: np.random.default_rng(1).standard_normal(v),
    "one far ahead": lambda v: np.eye(1, v, v // 2)[0] * 40,
    "one 26 ahead": lambda v: np.eye(1, v, v - 1)[0] * 26,  # the range of the noise
    "one 13 ahead": lambda v: np.eye(1, v, 0)[0] * 13,
    "steep": lambda v: -np.arange(v) * 0.1,
    "steps of an ulp": lambda v: 1 + np.arange(v) * 2.0**-23,
    "huge": lambda v: np.linspace(-3e38, 3e38, v),
    "tiny": lambda v: np.linspace(-1e-40, 1e-40, v),
    "half ruled out": lambda v: np.where(np.arange(v) % 2, -INF, np.linspace(-1, 1, v)),
    "like a model": lambda v: np.random.default_rng(2).gumbel(size=v) * 3,
}


@pytest.mark.parametrize("vocab_size", [512, 5003, 40_000])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_token_is_exactly_that_of_noise_for_all_tokens(name: str, vocab_size: int) -> None:
    l_v = ADVERSARIAL[name](vocab_size).astype(np.float32)
    rng = np.random.default_rng(9)
    cuts = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}]
    params = [SamplingParams(temperature=t, **c) for t in (0.2, 1.0, 5.0, 1e6) for c in cuts]
    seeds = plain.random_seeds(rng, len(params))
    for first in (0, 1000):
        positions = list(range(first, first + len(params)))
        samples = sample(np.tile(l_v, (len(params), 1)), params, seeds, positions)
        for row, one in enumerate(params):
            keep_v = np.zeros(vocab_size, bool)
            keep_v[kept(l_v.tolist(), one)] = True
            scores = plain.full_scores(l_v, keep_v, one, seeds[row], positions[row])
            assert int(samples.token_ids[row]) == scores.argmax()


@pytest.mark.parametrize(("lead", "winner"), [(25.25, 6642), (25.3, 123_223)])
@pytest.mark.parametrize("others", [-INF, 0.0], ids=["two tokens", "all tokens"])
def test_token_far_below_the_largest_wins_where_the_noise_is_that_far_apart(
    others: float, lead: float, winner: int
) -> None:
    """At this seed and position token 6642 has the largest noise there is (its word is 0), and
    token 123,223 almost the smallest; 25.272 lie between them.
    """
    l_v = np.full(129_280, others)
    l_v[6642], l_v[123_223] = 0, lead
    assert sample([l_v.tolist()], [SamplingParams()], [7], [2691]).token_ids.tolist() == [winner]


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 512, 5003])
def test_definition_for_other_devices_gives_the_same(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size + 1)
    count = 40
    params, seeds = plain.random_params(rng, count), plain.random_seeds(rng, count)
    table = plain.table_of(params, seeds, vocab_size)
    banned = SamplingParams(min_tokens=50, logprobs=3, logprobs_mode="processed")
    table.set(7, banned, 3, [0] if vocab_size > 1 else [])
    index = np.arange(count)
    rows = table.rows(index + 1, index * 1000, index)
    l_rv = random_logits(rng, count, vocab_size)
    l_rv[3, 0], l_rv[5, 0], l_rv[9] = NAN, INF, -INF
    logits_rv = torch.from_numpy(l_rv)
    fast = Sampler(vocab_size)(logits_rv, rows)
    tokens, is_valid, chosen, top_ids, top = sample_on_device(logits_rv, rows)
    assert torch.equal(tokens, fast.token_ids)
    assert torch.equal(is_valid, fast.is_valid)
    assert fast.top_ids is not None
    assert torch.equal(top_ids, fast.top_ids)
    torch.testing.assert_close(chosen, fast.logprobs, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(top, fast.top_logprobs, rtol=1e-6, atol=2e-6)


# ---- cuts ----


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=1, max_size=24),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.sampled_from([-1, 1, 2, 7, 100]),
    st.sampled_from([1.0, 0.99, 0.5, 0.1, 1e-9]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_kept_tokens_equal_the_plain_version(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    want = plain.process(logits, params)
    if not want.is_near_cut:
        assert kept(logits, params) == sorted(want.kept)


@pytest.mark.parametrize("vocab_size", [4096, 4097, 30_000])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_cuts_of_large_vocabularies_equal_the_plain_version(vocab_size: int, scale: float) -> None:
    """Cuts within the first guess, beyond it, and at ties."""
    rng = np.random.default_rng(6)
    l_v = (rng.standard_normal(vocab_size) * scale).astype(np.float32)
    for logits in (l_v.tolist(), np.round(l_v, 1).tolist()):
        for cut in (
            {"top_p": 0.3},
            {"top_p": 0.9},
            {"top_p": 0.999},
            {"top_k": 50},
            {"top_k": 700},
            {"top_k": vocab_size - 1},
            {"top_k": 3000, "top_p": 0.9},
            {"top_k": 10, "top_p": 0.5, "min_p": 0.1},
        ):
            params = SamplingParams(**cut)
            want = plain.process(logits, params)
            found = kept(logits, params)
            if not want.is_near_cut:
                assert found == sorted(want.kept), cut


@pytest.mark.parametrize(
    ("logits", "cut", "ids"),
    [
        ([1, 3, 3, 3, 2], {"top_k": 2}, [1, 2]),
        ([1, 3, 3, 3, 2], {"top_k": 1}, [1]),
        ([0, 0, 0, 0], {"top_p": 0.25}, [0, 1]),  # a quarter is not more than a quarter
        ([0, 0, 0, 0], {"top_p": 0.24}, [0]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 1.0}, [0, 1, 2, 3]),
        ([9, 0, 0], {"top_p": 0.5}, [0]),
        ([0, 9, 0], {"top_p": 1e-12}, [1]),
        ([0.0, -0.0, 0.0], {"top_k": 2}, [0, 1]),
        ([-0.0, 0.0, -0.0], {"top_k": 2}, [0, 1]),
        ([2, 2, 1], {"min_p": 1.0}, [0, 1]),
        ([0, 0, -1], {"min_p": 0.3}, [0, 1, 2]),
        ([0, 0, -1], {"min_p": 0.4}, [0, 1]),
        ([-INF, 1, -INF, 0], {"top_k": 3}, [1, 3]),
        ([-INF, 1, -INF, 0], {"top_p": 0.999999}, [1, 3]),
        ([-INF, 1, -INF, 0], {}, [1, 3]),
        ([5, 4, 3, 2], {"top_k": 1000}, [0, 1, 2, 3]),
        ([5, 4, 3, 2], {"top_k": 3, "top_p": 0.8, "min_p": 0.2}, [0, 1]),
    ],
)
def test_boundary_cuts(logits: list[float], cut: dict[str, float], ids: list[int]) -> None:
    assert kept(logits, SamplingParams(**cut)) == ids


def test_top_p_is_measured_before_top_k() -> None:
    """4 tokens have 0.4 of the mass; 0.45 of it reaches past them, however many top-k leaves."""
    logits = [0.0] * 10
    assert kept(logits, SamplingParams(top_p=0.15, top_k=4)) == [0, 1]
    assert kept(logits, SamplingParams(top_p=0.45, top_k=4)) == [0, 1, 2, 3]


# ---- greedy, faults, masks ----


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_of_the_largest_whatever_else_is_asked(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.2, min_p=0.3, seed=4)
    logits = [[1, 5, 5, 2], [-0.0, 0.0, 0.0, -1], [-INF, -INF, -3e38, -INF]]
    samples = sample(logits, [params] * 3, [1, 2, 3], [0, 0, 0])
    assert samples.token_ids.tolist() == [1, 0, 2]
    assert samples.logprobs is samples.top_ids is samples.top_logprobs is None


def test_greedy_processed_logprobs_are_certain() -> None:
    params = SamplingParams(temperature=0, logprobs=3, logprobs_mode="processed")
    samples = sample([[1, 5, 5, 2]], [params], [1], [0])
    assert samples.logprobs is not None
    assert samples.top_ids is not None
    assert samples.top_logprobs is not None
    assert samples.logprobs.tolist() == [0.0]
    assert samples.top_ids.tolist() == [[1, 2, 3]]
    assert samples.top_logprobs.tolist() == [[0.0, -9999.0, -9999.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [3, 17, 512, 5003])
@pytest.mark.parametrize(
    "fault", [{2: NAN}, {0: NAN, 1: INF}, {1: INF}, "all -inf", {2: NAN, 0: -INF}], ids=str
)
def test_row_that_is_not_valid_says_so_and_its_neighbours_are_unaffected(
    fault: object, vocab_size: int, temperature: float
) -> None:
    rng = np.random.default_rng(8)
    l_rv = rng.standard_normal((3, vocab_size)).astype(np.float32)
    one = SamplingParams(temperature=temperature, top_p=0.9, logprobs=2)
    good = sample(l_rv, [one] * 3, [5, 6, 7], [1, 2, 3])
    if isinstance(fault, dict):
        for token, value in fault.items():
            l_rv[1, token - 1] = value  # -1 is the last token
    else:
        l_rv[1] = -INF
    samples = sample(l_rv, [one] * 3, [5, 6, 7], [1, 2, 3])
    assert samples.is_valid.tolist() == [True, False, True]
    assert samples.token_ids[1] == 0
    assert samples.logprobs is not None
    assert samples.top_ids is not None
    assert samples.logprobs[1] == -9999.0
    assert samples.top_ids[1].tolist() == [-1, -1]
    for row in (0, 2):
        assert plain.row_of(samples, row, one) == plain.row_of(good, row, one)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_finite_logit_is_always_drawn(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5, logprobs=2)
    logits = [[-INF] * 5 + [-1000.0] + [-INF] * 3] * 20
    samples = sample(logits, [params] * 20, list(range(20)), list(range(20)))
    assert samples.token_ids.tolist() == [5] * 20
    assert samples.logprobs is not None
    assert samples.top_ids is not None
    assert samples.top_logprobs is not None
    assert samples.logprobs.tolist() == [0.0] * 20
    assert samples.top_ids[0].tolist() == [5, 0]
    assert samples.top_logprobs[0].tolist() == [0.0, -9999.0]


def test_banned_tokens_come_only_after_min_tokens_and_raw_logprobs_do_not_see_the_ban() -> None:
    table = SamplingTable(2, 4)
    banned = [3, 1, 3]
    table.set(1, SamplingParams(temperature=0, min_tokens=2, logprobs=1), 0, banned)
    processed = SamplingParams(min_tokens=2, logprobs=4, logprobs_mode="processed")
    table.set(2, processed, 0, banned)
    logits_rv = torch.tensor([[0.0, 8.0, 1.0, 9.0]]).expand(6, 4)
    slots = np.array([1, 1, 1, 2, 2, 2])
    outputs = np.array([0, 1, 2, 0, 1, 2])
    samples = Sampler(4)(logits_rv, table.rows(slots, outputs + 10, outputs))
    assert samples.token_ids[:3].tolist() == [2, 2, 3]
    assert set(samples.token_ids[3:5].tolist()) <= {0, 2}
    assert samples.top_ids is not None
    assert samples.top_logprobs is not None
    assert samples.logprobs is not None
    raw = plain.log_softmax([0, 8, 1, 9])
    assert samples.logprobs[:3].tolist() == pytest.approx([raw[2], raw[2], raw[3]], abs=1e-5)
    assert samples.top_ids[:3, 0].tolist() == [3, 3, 3]
    assert samples.top_ids[3].tolist() == [2, 0, 1, 3]
    assert samples.top_ids[5].tolist() == [3, 1, 2, 0]
    assert samples.top_logprobs[3, 2:].tolist() == [-9999.0, -9999.0]
    assert logits_rv.tolist() == [[0.0, 8.0, 1.0, 9.0]] * 6, "the model's logits are not written to"


def test_row_whose_every_possible_token_is_banned_is_not_valid() -> None:
    table = SamplingTable(1, 3)
    table.set(1, SamplingParams(min_tokens=1), 0, [1, 2])
    logits_rv = torch.tensor([[-INF, 1.0, 2.0]])
    rows = table.rows(np.array([1]), np.array([5]), np.array([0]))
    assert Sampler(3)(logits_rv, rows).is_valid.tolist() == [False]
    assert sample_on_device(logits_rv, rows)[1].tolist() == [False]


def test_step_without_rows_gives_nothing() -> None:
    none = np.empty(0, np.int64)
    rows = SamplingTable(1, 5).rows(none, none, none)
    samples = Sampler(5)(torch.empty(0, 5), rows)
    assert samples.token_ids.shape == samples.is_valid.shape == (0,)
    assert sample_on_device(torch.empty(0, 5), rows)[0].shape == (0,)


def test_logits_that_are_a_slice_of_a_wider_tensor_are_read_right() -> None:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(top_p=0.9, logprobs=2)] * 6
    table = plain.table_of(params, list(range(6)), 20)
    rows = table.rows(np.arange(1, 7), np.arange(6), np.arange(6))
    narrow, copied = (Sampler(20)(x, rows) for x in (wide[:, 10:30], wide[:, 10:30].contiguous()))
    for row, one in enumerate(params):
        assert plain.row_of(narrow, row, one) == plain.row_of(copied, row, one)


def test_slot_that_is_cleared_or_set_again_keeps_nothing_of_the_old_one() -> None:
    table, fresh = SamplingTable(2, 6), SamplingTable(2, 6)
    old = SamplingParams(temperature=0.5, top_k=2, top_p=0.5, min_p=0.2, logprobs=3, min_tokens=9)
    table.set(1, old, 77, [2])
    table.set(1, SamplingParams(), 5)
    fresh.set(1, SamplingParams(), 5)
    arguments = np.array([1, 1]), np.array([3, 4]), np.array([0, 1])
    ours, want = table.rows(*arguments), fresh.rows(*arguments)
    for name in ours.__dataclass_fields__:
        assert np.array_equal(getattr(ours, name), getattr(want, name)), name
    table.clear(1)
    with pytest.raises(AssertionError, match="no parameters"):
        table.rows(*arguments)
