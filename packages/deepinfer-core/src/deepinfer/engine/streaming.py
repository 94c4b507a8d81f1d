"""`DeltaStream`: what `LLM.stream` returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Self

from deepinfer.engine.driver import Call, Driver
from deepinfer.engine.interrupt import InterruptWatch
from deepinfer.outputs import RequestDelta

__all__ = ["DeltaStream"]


class DeltaStream(Iterator[RequestDelta]):
    """Steps an engine as deltas are asked for.

    Ending it early aborts what is unfinished: `close`, Ctrl-C while a delta is awaited (which ends
    the step first), or forgetting the stream, whether or not it was begun.

    Args:
        driver: steps the engine.
        call: submitted before.
        deltas: where its deltas arrive.
        should_stop: asked before every step; True aborts what is unfinished.
    """

    def __init__(
        self,
        driver: Driver,
        call: Call,
        deltas: deque[RequestDelta],
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self._driver, self._call, self._deltas = driver, call, deltas
        self._should_stop = should_stop
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestDelta:
        try:
            while not self._is_over:
                if self._deltas:
                    return self._deltas.popleft()
                if self._call.is_done:
                    self._is_over = True
                    self._driver.check(self._call)
                else:
                    self._turn()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _turn(self) -> None:
        if self._should_stop is not None and self._should_stop():
            self._should_stop = None
            self._driver.abort(self._call.request_ids)
        with InterruptWatch(notice="interrupted") as watch:
            self._driver.turn(self._call)
        if watch.is_interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Abort what is unfinished; more than once does no harm."""
        self._is_over = True
        if not self._call.is_done:
            self._driver.abort(self._call.request_ids)
            self._driver.finish(self._call)

    def __del__(self) -> None:
        with suppress(Exception):  # nobody could be told
            self.close()
