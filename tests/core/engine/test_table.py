"""The arrays of the running sequences give the same inputs as the sequences one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.core.model.golden import all_cases
from tests.core.step.compare import differences

from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.sequence import Request, Sequence
from deepinfer.engine.table import SequenceTable
from deepinfer.sampling_params import SamplingParams
from deepinfer.step.builder import InputBuilder, SequenceRows

BLOCK, SLOTS, MAX_LEN = 128, 6, 600

LAYOUT = CacheLayout(next(c for c in all_cases() if c.name == "c08").load().config)
IMAGE = LAYOUT.config.image_token_id if LAYOUT.config.image_token_id is not None else -1


class Run:
    """A table with random sequences in random states, and the same as plain lists."""

    def __init__(self, draw: random.Random, *, images: bool) -> None:
        self.builder = InputBuilder(LAYOUT)
        self.table = SequenceTable(SLOTS, MAX_LEN, self.builder.ngram_order, IMAGE)
        self.pool, self.plain, self.counts = BlockPool(40), [], []
        for number, slot in enumerate(draw.sample(range(1, SLOTS + 1), draw.randint(1, SLOTS))):
            length = draw.choice([1, 2, 3, 8, 30, 129, 200])
            tokens = [draw.randrange(100) for _ in range(length)]
            if images and draw.random() < 0.7:
                tokens[draw.randrange(length)] = IMAGE
            prompt = np.array(tokens, dtype=np.int32)
            request = Request(str(number), number, prompt, SamplingParams(), 0, MAX_LEN)
            self.table.place(Sequence(request, 0, number, 0, prompt), slot)
            start = draw.randrange(length)
            count = draw.randint(1, length - start)
            self.table.num_computed[slot] = start
            blocks = self.pool.allocate(-(-(start + count) // BLOCK))
            self.table.add_blocks(slot, blocks)
            self.counts.append(count)
            self.plain.append((slot, tokens, start, count, blocks))

    def from_table(self) -> Any:
        slots = np.array([p[0] for p in self.plain], dtype=np.int64)
        return self.builder.build(self.table.batch(slots, np.array(self.counts, dtype=np.int64)))

    def from_lists(self) -> Any:
        return self.builder.step(
            [
                SequenceRows(
                    token_ids=tokens,
                    start=start,
                    count=count,
                    slot=slot,
                    blocks=blocks,
                    num_logits=int(start + count == len(tokens)),
                    is_image=[t == IMAGE for t in tokens] if IMAGE in tokens else None,
                )
                for slot, tokens, start, count, blocks in self.plain
            ]
        )


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_inputs_from_the_table_equal_those_from_lists(seed: int, images: bool) -> None:
    assert IMAGE >= 0
    run = Run(random.Random(seed), images=images)
    assert differences(run.from_table(), run.from_lists()) == []


def test_a_sequence_that_leaves_keeps_its_tokens_and_names_its_blocks() -> None:
    run = Run(random.Random(1), images=False)
    for slot, tokens, _, _, blocks in run.plain:
        seq = run.table.owner[slot]
        assert seq is not None
        epoch = run.table.epoch[slot]
        assert run.table.remove(seq) == blocks
        assert seq.token_ids.tolist() == tokens
        assert run.table.epoch[slot] == epoch + 1
        assert not run.table.blocks[slot].any()
    assert len(run.table.running) == 0


def test_a_row_whose_token_is_not_read_yet_is_named_with_its_sample() -> None:
    run = Run(random.Random(2), images=False)
    table, slots = run.table, run.table.running
    table.num_computed[slots] = table.num_tokens[slots]
    table.num_unread[slots] = 1
    table.sample_row[slots] = np.arange(len(slots))[::-1]
    rows, samples = table.unread_rows(slots, np.ones_like(slots))
    assert rows.tolist() == list(range(len(slots)))
    assert samples.tolist() == list(range(len(slots)))[::-1]
    assert (table.for_scheduler().num_tokens_r == table.num_computed[slots] + 1).all()


def test_a_sequence_that_launched_steps_will_complete_has_nothing_to_compute() -> None:
    run = Run(random.Random(3), images=False)
    table, slot = run.table, int(run.table.running[0])
    table.num_computed[slot] = table.num_tokens[slot]
    table.num_unread[slot], table.max_len[slot] = 1, table.num_tokens[slot] + 1
    seen = table.for_scheduler()
    assert seen.num_tokens_r[0] == seen.num_computed_r[0]
