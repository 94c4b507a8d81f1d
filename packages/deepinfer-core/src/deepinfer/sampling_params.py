"""`SamplingParams`: how one request is continued, under the names people know from vLLM.

Names of the published engine are taken too: `seq_seed` for `seed`, `top_logprobs` for `logprobs`.
Only the standard library is imported, so that a front end can build and check parameters without
paying for more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from deepinfer.errors import RequestError

__all__ = ["GREEDY_BELOW", "MAX_ANSWERS", "MAX_LOGPROBS", "SamplingParams"]

GREEDY_BELOW = 1e-5
"""A temperature below this one is greedy."""

MAX_LOGPROBS = 1000
"""Most alternatives of which log-probabilities can be asked."""

MAX_ANSWERS = 16384
"""Most answers to one prompt."""

_MAX_COUNT = 2**31 - 1
_MAX_TEMPERATURE = 1e9  # far above it, 1 / temperature is no normal float32; all tokens are alike

_ALIASES = ("seq_seed", "top_logprobs")

_LATER: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "frequency_penalty": (None, 0),
    "golden_token_ids": (None,),
    "logit_bias": (None,),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None, False),
    "repetition_penalty": (None, 1),
    "so_args": (None,),
    "structured_outputs": (None,),
}
"""Names of later work, with the values that ask for nothing; an empty container is one more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is continued; immutable, hashable, checked when it is built.

    Scalars of numpy and torch are taken as the numbers they are; True and False are no numbers.

    Raises:
        RequestError: an unknown name, a value out of its range, values that contradict each other,
            or a name of later work with a value that asks for something.
    """

    n: int = 1
    """Number of answers to each prompt, 1 to 16384."""
    temperature: float = 1.0
    """Scale of randomness, 0 to 1e9; below 1e-5 the most likely token is taken each time."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with more than this mass, above 0 up to 1."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1 or 0: from all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the most likely one, 0 to 1."""
    seed: int | None = None
    """Seed of the random numbers, an integer, taken modulo 2^64; None: a new one each time."""
    max_tokens: int | None = None
    """Most tokens to generate, at least 1; None: as many as the model has room for."""
    min_tokens: int = 0
    """Tokens to generate before the end of the sequence or a stop may come."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer."""
    ignore_eos: bool = False
    """Whether to go on after the end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities: none (None), of each token (0), of the k best tokens too (k to 1000)."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities of the model as it is, or after temperature, masks and truncation."""
    detokenize: bool = True
    """Whether to make text of the tokens."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    include_stop_str_in_output: bool = False
    """Whether the text that ended the answer is part of it."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            n: int = ...,
            temperature: float = ...,
            top_p: float = ...,
            top_k: int = ...,
            min_p: float = ...,
            seed: int | None = ...,
            max_tokens: int | None = ...,
            min_tokens: int = ...,
            stop: str | list[str] | tuple[str, ...] | None = ...,
            stop_token_ids: list[int] | tuple[int, ...] | None = ...,
            ignore_eos: bool = ...,
            logprobs: int | None = ...,
            logprobs_mode: Literal["raw", "processed"] = ...,
            detokenize: bool = ...,
            skip_special_tokens: bool = ...,
            include_stop_str_in_output: bool = ...,
            seq_seed: int | None = ...,
            top_logprobs: int = ...,
            **later: Any,
        ) -> None: ...

    else:

        def __init__(self, **given: Any) -> None:
            _check_names(given)
            values = {name: _plain(value) for name, value in given.items()}
            _check_later(values)
            _merge_aliases(values)
            for field in fields(SamplingParams):
                value = values.get(field.name, MISSING)
                value = field.default if value is MISSING else _checked(field.name, value)
                object.__setattr__(self, field.name, value)
            _check_together(self)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the arg-max of the logits, lowest id on ties.

        `top_p`, `top_k`, `min_p` and `seed` have no effect then.
        """
        return self.temperature < GREEDY_BELOW


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    # The package `config` imports numpy: only where something is wrong.
    from deepinfer.config.fields import shown

    raise RequestError(f"{name}={shown(value)} is not allowed; give {allowed}")


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as the Python value; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


# ---- names ----


def _check_names(given: Mapping[str, object]) -> None:
    known = {field.name for field in fields(SamplingParams)}.union(_ALIASES, _LATER)
    if not known.issuperset(given):
        from deepinfer.config.keywords import check_keywords

        check_keywords(given, known, "SamplingParams", RequestError)


def _check_later(values: Mapping[str, Any]) -> None:
    for name in _LATER.keys() & values.keys():
        value, neutral = values[name], _LATER[name]
        is_empty = isinstance(value, list | tuple | dict | set | frozenset) and not value
        # True and False are no numbers: 0 asks for a prompt log-probability, False for none
        is_same = any(
            value is x or (_is_number(value) and _is_number(x) and value == x) for x in neutral
        )
        if not (is_empty or is_same):
            told = " or ".join(map(str, neutral))
            _refuse(name, value, f"{told}: more is not supported in this version")


def _merge_aliases(values: dict[str, Any]) -> None:
    """Put the published engine's names under ours, in place.

    `top_logprobs=0` is that engine's default and asks for nothing. `logprobs=True` asks for the
    chosen token's (0), or for what `top_logprobs` says. Whatever else is given under both names has
    to be the same.
    """
    if "seq_seed" in values:
        alias = values.pop("seq_seed")
        alias = None if alias is None else _checked("seed", alias, told="seq_seed")
        seed = values.get("seed")
        if seed is not None and alias is not None and _checked("seed", seed) != alias:
            _contradict("seed", seed, "seq_seed", alias)
        values["seed"] = alias if seed is None else seed
    given = values.get("logprobs")
    if isinstance(given, bool):
        values["logprobs"] = 0 if given else None
    if "top_logprobs" in values:
        top = values.pop("top_logprobs")
        top = _number("top_logprobs", 0 if top is None else top, 0, MAX_LOGPROBS, integer=True)
        if top and given is not None and given is not True and (given is False or given != top):
            _contradict("logprobs", given, "top_logprobs", top)
        if top:
            values["logprobs"] = top


def _contradict(name: str, value: object, alias: str, other: object) -> NoReturn:
    raise RequestError(f"{name}={value} and {alias}={other} contradict each other; give one")


# ---- values ----


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(
    name: str, value: Any, low: float, high: float, *, integer: bool, above: bool = False
) -> Any:
    """A number in [low, high], or (low, high] with `above`; a float unless `integer`."""
    kind = int if integer else (int, float)
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    # the comparisons are false for NaN
    if not is_number or not low <= value <= high or (above and value == low):
        what = "an integer" if integer else "a number"
        start = "above" if above else "from"
        upper = "2^31 - 1" if high == _MAX_COUNT else f"{high:g}"
        _refuse(name, value, f"{what} {start} {low:g} to {upper}")
    return value if integer else float(value)


def _seed(value: Any, told: str) -> int:
    """Any integer, as the unsigned 64-bit number that the published engine makes of it."""
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse(told, value, "an integer (taken modulo 2^64), or None for a new one each time")
    return value & (2**64 - 1)


def _stop(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else () if value is None else value
    is_list = isinstance(texts, list | tuple)
    if not is_list or not all(isinstance(text, str) and text for text in texts):
        _refuse("stop", value, "a text or a list of texts, none of them empty")
    return tuple(texts)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is not None and not isinstance(value, list | tuple):
        _refuse("stop_token_ids", value, "a list of token ids")
    ids = [_plain(item) for item in value or ()]
    return tuple(_number("stop_token_ids", x, 0, _MAX_COUNT, integer=True) for x in ids)


def _checked(name: str, value: Any, told: str = "") -> Any:
    """The value of a field, checked and in the type that is kept.

    Args:
        name: the field.
        value: what was given, scalars plain.
        told: how messages call the field; empty: by its name.
    """
    if name in _BOUNDS:
        may_be_none, low, high, integer, above = _BOUNDS[name]
        if value is None and may_be_none:
            return None
        return _number(name, value, low, high, integer=integer, above=above)
    if name == "seed":
        return None if value is None else _seed(value, told or name)
    if name == "stop":
        return _stop(value)
    if name == "stop_token_ids":
        return _stop_token_ids(value)
    if name == "logprobs_mode":
        if not isinstance(value, str) or value not in ("raw", "processed"):
            _refuse(name, value, "'raw' or 'processed'")
        return value
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")
    return value


_BOUNDS: dict[str, tuple[bool, float, float, bool, bool]] = {
    "n": (False, 1, MAX_ANSWERS, True, False),
    "temperature": (False, 0, _MAX_TEMPERATURE, False, False),
    "top_p": (False, 0, 1, False, True),
    "top_k": (False, -1, _MAX_COUNT, True, False),
    "min_p": (False, 0, 1, False, False),
    "max_tokens": (True, 1, _MAX_COUNT, True, False),
    "min_tokens": (False, 0, _MAX_COUNT, True, False),
    "logprobs": (True, 0, MAX_LOGPROBS, True, False),
}
"""May be None, lowest, highest, is an integer, lies above the lowest."""


def _check_together(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}; "
            f"lower the one or raise the other"
        )
    if params.stop and not params.detokenize:
        raise RequestError(
            "stop is given and detokenize=False: a stop text is looked for in the text; "
            "leave one of them out, or use stop_token_ids"
        )
