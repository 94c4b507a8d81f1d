"""Bounded replay: what the decoder sees of a prompt, for any chunks, and what it leaves out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.engine.scripted import engine_of, leftovers, llm_of

import deepinfer
from deepinfer.cache.layout import BLOCK_TOKENS as BLOCK
from deepinfer.checkpoint import synthesize
from deepinfer.engine.flops import StepFlops
from deepinfer.errors import ConfigError
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.model.model import Model
from deepinfer.sampling_params import SamplingParams
from deepinfer.step.builder import SequenceRows
from deepinfer.testing import ScriptedModel

PARAMS = SamplingParams(max_tokens=10, temperature=0, logprobs=1)


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(200) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    synthesize(folder, config="tiny", seed=3)
    return deepinfer.load_model(
        folder,
        kernels=CpuKernels(kv_format="none"),
    )


@pytest.fixture(scope="module")
def keep(model: Model) -> int:
    """As few tokens as may be kept."""
    return model.layout.config.sliding_window + model.layout.max_backtrack


def engine(model: Model, mode: str = "off", **options: Any) -> LLM:
    limits = {"max_model_len": 600, "max_num_seqs": 6, "kv_cache_memory_bytes": 10**9}
    return LLM(model, swa_replay=mode, **(limits | options))


def poisoned(llm: LLM) -> LLM:
    """An engine whose caches hold NaN wherever nothing was written."""
    cache: Any = engine_of(llm)._runner._chain._cache  # noqa: SLF001
    pools = [*cache.window, *cache.entries.values(), *cache.index_keys.values()]
    for data in (*(pool.data for pool in pools), *cache.states.values()):
        data.fill_(float("nan"))
    for pool in cache.window:
        pool.data[: cache.layout.ring_rows] = 0
    for layer, pool in (*cache.entries.items(), *cache.index_keys.items()):
        pool.data[: cache.layout.entries_per_block(layer)] = 0
    for state in cache.states.values():
        state[: cache.layout.state_rows] = 0
    return llm


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    found = []
    for output in llm.generate(prompts, PARAMS):
        assert output.error is None, output.error
        found.append((output.token_ids, output.logprobs, output.outputs[0].top_logprobs))
    assert leftovers(llm) == []
    llm.close()
    return found


def prompts_around(keep: int) -> list[list[int]]:
    lengths = (1, keep - 1, keep, keep + 1, keep + 40, 2 * keep + 3, 300)
    return [tokens(length, length) for length in lengths]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rows", [7, 16, 64, 1000])
def test_mask_and_compact_agree_for_any_chunks_and_never_read_what_was_left_out(
    model: Model, keep: int, rows: int, is_async: bool
) -> None:
    prompts = prompts_around(keep)
    want = answers(engine(model, "mask", max_num_batched_tokens=1000), prompts)
    for mode in ("mask", "compact"):
        llm = poisoned(engine(model, mode, max_num_batched_tokens=rows, async_scheduling=is_async))
        assert answers(llm, prompts) == want, mode


def test_prompts_no_longer_than_keep_are_as_without_replay(model: Model, keep: int) -> None:
    prompts = prompts_around(keep)
    plain, kept = answers(engine(model), prompts), answers(engine(model, "compact"), prompts)
    assert plain[:3] == kept[:3]
    assert plain[-1] != kept[-1]
    wide = engine(model, "compact", swa_replay_keep=300)
    assert answers(wide, prompts) == plain


def test_the_answer_is_that_of_the_truncated_computation(model: Model, keep: int) -> None:
    """`Model.full_logits` with `replay_keep`, which the golden cases check, token by token."""
    for prompt in prompts_around(keep)[3:]:
        (got,) = answers(engine(model, "compact"), [prompt])
        cut = len(prompt) - keep
        ids = [*prompt]
        for token, logprob in zip(got[0], got[1], strict=True):
            # the rectangle stays where the prompt put it
            (logits,) = model.full_logits([ids], replay_keep=len(ids) - cut)
            assert int(logits[-1].argmax()) == token
            want = float(torch.log_softmax(logits[-1].double(), 0)[token])
            assert abs(logprob - want) < 1e-5
            ids.append(token)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_a_preempted_sequence_keeps_its_rectangle(model: Model, keep: int, mode: str) -> None:
    layout = model.layout
    prompts = [tokens(i, 120 + i) for i in range(4)]
    params = SamplingParams(max_tokens=30, temperature=0, logprobs=0)
    want = [
        output.logprobs
        for prompt in prompts
        for output in engine(model, mode, swa_replay_keep=keep).generate([prompt], params)
    ]
    tight = engine(
        model,
        mode,
        max_model_len=2 * BLOCK,
        max_num_batched_tokens=40,
        max_num_seqs=4,
        snapshot_memory_bytes=0,
        kv_cache_memory_bytes=5 * layout.bytes_per_block() + 5 * layout.bytes_per_slot(),
    )
    outputs = tight.generate(prompts, params)
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    assert [output.logprobs for output in outputs] == want


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_a_prefix_hit_changes_nothing(model: Model, keep: int, mode: str) -> None:
    prefix = tokens(1, 2 * BLOCK)
    prompts = [prefix + tokens(2 + i, n) for i, n in enumerate((5, keep + 1, keep + 60, 200))]
    want = answers(engine(model, mode, enable_prefix_caching=False), prompts)
    llm = engine(model, mode, max_num_batched_tokens=1000)
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS)
        found = [(o.token_ids, o.logprobs, o.outputs[0].top_logprobs) for o in outputs]
        assert found == want
    hits = [output.stats.num_cached_tokens for output in outputs]
    longest = [max(0, len(prompt) - keep) for prompt in prompts]
    assert all(hit <= most for hit, most in zip(hits, longest, strict=True))
    assert hits[1:] == [BLOCK * (most // BLOCK) for most in longest[1:]]


def test_rows_left_out_are_counted(model: Model, keep: int) -> None:
    prompts = prompts_around(keep)
    want = sum(max(0, len(prompt) - keep) for prompt in prompts)
    for mode, skipped in (("off", 0), ("mask", 0), ("compact", want)):
        for rows in (16, 1000):
            llm = engine(model, mode, max_num_batched_tokens=rows, log_interval_s=1e9)
            llm.generate(prompts, PARAMS)
            assert llm.statistics.counts.skipped_rows == skipped
            line = llm.statistics.log_line(1e9)
            assert ("decoder rows left out" in line) == (skipped > 0)


def test_counted_work_is_that_of_the_formulas(model: Model, keep: int) -> None:
    """A chunk before the rectangle keeps one row in the published formula and none here."""
    prompt, flops = tokens(1, 300), {}
    for mode in ("off", "mask", "compact"):
        llm = engine(model, mode, max_num_batched_tokens=1000, log_interval_s=1e9)
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
        flops[mode] = llm.statistics.counts.flops
    assert flops["compact"] < flops["mask"] < flops["off"]
    counter = StepFlops(model.config, replay_mode="compact", replay_keep=keep, keeps_a_row=False)
    whole = counter([300], [300], is_prefill_s=[True], length_s=[300], num_logits=1)[1]
    assert flops["compact"] == whole
    for rows in (16, 1):  # no row is counted that is not computed
        llm = engine(
            model, "compact", max_num_batched_tokens=rows, max_num_seqs=1, log_interval_s=9
        )
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
        assert abs(llm.statistics.counts.flops / whole - 1) < 0.02
    start, clipped = 0, 0
    while start < len(prompt):  # published: clip = clamp(R - chunk start, 0, rows - 1)
        rows = min(16, len(prompt) - start)
        clipped += max(0, min(len(prompt) - keep - start, rows - 1))
        start += rows
    whole_chunks_before = (len(prompt) - keep) // 16
    llm = engine(model, "compact", max_num_batched_tokens=16)
    llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    assert llm.statistics.counts.skipped_rows == clipped + whole_chunks_before


def test_rows_that_are_taken_back_leave_no_trace(model: Model, keep: int) -> None:
    """As many as the backtracking allows, straight behind a prompt of which rows were left out."""
    layout, prompt = model.layout, tokens(1, 200)
    builder, cut = model.input_builder(), len(prompt) - keep

    def run(detours: int) -> list[torch.Tensor]:
        cache = model.new_cache(num_slots=1, num_blocks=3)
        for pool in cache.window:
            pool.data[layout.ring_rows :] = float("nan")

        def rows(ids: list[int], start: int, count: int) -> torch.Tensor:
            part = SequenceRows(
                token_ids=ids,
                start=start,
                count=count,
                slot=1,
                blocks=[1, 2, 3],
                decoder_start=cut,
                num_logits=1,
            )
            with torch.inference_mode():
                return model.forward(builder.step([part]), cache)

        found = [rows(prompt, 0, len(prompt))]
        ids = [*prompt]
        for n in range(12):
            if detours:
                wrong = [*ids, *tokens(100 + n, detours)]
                rows(wrong, len(ids), detours)
            ids.append(7 * n + 1)
            found.append(rows(ids, len(ids) - 1, 1))
        return found

    plain = run(0)
    assert all(torch.isfinite(logits).all() for logits in plain)
    for detours in (1, layout.max_backtrack):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(detours), strict=True))


def test_keep_below_the_limit_is_refused_with_the_formula(model: Model, keep: int) -> None:
    window, back = model.layout.config.sliding_window, model.layout.max_backtrack
    with pytest.raises(ConfigError, match=rf"window \+ backtracking = {window} \+ {back} = {keep}"):
        engine(model, "compact", swa_replay_keep=keep - 1)
    assert engine(model, "compact", swa_replay_keep=keep).config.swa_replay_keep == keep
    assert engine(model, "mask").config.swa_replay_keep == keep
    with pytest.raises(ConfigError, match="needs swa_replay"):
        engine(model, "off", swa_replay_keep=keep)
    with pytest.raises(ConfigError, match="not one of off, mask, compact"):
        engine(model, "on")


def test_scheduling_under_replay_keeps_caches_right() -> None:
    """On the scripted model, which notices a window that shows what it must not."""
    llm = llm_of(
        ScriptedModel(after="hash", scripts={}, allows_replay=True),
        swa_replay="compact",
        max_num_batched_tokens=50,
    )
    outputs = llm.generate([tokens(i, 30 * i + 1) for i in range(12)], PARAMS)
    assert all(output.error is None for output in outputs)
    assert leftovers(llm) == []
