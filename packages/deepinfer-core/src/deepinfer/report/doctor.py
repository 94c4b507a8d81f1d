"""`examine`: what runs on this machine, and why the rest does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from deepinfer.config.environment import PREFIX, read_environment
from deepinfer.config.machine import available_memory_bytes, shown_bytes
from deepinfer.errors import ConfigError, DeepInferError

from .backends import BackendReport, report_backends
from .compiler import find_compiler
from .platforms import choose_platform

__all__ = ["DoctorReport", "Finding", "examine"]

Status = Literal["ok", "note", "warning", "failed"]

MIN_PYTHON = (3, 11)

_OPTIONAL = (
    ("xgrammar", "xgrammar", "structured output", "the extra `structured` brings it"),
    ("deepseek_recipe", "deepseek-recipe", "chat prompts", "the extra `chat` brings it"),
    ("prometheus_client", "prometheus-client", "metrics", "the extra `metrics` brings it"),
    ("matplotlib", "matplotlib", "plots in files", "the extra `plot` brings it"),
    ("plotext", "plotext", "plots in the terminal", "the extra `plot` brings it"),
    ("deepinfer_moe", "deepinfer-moe", "expert placement", "the extra `moe` brings it"),
    ("triton", "triton", "NVIDIA kernels", "the CUDA builds of torch bring it"),
    ("torch_npu", "torch_npu", "torch on Ascend", "install the release that matches torch"),
)
"""Module, distribution, what it is for, and what brings it; extras are the meta-package's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    """failed: nothing runs, or not what was asked for. warning: it runs, slower or with less."""
    found: str
    remedy: str = ""
    """What to do; empty where nothing needs doing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """All findings, and the platforms in detail."""

    findings: tuple[Finding, ...]
    backends: tuple[BackendReport, ...]

    @property
    def is_usable(self) -> bool:
        return not any(finding.status == "failed" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line: what runs here."""
        usable = [b.name for b in self.backends if b.is_usable and b.name != "reference"]
        names = ", ".join(usable) or "cpu"
        failed = [f"{f.section} {f.name}" for f in self.findings if f.status == "failed"]
        if failed:
            return f"not usable as it is: {', '.join(failed)}"
        return f"usable: {names}"

    def to_dict(self) -> dict[str, Any]:
        """Everything under stable keys."""
        return {
            "is_usable": self.is_usable,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "backends": [backend.to_dict() for backend in self.backends],
        }


def examine(environ: Mapping[str, str] = os.environ, *, self_test: bool = True) -> DoctorReport:
    """Look at everything that running a model depends on. Builds the CPU kernels if need be.

    Args:
        environ: the environment to judge.
        self_test: compute one token with a made-up model as well.
    """
    findings = [*_python(), *_torch(), *_environment(environ), *_compiler(environ)]
    has_torch = not any(f.section == "torch" and f.status == "failed" for f in findings)
    backends: list[BackendReport] = []
    if has_torch:
        has_compiler = all(f.section != "compiler" or f.status == "ok" for f in findings)
        findings += _cpu_kernels(has_compiler=has_compiler)
        backends = report_backends()
        findings += [_backend(report) for report in backends]
    findings += [*_optional(), *_folders(), *_memory()]
    if has_torch and self_test:
        findings.append(_self_test())
    return DoctorReport(findings=tuple(findings), backends=tuple(backends))


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    is_new = sys.version_info >= MIN_PYTHON
    yield Finding(
        section="python",
        name="version",
        status="ok" if is_new else "failed",
        found=f"{version} ({sys.executable}), {platform.system()} {platform.machine()}",
        remedy="" if is_new else "use Python 3.11 or newer",
    )


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as err:
        yield Finding(
            section="torch",
            name="version",
            status="failed",
            found=f"cannot be imported ({err})",
            remedy="pip install torch",
        )
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield Finding(
        section="torch",
        name="version",
        status="ok",
        found=f"{torch.__version__}, built for {build}, {torch.get_num_threads()} threads",
    )


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What is set, what is wrong with it, and whether the accelerator that it asks for is there."""
    section = "environment"
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        yield Finding(section=section, name=name, status="note", found=ascii(environ[name])[:200])
    try:
        read = read_environment(environ)
    except ConfigError as err:
        for line in str(err).splitlines():
            yield Finding(
                section=section,
                name=line.partition(":")[0],
                status="failed",
                found=line.partition(": ")[2],
            )
        return
    if warning := read.warning():
        name = read.without_effect[0]
        yield Finding(section=section, name=name, status="warning", found=warning)
    try:
        if read.accelerator is not None:
            choose_platform(read.accelerator)
    except DeepInferError as err:
        name = "DEEPINFER_ACCELERATOR"
        yield Finding(section=section, name=name, status="failed", found=str(err))


def _compiler(environ: Mapping[str, str]) -> Iterator[Finding]:
    found = find_compiler(environ)
    version = "" if found.version is None else f", {found.kind} {'.'.join(map(str, found.version))}"
    yield Finding(
        section="compiler",
        name="C",
        status="warning" if found.problem else "ok",
        found=found.problem or f"{found.path}{version}",
        remedy=f"{found.remedy}; without it the CPU runs on torch, several times slower"
        if found.problem
        else "",
    )


def _cpu_kernels(*, has_compiler: bool) -> Iterator[Finding]:
    """Built or buildable, for which instruction set."""
    from deepinfer.kernels import cpu_build

    before = set(cpu_build.cache_folder().glob("cpu-*.so"))
    start_s = time.perf_counter()
    try:
        _, tools = cpu_build.load()
    except cpu_build.BuildError as err:
        yield Finding(
            section="cpu kernels",
            name="library",
            status="warning",
            found=f"not built: {err if has_compiler else 'see the compiler'}",
            remedy="everything runs on torch until this is mended, several times slower",
        )
        return
    name = f"{tools.key(cpu_build.SOURCE.read_bytes())}.so"
    is_old = cpu_build.cache_folder() / name in before
    when = "built before" if is_old else f"built now in {time.perf_counter() - start_s:.1f} s"
    yield Finding(
        section="cpu kernels",
        name="library",
        status="ok",
        found=f"instruction set {tools.isa}, {when} with {tools.compiler}: {name}",
    )


def _backend(report: BackendReport) -> Finding:
    detail = ""
    if report.overrides is not None and report.inherits is not None:
        count = len(report.overrides) + len(report.inherits)
        detail = f"; overrides {len(report.overrides)} of {count} operations"
        if report.overrides:
            detail += f" ({', '.join(report.overrides)})"
    state = "usable" if report.is_usable else "not usable"
    return Finding(
        section="backend",
        name=report.name,
        status="ok" if report.is_usable else "note",
        found=f"{state}{f': {report.reason}' if report.reason else ''}{detail}",
    )


def _optional() -> Iterator[Finding]:
    for module, distribution, purpose, remedy in _OPTIONAL:
        try:
            found = f"{metadata.version(distribution)}, for {purpose}"
        except metadata.PackageNotFoundError:
            if find_spec(module) is None:
                yield Finding(
                    section="optional",
                    name=distribution,
                    status="note",
                    found=f"not installed; for {purpose}",
                    remedy=remedy,
                )
                continue
            found = f"found on the path, for {purpose}"
        yield Finding(section="optional", name=distribution, status="ok", found=found)


def _folders() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from deepinfer.kernels.cpu_build import CACHE_VARIABLE, cache_folder

    for name, folder, variable in (
        ("built kernels", cache_folder(), CACHE_VARIABLE),
        ("hub", Path(HF_HUB_CACHE), "HF_HUB_CACHE"),
    ):
        there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        can_write = there.is_dir() and os.access(there, os.W_OK)
        free = shown_bytes(shutil.disk_usage(there).free)
        yield Finding(
            section="folders",
            name=name,
            status="ok" if can_write else "warning",
            found=f"{folder}, {free} free" + ("" if can_write else ", cannot be written"),
            remedy="" if can_write else f"name another one in {variable}",
        )


def _memory() -> Iterator[Finding]:
    free = available_memory_bytes()
    found = "the system does not tell" if free is None else f"{shown_bytes(free)} free"
    yield Finding(section="memory", name="main", status="ok", found=found)


def _self_test() -> Finding:
    from .self_test import run_self_test

    section, name = "self test", "one token on the CPU"
    try:
        result = run_self_test()
    except Exception as err:  # whatever breaks it is the finding
        text = f"{type(err).__name__}: {err}"
        return Finding(section=section, name=name, status="failed", found=text)
    found = (
        f"token {result.token} with {result.kernels}, {result.reference_token} with the reference, "
        f"logits differ by {result.difference:.1e}"
    )
    status: Status = "ok" if result.passed else "failed"
    remedy = "" if result.passed else "please report this with the output of this command"
    return Finding(section=section, name=name, status=status, found=found, remedy=remedy)
