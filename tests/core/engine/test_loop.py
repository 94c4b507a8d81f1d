"""The generation loop: one result per request, in order, whatever runs beside it."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from tests.core.model.golden import all_cases

import deepinfer
from deepinfer.engine import generate
from deepinfer.engine.loop import _sample, _Sequence
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.model import Model
from deepinfer.outputs import GenerationRequest, Progress

CASE = next(c for c in all_cases() if c.name == "c03")


@pytest.fixture(scope="module")
def model() -> Model:
    return CASE.load()


def request(prompt: list[int] | None, **options: object) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt, **({"max_tokens": 6, "ignore_eos": True} | options)
    )  # type: ignore[arg-type]


def test_results_come_in_order_and_once(model: Model) -> None:
    prompts = [[3 + i] * (1 + 7 * i % 20) for i in range(9)]
    results = generate(
        model, [request(p) for p in prompts], max_num_seqs=3, max_num_batched_tokens=5
    )
    assert [r.index for r in results] == list(range(9))
    assert [r.num_prompt_tokens for r in results] == [len(p) for p in prompts]
    assert all(len(r.token_ids) == 6 and r.finish_reason == "length" for r in results)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_company_or_chunks(
    model: Model, temperature: float, seed: int
) -> None:
    """Random prompts, limits and budgets: each request gets the tokens that it gets alone."""
    draw = random.Random(seed)
    requests = [
        request(
            [draw.randrange(256) for _ in range(draw.randint(1, 40))],
            max_tokens=draw.randint(1, 12),
            temperature=temperature,
            seed=draw.randrange(2**64),
        )
        for _ in range(draw.randint(2, 7))
    ]
    num_seqs = draw.randint(1, 5)
    together = generate(
        model, requests, max_num_seqs=num_seqs, max_num_batched_tokens=draw.randint(num_seqs, 60)
    )
    for one, result in zip(requests, together, strict=True):
        assert generate(model, [one])[0].token_ids == result.token_ids


def test_a_bad_request_fails_alone(model: Model) -> None:
    requests = [
        request([1, 2, 3]),
        request([]),
        request([1, 256]),
        request([1, -1]),
        request(None, error="line 4 is not JSON"),
        request([1], max_tokens=0),
        request([1], temperature=float("nan")),
        request([1] * 30),
        request([4, 5]),
    ]
    results = generate(model, requests, max_model_len=30)
    said = [
        "",
        "empty",
        "256",
        "-1",
        "line 4 is not JSON",
        "max_tokens=0",
        "temperature=nan",
        "max_model_len=30",
        "",
    ]
    for result, words in zip(results, said, strict=True):
        assert (result.error is None) == (words == "")
        assert words in (result.error or "")
        assert (result.finish_reason == "error") == (words != "")
    assert len(results[0].token_ids) == 6


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([1], {"max_tokens": 1.5}, "max_tokens=1.5"),
        ([1], {"max_tokens": True}, "max_tokens=True"),
        ([1], {"max_tokens": None}, "max_tokens=None"),
        (["a"], {}, "'a', token ids are integers"),
        ([1.5], {}, "1.5, token ids are integers"),
        ([1, True], {}, "True, token ids are integers"),
        ([1, None], {}, "None, token ids are integers"),
        ([[1]], {}, "token ids are integers"),
        ("ab", {}, "prompt is 'ab'; give a list of token ids"),
        (7, {}, "prompt is 7; give a list of token ids"),
        ([1], {"seed": 1.5}, "seed=1.5"),
        ([1], {"seed": "x"}, "seed='x'"),
        ([1], {"seed": -1}, "seed=-1"),
        ([1], {"seed": 2**64}, "0 to 2.64 - 1"),
        ([1], {"temperature": "x"}, "temperature='x'"),
        ([1], {"temperature": float("inf")}, "temperature=inf"),
        ([1], {"temperature": 10**400}, "temperature="),
        ([1], {"temperature": -0.5}, "temperature=-0.5"),
        ([1], {"ignore_eos": "no"}, "ignore_eos='no'"),
    ],
    ids=str,
)
def test_a_request_of_wrong_types_fails_alone(
    model: Model, prompt: object, options: dict, words: str
) -> None:
    """They used to end the run with TypeError, or to be cut to an integer."""
    bad = request(prompt, **options)  # type: ignore[arg-type]
    first, result, last = generate(model, [request([1]), bad, request([2])])
    assert result.error is not None
    assert re.search(words, result.error)
    assert result.finish_reason == "error"
    assert first.error is last.error is None


def test_what_is_no_request_fails_alone(model: Model) -> None:
    bad, good = generate(model, ["The sea", request([1])])  # type: ignore[list-item]
    assert "'The sea', allowed: a GenerationRequest" in (bad.error or "")
    assert good.error is None


def test_numbers_and_ids_of_numpy_and_torch_are_taken(model: Model) -> None:
    want = generate(model, [request([1, 2], seed=3, max_tokens=4, temperature=0.5)])[0].token_ids
    for ids in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2), [np.int32(1), torch.tensor(2)]):
        given = request(
            ids,  # type: ignore[arg-type]
            seed=np.uint64(3),
            max_tokens=np.int64(4),
            temperature=np.float32(0.5),
        )
        assert generate(model, [given])[0].token_ids == want


def test_every_step_is_a_debug_line(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="deepinfer.engine"):
        generate(model, [request([1, 2, 3], max_tokens=2)])
    assert [record.getMessage() for record in caplog.records] == [
        "step: 3 rows of 1 sequences, 0 waiting",
        "step: 1 rows of 1 sequences, 0 waiting",
    ]


def test_generate_is_a_name_of_the_package(model: Model) -> None:
    asked = deepinfer.GenerationRequest(prompt_token_ids=[1], max_tokens=2, ignore_eos=True)
    (result,) = deepinfer.generate(model, [asked])
    assert len(result.token_ids) == 2
    assert deepinfer.generate is generate
    assert "generate" in dir(deepinfer)


def test_end_of_sequence_stops_unless_it_is_ignored(model: Model) -> None:
    prompt = CASE.ids(0)
    free = generate(model, [request(prompt, max_tokens=32)])[0].token_ids
    config = model.config
    stop_at = free[5]
    assert stop_at not in free[:5]
    object.__setattr__(config, "eos_token_id", stop_at)
    try:
        stopped, ignored = generate(model, [request(prompt, ignore_eos=False), request(prompt)])
    finally:
        object.__setattr__(config, "eos_token_id", 1)
    assert stopped.token_ids == free[:6]
    assert stopped.finish_reason == "stop"
    assert ignored.token_ids == free[:6]
    assert ignored.finish_reason == "length"


def test_the_context_limits_the_output(model: Model) -> None:
    result = generate(model, [request([1, 2, 3, 4], max_tokens=100)], max_model_len=10)[0]
    assert len(result.token_ids) == 6
    assert result.finish_reason == "length"


def test_an_interrupted_run_returns_what_it_has(model: Model) -> None:
    calls: list[Progress] = []
    results = generate(
        model,
        [request([1, 2], max_tokens=2), request([3], max_tokens=50), request([4], max_tokens=50)],
        max_num_seqs=2,
        on_progress=calls.append,
        should_stop=lambda: len(calls) >= 4,
    )
    assert [r.finish_reason for r in results] == ["length", "abort", "abort"]
    assert len(results[1].token_ids) == 4
    assert calls[-1].num_finished == 1
    assert calls[-1].output_tokens == sum(len(r.token_ids) for r in results)


def test_progress_adds_up(model: Model) -> None:
    calls: list[Progress] = []
    requests = [request(list(range(n + 1))) for n in range(5)]
    generate(model, requests, max_num_batched_tokens=16, on_progress=calls.append)
    assert calls[-1] == Progress(num_finished=5, num_requests=5, prompt_tokens=15, output_tokens=30)
    assert all(a.output_tokens <= b.output_tokens for a, b in zip(calls, calls[1:], strict=False))


def test_times_are_those_of_the_request(model: Model) -> None:
    first, second = generate(
        model, [request([1], max_tokens=3), request([2], max_tokens=1)], max_num_seqs=1
    )
    assert first.stats.queue_s is not None
    assert second.stats.queue_s is not None
    assert second.stats.queue_s > first.stats.queue_s
    assert first.tpot_s is not None
    assert first.tpot_s > 0
    assert second.stats.decode_s == 0
    assert second.tpot_s is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"max_model_len": 10**9}, "max_model_len=1000000000"),
        ({"max_model_len": 9.5}, "max_model_len=9.5 is no integer"),
        ({"max_num_seqs": "3"}, "max_num_seqs='3' is no integer"),
        ({"max_num_batched_tokens": 4.0}, "max_num_batched_tokens=4.0 is no integer"),
    ],
)
def test_limits_that_let_nothing_run(model: Model, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model, [request([1])], **options)


def test_no_requests_no_results(model: Model) -> None:
    assert generate(model, []) == []


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert _sample([_state(temperature=0.0)], logits) == [1]


def test_sampled_tokens_have_the_models_distribution() -> None:
    """Frequencies over many seeds against softmax(logits / T); chi-square bound at about 1e-6."""
    logits, temperature, n = torch.tensor([1.0, 0.0, -1.0, 2.0]), 1.5, 4000
    drawn = [_sample([_state(temperature=temperature, seed=s)], logits[None])[0] for s in range(n)]
    want = torch.softmax(logits / temperature, -1) * n
    got = torch.bincount(torch.tensor(drawn), minlength=4)
    assert float(((got - want) ** 2 / want).sum()) < 31


def test_noise_of_one_position_says_nothing_about_another() -> None:
    """At an absurd temperature only the noise decides. Counting Philox by position alone, each
    row's noise was the last one's shifted by four ids, and the tokens went down in steps of four.
    """
    drawn = []
    for length in range(1, 60):
        state = _state(temperature=1e30, seed=7)
        state.token_ids = [1] * length
        drawn += _sample([state], torch.zeros(1, 512))
    steps = [(a - b) % 512 for a, b in zip(drawn, drawn[1:], strict=False)]
    assert max(steps.count(step) for step in steps) <= 4


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)) * 30
    assert _sample([_state(temperature=temperature)], logits) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_their_request_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    """They used to become token 0."""
    forward = type(model.transformer).forward

    def spoil(self, step, cache, trace=None):  # type: ignore[no-untyped-def]
        logits = forward(self, step, cache, trace)
        logits[(step.token_ids_t[-len(logits) :] == 77).nonzero()[:1, 0]] = bad
        return logits

    monkeypatch.setattr(type(model.transformer), "forward", spoil)
    good, spoilt = generate(model, [request([1]), request([77], max_tokens=4)])
    assert good.finish_reason == "length"
    assert spoilt.finish_reason == "error"
    assert "not finite" in (spoilt.error or "")


def test_a_damaged_table_row_fails_only_the_request_that_looks_it_up(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that meets it is shared; the others are computed again and get their own tokens."""
    forward = type(model.transformer).forward
    requests = [request([n, 5, n], max_tokens=5) for n in (10, 11, 12)]
    want = [r.token_ids for r in generate(model, requests)]

    def fail(self, step, cache, trace=None):  # type: ignore[no-untyped-def]
        if bool((step.token_ids_t == 11).any()):
            raise CheckpointError("layers.1.engram.embed.weight: row 3 is NaN")
        return forward(self, step, cache, trace)

    monkeypatch.setattr(type(model.transformer), "forward", fail)
    got = generate(model, requests)
    assert [r.finish_reason for r in got] == ["length", "error", "length"]
    assert "row 3" in (got[1].error or "")
    assert [got[0].token_ids, got[2].token_ids] == [want[0], want[2]]


def test_a_small_row_budget_lowers_the_default_number_of_sequences(model: Model) -> None:
    results = generate(model, [request([n]) for n in range(5)], max_num_batched_tokens=2)
    assert all(r.finish_reason == "length" for r in results)


def test_caches_that_do_not_fit_are_said_in_gigabytes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**sizes: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(model, "new_cache", refuse)
    with pytest.raises(ConfigError, match="GB, more than can be had; lower max_num_seqs"):
        generate(model, [request([1])])


def _state(**options: object) -> _Sequence:
    return _Sequence(
        index=0, request=request([1], **options), token_ids=[1], is_image=None, max_len=9
    )
