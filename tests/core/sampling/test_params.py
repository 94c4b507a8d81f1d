"""`SamplingParams`: names, ranges, aliases, and what is refused with which words."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling_params import SamplingParams

pytestmark = pytest.mark.torchless


def refusal(**given: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    return str(caught.value)


def test_defaults() -> None:
    params = SamplingParams()
    assert {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": None,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "logprobs_mode": "raw",
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }


def test_is_immutable_and_can_be_copied_hashed_pickled_and_replaced() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=[4], seed=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    for other in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert other == params
        assert hash(other) == hash(params)
    colder = dataclasses.replace(params, temperature=0.0)
    assert (colder.temperature, colder.stop, colder.seed) == (0.0, ("a", "b"), 2**64 - 1)
    with pytest.raises(RequestError, match="top_p=2"):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(TypeError):
        SamplingParams(1.0)  # type: ignore[misc]


def test_type_checkers_are_told_every_field() -> None:
    """Their signature is written beside the fields: it must not fall behind."""
    source = inspect.getsource(SamplingParams)
    told = source.partition("def __init__(")[2].partition("-> None: ...")[0]
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    lines = [line.strip().partition(":")[0] for line in told.splitlines()]
    assert [line for line in lines if line in names] == names
    assert {"seq_seed", "top_logprobs"} <= set(lines)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("n", [0, -1, 2**31, 1.0, True, "1", None, 16385], "an integer from 1 to 16384"),
        (
            "temperature",
            [-1e-9, math.nan, math.inf, -math.inf, 1e10, True, "1", None],
            "a number from 0 to 1e+09",
        ),
        ("top_p", [0, 0.0, -0.1, 1.0001, math.nan, True, "x", None], "a number above 0 to 1"),
        ("top_k", [-2, 2**31, 1.0, math.nan, False, None], "an integer from -1 to 2^31 - 1"),
        ("min_p", [-0.1, 1.1, math.nan, True, None], "a number from 0 to 1"),
        ("seed", [1.0, "1", True, [1]], "an integer (taken modulo 2^64), or None"),
        ("seq_seed", [1.0, "1", True], "an integer (taken modulo 2^64), or None"),
        ("max_tokens", [0, -1, 2**31, 1.5, True], "an integer from 1 to 2^31 - 1"),
        ("min_tokens", [-1, 1.5, None, True], "an integer from 0 to 2^31 - 1"),
        ("stop", ["", ["a", ""], [1], 5, {"a"}], "a text or a list of texts, none of them empty"),
        ("stop_token_ids", [5, "5", {5}], "a list of token ids"),
        ("stop_token_ids", [[-1], [1.0], [True], ["1"]], "an integer from 0 to"),
        ("ignore_eos", [0, 1, None, "True"], "True or False"),
        ("logprobs", [-1, 1001, 1.0, "1"], "an integer from 0 to 1000"),
        ("top_logprobs", [-1, 1001, 1.0, True], "an integer from 0 to 1000"),
        ("logprobs_mode", ["Raw", None, 0, []], "'raw' or 'processed'"),
        ("detokenize", [0, None], "True or False"),
        ("skip_special_tokens", [1], "True or False"),
        ("include_stop_str_in_output", ["no"], "True or False"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_what_is_out_of_range_is_refused_with_name_value_and_range(
    name: str, values: list[object], allowed: str
) -> None:
    for value in values:
        told = refusal(**{name: value})
        assert told.startswith(f"{name}=")
        assert allowed in told


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"temperature": np.array(2)}, "temperature", 2.0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": np.int64(7)}, "top_k", 7),
        ({"top_p": 1}, "top_p", 1.0),
        ({"min_p": 1}, "min_p", 1.0),
        ({"seed": 0}, "seed", 0),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": 2**64 + 5}, "seed", 5),
        ({"seed": np.uint64(2**64 - 1)}, "seed", 2**64 - 1),
        ({"stop": "end"}, "stop", ("end",)),
        ({"stop": ["a", "b"]}, "stop", ("a", "b")),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": (np.int32(3), 4)}, "stop_token_ids", (3, 4)),
        ({"stop_token_ids": None}, "stop_token_ids", ()),
        ({"ignore_eos": np.bool_(True)}, "ignore_eos", True),
        ({"logprobs": 1000}, "logprobs", 1000),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", None),
        ({"seq_seed": -2}, "seed", 2**64 - 2),
        ({"seq_seed": None, "seed": 3}, "seed", 3),
        ({"seq_seed": 3, "seed": None}, "seed", 3),
        ({"seq_seed": -1, "seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"top_logprobs": 0}, "logprobs", None),
        ({"top_logprobs": None}, "logprobs", None),
        ({"top_logprobs": 0, "logprobs": 4}, "logprobs", 4),
        ({"top_logprobs": 0, "logprobs": 0}, "logprobs", 0),
        ({"top_logprobs": 5}, "logprobs", 5),
        ({"top_logprobs": 5, "logprobs": True}, "logprobs", 5),
        ({"top_logprobs": 5, "logprobs": 5}, "logprobs", 5),
        ({"top_logprobs": 5, "logprobs": None}, "logprobs", 5),
    ],
    ids=str,
)
def test_what_is_accepted_is_kept_as_a_plain_value(
    given: dict[str, object], name: str, value: object
) -> None:
    found = getattr(SamplingParams(**given), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "given",
    [
        {"seed": 1, "seq_seed": 2},
        {"logprobs": 3, "top_logprobs": 5},
        {"logprobs": 0, "top_logprobs": 5},
        {"logprobs": False, "top_logprobs": 5},
        {"logprobs": 1, "top_logprobs": 5},
    ],
    ids=str,
)
def test_both_names_with_different_values_are_refused(given: dict[str, object]) -> None:
    told = refusal(**given)
    assert all(f"{name}={value}" in told for name, value in given.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is above max_tokens=4"),
        ({"stop": "a", "detokenize": False}, "stop is given and detokenize=False"),
    ],
)
def test_values_that_contradict_each_other_are_refused(given: dict, words: str) -> None:
    assert words in refusal(**given)


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("presence_penalty", [0, 0.0, None], [0.1, -1, False, math.nan]),
        ("frequency_penalty", [0, 0.0, None], [0.1, True]),
        ("repetition_penalty", [1, 1.0, None], [1.1, 0, True]),
        ("logit_bias", [None, {}], [{5: 1.0}]),
        ("allowed_token_ids", [None, []], [[1]]),
        ("bad_words", [None, [], ()], [["x"]]),
        ("prompt_logprobs", [None, False], [0, 1, True]),
        ("golden_token_ids", [None, []], [[1]]),
        ("structured_outputs", [None], [{"json": "{}"}, object()]),
        ("so_args", [None, {}], [{"schema_type": "json"}]),
    ],
)
def test_names_of_later_work_are_taken_only_where_they_ask_for_nothing(
    name: str, neutral: list[object], other: list[object]
) -> None:
    for value in neutral:
        assert SamplingParams(**{name: value}) == SamplingParams()
    for value in other:
        told = refusal(**{name: value})
        assert told.startswith(f"{name}=")
        assert "not supported in this version" in told


def test_unknown_names_are_refused_with_the_nearest_ones() -> None:
    told = refusal(temprature=1.0, topp=0.5)
    assert "temprature" in told
    assert "did you mean temperature?" in told
    assert "did you mean top_p?" in told
    assert "did you mean max_tokens?" in refusal(**{"max-tokens": 5})
    assert "known: allowed_token_ids" in refusal(zzz=1)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (9.99e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy_is_below_a_hundred_thousandth(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_building_one_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from deepinfer.sampling_params import SamplingParams as S; "
        "S(temperature=0.5, stop='x', stop_token_ids=[1], seed=3, top_logprobs=2); "
        "print([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
