"""The model against `plain_model` on random small models: random shapes, prompts, chunks, formats.

Two comparisons. In float64 both sides carry the same values to 1e-13, so that quantisers and top-k
choices fall alike: every row must agree to what float32 logits can show. In float32, as the library
runs by default, a row is held to `TIGHT` unless something that may fall otherwise lies at or before
it in its sequence (`Margins`): a choice with a relative gap below `CHOICE` takes its rows out of
the comparison, a cache record within `BOUNDARY` of a rounding boundary lets them move. Both are
counted.

Shape letters: T = positions.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.core.model.golden import TIGHT, Runner, row_errors
from tests.core.model.plain_model import (
    Outcome,
    PlainModel,
    e4m3,
    grouped,
    power_of_two_above,
)
from tests.core.model.random_models import RandomModel, RandomPrompts, make_model, make_prompts

import deepinfer
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.kernels.registry import cpu_backend, reference_backend
from deepinfer.model.model import Model

MODELS = 96
PIECES = 8
FORMATS = ("v41", "none", "bf16")
WIDE = 1e-6
"""Float64 against float64: the logits are handed out as float32, rounded to 6e-8 of their size."""
CHOICE = 1e-5
"""Relative gap of router scores, index scores or block scores that float32 may close."""
BOUNDARY = 3e-7
"""Distance from a rounding boundary, over the group's largest value: a few float32 roundings."""
MOVED_ROWS = 0.1
"""Part of the rows near a boundary that may move by more than `TIGHT`, however far."""
TIE = 1e-12
"""Relative gap of scores that are equal but for their last bits, as those of equal 4-bit keys."""
PARTED_ROWS = 0.05
"""Part of the rows of float64 forwards that may part behind such ties."""

pieces = pytest.mark.parametrize("piece", range(PIECES))


class Margins:
    """A `watch` that keeps how near cache records and choices are to falling otherwise."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"record": [], "choice": []}

    def __call__(
        self, event: str, how: str | int, value: torch.Tensor, positions: torch.Tensor
    ) -> None:
        if event == "record":
            self.seen[event].append((positions, boundary_distance(str(how), value)))
        elif value.shape[-1] > int(how):
            self.seen[event].append((positions, choice_gap(value, int(how))))

    def of(self, event: str, count: int) -> torch.Tensor:
        """Least margin at or before each of `count` positions; 1 where there is none."""
        least = torch.ones(count, dtype=torch.float64)
        for positions, margin in self.seen[event]:
            positions, margin = positions[positions < count], margin[positions < count]
            least.scatter_reduce_(0, positions, margin.double(), "amin")
        return least.cummin(0).values


def choice_gap(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """Gap between the last taken and the first left out, over the larger of them, (T,).

    1 where both are 0 or one may not be taken: such ties are exact.
    """
    best = ranking.sort(descending=True).values
    last, left = best[:, count - 1], best[:, count]
    gap = (last - left) / torch.maximum(last.abs(), left.abs()).clamp(min=1e-30)
    return gap.masked_fill(left.isinf() | last.isinf() | ((last == 0) & (left == 0)), 1.0)


def boundary_distance(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Least change that moves a value or a scale of each row over a rounding boundary, (T,).

    In units of the largest value of its group.
    """
    top, bits, low = {"Q8": (448.0, 3, -6), "bf16": (math.inf, 7, -126)}.get(kind, (6.0, 1, 0))
    g = grouped(x.flatten(0, -2), 16 if kind == "Qkv4" else 32).abs()
    largest = g.amax(-1, keepdim=True).clamp(min=1e-30)
    scale, to_scale = torch.ones_like(largest), torch.ones_like(largest)
    if kind == "Qkv4":
        ratio = (largest / 6).clamp(2.0**-9, 448)
        step = 2.0 ** ((torch.frexp(ratio).exponent - 1).clamp(-6) - 3)
        scale, to_scale = e4m3(ratio), ((ratio / step).frac() - 0.5).abs() * step / ratio
    elif kind != "bf16":
        ratio = largest.clamp(min=1e-4 if kind == "Q8" else 0.0) / top
        mantissa = torch.frexp(ratio).mantissa
        scale, to_scale = power_of_two_above(ratio), torch.minimum(mantissa - 0.5, 1 - mantissa)
    y = g / scale
    step = 2.0 ** ((torch.frexp(y).exponent - 1).clamp(low) - bits)
    to_value = ((y / step).frac() - 0.5).abs() * step * scale / largest
    to_value = to_value.masked_fill((y > top) | (y == 0), 1.0)
    least = torch.minimum(to_value.amin(-1), to_scale.squeeze(-1)).amin(-1)
    return least.view(len(x), -1).amin(-1) if len(x) else least


class Case:
    """A random model, prompts for it, and how they are run."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = random.Random(f"case {seed}")
        self.name = f"seed {seed}"
        self.rng = rng
        self.kv_format = rng.choice(FORMATS)
        self.made: RandomModel = make_model(
            seed, folder / str(seed), record_multiple=rng.choice([32, 32, 2])
        )
        self.prompts: RandomPrompts = make_prompts(self.made, seed)
        self.chunk_size = rng.choice([None, 1, 2, 3, rng.randint(1, 60)])
        has_decoder = self.made.decoder_start < self.made.text["num_hidden_layers"]
        can_replay = has_decoder and self.made.targets_on_one_side
        self.replay_keep = rng.choice([None, rng.randint(1, 30)]) if can_replay else None

    def load(self, **options: object) -> Model:
        return deepinfer.load_model(
            self.made.folder, engram_token_map=self.made.engram_token_map, **options
        )

    def load_float32(self) -> Model:
        """On the reference's kernels or on those of the CPU, seed by seed."""
        backend = reference_backend() if self.made.seed % 2 else cpu_backend()
        ops = backend.create(numerics="exact", kv_format=self.kv_format, device=torch.device("cpu"))
        return self.load(kernels=ops)

    def load_float64(self) -> Model:
        return self.load(
            kernels=ReferenceKernels(
                numerics="exact", kv_format=self.kv_format, compute_dtype=torch.float64
            )
        )

    def logits(self, model: Model) -> list[torch.Tensor]:
        return model.full_logits(
            self.prompts.ids,
            image_mask=self.prompts.masks,
            image_embeds=self.prompts.embeds,
            replay_keep=self.replay_keep,
            chunk_size=self.chunk_size,
        )

    def plain(self) -> Iterator[tuple[PlainModel, Outcome, Margins]]:
        """The plain model's outcome of each sequence."""
        model = PlainModel(
            self.made.folder,
            kv_format=self.kv_format,
            engram_token_map=self.made.engram_token_map,
        )
        prompts = self.prompts
        for ids, mask, embeds in zip(prompts.ids, prompts.masks, prompts.embeds, strict=True):
            model.watch = margins = Margins()
            outcome = model.forward(
                ids, image_mask=mask, image_embeds=embeds, replay_keep=self.replay_keep
            )
            yield model, outcome, margins


def cases(piece: int, folder: Path, *, start: int = 0, count: int = MODELS) -> Iterator[Case]:
    """One piece of `count` models, seeds from `start`."""
    for seed in range(start + piece, start + count, PIECES):
        yield Case(seed, folder)


@pieces
def test_float64_agrees_in_every_row(piece: int, tmp_path: Path) -> None:
    """All formats, several sequences, chunks, replay. Only behind a tie may rows part."""
    count: Counter[str] = Counter()
    for case in cases(piece, tmp_path):
        got = case.logits(case.load_float64())
        for number, (logits, (_, want, margins)) in enumerate(zip(got, case.plain(), strict=True)):
            count += compare_float64(logits, want, margins, f"{case.name}, sequence {number}")
    assert count["parted"] <= PARTED_ROWS * count["rows"], f"too much parts behind ties: {count}"


def compare_float64(
    logits: torch.Tensor, want: Outcome, margins: Margins, what: str
) -> Counter[str]:
    errors = row_errors(logits.float(), want.logits)
    rows = want.first_row + len(errors)
    is_decided = margins.of("choice", rows)[want.first_row :] > TIE
    worst = float(errors[is_decided].max()) if is_decided.any() else 0.0
    assert worst < WIDE, (
        f"{what}: row {want.first_row + int(errors.masked_fill(~is_decided, 0).argmax())} "
        f"is off by {worst:.1e} deviations"
    )
    return Counter(rows=len(errors), parted=int((errors >= WIDE).sum()))


@pieces
def test_float32_agrees_where_nothing_is_near_a_boundary(piece: int, tmp_path: Path) -> None:
    count: Counter[str] = Counter()
    for case in cases(piece, tmp_path, start=10_000):
        got = case.logits(case.load_float32())
        for number, (logits, (_, want, margins)) in enumerate(zip(got, case.plain(), strict=True)):
            errors = row_errors(logits, want.logits)
            rows = want.first_row + len(errors)
            is_clear = margins.of("choice", rows)[want.first_row :] > CHOICE
            is_tight = is_clear & (margins.of("record", rows)[want.first_row :] > BOUNDARY)
            count += Counter(
                rows=len(errors),
                clear=int(is_clear.sum()),
                tight=int(is_tight.sum()),
                moved=int((is_clear & (errors > TIGHT)).sum()),
            )
            what = f"{case.name}, sequence {number}, {case.kv_format}"
            worst_tight = float(errors[is_tight].max()) if is_tight.any() else 0.0
            assert worst_tight < TIGHT, f"{what}: off by {worst_tight:.1e} deviations"
    assert count["clear"] > 0.8 * count["rows"], f"too much is left out: {count}"
    assert count["tight"] > 0.15 * count["rows"], f"too little is compared closely: {count}"
    near = count["clear"] - count["tight"]
    assert count["moved"] <= MOVED_ROWS * near, f"too much moves near boundaries: {count}"


@pieces
def test_draft_blocks(piece: int, tmp_path: Path) -> None:
    """Drafts behind some rows of prefills that run in chunks together, with and without replay."""
    for case in cases(piece, tmp_path, start=20_000):
        if case.made.text["num_nextn_predict_layers"] == 0:
            continue
        runner, wanted = make_runner(case), list(case.plain())
        while any(left := rows_left(runner)):
            step(runner, [min(n, case.rng.randint(0, 20)) for n in left])
            seq = case.rng.randrange(len(left))
            anchor, low = runner.done[seq] - 1, runner.decoder_start[seq]
            if anchor < low:
                continue
            plain, outcome, margins = wanted[seq]
            if margins.of("choice", anchor + 1)[-1] <= TIE:
                continue
            token = case.rng.randrange(case.made.text["vocab_size"])
            keys_from = low if drafts_read_decoder(case.made) else 0
            want = plain.draft(outcome.context, anchor, token, keys_from)
            got = runner.draft(seq, token)
            what = f"{case.name}, {case.kv_format}, sequence {seq}, block behind {anchor}"
            for name in ("logits", "hidden"):
                errors = row_errors(got[name], want[name])
                assert errors.max() < WIDE, f"{what}: {name} off by {errors.max():.1e} deviations"
            assert got["tokens"].tolist() == want["tokens"].tolist(), what
            torch.testing.assert_close(got["conf"], want["conf"], rtol=1e-6, atol=1e-9)


@pieces
def test_rows_that_are_taken_back_leave_no_trace(piece: int, tmp_path: Path) -> None:
    """Rejected drafts: wrong tokens run, are taken back, and the right ones take their places."""
    for case in cases(piece, tmp_path, start=30_000, count=MODELS // 2):
        case.replay_keep = None
        runner, vocab = make_runner(case), case.made.text["vocab_size"]
        most, right = runner.model.layout.max_backtrack, [list(ids) for ids in runner.tokens]
        parts: list[list[torch.Tensor]] = [[] for _ in right]
        while any(left := rows_left(runner)):
            done, masks, embeds = list(runner.done), runner.masks, runner.embeds
            runner.masks = runner.embeds = [None] * len(right)
            wrong = [min(n, case.rng.randint(0, most)) for n in left]
            for ids, start, count in zip(runner.tokens, done, wrong, strict=True):
                ids[start : start + count] = [case.rng.randrange(vocab) for _ in range(count)]
            step(runner, wrong)
            runner.masks, runner.embeds = masks, embeds
            runner.done, runner.tokens = done, [list(ids) for ids in right]
            found = step(runner, [min(n, case.rng.randint(0, 6)) for n in left])
            for seq, logits in enumerate(found):
                parts[seq].append(logits)
        for seq, (_, want, margins) in enumerate(case.plain()):
            compare_float64(torch.cat(parts[seq]), want, margins, f"{case.name}, sequence {seq}")


def rows_left(runner: Runner) -> list[int]:
    return [len(ids) - done for ids, done in zip(runner.tokens, runner.done, strict=True)]


def step(runner: Runner, counts: list[int]) -> list[torch.Tensor]:
    """A step of the runner, or of nothing."""
    return runner.step(counts) if any(counts) else []


def make_runner(case: Case) -> Runner:
    runner = Runner(case.load_float64(), case.prompts.ids, room=16)
    for seq, (ids, mask) in enumerate(zip(case.prompts.ids, case.prompts.masks, strict=True)):
        runner.masks[seq] = mask.tolist() if mask is not None else None
        if case.replay_keep is not None:
            runner.decoder_start[seq] = max(0, len(ids) - case.replay_keep)
    runner.embeds = list(case.prompts.embeds)
    return runner


def drafts_read_decoder(made: RandomModel) -> bool:
    """Whether context keys exist for the rows that replay keeps only."""
    return max(made.text["dspark_target_layer_ids"]) >= made.decoder_start


def test_the_seeds_reach_every_feature(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in range(MODELS):
        found.update(Case(seed, tmp_path).made.traits)
    possible = {f"streams {n}" for n in range(1, 7)}
    possible |= {f"ratios {r}" for r in ("0", "1", "2", "01", "02", "12", "012")}
    missing = possible - set(found)
    assert not missing
    assert min(found.values()) >= 3, found
