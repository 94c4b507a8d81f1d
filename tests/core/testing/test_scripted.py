"""`ScriptedModel` says what its scripts say, depends on the whole context, and notices every kind
of mix-up in its caches.
"""

from __future__ import annotations

import doctest
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError, RequestError
from deepinfer.step import StepInputs
from deepinfer.step.builder import SequenceRows
from deepinfer.testing import CacheCorruption, ScriptedModel, byte_tokenizer
from deepinfer.testing.scripted import model as model_module
from deepinfer.testing.scripted.records import HASH, POISON

NUM_PLAIN = 252
"""Ids below the special ones of the default vocabulary."""
SPECIAL = {252, 253, 254, 255}
EOS = 253


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(NUM_PLAIN) for _ in range(length)]


class Driver:
    """Runs sequences through one cache; slots and blocks are dealt out backwards."""

    def __init__(self, model: ScriptedModel, prompts: Sequence[Sequence[int]], room: int = 64):
        self.model, self.builder = model, model.input_builder()
        self.tokens = [list(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        self.slots = list(range(len(prompts), 0, -1))
        need = [model.layout.blocks_for(len(prompt) + room) for prompt in prompts]
        blocks = list(range(1, sum(need) + 1))
        self.blocks = [[blocks.pop() for _ in range(num)] for num in need]
        self.cache = model.new_cache(num_slots=len(prompts), num_blocks=sum(need))
        self.more: dict[str, Any] = {}

    def rows(self, number: int, count: int, **other: Any) -> SequenceRows:
        values: dict[str, Any] = {
            "token_ids": self.tokens[number],
            "start": self.done[number],
            "count": count,
            "slot": self.slots[number],
            "blocks": self.blocks[number],
            "num_logits": count,
        }
        return SequenceRows(**values | self.more | other)

    def inputs(self, counts: Sequence[int]) -> StepInputs:
        return self.builder.step([self.rows(n, count) for n, count in enumerate(counts) if count])

    def step(
        self, counts: Sequence[int], tamper: Callable[[StepInputs], StepInputs] = lambda step: step
    ) -> list[torch.Tensor]:
        """Run `counts[i]` further rows of sequence i; logits of each sequence's rows."""
        logits = self.model.forward(tamper(self.inputs(counts)), self.cache)
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        return list(logits.split(list(counts)))

    def run(self, size: int) -> list[torch.Tensor]:
        """Run every sequence to its end in chunks of `size`; logits of all its rows."""
        parts: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        while any(self.left()):
            for part, logits in zip(
                parts, self.step([min(size, n) for n in self.left()]), strict=True
            ):
                part.append(logits)
        return [torch.cat(part) for part in parts]

    def left(self) -> list[int]:
        return [len(ids) - done for ids, done in zip(self.tokens, self.done, strict=True)]

    def greedy(self, count: int) -> list[list[int]]:
        """The arg-max continuation of every sequence."""
        given = [len(tokens) for tokens in self.tokens]
        for _ in range(count):
            for tokens, logits in zip(self.tokens, self.step(self.left()), strict=True):
                tokens.append(int(logits[-1].argmax()))
        return [tokens[num:] for tokens, num in zip(self.tokens, given, strict=True)]


def alone(prompt: Sequence[int], **options: Any) -> torch.Tensor:
    return Driver(ScriptedModel(**options), [prompt]).run(len(prompt))[0]


# ---- the context, and nothing but the context ----


@pytest.mark.parametrize("size", [1, 2, 3, 17, 50, 129])
def test_chunks_give_the_bits_of_the_whole(size: int) -> None:
    prompt = prompt_of(1, 300)
    assert torch.equal(Driver(ScriptedModel(), [prompt]).run(size)[0], alone(prompt))


def test_sequences_that_run_together_give_the_bits_of_each_alone() -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 5, 90, 260, 16, 17))]
    driver, draw = Driver(ScriptedModel(), prompts), random.Random(0)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(driver.left()):
        counts = [min(left, draw.choice((0, 0, 1, 2, 7, 40))) for left in driver.left()]
        if any(counts):
            for part, logits in zip(parts, driver.step(counts), strict=True):
                part.append(logits)
    for part, prompt in zip(parts, prompts, strict=True):
        assert torch.equal(torch.cat(part), alone(prompt))


def test_every_token_of_the_context_changes_every_later_row() -> None:
    prompt = prompt_of(2, 40)
    other = [*prompt]
    other[20] = (prompt[20] + 1) % NUM_PLAIN
    one, two = alone(prompt), alone(other)
    is_same = (one == two).all(-1)
    assert is_same.tolist() == [True] * 20 + [False] * 20


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_slots_and_blocks_can_be_used_again(is_poisoned: bool) -> None:
    model, prompt = ScriptedModel(), prompt_of(3, 200)
    driver = Driver(model, [prompt_of(4, 250)])
    driver.run(64)
    if is_poisoned:
        driver.cache.poison([1], driver.blocks[0])
    driver.tokens[0], driver.done[0] = prompt, 0
    assert torch.equal(driver.run(30)[0], alone(prompt))


@pytest.mark.parametrize("num_rejected", [1, 2, 3])
def test_rows_that_are_taken_back_leave_no_trace(num_rejected: int) -> None:
    prompt = prompt_of(5, 80)
    driver = Driver(ScriptedModel(backtrack=4), [prompt])
    parts = []
    for at in range(len(prompt)):
        driver.tokens[0] = [*prompt[: at + 1], *prompt_of(at, num_rejected)]
        driver.step([1 + num_rejected])
        driver.tokens[0], driver.done[0] = [*prompt], at
        parts += driver.step([1])
    assert torch.equal(torch.cat(parts), alone(prompt))


def test_more_rows_taken_back_than_the_rings_allow_are_noticed() -> None:
    driver = Driver(ScriptedModel(backtrack=2), [prompt_of(6, 60)])
    driver.step([50])
    driver.done[0] = 46
    with pytest.raises(CacheCorruption, match="window key"):
        driver.step([1])


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules_with_preemption_change_nothing(seed: int) -> None:
    """Requests come, are thrown out and start again in other slots and blocks, all poisoned in
    between: every answer is the one that its prompt has alone.
    """
    draw = random.Random(seed)
    prompts = [prompt_of(100 * seed + n, draw.choice((1, 2, 20, 130, 200))) for n in range(8)]
    want = [Driver(ScriptedModel(), [prompt]).greedy(30)[0] for prompt in prompts]
    driver = Driver(ScriptedModel(), prompts, room=40)
    spare_slots = [driver.slots[n] for n in range(4, 8)]
    spare_blocks = [block for blocks in driver.blocks[4:] for block in blocks]
    waiting, running = list(range(4, 8)), list(range(4))
    while running:
        batch = [n for n in running if draw.random() < 0.8] or running[:1]
        counts = [0] * 8
        for n in batch:
            counts[n] = min(driver.left()[n], draw.choice((1, 2, 50)))
        for n, logits in enumerate(driver.step(counts)):
            if counts[n] and not driver.left()[n]:
                driver.tokens[n].append(int(logits[-1].argmax()))
        for n in [*running]:
            is_done = len(driver.tokens[n]) == len(prompts[n]) + 30
            if is_done or draw.random() < 0.02:
                running.remove(n)
                driver.cache.poison([driver.slots[n]], driver.blocks[n])
                spare_slots.append(driver.slots[n])
                spare_blocks += driver.blocks[n]
                driver.done[n] = 0
                waiting += [] if is_done else [n]
        draw.shuffle(spare_blocks)
        while waiting and spare_slots:
            need = driver.model.layout.blocks_for(len(prompts[waiting[0]]) + 40)
            if need > len(spare_blocks):
                break
            n = waiting.pop(0)
            driver.slots[n] = spare_slots.pop(0)
            driver.blocks[n] = [spare_blocks.pop() for _ in range(need)]
            running.append(n)
    assert not waiting
    got = [tokens[len(p) :] for tokens, p in zip(driver.tokens, prompts, strict=True)]
    assert got == want


# ---- images and replay ----


def test_image_rows_and_their_embeddings_are_part_of_the_context() -> None:
    prompt = prompt_of(7, 40)
    prompt[10:13] = [255] * 3
    is_image = [token == 255 for token in prompt]

    def logits(size: int, embeds: torch.Tensor | None) -> torch.Tensor:
        driver, parts = Driver(ScriptedModel(), [prompt]), []
        while driver.left()[0]:
            start = driver.done[0]
            before, inside = sum(is_image[:start]), sum(is_image[start : start + size])
            own = embeds[before : before + inside] if embeds is not None else None
            driver.more = {"is_image": is_image, "image_embeds": own}
            parts += driver.step([min(size, driver.left()[0])])
        return torch.cat(parts)

    embeds = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    other = embeds.clone()
    other[1, 7] += 1
    one, two = logits(40, embeds), logits(40, other)
    assert torch.equal(logits(4, embeds), one)
    assert torch.equal(logits(1, None), logits(40, None))
    assert (one == two).all(-1).tolist() == [True] * 11 + [False] * 29
    assert not (logits(40, None)[10:] == one[10:]).all(-1).any()


@pytest.mark.parametrize("size", [1, 5, 100])
def test_replay_is_followed_where_it_is_allowed(size: int) -> None:
    """The decoder layers run on the last rows only, and the window begins late."""
    prompt = prompt_of(8, 100)
    driver, want = Driver(ScriptedModel(allows_replay=True), [prompt]), alone(prompt)
    driver.run(40)
    driver.cache.poison([1])  # entries stay, the window is gone
    driver.done[0], parts = 70, []
    while driver.left()[0]:
        count = min(size, driver.left()[0])
        driver.more = {
            "decoder_start": 90,
            "window_start": 70,
            "num_logits": max(0, driver.done[0] + count - max(90, driver.done[0])),
        }
        parts.append(driver.model.forward(driver.inputs([count]), driver.cache))
        driver.done[0] += count
    assert torch.equal(torch.cat(parts), want[90:])


def test_replay_is_refused_by_default_and_must_go_on_as_it_began() -> None:
    prompt = prompt_of(9, 60)
    driver = Driver(ScriptedModel(), [prompt])
    driver.more = {"decoder_start": 40, "num_logits": 0}
    with pytest.raises(CacheCorruption, match="window key"):
        driver.model.forward(driver.inputs([50]), driver.cache)
    driver = Driver(ScriptedModel(allows_replay=True), [prompt])
    driver.more = {"decoder_start": 40, "num_logits": 0}
    driver.model.forward(driver.inputs([50]), driver.cache)
    driver.done[0], driver.more = 50, {}
    with pytest.raises(CacheCorruption, match="window key"):  # the decoder's ring begins at 40
        driver.step([1])


# ---- corruption: each kind by its name ----


def running(**options: Any) -> Driver:
    """Three sequences in the middle of their lives; the first one has an open pair."""
    driver = Driver(
        ScriptedModel(**options), [prompt_of(10, 160), prompt_of(11, 300), prompt_of(12, 21)]
    )
    driver.step([151, 290, 10])
    return driver


def wrong_slot(driver: Driver) -> None:
    driver.slots[0] = driver.slots[1]


def stale_block(driver: Driver) -> None:
    """A block still holds what its last owner left: the same positions of another context."""
    other = Driver(ScriptedModel(), [prompt_of(99, 160)])
    other.run(160)
    for ratio, pool in driver.cache.entries.items():
        rows = 128 // ratio
        old, new = other.blocks[0][0] * rows, driver.blocks[0][0] * rows
        pool[:, new : new + rows] = other.cache.entries[ratio][:, old : old + rows]


def swapped_blocks(driver: Driver) -> None:
    driver.blocks[1][:2] = driver.blocks[1][1::-1]


def foreign_block(driver: Driver) -> None:
    driver.blocks[0][0] = driver.blocks[1][0]


def missing_block(driver: Driver) -> None:
    driver.blocks[0][0] = 0


def no_block_to_write(driver: Driver) -> None:
    driver.blocks[0][1] = 0


def start_behind(driver: Driver) -> None:
    driver.done[1] += 1


def start_before(driver: Driver) -> None:
    driver.done[1] -= 3


def freed_slot(driver: Driver) -> None:
    driver.cache.poison(slots=[driver.slots[1]])


def freed_block(driver: Driver) -> None:
    driver.cache.poison(blocks=[driver.blocks[1][1]])


def poisoned_ring_row(driver: Driver) -> None:
    driver.cache.windows[0][:, driver.slots[2] * driver.model.layout.ring_rows + 3] = POISON


def poisoned_decoder_row(driver: Driver) -> None:
    driver.cache.windows[1][:, driver.slots[2] * driver.model.layout.ring_rows + 3] = POISON


def lost_state(driver: Driver) -> None:
    rows = driver.model.layout.state_rows
    driver.cache.states[:, driver.slots[0] * rows : (driver.slots[0] + 1) * rows] = POISON


def wrong_token(driver: Driver) -> None:
    driver.tokens[1][289] += 1


@pytest.mark.parametrize(
    ("mix_up", "name"),
    [
        (wrong_slot, "window key"),
        (stale_block, "entry"),
        (swapped_blocks, "entry"),
        (foreign_block, "entry"),
        (missing_block, "block table"),
        (no_block_to_write, "write"),
        (start_behind, "window key"),
        (start_before, "window key"),
        (freed_slot, "window key"),
        (freed_block, "entry"),
        (poisoned_ring_row, "window key"),
        (poisoned_decoder_row, "window key"),
        (lost_state, "pair partner"),
        (wrong_token, "look-back"),
    ],
)
def test_a_mix_up_of_the_engine_is_named(mix_up: Callable[[Driver], None], name: str) -> None:
    running().step([1, 1, 1])  # as it should be
    driver = running()
    mix_up(driver)
    with pytest.raises(CacheCorruption) as caught:
        driver.step([1, 1, 1])
    assert caught.value.what == name
    assert 0 <= caught.value.sequence < 3
    assert {"read", "expected"} <= set(str(caught.value).replace(",", "").split())


def test_a_slot_of_another_sequence_at_the_same_position_is_noticed() -> None:
    """Its window is a fine window, only not that of these tokens and these blocks."""
    driver = Driver(ScriptedModel(), [prompt_of(13, 40), prompt_of(14, 40)])
    driver.step([30, 30])
    driver.slots[0] = driver.slots[1]
    with pytest.raises(CacheCorruption, match="look-back"):
        driver.step([1, 0])
    driver.tokens[0][28:30] = driver.tokens[1][28:30]  # and it happens to go on the same way
    with pytest.raises(CacheCorruption, match="entry"):
        driver.step([1, 0])


def test_single_records_of_another_sequence_are_noticed() -> None:
    """They have the right position."""
    prompts = [prompt_of(13, 40), prompt_of(14, 40)]

    def driver() -> Driver:
        both = Driver(ScriptedModel(), prompts)
        both.step([31, 31])
        return both

    one = driver()
    own, other = (slot * one.model.layout.ring_rows for slot in one.slots)
    at = 25 % one.model.layout.ring_rows
    one.cache.windows[0][:, own + at] = one.cache.windows[0][:, other + at]
    with pytest.raises(
        CacheCorruption, match="window key.*read position 25 .*expected position 25"
    ):
        one.step([1, 1])
    one = driver()
    own, other = (slot * one.model.layout.state_rows for slot in one.slots)
    at = 30 % one.model.layout.state_rows
    one.cache.states[:, own + at] = one.cache.states[:, other + at]
    with pytest.raises(CacheCorruption, match="pair partner.*expected position 30"):
        one.step([1, 1])
    one = driver()
    one.step([1, 1])
    own, other = (blocks[0] * 64 for blocks in one.blocks)
    one.cache.entries[2][HASH, own + 15] = one.cache.entries[2][HASH, other + 15]
    with pytest.raises(CacheCorruption, match="entry 15"):
        one.step([1, 1])


def test_a_row_that_reads_its_own_key_from_the_ring_is_noticed() -> None:
    """There it may find the key of a rejected draft."""
    driver = Driver(ScriptedModel(backtrack=2), [prompt_of(13, 40)])
    driver.step([31])
    driver.tokens[0][30] += 1
    driver.done[0] = 30

    def read_ring(step: StepInputs) -> StepInputs:
        slot = driver.slots[0] * driver.model.layout.ring_rows + 30 % driver.model.layout.ring_rows
        history = torch.cat((step.rows.history_slots_x, torch.tensor([slot])))
        # the new history row takes the place of the row's own, which moves up by one
        rows = replace(step.rows, history_slots_x=history)
        return replace(step, rows=rows, decoder_rows=rows)

    with pytest.raises(CacheCorruption, match="window key"):
        driver.step([1], read_ring)


@pytest.mark.parametrize(
    ("field", "change", "name"),
    [
        ("positions_t", lambda t: t + torch.tensor([0, 0, 1, 0]), "rows"),
        ("last_positions", lambda last: (last[0], last[1] + 1, last[2]), "rows"),
        ("history_slots_x", lambda t: t.clone().fill_(3), "address"),
        ("history_slots_x", lambda t: t + 10**6, "address"),
        ("window_tw", lambda t: t + 10**6, "address"),
    ],
    ids=["gap", "last", "null history", "history", "window"],
)
def test_rows_and_addresses_that_cannot_be_are_named(
    field: str, change: Callable[[Any], Any], name: str
) -> None:
    def tamper(step: StepInputs) -> StepInputs:
        rows = replace(step.rows, **{field: change(getattr(step.rows, field))})
        return replace(step, rows=rows, decoder_rows=rows)

    with pytest.raises(CacheCorruption) as caught:
        running().step([1, 2, 1], tamper)
    assert caught.value.what == name


def test_logits_of_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(CacheCorruption, match="logits row 4"):
        running().step([1, 2, 1], lambda step: replace(step, logits_rows=step.logits_rows + 1))


@pytest.mark.parametrize(("by", "name"), [(100, "address"), (-1, "rows")])
def test_decoder_rows_that_are_not_those_kept_are_noticed(by: int, name: str) -> None:
    driver = Driver(ScriptedModel(allows_replay=True), [prompt_of(9, 60)])
    driver.more = {"decoder_start": 40, "num_logits": 0}
    step = driver.inputs([50])
    assert step.decoder_keep is not None
    with pytest.raises(CacheCorruption) as caught:
        driver.model.forward(replace(step, decoder_keep=step.decoder_keep + by), driver.cache)
    assert caught.value.what == name


def test_two_sequences_in_one_slot_are_noticed() -> None:
    driver = Driver(ScriptedModel(), [prompt_of(15, 8), prompt_of(16, 8)])
    driver.slots = [1, 1]
    with pytest.raises(CacheCorruption, match="twice"):
        driver.step([8, 8])


def test_two_sequences_in_one_block_are_noticed() -> None:
    driver = Driver(ScriptedModel(), [prompt_of(15, 8), prompt_of(16, 8)])
    driver.blocks[1] = driver.blocks[0]
    with pytest.raises(CacheCorruption, match="twice"):
        driver.step([8, 8])


def _change(tensor: torch.Tensor, at: int, draw: random.Random, num_values: int) -> torch.Tensor:
    changed = tensor.clone()
    flat = changed.view(-1)
    old = int(flat[at])
    choices = [value for value in (old - 1, old + 1, draw.randrange(num_values)) if value != old]
    flat[at] = draw.choice(choices)
    return changed


def _change_index(
    step: StepInputs, name: str, draw: random.Random, driver: Driver, ends: Sequence[int]
) -> StepInputs:
    """One number of one index of a step is off."""
    part, _, field = name.rpartition(".")
    owners = {"rows": step.rows, "writes": step.rows.window_writes, "": step}
    owners |= {
        "one": step.entries[1],
        "two": step.entries[2],
        "state": step.entries[2].state_writes,
    }
    tensor = getattr(owners[part], field)
    limit = {
        "history_slots_x": driver.cache.windows[0].shape[1],
        "slot_m": driver.cache.windows[0].shape[1],
        "slot_n": driver.cache.entries[1].shape[1],
        "block_table_sb": driver.cache.num_blocks + 1,
    }.get(field, 1 + len(step.rows.history_slots_x) + step.rows.num_rows)
    places = range(tensor.numel())
    if part == "writes":  # only the newest rows of a ring are read again
        cu, reach = step.rows.cu_seqlens_q, driver.model.config.sliding_window - 1
        source = step.rows.window_writes.source_m.tolist()
        ends = [next(end for end in cu if end > row) for row in source]
        places = [n for n in places if ends[n] - source[n] <= reach]
    if part == "state":  # only open tokens are read again
        rows = step.entries[2].state_writes.source_m
        places = [
            n
            for n in places
            if step.rows.positions_t[rows[n]] + 1 in ends
            and step.rows.positions_t[rows[n]] % 2 == 0
        ]
    if field == "block_table_sb":
        width = tensor.shape[1]
        used = [-(-end // 128) for end in ends]
        places = [s * width + b for s, num in enumerate(used) for b in range(num)]
    changed = replace(owners[part], **{field: _change(tensor, draw.choice(places), draw, limit)})
    if part == "":
        return changed
    if part == "rows" or part == "writes":
        rows = changed if part == "rows" else replace(step.rows, window_writes=changed)
        return replace(step, rows=rows, decoder_rows=rows)
    ratio = 1 if part == "one" else 2
    writes = changed if part != "state" else replace(step.entries[2], state_writes=changed)
    return replace(step, entries={**step.entries, ratio: writes})


@pytest.mark.parametrize(
    "name",
    [
        "token_ids_t",
        "lookback_tg",
        "rows.positions_t",
        "rows.block_table_sb",
        "rows.history_slots_x",
        "rows.window_tw",
        "writes.source_m",
        "writes.slot_m",
        "one.row_n",
        "one.position_n",
        "one.slot_n",
        "two.row_n",
        "two.partner_n",
        "two.position_n",
        "two.slot_n",
        "two.state_slots_x",
        "state.source_m",
        "state.slot_m",
    ],
)
def test_every_single_number_that_is_off_is_noticed(name: str) -> None:
    """In the step itself or in the next one."""

    def run(seed: int) -> None:
        draw, driver = random.Random(seed), running()
        counts = draw.choice([(1, 1, 2), (3, 1, 6), (2, 7, 2)])
        ends = [done + count for done, count in zip(driver.done, counts, strict=True)]
        driver.step(counts, lambda step: _change_index(step, name, draw, driver, ends))
        driver.step([1, 1, 1])

    for seed in range(40):
        with pytest.raises(CacheCorruption):
            run(seed)


def test_rows_that_a_step_forgets_to_write_are_noticed() -> None:
    def forget_entry(step: StepInputs) -> StepInputs:
        one = step.entries[1]
        few = replace(one, row_n=one.row_n[:-1], position_n=one.position_n[:-1])
        return replace(step, entries={**step.entries, 1: replace(few, slot_n=one.slot_n[:-1])})

    with pytest.raises(CacheCorruption, match="entry"):
        running().step([1, 1, 1], forget_entry)

    def forget_ring(step: StepInputs) -> StepInputs:
        writes = step.rows.window_writes
        few = replace(writes, source_m=writes.source_m[1:], slot_m=writes.slot_m[1:])
        rows = replace(step.rows, window_writes=few)
        return replace(step, rows=rows, decoder_rows=rows)

    driver = running()
    driver.step([1, 1, 1], forget_ring)
    with pytest.raises(CacheCorruption, match="window key"):
        driver.step([1, 1, 1])


def test_the_null_rows_must_not_be_written() -> None:
    def to_null(step: StepInputs) -> StepInputs:
        one = step.entries[1]
        return replace(step, entries={**step.entries, 1: replace(one, slot_n=one.slot_n * 0)})

    with pytest.raises(CacheCorruption, match="write"):
        running().step([1, 1, 1], to_null)


@pytest.mark.parametrize("entry", [0, 200, 777, 1500])
def test_in_long_contexts_every_entry_is_looked_at_in_the_course_of_some_steps(entry: int) -> None:
    driver = Driver(ScriptedModel(), [prompt_of(17, 1800)], room=200)
    driver.run(600)
    block = driver.blocks[0][entry // 128]
    driver.cache.entries[1][:, block * 128 + entry % 128] += 1

    def decode() -> None:
        for _ in range(64):  # 1,900 entries are 60 parts of 32
            driver.tokens[0].append(1)
            driver.step([1])

    with pytest.raises(CacheCorruption, match="entry"):
        decode()


def test_in_long_contexts_a_foreign_block_is_noticed_at_once() -> None:
    driver = Driver(ScriptedModel(), [prompt_of(18, 1800), prompt_of(19, 1800)])
    driver.run(600)
    driver.blocks[0][6] = driver.blocks[1][6]
    driver.tokens[0].append(1)
    with pytest.raises(CacheCorruption, match="entry"):
        driver.step([1, 0])


def test_without_checks_a_mix_up_changes_the_output() -> None:
    fine, wrong = running(check_every=0), running(check_every=0)
    wrong.cache.poison(slots=[wrong.slots[1]])
    want, got = fine.step([1, 1, 1]), wrong.step([1, 1, 1])
    assert [torch.equal(a, b) for a, b in zip(want, got, strict=True)] == [True, False, True]


def test_checks_can_be_thinned() -> None:
    driver = running(check_every=3)
    driver.model.num_forwards = 0
    driver.cache.poison(blocks=[driver.blocks[1][0]])
    driver.step([1, 1, 1])
    driver.step([1, 1, 1])
    with pytest.raises(CacheCorruption, match="poison"):
        driver.step([1, 1, 1])


# ---- scripts ----


def test_a_script_is_followed_and_then_comes_eos() -> None:
    prompt = prompt_of(20, 33)
    model = ScriptedModel(scripts={tuple(prompt): [5, 6, 7], (1,): [9]})
    assert Driver(model, [prompt, [1], [2]]).greedy(6) == [
        [5, 6, 7, EOS, EOS, EOS],
        [9, EOS, EOS, EOS, EOS, EOS],
        Driver(ScriptedModel(), [[2]]).greedy(6)[0],
    ]


def test_a_script_may_end_in_what_the_context_gives() -> None:
    outputs = Driver(ScriptedModel(scripts={(1, 2): [5, 6]}, after="hash"), [[1, 2]]).greedy(20)[0]
    assert outputs[:2] == [5, 6]
    assert not SPECIAL & set(outputs)
    assert outputs[2:] == Driver(ScriptedModel(), [[1, 2, 5, 6]]).greedy(18)[0]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_script_goes_on_whatever_is_sampled_and_after_preemption(size: int) -> None:
    """The prompt and the outputs so far are computed again, in chunks, elsewhere."""
    prompt = prompt_of(21, 30)
    script = [[10 + n, 100 + n] for n in range(20)]
    driver = Driver(ScriptedModel(scripts={tuple(prompt): script}), [prompt])
    for at in range(12):
        logits = driver.step(driver.left())[0][-1]
        assert logits.topk(2).indices.tolist() == script[at]
        driver.tokens[0].append(script[at][at % 2] if at % 3 else 77)
    driver.cache.poison([1], driver.blocks[0])
    driver.blocks[0].reverse()
    driver.done[0] = 0
    logits = driver.run(size)[0]
    for at in range(13):
        assert logits[29 + at].topk(2).indices.tolist() == script[at]


def test_preferred_logits_count_down_from_ten_and_the_rest_is_below_zero() -> None:
    model = ScriptedModel(scripts={(1,): [[40, 3, 250, EOS]]})
    logits = Driver(model, [[1]]).step([1])[0][0]
    assert logits[[40, 3, 250, EOS]].tolist() == [10, 9, 8, 7]
    rest = logits.clone()
    rest[[40, 3, 250, EOS]] = -1
    assert bool((rest < 0).all())
    assert len(set(logits.tolist())) == 256


def test_faults_are_that_row_alone() -> None:
    model = ScriptedModel(
        scripts={(1,): [ScriptedModel.NAN, ScriptedModel.INF, 8], (2,): [9, 9, 9]}
    )
    driver = Driver(model, [[1], [2]])
    rows = []
    for _ in range(3):
        rows.append(driver.step([1, 1]))
        driver.tokens = [[*tokens, 3] for tokens in driver.tokens]
    assert bool(torch.isnan(rows[0][0]).all())
    assert int(torch.isposinf(rows[1][0]).sum()) == 1
    assert int(torch.isfinite(rows[1][0]).sum()) == 255
    assert bool(torch.isfinite(rows[2][0]).all())
    assert [int(row[1].argmax()) for row in rows] == [9, 9, 9]


def test_a_longer_prompt_takes_over_from_a_shorter_one() -> None:
    model = ScriptedModel(scripts={(1, 2): [5, 6], (1, 2, 3): [7]})
    assert Driver(model, [[1, 2], [1, 2, 3]]).greedy(2) == [[5, 6], [7, EOS]]
    with pytest.raises(ConfigError, match="another script"):
        ScriptedModel(scripts={(1, 2): [[3, 4], 6], (1, 2, 3): [7]})
    with pytest.raises(ConfigError, match="another script"):
        ScriptedModel(scripts={(1, 2): [3], (1, 2, 3, EOS): [7]})


def test_a_script_may_be_a_function_of_all_tokens_so_far() -> None:
    seen = []

    def next_number(tokens: Sequence[int]) -> int | None:
        seen.append(list(tokens))
        return len(tokens) if len(tokens) % 2 else None

    driver = Driver(ScriptedModel(scripts=next_number), [prompt_of(22, 151)])
    outputs = driver.greedy(4)[0]
    assert outputs[0::2] == [151, 153]
    assert seen[-1] == driver.tokens[0][:-1]


def test_text_is_scripted_by_a_tokenizer() -> None:
    text = "h\u00e9llo \U0001f600!"
    model = ScriptedModel(tokenizer="bytes", scripts={"Say it": text})
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode("Say it")
    assert prompt[0] == model.config.bos_token_id == 256
    outputs = Driver(model, [prompt]).greedy(len(text.encode()) + 1)[0]
    assert bytes(outputs[:-1]) == text.encode()
    assert outputs[-1] == model.config.eos_token_id
    assert model.tokenizer.decode(outputs) == text
    assert model.tokenizer.decode(outputs[:2]) == "h\ufffd"


def test_byte_ids_are_bytes() -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    text = "".join(map(chr, range(32, 0x250))) + "\n\t \r\n  a"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 260


# ---- logits without a script ----


def test_best_tokens_are_spread_evenly_over_contexts_but_for_special_ones() -> None:
    outputs = np.array(Driver(ScriptedModel(), [[n] for n in range(200)]).greedy(100)).ravel()
    counts = np.bincount(outputs, minlength=256)
    assert not counts[NUM_PLAIN:].any()
    mean = len(outputs) / NUM_PLAIN
    chi2 = float(((counts[:NUM_PLAIN] - mean) ** 2 / mean).sum())
    assert abs(chi2 - (NUM_PLAIN - 1)) < 4 * (2 * (NUM_PLAIN - 1)) ** 0.5


def test_pseudo_random_logits_are_distinct_and_bounded() -> None:
    logits = alone(prompt_of(23, 500), vocab_size=5000)
    assert all(len(set(row.tolist())) == 5000 for row in logits[:20])
    assert logits.dtype == torch.float32
    plain = logits[:, :-4]
    assert -8 <= float(plain.min()) < -7.9 < -0.1 < float(plain.max()) < 0
    assert abs(float(plain.mean()) + 4) < 0.01


def test_eos_comes_as_often_as_it_is_asked_for() -> None:
    logits = alone(prompt_of(24, 4000), eos_share=0.25)
    share = float((logits.argmax(-1) == EOS).float().mean())
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


# ---- failures, time, callbacks ----


def test_a_failing_prompt_fails_every_step_that_it_is_in() -> None:
    bad = prompt_of(25, 20)
    model = ScriptedModel(fails_at=bad, raises=OSError("no such row"), scripts={(1,): [2, 3]})
    driver = Driver(model, [bad, [1], [*bad, 5, 6, 7]])
    driver.step([19, 1, 0])
    for counts in ([1, 0, 0], [0, 0, 21]):
        with pytest.raises(OSError, match="no such row"):
            driver.step(counts)
    driver.tokens[1].append(2)
    assert int(driver.step([0, 1, 0])[1].argmax()) == 3


def test_a_failing_prompt_keeps_its_script_and_others_may_begin_like_it() -> None:
    model = ScriptedModel(fails_at=(1, 2), scripts={(1, 2, 4): [8]})
    with pytest.raises(RuntimeError, match="as it was told"):
        Driver(model, [[1, 2, 3]]).step([3])
    assert Driver(model, [[1, 3]]).step([2])[0].shape == (2, 256)


def test_a_forward_that_fails_leaves_poison_and_the_sequence_can_begin_again() -> None:
    prompt = prompt_of(26, 60)
    driver = Driver(ScriptedModel(fails_at=2), [prompt])
    driver.step([20])
    with pytest.raises(RuntimeError, match="as it was told"):
        driver.step([20])
    with pytest.raises(CacheCorruption, match="poison"):  # the ring held fewer rows than it wrote
        driver.step([20])
    driver.done[0] = 0
    assert torch.equal(driver.run(30)[0], alone(prompt))


def test_a_forward_that_fails_spoils_all_places_that_it_would_have_written() -> None:
    def pools(driver: Driver) -> list[np.ndarray]:
        cache = driver.cache
        return [pool.copy() for pool in (*cache.windows, *cache.entries.values(), cache.states)]

    fine, failing = running(), running(fails_at=2)
    for driver in (fine, failing):
        for pool in (*driver.cache.windows, *driver.cache.entries.values(), driver.cache.states):
            pool[pool == POISON] = 7  # what nobody has written yet must not pass for spoilt
    before = pools(fine)
    fine.step([1, 2, 3])
    with pytest.raises(RuntimeError):
        failing.step([1, 2, 3])
    for old, written, spoilt in zip(before, pools(fine), pools(failing), strict=True):
        is_written = (written != old).any(axis=0)
        assert is_written.any()
        assert (spoilt[:, is_written] == POISON).all()
        assert (spoilt[:, ~is_written] == old[:, ~is_written]).all()


def test_poison_spoils_what_it_is_told_to_and_nothing_else() -> None:
    cache = ScriptedModel().new_cache(num_slots=3, num_blocks=3)
    layout = cache.layout
    per_owner = [
        *((pool, layout.ring_rows) for pool in cache.windows),
        (cache.states, layout.state_rows),
        *((pool, 128 // ratio) for ratio, pool in cache.entries.items()),
    ]
    for pool, rows in per_owner:
        assert (pool[:, rows:] == POISON).all()
        pool[:] = 7
    cache.poison(slots=[2], blocks=[1, 3])
    for number, (pool, rows) in enumerate(per_owner):
        spoilt = (pool == POISON).all(axis=0).reshape(4, rows)
        owners = [2] if number < 3 else [1, 3]
        assert spoilt.all(axis=1).nonzero()[0].tolist() == owners
        assert spoilt.any(axis=1).nonzero()[0].tolist() == owners
    with pytest.raises(AssertionError, match=r"slot 0 is not in 1\.\.3"):
        cache.poison(slots=[0])


def test_a_forward_takes_its_time_without_holding_the_lock() -> None:
    driver = Driver(ScriptedModel(step_time_s=0.2), [[1, 2, 3]])
    ticks, is_over = [], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.005):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    driver.step([3])
    ended = time.perf_counter()
    is_over.set()
    thread.join()
    assert ended - began >= 0.2
    assert sum(began < at < ended for at in ticks) >= 3


def test_callers_see_every_step() -> None:
    seen: list[int] = []
    model = ScriptedModel(on_forward=lambda step: seen.append(step.rows.num_rows))
    Driver(model, [prompt_of(27, 10)]).run(4)
    assert seen == [4, 4, 2]
    assert model.num_forwards == 3


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scripts": {(1, 256): [2]}}, "0..255"),
        ({"scripts": {(): [2]}}, "token ids"),
        ({"scripts": {(1,): [256]}}, "0..255"),
        ({"scripts": {(1,): [[2, 2]]}}, "different tokens"),
        ({"scripts": {(1,): [list(range(11))]}}, "1 to 10"),
        ({"scripts": {(1,): [True]}}, "token ids"),
        ({"scripts": {"text": [1]}}, "tokenizer"),
        ({"after": "never"}, "'eos' and 'hash'"),
        ({"vocab_size": 7}, "at least 8"),
        ({"tokenizer": "bytes", "vocab_size": 256}, "at least 260"),
        ({"sliding_window": 2}, "at least 3"),
        ({"eos_share": 1.5}, "0 to 1"),
        ({"fails_at": [1, 999]}, "0..255"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScriptedModel(**arguments)


@pytest.mark.parametrize("prompt", [[], [256], [-1], [1.5], [True], "text", [1] * 65])
def test_prompts_that_cannot_run_are_refused(prompt: object) -> None:
    with pytest.raises(RequestError, match="prompt"):
        ScriptedModel(max_position_embeddings=64).check_prompt(prompt)


def test_prompts_may_be_arrays() -> None:
    model = ScriptedModel()
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2])):
        assert model.check_prompt(prompt) == [1, 2]


def test_the_config_has_every_kind_of_layer_and_is_overridden_by_one_given() -> None:
    config = ScriptedModel(vocab_size=300, sliding_window=9, max_position_embeddings=77).config
    assert isinstance(config, ModelConfig)
    assert set(config.compress_ratios) == {0, 1, 2}
    assert config.engram is not None
    assert config.dspark is None
    assert (config.vocab_size, config.sliding_window) == (300, 9)
    assert config.max_position_embeddings == 77
    assert ScriptedModel(config=config).config is config


def test_the_example_of_the_docstring_runs() -> None:
    result = doctest.testmod(model_module)
    assert result.attempted > 5
    assert result.failed == 0


# ---- speed ----


@pytest.mark.parametrize("check_every", [1, 0])
def test_decode_is_fast(check_every: int, capsys: pytest.CaptureFixture[str]) -> None:
    """256 sequences with 120 tokens each: the bound leaves room for a machine that is busy."""
    prompts = [prompt_of(seed, 110) for seed in range(256)]
    driver = Driver(ScriptedModel(check_every=check_every), prompts, room=10)
    driver.run(30)
    times_s = []
    for _ in range(10):
        driver.tokens = [[*tokens, 1] for tokens in driver.tokens]
        step = driver.inputs([1] * 256)
        began = time.perf_counter()
        driver.model.forward(step, driver.cache)
        times_s.append(time.perf_counter() - began)
        driver.done = [done + 1 for done in driver.done]
    best_s, median_s = min(times_s), sorted(times_s)[5]
    with capsys.disabled():
        print(
            f"\nforward of 256 decode rows, check_every={check_every}: median {median_s * 1e3:.2f} "
            f"ms, {256 / median_s:,.0f} tokens/s"
        )
    assert best_s < 0.02
