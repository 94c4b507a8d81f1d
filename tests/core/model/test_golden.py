"""The model against right values of an independent implementation, in numerics `exact`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.core.model.golden import (
    GoldenCase,
    Recorder,
    all_cases,
    assert_quantized,
    assert_tight,
    case_runner,
)

from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams

CASES = all_cases()


def with_kernels(cases: list[GoldenCase]) -> Any:
    """Each case on the reference and on the compiled kernels."""
    both = [case.on(kernels) for case in cases for kernels in ("reference", "cpu")]
    return pytest.mark.parametrize("case", both, ids=lambda case: f"{case.name}-{case.kernels}")


each_case = with_kernels(CASES)
each_format = pytest.mark.parametrize(
    ("kv_format", "key", "check"),
    [("none", "logits_no_kv_quant", assert_tight), ("v41", "logits", assert_quantized)],
    ids=["none", "v41"],
)
Check = Callable[..., None]


def full_logits(case: GoldenCase, kv_format: str, **options: Any) -> list[torch.Tensor]:
    numbers = case.numbers
    return case.load(kv_format=kv_format).full_logits(
        [case.ids(n) for n in numbers],
        image_mask=[case.mask(n) for n in numbers],
        image_embeds=[case.embeds(n) for n in numbers],
        **options,
    )


@each_case
@each_format
def test_logits_of_whole_sequences_together(
    case: GoldenCase, kv_format: str, key: str, check: Check
) -> None:
    for number, got in zip(case.numbers, full_logits(case, kv_format), strict=True):
        check(got, case.values[f"{number}.{key}"], f"sequence {number}")


@each_case
@each_format
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 7, 9, 16, 17, 33])
def test_logits_in_chunks(
    case: GoldenCase, kv_format: str, key: str, check: Check, chunk_size: int
) -> None:
    for number, got in zip(
        case.numbers, full_logits(case, kv_format, chunk_size=chunk_size), strict=True
    ):
        check(got, case.values[f"{number}.{key}"], f"sequence {number}")


@each_case
@each_format
def test_every_chunk_size_in_one_batch(
    case: GoldenCase, kv_format: str, key: str, check: Check
) -> None:
    """One copy of each sequence per chunk size from 1 to its length, all advancing in the same
    forwards.
    """
    jobs = [
        (number, size) for number in case.numbers for size in range(1, len(case.ids(number)) + 1)
    ]
    runner = case_runner(case, case.load(kv_format=kv_format), [number for number, _ in jobs])
    for (number, size), got in zip(jobs, runner.run([size for _, size in jobs]), strict=True):
        check(got, case.values[f"{number}.{key}"], f"sequence {number} in chunks of {size}")


@each_case
def test_prefixes_of_different_lengths_together(case: GoldenCase) -> None:
    """Rows do not see what comes later: every prefix gives the first rows of the whole sequence."""
    model, ids = case.load(kv_format="none"), case.ids(0)
    mask, embeds = case.mask(0), case.embeds(0)
    lengths = [1, 2, 3, 8, 9, 31, len(ids) - 1, len(ids)]
    masks = [mask[:n] if mask is not None else None for n in lengths]
    got = model.full_logits(
        [ids[:n] for n in lengths],
        image_mask=masks,
        image_embeds=[embeds[: int(m.sum())] if embeds is not None else None for m in masks],
    )
    for length, logits in zip(lengths, got, strict=True):
        assert_tight(
            logits, case.values["0.logits_no_kv_quant"][:length], f"the first {length} tokens"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_matches_to_the_precision_of_the_stored_values(case: GoldenCase) -> None:
    """In float64 nothing is left of summation order: what remains is float32 rotation angles and
    stored float32.
    """
    kernels = ReferenceKernels(numerics="exact", kv_format="none", compute_dtype=torch.float64)
    model = case.load_on(kernels)
    for number in case.numbers:
        got = model.full_logits(
            [case.ids(number)], image_mask=[case.mask(number)], image_embeds=[case.embeds(number)]
        )[0]
        want = case.values[f"{number}.logits_no_kv_quant"]
        assert (got - want).abs().max() / want.std() < 3e-6


@each_case
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_intermediates(case: GoldenCase, chunk_size: int | None) -> None:
    """Streams, index sets, candidate blocks, experts with weights, Engram rows and draft features,
    layer by layer.
    """
    model = case.load(kv_format="v41")
    for number in case.numbers:
        trace = Recorder()
        model.full_logits(
            [case.ids(number)],
            image_mask=[case.mask(number)],
            image_embeds=[case.embeds(number)],
            chunk_size=chunk_size,
            trace=trace,
        )
        value = {
            k.removeprefix(f"{number}."): v
            for k, v in case.values.items()
            if k.startswith(f"{number}.")
        }
        rows = value["rows"]
        for layer in range(model.config.num_hidden_layers):
            streams = trace.get("streams", layer)[rows]
            assert_quantized(
                streams.flatten(0, 1),
                value["streams"][layer].flatten(0, 1),
                f"streams of layer {layer}",
            )
            assert torch.equal(trace.get("experts", layer).int(), value["experts"][layer]), (
                f"experts of layer {layer}"
            )
            torch.testing.assert_close(
                trace.get("expert_weights", layer),
                value["expert_weights"][layer],
                rtol=1e-3,
                atol=1e-4,
            )
        compared = 0
        for key, want in value.items():
            kind, _, layer_name = key.partition(".")
            if kind in ("index", "blocks", "engram_rows"):
                got = trace.get(kind, int(layer_name))
                got = got if kind == "engram_rows" else got[rows]
                assert torch.equal(got.long(), want.long()), key
                compared += 1
        planned = sum(
            p.selects + p.publishes_candidates + p.has_engram for p in model.config.layers
        )
        assert compared == planned, "a golden value was not compared"
        if "context" in value:
            assert_quantized(trace.get("context", -1), value["context"], "draft context")


@each_case
def test_greedy_continuation(case: GoldenCase) -> None:
    """Alone, and all sequences of the case together with a stranger, in chunks that do not divide
    the prompt.
    """
    if case.mask(0) is not None:
        runner = case_runner(case, case.load(), [0], room=32)
        got = [runner.greedy(0, runner.run([len(case.ids(0))])[0], 32)]
    else:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        prompts = [case.ids(n) for n in case.numbers]
        stranger = case.ids(0)[::-1][:11]
        got = [r.token_ids for r in LLM(case.load()).generate(prompts, params)]
        mixed = LLM(case.load(), max_num_batched_tokens=23).generate([stranger, *prompts], params)
        assert [r.token_ids for r in mixed[1:]] == got
    for number, tokens in zip(case.numbers, got, strict=True):
        want, gaps = case.values[f"{number}.greedy"].tolist(), case.values[f"{number}.greedy_gap"]
        assert float(gaps.min()) > 1e-3, "the case does not decide the tokens"
        assert tokens == want


@with_kernels([c for c in CASES if "0.draft.anchors" in c.values])
@pytest.mark.parametrize("chunk_size", [64, 5, 1])
def test_draft_blocks(case: GoldenCase, chunk_size: int) -> None:
    """Drafts behind three anchors of one prompt, while its prefill goes on in chunks."""
    anchors = case.values["0.draft.anchors"].tolist()
    assert anchors == sorted(anchors)
    runner = case_runner(case, case.load(kv_format="v41"), [0])
    for j, anchor in enumerate(anchors):
        while runner.done[0] <= anchor:
            runner.step([min(chunk_size, anchor + 1 - runner.done[0])])
        check_draft(case, runner.draft(0, int(case.values[f"0.draft.{j}.token"])), f"0.draft.{j}")


def check_draft(case: GoldenCase, got: dict[str, torch.Tensor], key: str) -> None:
    for name, want in ((name, case.values[f"{key}.{name}"]) for name in ("logits", "hidden")):
        assert_quantized(got[name], want, f"{key}.{name}")
    assert got["tokens"].tolist() == case.values[f"{key}.tokens"].tolist(), key
    torch.testing.assert_close(got["conf"], case.values[f"{key}.conf"], rtol=1e-3, atol=1e-4)


@with_kernels([c for c in CASES if "0.replay.keep" in c.values])
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 16])
def test_bounded_replay(case: GoldenCase, chunk_size: int | None) -> None:
    """Decoder layers on the kept rows only: their logits, the greedy tokens after them, and the
    draft block.
    """
    keep = int(case.values["0.replay.keep"])
    got = full_logits(case, "v41", replay_keep=keep, chunk_size=chunk_size)
    for number in case.numbers:
        if f"{number}.replay.logits" in case.values:
            assert_quantized(
                got[number], case.values[f"{number}.replay.logits"], f"sequence {number}"
            )
    runner = case_runner(case, case.load(kv_format="v41"), [0], room=8)
    runner.decoder_start[0] = max(0, len(case.ids(0)) - keep)
    logits = runner.run([chunk_size or len(case.ids(0))])[0]
    if "0.replay.draft.token" in case.values:
        check_draft(
            case, runner.draft(0, int(case.values["0.replay.draft.token"])), "0.replay.draft"
        )
    assert runner.greedy(0, logits, 8) == case.values["0.replay.greedy"].tolist()


def test_replay_longer_than_the_prompt_changes_nothing() -> None:
    case = next(c for c in CASES if c.name == "c08")
    plain, kept = full_logits(case, "v41"), full_logits(case, "v41", replay_keep=len(case.ids(0)))
    assert torch.equal(plain[0], kept[0])


def test_image_rows_by_token_id_with_the_tables_embeddings() -> None:
    case = next(c for c in CASES if c.name == "c11")
    image_id = case.load().config.image_token_id
    assert [t == image_id for t in case.ids(0)] == case.mask(0).tolist(), (
        "the case marks its image rows by id"
    )
    for mask in (None, case.mask(0)):
        got = case.load().full_logits([case.ids(0)], image_mask=mask)[0]
        assert_quantized(got, case.values["0.logits_table_embeds"])
