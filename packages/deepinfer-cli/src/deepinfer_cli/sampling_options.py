"""Options that say how a prompt is continued: the fields of `deepinfer.SamplingParams`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from deepinfer_cli.engine_options import Count, Seed
from deepinfer_cli.exits import UsageError
from deepinfer_cli.options import Flag, Integer

if TYPE_CHECKING:
    from deepinfer.sampling_params import SamplingParams

__all__ = ["DEFAULT_SAMPLING", "SamplingOptions", "Temperature", "Texts"]

_SAMPLING = Group("Sampling", sort_key=20)


def _check_temperature(kind: object, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("Must be a finite number >= 0.")


Temperature = Annotated[float, Parameter(validator=_check_temperature)]
"""A temperature; 0 is greedy."""

Texts = Annotated[list[str], Parameter(negative="", allow_leading_hyphen=True)]
"""Texts, one for each time that the option is given."""

_Natural = Annotated[Integer, Parameter(validator=Number(gte=0))]
_Ids = Annotated[list[_Natural], Parameter(negative="")]
_TopK = Annotated[Integer, Parameter(validator=Number(gte=-1), allow_leading_hyphen=True)]
_TopP = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
_MinP = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
_Logprobs = Annotated[Integer, Parameter(validator=Number(gte=0, lte=1000))]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How a prompt is continued; the text under each one is its help."""

    max_tokens: Annotated[Count, Parameter(group=_SAMPLING)] = 128
    """Most tokens to generate for each prompt, in tokens, at least 1."""

    min_tokens: Annotated[_Natural, Parameter(group=_SAMPLING)] = 0
    """Tokens to generate before the end of the sequence or a stop may come."""

    temperature: Annotated[Temperature, Parameter(group=_SAMPLING)] = 0.0
    """Randomness, without unit: 0 takes the most likely token, 1 follows the model's
    probabilities."""

    top_p: Annotated[_TopP, Parameter(group=_SAMPLING)] = 1.0
    """Sample from the fewest most likely tokens with more than this mass, above 0 up to 1."""

    top_k: Annotated[_TopK, Parameter(group=_SAMPLING)] = -1
    """Sample from this many most likely tokens; -1 or 0: from all."""

    min_p: Annotated[_MinP, Parameter(group=_SAMPLING)] = 0.0
    """Sample from tokens at least this likely relative to the most likely one, 0 to 1."""

    seed: Annotated[Seed, Parameter(group=_SAMPLING)] = 0
    """Seed of the random numbers, 0 to 2^64 - 1; a prompt gives the same tokens for the same seed,
    alone or among others."""

    n: Annotated[Count, Parameter(group=_SAMPLING)] = 1
    """Number of answers to each prompt; each has a seed of its own."""

    stop: Annotated[Texts | None, Parameter(group=_SAMPLING, metavar="TEXT")] = None
    """Text that ends the answer and is left out of it. Repeat the option for several."""

    stop_token_ids: Annotated[_Ids | None, Parameter(group=_SAMPLING, metavar="ID")] = None
    """Token id that ends the answer. Repeat the option for several."""

    ignore_eos: Annotated[Flag, Parameter(group=_SAMPLING)] = False
    """Go on after the end-of-sequence token, up to --max-tokens."""

    logprobs: Annotated[_Logprobs | None, Parameter(group=_SAMPLING)] = None
    """Log-probabilities in the --json results: 0 of each token, k of the k best tokens too, up to
    1000. Default: none."""

    def to_params(self) -> SamplingParams:
        """The same for the engine.

        Raises:
            UsageError: values that contradict each other.
        """
        from deepinfer.errors import RequestError
        from deepinfer.sampling_params import SamplingParams

        try:
            return SamplingParams(**asdict(self))
        except RequestError as err:
            raise UsageError(str(err)) from err


DEFAULT_SAMPLING = SamplingOptions()
