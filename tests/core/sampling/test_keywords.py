"""`check_keywords`: unknown names are refused together, each with the nearest known one."""

from __future__ import annotations

import pytest

from deepinfer.config.keywords import check_keywords
from deepinfer.errors import ConfigError, RequestError

pytestmark = pytest.mark.torchless

KNOWN = ["ep", "max_model_len", "max_num_seqs", "model"]


def test_known_names_pass() -> None:
    check_keywords([], KNOWN, "LLM")
    check_keywords(iter(["model", "ep"]), iter(KNOWN), "LLM")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["max_num_seq"], "LLM has no keyword 'max_num_seq' (did you mean max_num_seqs?)"),
        (["Max-Model-Len"], "LLM has no keyword 'Max-Model-Len' (did you mean max_model_len?)"),
        (
            ["modle", "model", "max_seqs"],
            "LLM has no keyword 'modle' (did you mean model?) and no 'max_seqs' "
            "(did you mean max_num_seqs?)",
        ),
        (["gpu"], "LLM has no keyword 'gpu'; known: ep, max_model_len, max_num_seqs, model"),
        (
            ["gpu", "modell"],
            "LLM has no keyword 'gpu' and no 'modell' (did you mean model?); "
            "known: ep, max_model_len, max_num_seqs, model",
        ),
    ],
)
def test_message(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_keywords(given, KNOWN, "LLM")
    assert str(caught.value) == message


def test_raises_the_error_that_is_asked_for() -> None:
    with pytest.raises(RequestError):
        check_keywords(["x"], KNOWN, "SamplingParams", RequestError)


def test_long_and_strange_names_are_shown_safely() -> None:
    with pytest.raises(ConfigError) as caught:
        check_keywords(["m" * 10**6, "a\nb"], KNOWN, "LLM")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()
