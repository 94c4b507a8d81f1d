"""Ctrl-C or SIGTERM during a run: once asks it to end with what it has, twice ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from deepinfer_cli.exits import ExitCode
from deepinfer_cli.streams import write_stderr

__all__ = ["InterruptWatch"]


class InterruptWatch:
    """While entered, the first signal only sets a flag; the second raises KeyboardInterrupt.

    Outside the main thread nothing changes; nor for a signal that the parent process made us
    ignore.

    Args:
        notice: what is said when the first signal comes.
    """

    def __init__(self, notice: str = "stopping with the results so far") -> None:
        self._notice = notice
        self._asked: int | None = None
        self._previous: dict[signal.Signals, object] = {}

    def should_stop(self) -> bool:
        """Whether the run was asked to end; the engine asks this once per step."""
        return self._asked is not None

    @property
    def exit_code(self) -> ExitCode | None:
        """Exit code of a run that was asked to end, None for one that was not."""
        if self._asked is None:
            return None
        return ExitCode.TERMINATED if self._asked == signal.SIGTERM else ExitCode.INTERRUPTED

    def __enter__(self) -> InterruptWatch:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous = signal.getsignal(number)
                if previous is not signal.SIG_IGN:
                    signal.signal(number, self._handle)
                    self._previous[number] = previous
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]  # as it was
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            raise KeyboardInterrupt
        self._asked = number
        write_stderr(f"\n{self._notice}; Ctrl-C again to stop now\n")
