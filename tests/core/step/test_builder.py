"""The step builder against the plain definition of what each row sees and what each step writes."""

from __future__ import annotations

import random

import pytest
from tests.core.model.golden import all_cases
from tests.core.step.compare import differences

from deepinfer.cache.layout import CacheLayout
from deepinfer.step.batch import batch_of
from deepinfer.step.builder import InputBuilder, SequenceRows
from deepinfer.step.inputs import Rows

LAYOUT = CacheLayout(next(c for c in all_cases() if c.name == "c08").load().config)
WINDOW, RING, STATE = LAYOUT.config.sliding_window, LAYOUT.ring_rows, LAYOUT.state_rows


def random_sequences(draw: random.Random) -> list[SequenceRows]:
    sequences = []
    for number in range(draw.randint(1, 5)):
        start, count = draw.choice([0, 1, 2, 7, 8, 30, 129]), draw.choice([1, 2, 3, 8, 25, 140])
        tokens = [draw.randrange(256) for _ in range(start + count)]
        blocks = range(10 * number + 1, 10 * number + 2 + (start + count) // 128)
        sequences.append(
            SequenceRows(
                token_ids=tokens,
                start=start,
                count=count,
                slot=5 - number,
                blocks=list(blocks)[::-1],
                decoder_start=draw.choice([0, 0, start + 1, start + count, start + 500]),
                window_start=draw.choice([0, 0, 3]) if start else 0,
                num_logits=draw.randint(0, count),
                is_image=[draw.random() < 0.2 for _ in tokens] if draw.random() < 0.5 else None,
            )
        )
    return sequences


def seen_by(rows: Rows, row: int, sequences: list[SequenceRows]) -> list[tuple[int, int]]:
    """Window keys of a row as (sequence number, position), in order."""
    num_history, keys = len(rows.history_slots_x), []
    for index in rows.window_tw[row].tolist():
        if index == 0:
            continue
        if index > num_history:
            at = index - 1 - num_history
            number = next(n for n in range(len(sequences)) if at < rows.cu_seqlens_q[n + 1])
            keys.append((number, int(rows.positions_t[at])))
        else:
            slot, at = divmod(int(rows.history_slots_x[index - 1]), RING)
            number = next(n for n, seq in enumerate(sequences) if seq.slot == slot)
            before = [p for p in range(sequences[number].start) if p % RING == at]
            keys.append((number, before[-1]))  # the newest position that the slot can hold
    return keys


@pytest.mark.parametrize("seed", range(60))
def test_rows_see_their_window_and_nothing_else(seed: int) -> None:
    sequences = random_sequences(random.Random(seed))
    step = InputBuilder(LAYOUT).step(sequences)
    for rows, is_decoder in ((step.rows, False), (step.decoder_rows, True)):
        row = 0
        for number, seq in enumerate(sequences):
            low = max(seq.window_start, seq.decoder_start if is_decoder else 0)
            first = min(max(seq.start, seq.decoder_start if is_decoder else 0), seq.end)
            assert rows.cu_seqlens_q[number + 1] - rows.cu_seqlens_q[number] == seq.end - first
            for position in range(first, seq.end):
                keys = range(max(0, low, position - WINDOW + 1), position + 1)
                assert int(rows.positions_t[row]) == position
                assert seen_by(rows, row, sequences) == [(number, p) for p in keys]
                row += 1
        assert row == rows.num_rows


@pytest.mark.parametrize("seed", range(30))
def test_rings_keep_the_newest_rows_once(seed: int) -> None:
    sequences = random_sequences(random.Random(seed))
    rows = InputBuilder(LAYOUT).step(sequences).rows
    slots = rows.window_writes.slot_m.tolist()
    assert len(set(slots)) == len(slots), "a ring slot is written twice"
    want = {
        seq.slot * RING + p % RING: rows.cu_seqlens_q[n] + p - seq.start
        for n, seq in enumerate(sequences)
        for p in range(seq.start, seq.end)
    }
    assert dict(zip(slots, rows.window_writes.source_m.tolist(), strict=True)) == want


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_are_completed_by_the_last_of_their_tokens(seed: int, ratio: int) -> None:
    sequences = random_sequences(random.Random(seed))
    step = InputBuilder(LAYOUT).step(sequences)
    writes, per_block, at = step.entries[ratio], 128 // ratio, 0
    num_history = len(writes.state_slots_x)
    for number, seq in enumerate(sequences):
        for position in range(seq.start, seq.end):
            if (position + 1) % ratio:
                continue
            entry = position // ratio
            assert int(writes.row_n[at]) == step.rows.cu_seqlens_q[number] + position - seq.start
            assert int(writes.position_n[at]) == entry * ratio
            block = seq.blocks[entry // per_block]
            assert int(writes.slot_n[at]) == block * per_block + entry % per_block
            if ratio == 2:
                partner = int(writes.partner_n[at]) - 1
                if position - 1 >= seq.start:
                    assert partner == num_history + int(writes.row_n[at]) - 1
                else:
                    slot = seq.slot * STATE + (position - 1) % STATE
                    assert int(writes.state_slots_x[partner]) == slot
            at += 1
    assert at == len(writes.row_n)


@pytest.mark.parametrize("seed", range(30))
def test_look_back_stops_at_the_start_and_at_images(seed: int) -> None:
    sequences = random_sequences(random.Random(seed))
    step = InputBuilder(LAYOUT).step(sequences)
    assert step.lookback_tg is not None
    row = 0
    for seq in sequences:
        for position in range(seq.start, seq.end):
            want, blocked = [], False
            for back in range(LAYOUT.config.engram.max_ngram_size):
                at = position - back
                blocked = blocked or at < 0 or bool(seq.is_image and seq.is_image[at])
                want.append(-1 if blocked else seq.token_ids[at])
            assert step.lookback_tg[row].tolist() == want
            row += 1


@pytest.mark.parametrize("seed", range(30))
def test_logits_rows_are_the_last_ones_the_decoder_runs(seed: int) -> None:
    sequences = random_sequences(random.Random(seed))
    step = InputBuilder(LAYOUT).step(sequences)
    cu, want = step.decoder_rows.cu_seqlens_q, []
    for number, seq in enumerate(sequences):
        want += range(max(cu[number], cu[number + 1] - seq.num_logits), cu[number + 1])
    assert step.logits_rows.tolist() == want


@pytest.mark.parametrize("start", [0, 1, 5, 8, 60])
def test_draft_rows_all_see_the_block_and_one_window_before_it(start: int) -> None:
    seq = SequenceRows(
        token_ids=[0] * (start + 5), start=start, count=5, slot=2, blocks=[1], decoder_start=3
    )
    rows = InputBuilder(LAYOUT).draft_rows([seq])
    want = [(0, p) for p in range(max(0, 3, start - WINDOW), start + 5)]
    for row in range(5):
        assert seen_by(rows, row, [seq]) == want
    assert len(rows.window_writes.slot_m) == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_step_of_single_rows_is_what_the_definition_says(seed: int) -> None:
    draw, builder = random.Random(seed), InputBuilder(LAYOUT)
    long = seed % 2  # windows that are all full take another way
    sequences = []
    for number in range(draw.randint(1, 6)):
        start = draw.choice([200, 201, 260] if long else [0, 1, 2, 7, 8, 30, 129, 200])
        sequences.append(
            SequenceRows(
                token_ids=[draw.randrange(256) for _ in range(start + 1)],
                start=start,
                count=1,
                slot=9 - number,
                blocks=[20 * number + 1 + k for k in range(start // 128 + 1)][::-1],
                num_logits=draw.choice([0, 1]),
            )
        )
    batch = batch_of(sequences, builder.ngram_order)
    assert differences(builder.build(batch), builder.build_chunks(batch)) == []
