"""`Driver`: lets several threads share one engine.

The engine itself belongs to one caller at a time. Whoever waits for results steps it, for all; the
others wait. What they want of it (requests, aborts) goes through an inbox that is emptied before
each step, so that nobody waits for a lock to submit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from deepinfer.engine.core import Engine
from deepinfer.engine.sequence import Request
from deepinfer.errors import EngineError
from deepinfer.outputs import RequestDelta, RequestOutput

__all__ = ["Call", "Driver"]

logger = logging.getLogger(__name__)

_WAIT_S = 0.02
"""How long a waiting thread sleeps before it looks whether it should step the engine itself."""


class Call:
    """What one call asked for, and what came of it so far.

    Args:
        results: one per prompt; None where a request runs.
        on_delta: receives deltas, from whichever thread steps the engine; None: nobody streams.
        on_done: called once, when the last result is there.
    """

    def __init__(
        self,
        results: Sequence[RequestOutput | None],
        *,
        on_delta: Callable[[RequestDelta], None] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.results: list[RequestOutput | None] = [*results]
        self.on_delta = on_delta
        self.request_ids: list[str] = []
        self._on_done = on_done
        self._num_open = sum(result is None for result in results)
        self._done = threading.Event()
        if not self._num_open:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether every prompt has its result."""
        return self._done.is_set()

    @property
    def num_finished(self) -> int:
        return len(self.results) - self._num_open

    def wait(self, seconds: float) -> bool:
        """Wait for the last result; whether it is there."""
        return self._done.wait(seconds)

    def take(self, output: RequestOutput) -> None:
        """Take in a result."""
        assert self.results[output.index] is None, f"request {output.index} has two results"
        self.results[output.index] = output
        self._num_open -= 1
        if not self._num_open:
            self._done.set()
            if self._on_done is not None:
                self._on_done()

    def outputs(self) -> list[RequestOutput]:
        """All results, in the order of the prompts."""
        assert self.is_done, "some prompts have no result yet"
        return [output for output in self.results if output is not None]


class Driver:
    """Steps an engine for whoever waits.

    Args:
        engine: not used by anyone else from here on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: deque[Callable[[], object]] = deque()
        self._steps = threading.Lock()
        self._background: threading.Thread | None = None
        self._starts = threading.Lock()
        self._stepper: int | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue checked requests; from any thread."""
        self._inbox.append(lambda: self._submit(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with what they have; from any thread. Unknown names are passed over."""
        self._inbox.append(lambda: [self.engine.abort(name) for name in request_ids])

    def run(
        self,
        call: Call,
        *,
        on_turn: Callable[[], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[RequestOutput]:
        """Step the engine, or wait while another thread does, until a call has its results.

        Args:
            call: submitted before.
            on_turn: called after every turn of the loop.
            should_stop: asked before every turn; True aborts what is unfinished.

        Raises:
            EngineError: the engine has stopped; `outputs` has what there is.
        """
        is_stopped = False
        try:
            while not call.is_done:
                if should_stop is not None and not is_stopped and should_stop():
                    is_stopped = True
                    self.abort(call.request_ids)
                self.turn(call)
                if on_turn is not None:
                    on_turn()
        except BaseException:  # of a caller's function, or Ctrl-C: nothing of the call may stay
            self.abort(call.request_ids)
            self.finish(call)
            raise
        self.check(call)
        return call.outputs()

    def finish(self, call: Call) -> None:
        """Wait for the results of a call that was aborted. Inside a step (a stream may be forgotten
        there) nothing can be waited for; the next step sees to it.
        """
        while not call.is_done and self._stepper != threading.get_ident():
            self.turn(call)

    def turn(self, call: Call) -> None:
        """One step, here or in another thread."""
        assert self._stepper != threading.get_ident(), "the engine is stepped inside a step"
        if not self._steps.acquire(blocking=False):
            call.wait(_WAIT_S)
            return
        self._stepper = threading.get_ident()
        try:
            self._step()
            if call.is_done and not self._inbox and not self.engine.has_unfinished:
                while self.engine.has_work:  # a step that was launched before the end was known
                    self._step()
        finally:
            self._stepper = None
            self._steps.release()

    def check(self, call: Call) -> None:
        """Raise what stopped the engine while a call was in it."""
        failure = self.engine.failure
        if failure is None or not call.is_done:
            return
        outputs = call.outputs()
        if any(output.error == str(failure) for output in outputs):
            raise EngineError(str(failure), outputs) from failure.__cause__

    def run_in_background(self) -> None:
        """See that a thread steps the engine until there is nothing to do."""
        with self._starts:
            # in a forked process the thread of the parent is not there
            if self._background is None or not self._background.is_alive():
                self._background = threading.Thread(
                    target=self._serve, name="deepinfer-engine", daemon=True
                )
                self._background.start()

    def close(self) -> None:
        """Abort what runs and end the engine."""
        with self._steps:
            self._empty_inbox()
            self.engine.close()
        background = self._background
        if background is not None and background is not threading.current_thread():
            background.join(timeout=30.0)

    def _serve(self) -> None:
        while True:
            with self._steps:
                self._stepper = threading.get_ident()
                try:
                    self._step()
                except BaseException as problem:  # the requests have been told by the engine
                    logger.error("%s", problem)
                finally:
                    self._stepper = None
            with self._starts:  # new work starts a new thread, or is seen by this one
                if not self._inbox and not self.engine.has_work:
                    self._background = None
                    return

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self.engine.submit(request)
            except EngineError as problem:
                self.engine.refuse(request, str(problem))

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _step(self) -> None:
        self._empty_inbox()
        if not self.engine.has_work:
            return
        try:
            self.engine.step()
        except EngineError as problem:  # whoever waits for one of its requests is told
            logger.error("%s", problem)
