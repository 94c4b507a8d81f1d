"""The C compiler that builds the CPU kernels, and whether it is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MIN_VERSIONS", "Compiler", "find_compiler"]

MIN_VERSIONS = {"gcc": (9, 0), "clang": (10, 0)}
"""Oldest versions that know all that cpu.c uses (vector conversion, unrolling by pragma)."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """What was found under the names that the kernels' build tries."""

    path: str | None
    """None where there is none."""
    kind: str
    """gcc, clang or unknown."""
    version: tuple[int, int] | None
    problem: str
    """Why it will not do; empty when it will."""

    @property
    def remedy(self) -> str:
        oldest = " or ".join(f"{kind} {major}" for kind, (major, _) in MIN_VERSIONS.items())
        return f"install {oldest} or newer, or name one in the environment variable CC"


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """Look where the build of the CPU kernels looks: `CC`, else cc, gcc, clang."""
    names = [environ["CC"]] if environ.get("CC") else ["cc", "gcc", "clang"]
    path = next(
        (found for name in names if (found := shutil.which(name, path=environ.get("PATH")))), None
    )
    if path is None:
        looked = f"no C compiler found (looked for {', '.join(names)})"
        return Compiler(path=None, kind="unknown", version=None, problem=looked)
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return Compiler(path=path, kind="unknown", version=None, problem=f"it does not run: {err}")
    first = asked.stdout.partition("\n")[0]
    if asked.returncode != 0:
        problem = f"`{path} --version` ends with exit code {asked.returncode}"
        return Compiler(path=path, kind="unknown", version=None, problem=problem)
    kind = "clang" if "clang" in first else "gcc"
    numbers = _VERSION.findall(first)
    if not numbers:
        # what cannot be read is left to the build to find out
        return Compiler(path=path, kind="unknown", version=None, problem="")
    version = (int(numbers[-1][0]), int(numbers[-1][1]))
    problem = ""
    if version < MIN_VERSIONS[kind]:
        needed = ".".join(map(str, MIN_VERSIONS[kind]))
        problem = f"{kind} {version[0]}.{version[1]} is too old, needed is {needed} or newer"
    return Compiler(path=path, kind=kind, version=version, problem=problem)
