"""The waiting queue: order, removal, and the bound on overtaking."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer.engine.queue import MAX_OVERTAKES, WaitingQueue
from deepinfer.engine.sequence import MAX_PRIORITY, Request, Sequence
from deepinfer.sampling_params import SamplingParams


def sequence(arrival: int, priority: int = 0) -> Sequence:
    prompt = np.zeros(1, dtype=np.int32)
    request = Request(str(arrival), arrival, prompt, SamplingParams(), 0, 9, priority=priority)
    return Sequence(request, 0, arrival, 0, prompt)


def pop(queue: WaitingQueue) -> Sequence:
    """Take the head out."""
    head = next(iter(queue))
    queue.take([head])
    return head


def test_smaller_priority_goes_first_then_the_earlier_arrival() -> None:
    queue = WaitingQueue()
    for arrival, priority in enumerate([0, 5, -MAX_PRIORITY, 0, MAX_PRIORITY, -1]):
        queue.push(sequence(arrival, priority))
    assert [seq.arrival for seq in queue] == [2, 5, 0, 3, 1, 4]
    assert [pop(queue).arrival for _ in range(6)] == [2, 5, 0, 3, 1, 4]


def test_a_sequence_can_leave_from_anywhere_and_come_back_to_its_place() -> None:
    queue, seqs = WaitingQueue(), [sequence(i) for i in range(5)]
    for seq in seqs:
        queue.push(seq)
    queue.remove(seqs[3])
    assert pop(queue) is seqs[0]
    queue.push(seqs[0])  # preempted
    assert [seq.arrival for seq in queue] == [0, 1, 2, 4]
    with pytest.raises(AssertionError, match="does not wait"):
        queue.remove(seqs[3])


@pytest.mark.parametrize("older", [0, 1, 3])
def test_urgent_arrivals_without_end_do_not_starve_anyone(older: int) -> None:
    queue, arrival = WaitingQueue(), 0
    for arrival in range(older + 1):
        queue.push(sequence(arrival, priority=9))
    patient, num_later = arrival, 0
    while num_later < 10_000:
        arrival += 1
        queue.push(sequence(arrival, priority=-9))
        if pop(queue).arrival == patient:
            break
        num_later += 1
    assert num_later <= older + (older + 1) * MAX_OVERTAKES + older + 1


def test_a_promoted_sequence_keeps_its_importance_when_it_comes_back() -> None:
    queue, old = WaitingQueue(), sequence(0, priority=9)
    queue.push(old)
    for arrival in range(1, MAX_OVERTAKES + 1):
        queue.push(sequence(arrival, priority=-9))
        assert pop(queue) is not old
    queue.push(sequence(1000, priority=-MAX_PRIORITY))
    assert pop(queue) is old
    queue.push(old)
    assert pop(queue) is old


def test_what_is_taken_at_once_is_what_the_order_said() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, priority=9))
    for arrival in range(1, 2 * MAX_OVERTAKES):
        queue.push(sequence(arrival))
    order = [seq.arrival for seq in queue][: MAX_OVERTAKES + 10]
    queue.take([*queue][: len(order)])
    assert [seq.arrival for seq in queue][:1] == [0]  # promoted, but only now
    assert pop(queue).arrival == 0  # promoted meanwhile


def test_the_queue_agrees_with_a_sorted_list_over_random_operations() -> None:
    draw, queue, model, arrival = random.Random(5), WaitingQueue(), [], 0
    for _ in range(5_000):
        action = draw.random()
        if action < 0.5 or not model:
            seq = sequence(arrival, draw.randint(-2, 2))
            arrival += 1
            queue.push(seq)
            model.append(seq)
        elif action < 0.7:
            seq = draw.choice(model)
            queue.remove(seq)
            model.remove(seq)
        else:
            model.sort(key=lambda s: s.rank)
            assert pop(queue) is model.pop(0)
        assert len(queue) == len(model)
        assert {s.arrival for s in queue} == {s.arrival for s in model}
        assert [s.rank for s in queue] == sorted(s.rank for s in model)
