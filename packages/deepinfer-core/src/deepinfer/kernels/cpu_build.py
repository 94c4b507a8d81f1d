"""Builds `cpu.c` with the system's compiler, once per source, compiler and machine, and loads it.

The library lies in the user's cache folder under a key of everything that its bits depend on.
Several processes that start at once build it once. Nothing is ever written into the installed
package.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CACHE_VARIABLE",
    "FLAGS_VARIABLE",
    "ISA_VARIABLE",
    "BuildError",
    "Toolchain",
    "cache_folder",
    "load",
]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "DEEPINFER_CACHE_DIR"
"""Folder for built kernels; default: the user's cache folder."""
ISA_VARIABLE = "DEEPINFER_CPU_ISA"
"""`avx512`, `avx2` or `portable` instead of the best that this CPU has."""

FLAGS_VARIABLE = "DEEPINFER_CPU_FLAGS"
"""Further flags for the compiler, for sanitizers and profilers."""

SOURCE = Path(__file__).with_name("cpu.c")
_COMMON = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_ISA_FLAGS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
_ISA_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
    "avx2": {"avx2", "fma"},
    "portable": set[str](),
}


class BuildError(Exception):
    """The library could not be built or loaded; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What builds the library on this machine."""

    compiler: str
    """Path of the compiler."""
    version: str
    isa: str
    """`avx512`, `avx2` or `portable`."""
    cpu: str
    """Model of the CPU."""
    more_flags: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        return (*_COMMON, *_ISA_FLAGS[self.isa], *self.more_flags)

    def key(self, source: bytes) -> str:
        """Name of the library: a hash of source, flags, compiler and CPU."""
        parts = (*self.flags, self.compiler, self.version, self.isa, self.cpu, sys.platform)
        digest = hashlib.blake2b(source, digest_size=12)
        digest.update("\0".join(parts).encode())
        return f"cpu-{self.isa}-{digest.hexdigest()}"


def cache_folder() -> Path:
    """Where built kernels are kept."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "deepinfer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"


def load() -> tuple[ctypes.CDLL, Toolchain]:
    """The library for this machine, built now if it has not been.

    Raises:
        BuildError: no compiler, a compiler that fails, or a library that does not load.
    """
    variables = (
        CACHE_VARIABLE,
        "PATH",
        "CC",
        "HOME",
        "XDG_CACHE_HOME",
        ISA_VARIABLE,
        FLAGS_VARIABLE,
    )
    return _load_for(tuple(os.environ.get(name) for name in variables))


@functools.cache
def _load_for(environment: tuple[str | None, ...]) -> tuple[ctypes.CDLL, Toolchain]:
    """Once per process and environment; the environment is read where it matters."""
    tools = _toolchain()
    return _load_with(tools), tools


def _load_with(tools: Toolchain) -> ctypes.CDLL:
    source = SOURCE.read_bytes()
    path = cache_folder() / f"{tools.key(source)}.so"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_whole(path):
                _compile(tools, path)
                _sum_file(path).write_text(_digest(path))
        return _open(path)
    except OSError as problem:
        logger.warning(
            "cannot keep built kernels in %s (%s): building for this process alone; "
            "set %s to a folder that can be written",
            path.parent,
            problem.strerror or problem,
            CACHE_VARIABLE,
        )
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        private = Path(folder) / path.name
        _compile(tools, private)
        return _open(private)  # stays mapped after its file is gone


def _sum_file(path: Path) -> Path:
    return path.with_suffix(".sum")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether the library is what was built; loading half of one would end the process."""
    try:
        return _sum_file(path).read_text() == _digest(path)
    except (OSError, ValueError):
        return False


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as problem:
        raise BuildError(f"the built library does not load: {problem}") from problem


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that processes that start together build once."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(tools: Toolchain, path: Path) -> None:
    """Build beside `path` and rename, so that nobody loads half a library."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    command = [tools.compiler, *tools.flags, "-o", name, str(SOURCE), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"{tools.compiler} cannot build the CPU kernels: {first}")
        os.chmod(name, 0o755)
        os.replace(name, path)
        logger.info("built CPU kernels with %s for %s", tools.compiler, tools.isa)
    except subprocess.TimeoutExpired as problem:
        raise BuildError(f"{tools.compiler} did not finish in 300 s") from problem
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _toolchain() -> Toolchain:
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    compiler = next((found for name in candidates if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C compiler found (looked for {', '.join(candidates)})")
    try:
        asked = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise BuildError(f"{compiler} does not run: {problem}") from problem
    if asked.returncode != 0:
        raise BuildError(f"{compiler} --version fails with exit code {asked.returncode}")
    model, features = _cpu()
    more = tuple(shlex.split(os.environ.get(FLAGS_VARIABLE, "")))
    return Toolchain(compiler, asked.stdout.partition("\n")[0], _isa(features), model, more)


def _isa(features: set[str]) -> str:
    best = next(isa for isa, needs in _ISA_NEEDS.items() if needs <= features)
    chosen = os.environ.get(ISA_VARIABLE) or best
    if chosen not in _ISA_NEEDS:
        raise BuildError(f"{ISA_VARIABLE}={chosen!r} is none of {', '.join(_ISA_NEEDS)}")
    if not _ISA_NEEDS[chosen] <= features:
        raise BuildError(f"{ISA_VARIABLE}={chosen} was asked for, this CPU has {best}")
    return chosen


def _cpu() -> tuple[str, set[str]]:
    """Model name and feature flags; no features where the system does not list them."""
    model, features = platform.machine(), set[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                features = set(value.split())
                break
    return model, features
