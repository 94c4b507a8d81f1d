"""The memory that a run took."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["peak_memory_bytes"]


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
