"""`Feed`: requests come one by one, results as they finish; no more is kept than what runs."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Generic, TypeVar

from deepinfer.engine.driver import Call, Driver
from deepinfer.engine.prompts import Prompt
from deepinfer.engine.submission import Submission
from deepinfer.errors import EngineError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams

__all__ = ["Feed"]

_K = TypeVar("_K")


class Feed(Generic[_K]):
    """Keeps an engine supplied. For one thread; other calls on the same engine run beside it.

    The caller bounds the number in flight: it submits while `num_inflight` is below its bound, then
    takes a turn.

    Args:
        driver: of the engine.
        submission: checks requests for it.
    """

    def __init__(self, driver: Driver, submission: Submission) -> None:
        self._driver, self._submission = driver, submission
        self._numbers = count()
        self._open: dict[int, tuple[_K, Call]] = {}
        self._done: deque[int] = deque()  # filled by whichever thread steps the engine

    @property
    def num_inflight(self) -> int:
        """Requests whose result has not been handed out."""
        return len(self._open)

    def submit(
        self, key: _K, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> None:
        """Queue a request; one that cannot run has its error as a result of the next turn.

        Args:
            key: the caller's own name for it, handed back with the result.
            prompt, params, priority: as for `LLM.generate`.
        """
        number = next(self._numbers)
        call, requests = self._submission.call(
            [prompt], params, priority, on_done=partial(self._done.append, number)
        )
        self._open[number] = key, call
        if requests:
            self._driver.submit(requests)
        else:
            self._done.append(number)

    def turn(self) -> list[tuple[_K, RequestOutput]]:
        """Step the engine once, unless there are results already, and hand out what has finished.

        Raises:
            EngineError: the engine has stopped, and all results from before have been handed out;
                `outputs` has one for each request that was in flight.
        """
        if self._open and not self._done:
            _, oldest = next(iter(self._open.values()))
            self._driver.turn(oldest)
        found: list[tuple[_K, RequestOutput]] = []
        lost: list[tuple[int, RequestOutput]] = []
        failure = self._driver.engine.failure
        while self._done:
            number = self._done.popleft()
            key, call = self._open[number]
            (output,) = call.outputs()
            if failure is not None and output.error == str(failure):
                lost.append((number, output))
                continue
            del self._open[number]
            found.append((key, output))
        if lost and found:
            self._done.extend(number for number, _ in lost)  # told of by the next turn
        elif lost:
            for number, _ in lost:
                del self._open[number]
            assert failure is not None
            raise EngineError(str(failure), [output for _, output in lost]) from failure.__cause__
        return found

    def abort(self) -> None:
        """End all that is in flight with what it has; the results come with the next turns."""
        self._driver.abort([name for _, call in self._open.values() for name in call.request_ids])

    def close(self) -> None:
        """Abort what is in flight and forget it. More than once does no harm."""
        self.abort()
        with suppress(EngineError):
            while self._open:
                self.turn()
