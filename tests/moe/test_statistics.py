"""The expert counter against counting row by row."""

import numpy as np
import pytest
import torch

from deepinfer_moe import BalanceError, ExpertCounter, read_counts


def feed(counter, num_steps, seed=0):
    """Record random steps; gives text and image counts (steps, layers, experts)."""
    generator = np.random.default_rng(seed)
    num_layers, experts = 2, counter.num_experts
    want = np.zeros((2, num_steps, num_layers, experts), dtype=np.int64)
    for step in range(num_steps):
        for layer in range(num_layers):
            rows = int(generator.integers(0, 9))
            ids = generator.integers(-1, experts, (rows, 3))
            valid = generator.random(rows) < 0.7
            image = generator.random(rows) < 0.4
            counter.record(
                layer, torch.tensor(ids), torch.tensor(valid), torch.tensor(image, dtype=torch.bool)
            )
            for row in range(rows):
                for expert in ids[row]:
                    if valid[row] and expert >= 0:
                        want[int(image[row]), step, layer, expert] += 1
        counter.end_step()
    return want


@pytest.mark.parametrize("num_steps", [0, 1, 4, 5, 13])
def test_window_and_totals_equal_counting_row_by_row(num_steps):
    counter = ExpertCounter(2, 7, window_steps=5)
    want = feed(counter, num_steps)
    first = max(0, num_steps - 5)
    for kind, counts in (("text", want[0]), ("image", want[1]), ("all", want.sum(axis=0))):
        assert np.array_equal(counter.window(kind), counts[first:])
        assert np.array_equal(counter.totals(kind), counts.sum(axis=0))


def test_several_calls_for_a_layer_add_up_within_a_step():
    counter = ExpertCounter(1, 4, window_steps=2)
    counter.record(0, torch.tensor([[0, 1]], dtype=torch.int32))
    counter.record(0, torch.tensor([[1, 3]]))
    counter.end_step()
    assert counter.window().tolist() == [[[1, 2, 0, 1]]]


def test_reset_forgets_all_steps():
    counter = ExpertCounter(2, 7, window_steps=3)
    feed(counter, 4)
    counter.reset()
    assert counter.window().shape == (0, 2, 7)
    assert counter.totals().sum() == 0


def test_the_dump_is_read_back_as_the_window(tmp_path):
    counter = ExpertCounter(2, 7, window_steps=3)
    feed(counter, 4)
    counter.dump(tmp_path / "counts.npz")
    assert np.array_equal(read_counts(tmp_path / "counts.npz"), counter.window())


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(BalanceError, match="window_steps=0"):
        ExpertCounter(1, 4, window_steps=0)
    with pytest.raises(BalanceError, match="text, image and all"):
        ExpertCounter(1, 4, window_steps=1).totals("audio")
