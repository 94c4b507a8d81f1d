"""The scheduler as a pure function, and a simulation of many steps around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.scheduler import (
    NEVER,
    PRIORITY_SHIFT,
    Running,
    SchedulerLimits,
    StepPlan,
    Waiting,
    plan,
)

BLOCK = 128


def limits(rows: int = 64, seqs: int = 8, **more: int | bool) -> SchedulerLimits:
    return SchedulerLimits(max_num_batched_tokens=rows, max_num_seqs=seqs, **more)  # type: ignore[arg-type]


def running(
    *items: tuple[int, int], alone: int | None = None, ranks: Sequence[int] = ()
) -> Running:
    """Sequences as (computed, tokens), each with the blocks that its computed positions need."""
    computed = np.array([c for c, _ in items], dtype=np.int64)
    return Running(
        num_computed_r=computed,
        num_tokens_r=np.array([t for _, t in items], dtype=np.int64),
        num_blocks_r=-(-computed // BLOCK),
        rank_r=np.array(ranks or range(len(items)), dtype=np.int64),
        stop_r=np.full(len(items), NEVER, dtype=np.int64),
        is_alone_r=np.array([i == alone for i in range(len(items))], dtype=np.bool_),
    )


def test_decoding_sequences_get_their_row_before_prompts_get_chunks() -> None:
    found = plan(
        running((10, 100), (50, 51), (7, 8)), [], num_free_blocks=9, limits=limits(rows=20)
    )
    assert found.counts_r.tolist() == [18, 1, 1]


def test_the_more_important_prompt_gets_the_rows() -> None:
    state = running((1, 90), (1, 90), ranks=(5, 2))
    found = plan(state, [], num_free_blocks=9, limits=limits(rows=60))
    assert found.counts_r.tolist() == [0, 60]


def test_waiting_sequences_start_in_order_with_what_is_left_of_the_rows() -> None:
    found = plan(
        running((50, 51)),
        [Waiting(30), Waiting(40), Waiting(5)],
        num_free_blocks=9,
        limits=limits(rows=64),
    )
    assert found.counts_r.tolist() == [1]
    assert found.admitted == (30, 33)


def test_the_sequence_budget_bounds_admission() -> None:
    found = plan(running((50, 51)), [Waiting(2)] * 5, num_free_blocks=9, limits=limits(seqs=3))
    assert found.admitted == (2, 2)


def test_a_prompt_is_admitted_only_if_all_of_it_has_room() -> None:
    waiting = [Waiting(3 * BLOCK), Waiting(1)]
    found = plan(running((5, 6)), waiting, num_free_blocks=2, limits=limits())
    assert found.admitted == ()  # and the smaller one behind it does not overtake it
    assert plan(running((5, 6)), waiting, num_free_blocks=4, limits=limits()).admitted == (63,)


def test_blocks_that_a_running_prompt_will_need_are_not_given_away() -> None:
    state = running((BLOCK, 4 * BLOCK))  # will ask for 3 more
    assert plan(state, [Waiting(1)], num_free_blocks=3, limits=limits()).admitted == ()
    many = limits(rows=400)
    assert plan(state, [Waiting(1)], num_free_blocks=4, limits=many).admitted == (1,)


def test_a_preempted_sequence_waits_for_a_block_more_for_each_that_runs() -> None:
    state = running((5, 6), (5, 6), (5, 6))
    again = [Waiting(10, was_preempted=True)]
    assert plan(state, again, num_free_blocks=3, limits=limits()).admitted == ()
    assert plan(state, again, num_free_blocks=4, limits=limits()).admitted == (10,)
    nothing_runs = running()
    assert plan(nothing_runs, again, num_free_blocks=1, limits=limits()).admitted == (10,)


def test_the_watermark_holds_for_new_prompts_beside_others() -> None:
    spare = limits(watermark_blocks=2)
    assert plan(running((5, 6)), [Waiting(10)], num_free_blocks=2, limits=spare).admitted == ()
    assert plan(running(), [Waiting(10)], num_free_blocks=1, limits=spare).admitted == (10,)


def test_the_victim_is_the_less_important_one_that_loses_the_least_work() -> None:
    state = running((BLOCK, BLOCK + 1), (300, 301), (140, 141), (200, 201))
    found = plan(state, [Waiting(1)], num_free_blocks=0, limits=limits())
    assert found.preempted == (2,)
    assert found.counts_r.tolist() == [1, 1, 0, 1]
    assert found.admitted == ()


def test_the_larger_priority_number_goes_before_the_smaller_loss() -> None:
    ranks = (0, (1 << PRIORITY_SHIFT) + 1, 2)
    state = running((BLOCK, BLOCK + 1), (300, 301), (140, 141), ranks=ranks)
    assert plan(state, [], num_free_blocks=0, limits=limits()).preempted == (1,)


def test_of_equal_losses_the_less_important_one_goes() -> None:
    state = running((BLOCK, BLOCK + 1), (140, 141), (140, 141))
    assert plan(state, [], num_free_blocks=0, limits=limits()).preempted == (2,)


def test_a_less_important_sequence_never_takes_blocks_from_a_more_important_one() -> None:
    state = running((300, 301), (140, 141), (BLOCK, BLOCK + 1))
    found = plan(state, [], num_free_blocks=0, limits=limits())
    assert found.preempted == ()
    assert found.counts_r.tolist() == [1, 1, 0]  # it waits


def test_a_chunk_shrinks_to_the_blocks_there_are() -> None:
    found = plan(running((100, 500)), [], num_free_blocks=1, limits=limits(rows=400))
    assert found.counts_r.tolist() == [2 * BLOCK - 100]


def test_a_chunk_ends_at_its_stop() -> None:
    state = replace(running((10, 500)), stop_r=np.array([BLOCK], dtype=np.int64))
    wide = limits(rows=400)
    assert plan(state, [], num_free_blocks=9, limits=wide).counts_r.tolist() == [BLOCK - 10]
    waiting = [Waiting(500, stop=2 * BLOCK, num_cached=BLOCK, num_shared=1), Waiting(3)]
    found = plan(running(), waiting, num_free_blocks=9, limits=wide)
    assert found.admitted == (BLOCK, 3)


def test_blocks_that_others_hold_cost_no_free_ones() -> None:
    whole = Waiting(3 * BLOCK)
    assert plan(running(), [whole], num_free_blocks=2, limits=limits()).admitted == ()
    shared = replace(whole, num_cached=2 * BLOCK, num_shared=1)
    assert plan(running(), [shared], num_free_blocks=2, limits=limits()).admitted == (64,)


def test_a_suspect_runs_alone() -> None:
    state = running((10, 100), (50, 51), alone=1)
    found = plan(state, [Waiting(3)], num_free_blocks=9, limits=limits())
    assert (found.counts_r.tolist(), found.admitted) == ([0, 1], ())
    queued = [Waiting(30, is_alone=True), Waiting(3)]
    found = plan(running((10, 100), (50, 51)), queued, num_free_blocks=9, limits=limits())
    assert (found.counts_r.tolist(), found.admitted) == ([0, 0], (30,))


def test_a_model_without_compressed_entries_needs_no_blocks() -> None:
    state = running((500, 501))
    bare = replace(state, num_blocks_r=state.num_blocks_r * 0)
    found = plan(bare, [Waiting(900)], num_free_blocks=0, limits=limits(uses_blocks=False))
    assert (found.counts_r.tolist(), found.admitted) == ([1], (63,))


@st.composite
def states(draw: st.DrawFn) -> tuple[Running, list[Waiting], int, SchedulerLimits]:
    num = draw(st.integers(0, 7))
    items = []
    for _ in range(num):
        tokens = draw(st.integers(1, 700))
        items.append((draw(st.integers(0, tokens)), tokens))
    ranks = draw(st.permutations(range(num)))
    alone = draw(st.none() | st.integers(0, max(0, num - 1)))
    waiting = [
        Waiting(draw(st.integers(1, 700)), draw(st.booleans()), draw(st.booleans()))
        for _ in range(draw(st.integers(0, 4)))
    ]
    seqs = draw(st.integers(max(1, num), 9))
    lim = limits(draw(st.integers(seqs, 300)), seqs, watermark_blocks=draw(st.integers(0, 2)))
    return running(*items, alone=alone, ranks=ranks), waiting, draw(st.integers(0, 8)), lim


@settings(max_examples=1500, deadline=None)
@given(states())
def test_every_plan_keeps_the_budgets_and_what_it_gives_exists(
    given_state: tuple[Running, list[Waiting], int, SchedulerLimits],
) -> None:
    state, waiting, free, lim = given_state
    before = [a.copy() for a in (state.num_computed_r, state.num_tokens_r, state.num_blocks_r)]
    found = plan(state, waiting, num_free_blocks=free, limits=lim)
    for array, copy in zip(
        (state.num_computed_r, state.num_tokens_r, state.num_blocks_r), before, strict=True
    ):
        assert (array == copy).all(), "the state was written"
    left = state.num_tokens_r - state.num_computed_r
    assert found.num_rows <= lim.max_num_batched_tokens
    assert ((found.counts_r >= 0) & (found.counts_r <= left)).all()
    assert len(left) + len(found.admitted) - len(found.preempted) <= lim.max_num_seqs
    gone = list(found.preempted)
    assert len(set(gone)) == len(gone)
    assert not found.counts_r[gone].any()
    need = -(-(state.num_computed_r + found.counts_r) // BLOCK) - state.num_blocks_r
    need = np.where(found.counts_r > 0, np.maximum(need, 0), 0).sum()
    need += sum(-(-rows // BLOCK) for rows in found.admitted)
    assert need <= free + state.num_blocks_r[gone].sum(), "blocks are given that nobody has"
    if gone and not state.is_alone_r.any():
        assert int(state.rank_r.argmin()) not in gone, "the most important one was preempted"
    for rows, item in zip(found.admitted, waiting, strict=False):
        assert 1 <= rows <= item.num_tokens


@dataclass
class _Seq:
    rank: int
    prompt: int
    outputs: int
    computed: int = 0
    made: int = 0
    blocks: int = 0
    preemptions: int = 0
    waited: int = 0
    log: list[int] = field(default_factory=list)


def simulate(
    seqs: list[_Seq], arrivals: list[int], num_blocks: int, lim: SchedulerLimits, max_steps: int
) -> int:
    """Run all sequences to their end around `plan`; returns the steps it took."""
    waiting: list[_Seq] = []
    live: list[_Seq] = []
    free, pending = num_blocks, list(zip(arrivals, seqs, strict=True))
    for step in range(max_steps):
        while pending and pending[0][0] <= step:
            waiting.append(pending.pop(0)[1])
        waiting.sort(key=lambda s: s.rank)
        if not (waiting or live or pending):
            return step
        state = Running(
            *(np.array([getattr(s, name) for s in live], dtype=np.int64) for name in ("computed",)),
            np.array([s.prompt + s.made for s in live], dtype=np.int64),
            np.array([s.blocks for s in live], dtype=np.int64),
            np.array([s.rank for s in live], dtype=np.int64),
            np.full(len(live), NEVER, dtype=np.int64),
            np.zeros(len(live), dtype=np.bool_),
        )
        found: StepPlan = plan(
            state,
            [Waiting(s.prompt + s.made, s.preemptions > 0) for s in waiting],
            num_free_blocks=free,
            limits=lim,
        )
        batch = [(s, int(c)) for s, c in zip(live, found.counts_r, strict=True) if c]
        for r in sorted(found.preempted, reverse=True):
            seq = live.pop(r)
            free += seq.blocks
            seq.blocks, seq.computed, seq.preemptions = 0, 0, seq.preemptions + 1
            waiting.append(seq)
        for rows in found.admitted:
            seq = waiting.pop(0)
            live.append(seq)
            batch.append((seq, rows))
        assert batch or not live, "nothing runs although sequences do"
        for seq, rows in batch:
            need = -(-(seq.computed + rows) // BLOCK) - seq.blocks
            seq.blocks += max(0, need)
            free -= max(0, need)
            seq.computed += rows
            if seq.computed == seq.prompt + seq.made:
                seq.made += 1
                if seq.made == seq.outputs:
                    live.remove(seq)
                    free += seq.blocks
                    seq.log.append(step)
        assert 0 <= free <= num_blocks
    raise AssertionError(f"not done after {max_steps} steps")


@pytest.mark.parametrize("seed", range(12))
def test_everything_finishes_under_pressure_and_no_sequence_thrashes(seed: int) -> None:
    draw = random.Random(seed)
    seqs = [
        _Seq(rank=i, prompt=draw.randint(1, 500), outputs=draw.randint(1, 300)) for i in range(40)
    ]
    arrivals = sorted(draw.randint(0, 400) for _ in seqs)
    lim = limits(rows=draw.choice([8, 64, 256]), seqs=8, watermark_blocks=draw.choice([0, 1]))
    steps = simulate(seqs, arrivals, num_blocks=draw.randint(7, 14), lim=lim, max_steps=60_000)
    assert all(seq.made == seq.outputs for seq in seqs)
    # what is computed again stays a small part: each time a sequence gets on before the next
    assert max(seq.preemptions for seq in seqs) <= 6, [seq.preemptions for seq in seqs]
    assert steps < 20_000


def test_the_pressure_of_the_simulation_is_real() -> None:
    draw = random.Random(3)
    seqs = [_Seq(rank=i, prompt=draw.randint(100, 120), outputs=300) for i in range(20)]
    simulate(seqs, [0] * 20, num_blocks=8, lim=limits(rows=256, seqs=8), max_steps=60_000)
    assert sum(seq.preemptions for seq in seqs) > 5


def test_a_full_length_sequence_finishes_in_a_pool_that_just_holds_it() -> None:
    seqs = [_Seq(rank=i, prompt=3 * BLOCK - 10, outputs=10) for i in range(5)]
    simulate(seqs, [0] * 5, num_blocks=3, lim=limits(rows=64, seqs=4), max_steps=5_000)
    assert [seq.log[0] for seq in seqs] == sorted(seq.log[0] for seq in seqs)
