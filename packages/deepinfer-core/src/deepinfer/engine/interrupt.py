"""`InterruptWatch`: Ctrl-C ends a run with what it has; a second one ends the program."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["InterruptWatch"]

logger = logging.getLogger(__name__)


class InterruptWatch:
    """Notes the first Ctrl-C instead of raising it, while it is entered.

    It leaves alone what is not Python's own reaction to Ctrl-C: a program with a handler of its own
    keeps it, and threads other than the main one never get the signal.
    """

    def __init__(self, notice: str = "interrupted: returning what is there") -> None:
        self.is_interrupted, self._notice = False, notice
        self._is_on = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_on = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_on:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True
        logger.warning("%s; Ctrl-C again ends at once", self._notice)
