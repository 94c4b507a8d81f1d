"""Facts about this machine that memory budgets are made of."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory_bytes", "shown_bytes"]


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Memory that programs can still get without swapping; None where the system does not tell.

    A limit of the container counts, where it is tighter than what the machine has.
    """
    free = _meminfo(proc / "meminfo")
    if free is None:
        try:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used))


def _meminfo(path: Path) -> int | None:
    try:
        for line in path.read_text("ascii", "replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _number(path: Path) -> int | None:
    """The number in a control file; None when there is none, as in `max`."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def shown_bytes(count: int) -> str:
    """A size for people, in powers of 1000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
