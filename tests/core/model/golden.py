"""Golden cases: right values from an independent float64 implementation, and how a model is
compared with them.

Cases lie in `tests/data/golden`; a folder named by the environment variable DEEPINFER_GOLDEN adds
more.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import deepinfer
from deepinfer.cache.pools import CachePools
from deepinfer.cache.records import KvFormat
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.kernels.interface import Kernels, Numerics
from deepinfer.kernels.padded import PaddedKernels
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.model.model import Model
from deepinfer.step.builder import SequenceRows

KERNELS = {"reference": ReferenceKernels, "cpu": CpuKernels, "padded": PaddedKernels}

TIGHT = 1e-4
"""Largest difference over the logits' deviation where no quantiser boundary can be crossed: fp32
reordering alone stays below 3e-5."""


@dataclass(frozen=True)
class GoldenCase:
    """One folder of right values."""

    folder: Path
    kernels: str = "cpu"
    """Name in `KERNELS` of what it runs on."""

    @property
    def name(self) -> str:
        return self.folder.name

    def on(self, kernels: str) -> GoldenCase:
        """The same case on other kernels."""
        return replace(self, kernels=kernels)

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "golden.safetensors")

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text())

    @property
    def numbers(self) -> range:
        return range(len(self.meta["lengths"]))

    def ids(self, number: int) -> list[int]:
        return self.values[f"{number}.input_ids"].tolist()

    def mask(self, number: int) -> torch.Tensor | None:
        return self.values.get(f"{number}.image_mask")

    def embeds(self, number: int) -> torch.Tensor | None:
        return self.values.get(f"{number}.image_embeds")

    def load_on(self, kernels: Kernels) -> Model:
        """The case's model on a kernels object."""
        return deepinfer.load_model(
            self.folder, kernels=kernels, engram_token_map=self.values.get("engram_token_map")
        )

    def load(self, *, numerics: Numerics = "exact", kv_format: KvFormat = "v41") -> Model:
        """The case's model on its kernels; the same model for the same arguments."""
        return _load(self, numerics, kv_format)


@cache
def _load(case: GoldenCase, numerics: Numerics, kv_format: KvFormat) -> Model:
    return case.load_on(KERNELS[case.kernels](numerics=numerics, kv_format=kv_format))


def all_cases() -> list[GoldenCase]:
    roots = [Path(__file__).parents[2] / "data" / "golden"]
    if extra := os.environ.get("DEEPINFER_GOLDEN"):
        roots.append(Path(extra))
    folders = {
        path.name: path for root in roots for path in sorted(root.glob("c*")) if path.is_dir()
    }
    assert folders, f"no golden cases in {roots}"
    return [GoldenCase(path) for _, path in sorted(folders.items())]


class Recorder:
    """A trace that keeps everything, concatenated over the forwards it saw."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)

    def __call__(self, name: str, layer: int, value: torch.Tensor) -> None:
        self._parts[name, layer].append(value.clone())

    def get(self, name: str, layer: int) -> torch.Tensor:
        return torch.cat(self._parts[name, layer])


class Runner:
    """Runs sequences step by step through one cache, each in chunks of its own choosing."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], *, room: int = 0) -> None:
        self.model, self.builder = model, model.input_builder()
        self.tokens = [list(ids) for ids in prompts]
        self.done = [0] * len(prompts)
        self.decoder_start = [0] * len(prompts)
        self.masks: list[list[bool] | None] = [None] * len(prompts)
        self.embeds: list[torch.Tensor | None] = [None] * len(prompts)
        need = [model.layout.blocks_for(len(ids) + room) for ids in prompts]
        # blocks are dealt out round robin and backwards, so that no two of a sequence are
        # neighbours
        order = [seq for depth in range(max(need)) for seq, n in enumerate(need) if depth < n]
        self.blocks: list[list[int]] = [[] for _ in prompts]
        for block, seq in enumerate(order):
            self.blocks[seq].append(len(order) - block)
        self.cache: CachePools = model.new_cache(num_slots=len(prompts), num_blocks=sum(need))

    def rows(self, seq: int, count: int, *, num_logits: int | None = None) -> SequenceRows:
        start, end = self.done[seq], self.done[seq] + count
        mask, embeds = self.masks[seq], self.embeds[seq]
        before, inside = (sum(mask[:start]), sum(mask[start:end])) if mask else (0, 0)
        return SequenceRows(
            token_ids=self.tokens[seq],
            start=start,
            count=count,
            slot=len(self.tokens) - seq,
            blocks=self.blocks[seq],
            decoder_start=self.decoder_start[seq],
            num_logits=max(0, end - max(start, self.decoder_start[seq]))
            if num_logits is None
            else num_logits,
            is_image=mask,
            image_embeds=embeds[before : before + inside] if embeds is not None else None,
        )

    @torch.inference_mode()
    def step(
        self, counts: Sequence[int], trace: Callable[..., None] | None = None
    ) -> list[torch.Tensor]:
        """Run `counts[i]` further rows of sequence i; logits of each sequence's rows."""
        batch = [(seq, self.rows(seq, count)) for seq, count in enumerate(counts) if count]
        logits = self.model.transformer.forward(
            self.builder.step([rows for _, rows in batch]), self.cache, trace
        )
        out = [logits.new_empty((0, logits.shape[1])) for _ in counts]
        for (seq, rows), part in zip(
            batch, logits.split([r.num_logits for _, r in batch]), strict=True
        ):
            self.done[seq] = rows.end
            out[seq] = part
        return out

    def run(
        self, chunk_sizes: Sequence[int], trace: Callable[..., None] | None = None
    ) -> list[torch.Tensor]:
        """Run all prompts to their ends, sequence i in chunks of `chunk_sizes[i]`, all in the same
        forwards.
        """
        parts: list[list[torch.Tensor]] = [[] for _ in self.tokens]
        while any(done < len(ids) for done, ids in zip(self.done, self.tokens, strict=True)):
            left = [len(ids) - done for done, ids in zip(self.done, self.tokens, strict=True)]
            counts = [min(size, rest) for size, rest in zip(chunk_sizes, left, strict=True)]
            for seq, logits in enumerate(self.step(counts, trace)):
                parts[seq].append(logits)
        return [torch.cat(part) for part in parts]

    @torch.inference_mode()
    def greedy(self, seq: int, first_logits: torch.Tensor, count: int) -> list[int]:
        """Arg-max continuation of one sequence whose prompt has run."""
        tokens = [int(first_logits[-1].argmax())]
        while len(tokens) < count:
            self.tokens[seq].append(tokens[-1])
            if self.masks[seq] is not None:
                self.masks[seq].append(False)
            counts = [0] * len(self.tokens)
            counts[seq] = 1
            tokens.append(int(self.step(counts)[seq][-1].argmax()))
        return tokens

    @torch.inference_mode()
    def draft(self, seq: int, token: int) -> dict[str, torch.Tensor]:
        """Greedy draft block behind the rows that have run: tokens, logits, conf, hidden."""
        model = self.model
        k, transformer, dspark = model.kernels, model.transformer, model.transformer.dspark
        assert dspark is not None
        block = [token] + [dspark.noise_token_id] * (dspark.block_size - 1)
        rows = self.builder.draft_rows(
            [
                SequenceRows(
                    token_ids=[*self.tokens[seq][: self.done[seq]], *block],
                    start=self.done[seq],
                    count=len(block),
                    slot=len(self.tokens) - seq,
                    blocks=self.blocks[seq],
                    decoder_start=self.decoder_start[seq],
                )
            ]
        )
        hidden = dspark.block(k, transformer.embed, torch.tensor(block), rows, self.cache)
        base = dspark.base_logits(k, transformer.head, hidden)
        tokens, logits, conf = [token], [], []
        for i in range(dspark.block_size):
            row, c = dspark.markov_step(
                k, base[i : i + 1], hidden[i : i + 1], torch.tensor(tokens[-1:])
            )
            logits.append(row[0])
            conf.append(c[0])
            tokens.append(int(row[0].argmax()))
        return {
            "tokens": torch.tensor(tokens[1:]),
            "logits": torch.stack(logits),
            "conf": torch.stack(conf),
            "hidden": hidden,
        }


def case_runner(case: GoldenCase, model: Model, numbers: Sequence[int], *, room: int = 0) -> Runner:
    """A runner over some sequences of a case (repeats allowed), image rows included."""
    runner = Runner(model, [case.ids(n) for n in numbers], room=room)
    for seq, number in enumerate(numbers):
        mask = case.mask(number)
        runner.masks[seq] = mask.tolist() if mask is not None else None
        runner.embeds[seq] = case.embeds(number)
    return runner


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Largest difference of each row over the deviation of the right values."""
    assert got.shape == want.shape, f"{tuple(got.shape)} logits, {tuple(want.shape)} expected"
    return (got.double() - want.double()).abs().amax(-1) / want.double().std()


def assert_tight(got: torch.Tensor, want: torch.Tensor, what: str = "logits") -> None:
    """No quantiser in the way: every row within `TIGHT`."""
    errors = row_errors(got, want)
    assert errors.max() < TIGHT, (
        f"{what}: row {int(errors.argmax())} is off by {errors.max():.1e} deviations"
    )


def assert_quantized(got: torch.Tensor, want: torch.Tensor, what: str = "logits") -> None:
    """A float32 run may cross a boundary of the cache's quantisers. That row and those that look
    back at it then move by 1e-4 to 1e-2 deviations; the rows before it may not move at all.
    """
    errors = row_errors(got, want)
    moved = float((errors >= TIGHT).double().mean())
    assert moved <= 0.5, f"{what}: {moved:.0%} of the rows are off by more than {TIGHT} deviations"
    assert errors.max() < 0.03, f"{what}: row {int(errors.argmax())} is off by {errors.max():.1e}"
    top2 = want.topk(2).values
    clear = (top2[..., 0] - top2[..., 1]) > 0.02 * want.std()
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear]), f"{what}: another arg-max"
