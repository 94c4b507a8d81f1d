"""Loads, moves and hash thresholds of a plan against counting by hand."""

import numpy as np
import pytest

from deepinfer_moe import (
    BalancedPolicy,
    BalanceError,
    Layout,
    Plan,
    device_loads,
    imbalance,
    peak_over_mean,
    received_experts,
)

pytestmark = pytest.mark.torchless


def plan_of(slots, share, num_devices=2):
    return Plan(
        num_devices=num_devices, phy2log=np.array([slots]), share=np.array([share], dtype=float)
    )


def test_device_loads_follow_the_shares():
    plan = plan_of([0, 1, 0, 2], [0.25, 1, 0.75, 1])
    assert device_loads(plan, np.array([[8, 1, 2]])).tolist() == [[3.0, 8.0]]
    assert imbalance(plan, np.array([[8, 1, 2]])).tolist() == [8.0 / 5.5]
    assert imbalance(plan, np.zeros((1, 3))).tolist() == [1.0]


def test_peak_over_mean_sums_before_it_divides():
    plan = plan_of([0, 1], [1, 1])
    counts = np.array([[[1, 0]], [[30, 10]]])
    assert peak_over_mean(plan, counts) == pytest.approx((1 + 30) / (0.5 + 20))
    assert peak_over_mean(plan, np.zeros((1, 1, 2))) == 1.0


def test_an_expert_is_received_once_a_device_and_never_by_one_that_has_it():
    old = plan_of([0, 1, 2, 3, 0, 1], [0.5, 0.5, 1, 1, 0.5, 0.5])
    # device 0 had 0, 1, 2 and keeps all in other slots; device 1 had 3, 0, 1 and lacks 2, twice
    new = plan_of([2, 1, 0, 2, 2, 3], [1 / 3, 1, 1, 1 / 3, 1 / 3, 1])
    assert received_experts(old, new).tolist() == [[0, 1]]
    assert received_experts(old, old).sum() == 0


def test_plans_and_loads_that_do_not_belong_together_are_refused():
    plan = plan_of([0, 1], [1, 1])
    with pytest.raises(BalanceError, match="1 layers of 2 experts"):
        device_loads(plan, np.ones((1, 3)))
    with pytest.raises(BalanceError, match="plan afresh"):
        received_experts(plan, plan_of([0, 1], [1, 1], num_devices=1))


def test_thresholds_send_each_replica_its_share_of_the_hashes():
    plan = plan_of([0, 0, 0, 1, 0, 1], [0.5, 0.0, 0.125, 1.0, 0.375, 0.0])
    bounds = plan.thresholds()
    assert bounds.dtype == np.uint32
    hashes = (np.arange(1 << 12, dtype=np.uint64) << np.uint64(20)).astype(np.uint32)
    for expert, shares in ((0, [0.5, 0.0, 0.125, 0.375]), (1, [1.0, 0.0])):
        chosen = (bounds[0, expert][None, :] < hashes[:, None]).sum(axis=-1)
        drawn = np.bincount(chosen, minlength=4)[: len(shares)] / len(hashes)
        assert drawn.tolist() == shares


def test_thresholds_of_a_plan_never_lead_behind_the_last_replica():
    load = np.random.default_rng(0).integers(0, 1000, (1, 3, 24))
    plan = BalancedPolicy()(load, Layout(num_slots=40, num_devices=8))
    bounds, counts = plan.thresholds(), plan.replica_counts()
    for layer in range(3):
        for expert in range(24):
            assert bounds[layer, expert, counts[layer, expert] - 1] == 2**32 - 1
            assert (np.diff(bounds[layer, expert].astype(np.int64)) >= 0).all()
