"""Ctrl-C during a run: once asks it to end with what it has, twice ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from deepinfer_cli.streams import write_stderr

__all__ = ["InterruptWatch"]


class InterruptWatch:
    """While entered, the first Ctrl-C only sets a flag; the second raises KeyboardInterrupt.

    Outside the main thread, or where the parent process made us ignore Ctrl-C, nothing changes.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._previous: signal.Handlers | int | object | None = None
        self._installed = False

    def should_stop(self) -> bool:
        """Whether the run was asked to end; the engine asks this once per step."""
        return self._stopping

    def __enter__(self) -> InterruptWatch:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if self._previous is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]  # as it was
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            raise KeyboardInterrupt
        self._stopping = True
        write_stderr("\nstopping with the results so far; Ctrl-C again to stop now\n")
