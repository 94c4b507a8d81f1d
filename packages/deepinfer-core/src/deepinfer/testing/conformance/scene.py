"""Sequences with a past: pools filled as earlier steps left them, poison everywhere else.

A scene knows the value of every key of every sequence, so the state before any step can be written
down without running the steps before it. That makes every way of cutting the same rows into steps
comparable, and leaves no room for errors to make up for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.cache.records import KvFormat, RecordFormat, RecordKind
from deepinfer.checkpoint.synth_configs import named_config
from deepinfer.config.model_config import ModelConfig
from deepinfer.kernels.interface import Kernels
from deepinfer.kernels.records import Pool, encode_record, scatter_records
from deepinfer.step import StepInputs
from deepinfer.step.builder import InputBuilder, SequenceRows
from deepinfer.testing.conformance.base import generator

__all__ = ["KV_FORMATS", "Part", "Scene", "Seq", "Step", "cuts", "empty_pool", "fill"]


@dataclass(frozen=True, slots=True)
class Seq:
    """One sequence: positions `first .. last` run in the scene, those before are its past."""

    first: int
    last: int
    window_start: int = 0
    """First position whose window keys are valid (bounded replay)."""

    @property
    def length(self) -> int:
        return self.last + 1


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence that run in one step."""

    seq: int
    start: int
    count: int


Step = tuple[Part, ...]
KV_FORMATS: tuple[KvFormat, ...] = ("v41", "bf16", "none")


@dataclass(frozen=True)
class Scene:
    """Sequences, and the caches that they live in.

    Args:
        seqs: the sequences.
        window: window keys that a row sees.
        backtrack: rows by which a ring is longer than that.
        dim: values of a window key or entry.
        index_dim: values of an index key.
        kv_format: how records are stored.
        has_fp4_entries: compressed entries in FP4, else in FP8 (`v41`).
    """

    seqs: tuple[Seq, ...]
    window: int = 5
    backtrack: int = 3
    dim: int = 64
    index_dim: int = 64
    kv_format: KvFormat = "v41"
    has_fp4_entries: bool = True
    layout: CacheLayout = field(init=False)
    _inputs: dict[tuple[Step, torch.device], StepInputs] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        config = replace(
            ModelConfig.from_dict(named_config("tiny")),
            sliding_window=self.window,
            head_dim=self.dim,
            index_head_dim=self.index_dim,
            use_fp4_sparse_kv=self.has_fp4_entries,
        )
        layout = CacheLayout(config, self.kv_format, backtrack=self.backtrack)
        object.__setattr__(self, "layout", layout)

    def layer_of(self, ratio: int) -> int:
        """A layer that owns entries of this ratio."""
        ratios = self.layout.config.compress_ratios
        return next(layer for layer in self.layout.entry_layers if ratios[layer] == ratio)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each sequence, shuffled, so that no two of a sequence need be neighbours."""
        need = [-(-seq.length // BLOCK_TOKENS) + 1 for seq in self.seqs]
        order = (torch.randperm(sum(need), generator=generator(7)) + 1).tolist()
        starts = [sum(need[:i]) for i in range(len(need))]
        return tuple(tuple(order[at : at + n]) for at, n in zip(starts, need, strict=True))

    @property
    def num_blocks(self) -> int:
        """Blocks with the null block."""
        return 1 + sum(len(blocks) for blocks in self.blocks)

    @property
    def num_slots(self) -> int:
        """State slots with the null slot, and one that no sequence has."""
        return len(self.seqs) + 2

    def slot(self, seq: int) -> int:
        """State slot of a sequence: dealt out backwards, the last one stays free."""
        return len(self.seqs) - seq

    def ring_row(self, seq: int, position: int) -> int:
        """Row of a window ring."""
        rows = self.layout.ring_rows
        return self.slot(seq) * rows + position % rows

    def state_row(self, seq: int, position: int) -> int:
        """Row of a compressor-state ring."""
        rows = self.layout.state_rows
        return self.slot(seq) * rows + position % rows

    def entry_row(self, seq: int, entry: int, ratio: int) -> int:
        """Row of an entry pool."""
        per_block = BLOCK_TOKENS // ratio
        return self.blocks[seq][entry // per_block] * per_block + entry % per_block

    def inputs(self, step: Step, device: torch.device) -> StepInputs:
        """What a forward over the step is told; made once, since nothing may write to it."""
        found = self._inputs.get((step, device))
        if found is None:
            found = self.builder(device).step([self.rows_of(part) for part in step])
            self._inputs[step, device] = found
        return found

    def builder(self, device: torch.device) -> InputBuilder:
        """The engine's own input builder."""
        return InputBuilder(self.layout, device)

    def rows_of(self, part: Part) -> SequenceRows:
        """One part as the input builder takes it."""
        seq = self.seqs[part.seq]
        return SequenceRows(
            token_ids=range(part.start + part.count),
            start=part.start,
            count=part.count,
            slot=self.slot(part.seq),
            blocks=self.blocks[part.seq],
            window_start=seq.window_start,
        )

    def whole(self) -> Step:
        """All rows in one step."""
        return tuple(
            Part(number, seq.first, seq.last - seq.first + 1)
            for number, seq in enumerate(self.seqs)
        )


def cuts(scene: Scene, seed: int, *, quick: bool) -> list[tuple[str, list[Step]]]:
    """Ways to run the same rows, by name; the first one runs all in one step."""
    whole = scene.whole()
    ones: list[Step] = [
        (one,) for part in whole for one in _some_alone(part, all_of_them=not quick)
    ]
    alone: list[Step] = [(part,) for part in whole]
    ways: list[tuple[str, list[Step]]] = [
        ("all rows run in one step", [whole]),
        ("the same step runs again", [whole]),
        ("sequences are reversed", [tuple(reversed(whole))]),
        ("each sequence runs alone", alone),
        ("rows run by themselves", ones),
        ("random chunks run, mixed", _random_steps(whole, seed)),
    ]
    for size in () if quick else (2, 3, 5, 7, 16, 64):
        ways.append((f"chunks of {size} run, mixed", _side_by_side(whole, size)))
    return ways


def _random_steps(whole: Sequence[Part], seed: int) -> list[Step]:
    """Steps in which each sequence runs 0 to 7 of its next rows."""
    g = generator(seed)
    steps: list[Step] = []
    left = list(whole)
    while left:
        step, rest = [], []
        for part in left:
            count = min(part.count, int(torch.randint(0, 8, (1,), generator=g)))
            if count:
                step.append(Part(part.seq, part.start, count))
            if count < part.count:
                rest.append(Part(part.seq, part.start + count, part.count - count))
        if step:
            steps.append(tuple(step))
        left = rest
    return steps


def _some_alone(part: Part, *, all_of_them: bool) -> list[Part]:
    """Single rows of a part: all, or its first and its last."""
    ones = _chunks(part, 1)
    return ones if all_of_them else [ones[i] for i in sorted({0, len(ones) - 1})]


def _chunks(part: Part, size: int) -> list[Part]:
    return [
        Part(part.seq, part.start + at, min(size, part.count - at))
        for at in range(0, part.count, size)
    ]


def _side_by_side(whole: Sequence[Part], size: int) -> list[Step]:
    """Step i holds chunk i of every sequence that has one."""
    chunked = [_chunks(part, size) for part in whole]
    longest = max(len(chunks) for chunks in chunked)
    return [tuple(chunks[i] for chunks in chunked if i < len(chunks)) for i in range(longest)]


def empty_pool(kernels: Kernels, fmt: RecordFormat, num_rows: int) -> Pool:
    """A pool full of poison but for row 0, which is zero; the bytes of each format decode to NaN.

    In a sectioned pool the null row is entry 0 of block 0, and not one stretch of bytes.
    """
    device = kernels.device
    if not fmt.is_packed:
        dtype = torch.bfloat16 if fmt.kind is RecordKind.BF16 else kernels.compute_dtype
        data = torch.full((num_rows, fmt.dim), float("nan"), dtype=dtype, device=device)
        data[0] = 0
        return Pool(data, fmt)
    data = torch.full((num_rows, fmt.num_bytes()), 0xFF, dtype=torch.uint8, device=device)
    pool = Pool(data, fmt)
    null = torch.zeros((1, fmt.num_bytes()), dtype=torch.uint8, device=device)
    scatter_records(pool, torch.zeros(1, dtype=torch.int64, device=device), null)
    return pool


def fill(pool: Pool, slots: Sequence[int], values_nd: torch.Tensor) -> None:
    """Store values at some rows of a pool, as the reference encodes them."""
    if not slots:
        return
    device = pool.data.device
    record = encode_record(values_nd.to(device), pool.format)
    scatter_records(pool, torch.tensor(slots, dtype=torch.int64, device=device), record)
