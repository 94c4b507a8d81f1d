"""The same answer every time, on a checkpoint with every feature and on row-invariant kernels.

Tokens and log-probabilities of a request are compared bit for bit with those it gets alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.core.engine.scripted import leftovers

import deepinfer
from deepinfer.checkpoint import synthesize
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.model.model import Model
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams

LENGTHS = (120, 125, 110, 118, 1, 2, 3, 15, 16, 17, 63, 64, 65, 128, 129, 150)
CHUNKS = (1, 7, 16, 17, 64, 600)

Answer = tuple[tuple[int, ...], tuple[float, ...], str]


@pytest.fixture(scope="module", params=["exact", "served"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    synthesize(folder, config="tiny", seed=3)
    return deepinfer.load_model(folder, kernels=CpuKernels(numerics=request.param))


def requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of every phase of windows, pairs and blocks, with parameters of every kind."""
    draw = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1, "seed": 2, "top_p": 0.9},
        {"temperature": 1.3, "seed": 2, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "min_tokens": 15},
    ]
    return [
        (
            [draw.randrange(vocab_size - 8) for _ in range(length)],
            SamplingParams(
                max_tokens=draw.randint(18, 40), logprobs=i % 3, **kinds[i % len(kinds)]
            ),
        )
        for i, length in enumerate(LENGTHS)
    ]


def answer_of(output: RequestOutput) -> Answer:
    assert output.error is None
    assert output.logprobs is not None
    return tuple(output.token_ids), tuple(output.logprobs), output.finish_reason


def engine(model: Model, **options: Any) -> LLM:
    limits = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 200_000_000}
    return LLM(model, **(limits | options))


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Answer]:
    """Each request by itself, its prompt in one piece."""
    llm = engine(model, max_num_batched_tokens=600)
    return [
        answer_of(llm.generate([prompt], params)[0])
        for prompt, params in requests(model.config.vocab_size)
    ]


def together(llm: LLM, order: list[int]) -> tuple[list[Answer], int]:
    """All requests in one call, in some order; their answers in the standard one, and how many
    preemptions there were.
    """
    given = requests(llm.model.config.vocab_size)
    outputs = llm.generate([given[i][0] for i in order], [given[i][1] for i in order])
    found = [answer_of(outputs[order.index(i)]) for i in range(len(given))]
    assert leftovers(llm) == []
    llm.close()
    return found, sum(output.stats.num_preemptions for output in outputs)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_answer_does_not_depend_on_company_or_chunks(
    model: Model, alone: list[Answer], chunk: int, is_async: bool
) -> None:
    seqs = min(chunk, 8)
    llm = engine(model, max_num_batched_tokens=chunk, max_num_seqs=seqs, async_scheduling=is_async)
    found, _ = together(llm, list(range(len(LENGTHS))))
    assert found == alone


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_answer_does_not_depend_on_the_order(
    model: Model, alone: list[Answer], is_async: bool
) -> None:
    order = list(range(len(LENGTHS)))
    random.Random(5).shuffle(order)
    llm = engine(model, max_num_batched_tokens=33, async_scheduling=is_async)
    assert together(llm, order)[0] == alone
    llm = engine(model, max_num_batched_tokens=100, max_num_seqs=20, async_scheduling=is_async)
    assert together(llm, order[::-1])[0] == alone


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [2, 4])
def test_an_answer_does_not_depend_on_preemption(
    model: Model, alone: list[Answer], num_blocks: int, is_async: bool
) -> None:
    layout, seqs = model.layout, 6
    memory = (num_blocks + 1) * layout.bytes_per_block() + (seqs + 1) * layout.bytes_per_slot()
    llm = engine(
        model,
        max_num_seqs=seqs,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=memory,
        snapshot_memory_bytes=0,
        async_scheduling=is_async,
    )
    found, num_preemptions = together(llm, list(range(len(LENGTHS))))
    assert num_preemptions > 0
    assert found == alone
