"""The progress bar of a run, and the memory it took."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.outputs import Progress

__all__ = ["ProgressBar", "peak_memory_bytes"]


class ProgressBar:
    """One bar over the requests of a run, with prompt and output tokens per second, on stderr."""

    def __init__(self, num_requests: int, *, enabled: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=num_requests,
            unit="request",
            disable=not enabled,
            leave=False,
            miniters=0,  # a step that finishes no request still moves the token rates
            dynamic_ncols=True,
        )
        self._start_s = time.perf_counter()

    def update(self, progress: Progress) -> None:
        """Show the state after a step; cheap enough to be called for each one."""
        if self._bar.disable:
            return
        seconds = max(time.perf_counter() - self._start_s, 1e-9)
        self._bar.set_postfix_str(
            f"prompt {progress.prompt_tokens / seconds:.1f} tokens/s, "
            f"output {progress.output_tokens / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(progress.num_finished - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()


def peak_memory_bytes() -> int | None:
    """Highest resident memory of this process so far; None where the system does not tell.

    Linux's getrusage also counts the parent before exec, so its status file comes first.
    """
    try:
        status = Path("/proc/self/status").read_text("ascii", "replace")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
