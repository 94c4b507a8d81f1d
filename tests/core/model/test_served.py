"""Numerics `served` against `plain_model`: every rounding point is there, and no other.

Free-running forwards part after the first value that lies on a rounding boundary, so sub-layers are
judged one by one: the plain model is given the streams that the model had before each sub-layer,
and what that makes of them is compared bit by bit - streams, cache records, selections, draft
features. Sums in another order seldom move a bfloat16 rounding (one value in 10^4), and nearly all
bits are the same; where one moves, it moves others of its row and of rows that read it, so that one
of several prompts may differ more: the median over prompts is judged. A rounding point that is
missing, added or misplaced changes every prompt, which the tests of single points show.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.model.golden import (
    TIGHT,
    GoldenCase,
    Recorder,
    Runner,
    all_cases,
    row_errors,
)
from tests.core.model.plain_model import PlainModel
from tests.core.model.random_models import make_model, make_prompts

import deepinfer
from deepinfer.kernels.records import gather_records
from deepinfer.kernels.registry import cpu_backend, reference_backend
from deepinfer.model.model import Model

SAME = 0.005
"""Part of the values of any kind that may differ; of most kinds none does."""
CHANGED = 0.03
"""Part of the values of some kind that differ at least where a rounding point is misplaced."""
CHOSEN_OTHERWISE = 0.005
"""The same for the choice of entries, of rows in all prompts: near ties are rare."""
MODELS = 24
RANDOM_SAME = 0.02
"""Part of the values of any kind over all random models: one moved row may be 0.01 of a kind."""
CLEAR = 0.1
"""Gap of the two largest logits, in deviations, behind which free-running forwards may agree."""

POINTS = """
mix; attn_norm; ffn_norm; q_norm; kv_norm; norm; main_norm; trunk; wq_a; wkv; wq_b; wo_a; wo_b;
turned query; turned key; attended; turned back; latent; turned entry; expert hidden; expert out;
moe; engram kv; engram trunk; feature; main_proj; Q8 wq_a; Q8 wkv; Q8 wq_b; Q8 wo_a; Q8 wo_b;
Q8 experts.w1; Q8 experts.w2; Q8 experts.w3; Q8 shared_experts.w1; Q8 shared_experts.w2;
Q8 shared_experts.w3; Q8 main_proj
"""
INDEX_POINTS = """
k_norm; index query; turned index query; index weight; index score; index key; turned index key;
Q8 indexer.wq_b
"""
EXTRA = """
unweighted norm; coefficients; moved; probabilities; pair values; pair gates; activation; router;
combine; engram gate; Q8 gate; Q8 compressor.wkv; Q8 compressor.wgate; Q8 indexer.wk;
Q8 indexer.weights_proj; Q8 head
"""


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";")]


each_kernels = pytest.mark.parametrize("kernels", ["reference", "cpu"])


@dataclass(frozen=True)
class Seen:
    """What a model's forward over one sequence left behind."""

    ids: list[int]
    mask: torch.Tensor | None
    embeds: torch.Tensor | None
    runner: Runner
    trace: Recorder
    streams: list[torch.Tensor]
    """After each sub-layer."""
    logits: torch.Tensor

    def window(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Window keys of the positions that the ring still holds, and these positions."""
        rows, count = self.runner.model.layout.ring_rows, len(self.ids)
        positions = torch.arange(max(0, count - rows), count)
        return gather_records(self.runner.cache.window[layer], rows + positions % rows), positions

    def stored(self, name: str, layer: int, count: int) -> torch.Tensor:
        """The first `count` entries or index keys of their owner."""
        per_block = self.runner.model.layout.entries_per_block(layer)
        entry = torch.arange(count)
        block = torch.tensor(self.runner.blocks[0])[entry // per_block]
        pool = getattr(self.runner.cache, name)[layer]
        return gather_records(pool, block * per_block + entry % per_block)


def observe(
    model: Model,
    ids: list[int],
    mask: torch.Tensor | None = None,
    embeds: torch.Tensor | None = None,
) -> Seen:
    runner, trace = Runner(model, [ids], room=16), Recorder()
    runner.masks, runner.embeds = [mask.tolist() if mask is not None else None], [embeds]
    middle: list[torch.Tensor] = []
    seam = model.kernels.hc_seam

    def watched_seam(*args: Any) -> Any:
        # a traced forward settles the streams behind each layer: what is left are its middles
        found = seam(*args)
        middle.append(found[0].clone())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.kernels, "hc_seam", watched_seam)
        logits = runner.run([len(ids)], trace)[0]
    assert len(middle) == model.config.num_hidden_layers
    streams = [x for i, m in enumerate(middle) for x in (m, trace.get("streams", i))]
    return Seen(ids, mask, embeds, runner, trace, streams, logits)


def differences(plain: PlainModel, seen: Seen) -> tuple[Counter[str], Counter[str]]:
    """Per kind, how many values differ when each layer starts from the same streams, and of all."""
    want = plain.forward(
        seen.ids, image_mask=seen.mask, image_embeds=seen.embeds, given_streams=seen.streams
    )
    differ: Counter[str] = Counter()
    total: Counter[str] = Counter()

    def add(kind: str, is_other: torch.Tensor) -> None:
        differ[kind] += int(is_other.sum())
        total[kind] += is_other.numel()

    for i, streams in enumerate(want.streams):
        add("attention" if i % 2 == 0 else "experts", seen.streams[i].double() != streams)
    for layer, keys in want.window.items():
        got, positions = seen.window(layer)
        add("window", got.double() != keys[positions])
    for layer, entries in want.entries.items():
        add("entries", seen.stored("entries", layer, len(entries)).double() != entries)
    for layer, keys in want.index_keys.items():
        add("index keys", seen.stored("index_keys", layer, len(keys)).double() != keys)
    for layer, chosen in want.selected.items():
        marks = torch.zeros(len(chosen), chosen.shape[1] + 1, dtype=torch.bool)
        got = seen.trace.get("index", layer).long()
        marks.scatter_(1, got.where(got >= 0, torch.tensor(chosen.shape[1])), True)
        add("selected rows", (marks[:, :-1] != chosen).any(1))
    deviation = want.logits.std()
    add("logits", (seen.logits.double() - want.logits).abs() > 1e-5 * deviation)
    if want.context is not None:
        add("context", seen.trace.get("context", -1).double() != want.context)
    return differ, total


def shares(plain: PlainModel, seen: Sequence[Seen]) -> dict[str, float]:
    """Per kind, the part that differs: median over prompts, or over all rows for choices."""
    found = [differences(plain, each) for each in seen]
    part = {
        kind: statistics.median(differ[kind] / max(1, total[kind]) for differ, total in found)
        for kind in found[0][1]
    }
    chosen = sum(total["selected rows"] for _, total in found)
    return part | {"selected rows": sum(d["selected rows"] for d, _ in found) / max(1, chosen)}


def load(
    folder: Path, kernels: str, kv_format: str, engram_token_map: torch.Tensor | None
) -> Model:
    """The model in `served`, on the reference's kernels or on those of the CPU."""
    create = {"reference": reference_backend, "cpu": cpu_backend}[kernels]().create
    ops = create(numerics="served", kv_format=kv_format, device=torch.device("cpu"))
    return deepinfer.load_model(folder, kernels=ops, engram_token_map=engram_token_map)


def golden_case() -> GoldenCase:
    return next(case for case in all_cases() if case.name == "c10")


@cache
def golden_model(kernels: str, kv_format: str) -> Model:
    case = golden_case()
    return load(case.folder, kernels, kv_format, case.values["engram_token_map"])


@cache
def golden_seen(kernels: str, kv_format: str, count: int, length: int) -> list[Seen]:
    """Forwards over `count` random prompts; half as long again as the index takes entries."""
    rng, model = random.Random(length), golden_model(kernels, kv_format)
    prompts = [[rng.randrange(250) for _ in range(length)] for _ in range(count)]
    return [observe(model, ids) for ids in prompts]


def golden_plain(**options: object) -> PlainModel:
    case = golden_case()
    token_map = case.values["engram_token_map"]
    return PlainModel(case.folder, numerics="served", engram_token_map=token_map, **options)


@each_kernels
@pytest.mark.parametrize("kv_format", ["v41", "bf16", "none"])
@pytest.mark.parametrize(("count", "length"), [(5, 24), (4, 96)])
def test_layers_give_the_same_bits(kernels: str, kv_format: str, count: int, length: int) -> None:
    seen = golden_seen(kernels, kv_format, count, length)
    found = shares(golden_plain(kv_format=kv_format), seen)
    assert len(found) == 8
    assert max(found.values()) < SAME, found


@pytest.mark.parametrize("point", names(POINTS))
def test_a_rounding_point_left_out_would_show(point: str) -> None:
    found = shares(golden_plain(without=[point]), golden_seen("reference", "v41", 5, 24))
    assert max(found.values()) > CHANGED, f"without {point!r}: {found}"


@pytest.mark.parametrize("point", names(INDEX_POINTS))
def test_a_rounding_point_of_the_index_left_out_would_show(point: str) -> None:
    found = shares(golden_plain(without=[point]), golden_seen("reference", "v41", 4, 96))
    assert found["selected rows"] > CHOSEN_OTHERWISE, f"without {point!r}: {found}"


@pytest.mark.parametrize("value", names(EXTRA))
def test_a_rounding_point_too_many_would_show(value: str) -> None:
    found = shares(golden_plain(extra=[value]), golden_seen("reference", "v41", 5, 24))
    assert max(found.values()) > CHANGED, f"with {value!r} rounded: {found}"


def test_expert_weights_behind_the_second_product_would_show() -> None:
    """4.3: the weight goes in before the second quantisation, not into the sum."""

    class WeightsLast(PlainModel):
        def expert(self, at: str, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            y = super().expert(at, x, None)
            return y if weight is None else self.bf16(y * weight.unsqueeze(-1), "expert out")

    case = golden_case()
    token_map = case.values["engram_token_map"]
    plain = WeightsLast(case.folder, numerics="served", engram_token_map=token_map)
    found = shares(plain, golden_seen("reference", "v41", 5, 24))
    assert found["experts"] > CHANGED, found


def test_image_embeddings_are_rounded_like_those_of_the_table() -> None:
    """2.1: the streams are bfloat16 from the start, whatever the embeddings come in."""
    ids = golden_case().ids(0)[:24]
    image = golden_model("reference", "v41").config.image_token_id
    ids[2:22] = [image] * 20
    mask = torch.tensor([t == image for t in ids])
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(int(mask.sum()), golden_plain().config["hidden_size"], generator=generator)
    seen = observe(golden_model("reference", "v41"), ids, mask, embeds)
    found = shares(golden_plain(), [seen])
    assert found["attention"] < SAME, found


@each_kernels
def test_random_models_give_the_same_bits(kernels: str, tmp_path: Path) -> None:
    """Quantised and bfloat16 checkpoints of random shape, every format."""
    differ: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for seed in range(MODELS):
        kv_format = ("v41", "bf16", "none")[seed % 3]
        storage = ("quantised", "bf16", "quantised", "quantised")[seed % 4]
        made = make_model(40_000 + seed, tmp_path / str(seed), storage=storage)
        model = load(made.folder, kernels, kv_format, made.engram_token_map)
        plain = PlainModel(
            made.folder,
            numerics="served",
            kv_format=kv_format,
            engram_token_map=made.engram_token_map,
        )
        prompts = make_prompts(made, seed)
        for ids, mask, embeds in zip(prompts.ids, prompts.masks, prompts.embeds, strict=True):
            rounded = embeds.bfloat16().float() if embeds is not None else None
            counts = differences(plain, observe(model, ids, mask, rounded))
            differ += counts[0]
            total += counts[1]
    assert len(total) == 8
    found = {kind: differ[kind] / total[kind] for kind in total}
    assert max(found.values()) < RANDOM_SAME, found


@each_kernels
def test_draft_features_of_any_number_of_streams(kernels: str, tmp_path: Path) -> None:
    """7.1: a mean is a division, not a product with a rounded 1/3: ties fall the wrong way then."""
    differ, total, seed = 0, 0, 41_000
    while total < 4_000:
        seed += 1
        made = make_model(seed, tmp_path / str(seed), storage="quantised")
        if not made.text["num_nextn_predict_layers"] or made.text["hc_mult"] not in (3, 5, 6):
            continue
        model = load(made.folder, kernels, "v41", made.engram_token_map)
        plain = PlainModel(made.folder, numerics="served", engram_token_map=made.engram_token_map)
        ids = [t % (made.text["vocab_size"] - 2) for t in range(seed, seed + 30)]
        counts = differences(plain, observe(model, ids))
        differ, total = differ + counts[0]["context"], total + counts[1]["context"]
    assert differ < SAME * total


@each_kernels
def test_free_running_forwards_agree_until_a_rounding_moves(kernels: str) -> None:
    """After that they part, at these sizes by whole experts; clear arg-maxes still mostly agree."""
    close, agrees = [], []
    for seen in golden_seen(kernels, "v41", 5, 24):
        want = golden_plain().forward(seen.ids).logits
        close.append(row_errors(seen.logits, want) < TIGHT)
        top = want.topk(2).values
        is_clear = top[:, 0] - top[:, 1] > CLEAR * want.std()
        agrees.append((seen.logits.argmax(-1) == want.argmax(-1))[is_clear])
        assert seen.logits.argmax(-1)[close[-1]].equal(want.argmax(-1)[close[-1]])
    assert torch.cat(close).double().mean() > 0.3
    assert torch.cat(agrees).double().mean() > 0.9


@each_kernels
@pytest.mark.parametrize("chunk_size", [5, 1])
def test_replay_in_chunks_that_may_keep_no_row(kernels: str, chunk_size: int) -> None:
    """Chunks before the kept rows run the decoder layers on nothing."""
    model, ids = golden_model(kernels, "v41"), golden_case().ids(0)[:30]
    (whole,) = model.full_logits([ids], replay_keep=4)
    (parts,) = model.full_logits([ids], replay_keep=4, chunk_size=chunk_size)
    want = golden_plain().forward(ids, replay_keep=4).logits
    assert whole.shape == parts.shape == want.shape
    assert min(float(row_errors(got, want).median()) for got in (whole, parts)) < 0.2


@each_kernels
def test_draft_blocks_give_the_same_bits(kernels: str) -> None:
    """Behind the last row of each prompt, on the context that the model itself has."""
    same = []
    for seen in golden_seen(kernels, "v41", 5, 24):
        token = int(seen.logits[-1].argmax())
        context = seen.trace.get("context", -1).double()
        want = golden_plain().draft(context, len(seen.ids) - 1, token)
        got = seen.runner.draft(0, token)
        same.append(got["hidden"].double().equal(want["hidden"]))
        if same[-1]:
            assert row_errors(got["logits"], want["logits"]).max() < TIGHT
            assert got["tokens"].equal(want["tokens"])
            torch.testing.assert_close(got["conf"].double(), want["conf"], rtol=1e-5, atol=1e-7)
    assert sum(same) > len(same) / 2


@pytest.mark.parametrize("point", ["mix", "attn_norm", "trunk", "wq_b", "moe", "Q8 wkv"])
def test_a_rounding_point_left_out_of_the_drafts_would_show(point: str) -> None:
    for seen in golden_seen("reference", "v41", 5, 24):
        token = int(seen.logits[-1].argmax())
        context = seen.trace.get("context", -1).double()
        want = golden_plain(without=[point]).draft(context, len(seen.ids) - 1, token)
        got = seen.runner.draft(0, token)
        assert (got["hidden"].double() != want["hidden"]).double().mean() > CHANGED
