"""`Submission`: turns what a call was given into requests that can run, and results of those that
cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np

from deepinfer.config.engine_config import ResolvedConfig
from deepinfer.config.fields import shown
from deepinfer.engine.driver import Call
from deepinfer.engine.prompts import token_ids_of
from deepinfer.engine.runner import EngineModel
from deepinfer.engine.sequence import MAX_PRIORITY, Request
from deepinfer.errors import RequestError
from deepinfer.model.arguments import plain
from deepinfer.outputs import RequestDelta, RequestOutput
from deepinfer.sampling.seeds import derived_seed
from deepinfer.sampling_params import SamplingParams

__all__ = ["Submission"]

logger = logging.getLogger(__name__)


class Submission:
    """Checks calls for one engine.

    Args:
        model: what the requests run on.
        config: limits of the engine.
    """

    def __init__(self, model: EngineModel, config: ResolvedConfig) -> None:
        self._model, self._config = model, config
        self._numbers = count()
        self._has_told = False

    def call(
        self,
        prompts: Sequence[object],
        params: object,
        priority: object,
        *,
        on_delta: Callable[[RequestDelta], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> tuple[Call, list[Request]]:
        """A call and its requests; prompts that cannot run have their result already.

        Raises:
            RequestError: the call itself is wrong.
        """
        each_params = _one_each(
            "sampling_params", params, SamplingParams, SamplingParams(), prompts
        )
        each_priority = _one_each("priority", priority, int, 0, prompts)
        requests: list[Request] = []
        results: list[RequestOutput | None] = []
        for index, prompt in enumerate(prompts):
            made = self._request(index, prompt, each_params[index], each_priority[index])
            if isinstance(made, Request):
                requests.append(made)
                results.append(None)
            else:
                results.append(made)
        if not self._has_told and any(p.max_tokens is None for p in each_params):
            self._has_told = True
            logger.info(
                "max_tokens is not given: answers may grow until prompt and answer have %d tokens",
                self._config.max_model_len,
            )
        call = Call(results, on_delta=on_delta, on_done=on_done)
        for request in requests:
            request.on_finish = call.take
            request.on_delta = on_delta
            call.request_ids.append(request.request_id)
        if on_delta is not None:
            for result in results:
                if result is not None:
                    on_delta(_failed_delta(result))
        return call, requests

    def _request(
        self, index: int, prompt: object, params: SamplingParams, priority: int
    ) -> Request | RequestOutput:
        """A request that can run, or the result of one that cannot."""
        number = next(self._numbers)
        prompt_ids: list[int] = []
        try:
            prompt_ids = token_ids_of(prompt, self._model)
            return self._checked(index, number, prompt_ids, params, priority)
        except RequestError as problem:
            return RequestOutput(
                index=index,
                request_id=str(number),
                num_prompt_tokens=len(prompt_ids),
                error=str(problem),
            )

    def _checked(
        self,
        index: int,
        number: int,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int,
    ) -> Request:
        limit, num_prompt = self._config.max_model_len, len(prompt_ids)
        if num_prompt >= limit:
            raise RequestError(
                f"the prompt is {num_prompt} tokens long and max_model_len={limit} leaves no room "
                f"for an answer; shorten it or raise max_model_len"
            )
        vocab_size = self._model.config.vocab_size
        outside = next((t for t in params.stop_token_ids if t >= vocab_size), None)
        if outside is not None:
            raise RequestError(
                f"stop_token_ids has {outside}, this model's ids are 0..{vocab_size - 1}"
            )
        if params.stop and self._model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model's folder has none")
        if abs(priority) > MAX_PRIORITY:
            raise RequestError(f"priority={priority} is not from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        seed = derived_seed(self._config.seed, number + 1) if params.seed is None else params.seed
        room = limit - num_prompt
        return Request(
            request_id=str(number),
            index=index,
            prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
            params=params,
            seed=seed,
            max_len=num_prompt + min(room, params.max_tokens or room),
            priority=priority,
        )


def _failed_delta(result: RequestOutput) -> RequestDelta:
    """What a stream tells of a request that could not run."""
    return RequestDelta(
        request_id=result.request_id, index=result.index, finish_reason="error", output=result
    )


def _one_each(name: str, given: Any, kind: type, default: Any, prompts: Sequence[object]) -> Any:
    """One value per prompt, of one for all, one each, or None."""
    given = default if given is None else plain(given)
    if isinstance(given, kind) and not isinstance(given, bool):
        return [given] * len(prompts)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{name}={shown(given)} is no {kind.__name__}; give one, or one each")
    if len(given) != len(prompts):
        raise RequestError(
            f"{name} has {len(given)} items for {len(prompts)} prompts; give one, or one each"
        )
    given = [plain(item) for item in given]
    wrong = next((x for x in given if not isinstance(x, kind) or isinstance(x, bool)), None)
    if wrong is not None:
        raise RequestError(f"{name} has {shown(wrong)}, which is no {kind.__name__}")
    return given
