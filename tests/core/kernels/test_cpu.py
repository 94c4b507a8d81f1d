"""`CpuKernels` and its fallback conform; how the library is built, kept and done without."""

from __future__ import annotations

import functools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer.cache.records import KvFormat
from deepinfer.kernels import cpu_build
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.kernels.interface import Kernels, Numerics
from deepinfer.kernels.padded import PaddedKernels
from deepinfer.testing import conformance_cases


@functools.cache
def compiled(numerics: Numerics, kv_format: KvFormat) -> Kernels:
    return CpuKernels(numerics=numerics, kv_format=kv_format)


@functools.cache
def padded(numerics: Numerics, kv_format: KvFormat) -> Kernels:
    return PaddedKernels(numerics=numerics, kv_format=kv_format)


Check = Callable[..., None]


@pytest.mark.parametrize("check", [pytest.param(c, id=n) for n, c in conformance_cases()])
def test_compiled_kernels_conform(check: Check) -> None:
    check(compiled, device="cpu")


@pytest.mark.parametrize("check", [pytest.param(c, id=n) for n, c in conformance_cases(quick=True)])
def test_torch_without_a_compiler_is_row_invariant_too(check: Check) -> None:
    check(padded, device="cpu")


GENERATE = """
import logging, sys, torch
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from deepinfer.kernels.registry import cpu_backend
make = cpu_backend().create
kernels = make(numerics="exact", kv_format="v41", device=torch.device("cpu"))
make(numerics="served", kv_format="v41", device=torch.device("cpu"))
x = torch.arange(12.0).view(2, 6)
from deepinfer.checkpoint import StoredTensor
weight = kernels.prepare_linear([StoredTensor("w", "plain", (6, 6), torch.eye(6), None, None)])
assert torch.equal(kernels.linear(x, weight), x)
print(type(kernels).__name__)
"""


def run(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new process that makes the kernels of the CPU twice and multiplies with them."""
    merged = os.environ | {cpu_build.CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", GENERATE],
        env=merged | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def test_the_library_is_built_once_and_kept(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first.stdout.strip() == "CpuKernels"
    assert first.stderr == ""
    (built,) = libraries(tmp_path)
    written = built.stat().st_mtime_ns
    assert run(tmp_path).stdout == first.stdout
    assert [p.stat().st_mtime_ns for p in libraries(tmp_path)] == [written]


@pytest.mark.parametrize("compiler", ["none", "broken", "silent", "not a program"])
def test_without_a_working_compiler_torch_is_used_and_said_once(
    tmp_path: Path, compiler: str
) -> None:
    environment = {"PATH": str(tmp_path / "nowhere")}
    if compiler != "none":
        path = tmp_path / "cc"
        body = {
            "broken": '[ "$1" = --version ] && exit 0; echo "cc: error: no luck" >&2; exit 1',
            "silent": "exit 3",
            "not a program": "",
        }[compiler]
        path.write_text(f"#!/bin/sh\n{body}\n" if body else "\0\0")
        path.chmod(0o755)
        environment["CC"] = str(path)
    done = run(tmp_path / "cache", **environment)
    assert done.stdout.strip() == "PaddedKernels"
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert "CPU kernels are not compiled" in lines[0]
    assert "Install a C compiler" in lines[0]
    if compiler == "broken":
        assert "no luck" in lines[0]


def test_a_cache_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")  # also stops root, unlike a mode
    done = run(blocked)
    assert done.stdout.strip() == "CpuKernels"
    (line,) = done.stderr.strip().splitlines()
    assert "cannot keep built kernels" in line
    assert cpu_build.CACHE_VARIABLE in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into read-only folders")
def test_a_read_only_cache_folder_is_done_without(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert run(tmp_path).stdout.strip() == "CpuKernels"


def test_a_library_that_was_cut_short_is_built_again(tmp_path: Path) -> None:
    run(tmp_path)
    (built,) = libraries(tmp_path)
    built.write_bytes(built.read_bytes()[:1000])
    assert run(tmp_path).stdout.strip() == "CpuKernels"
    assert built.stat().st_size > 1000


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """A compiler that counts its calls is called once for three processes."""
    counter = tmp_path / "calls"
    compiler = tmp_path / "cc"
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert real is not None, "the test needs a compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {counter}\nexec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    merged = os.environ | {
        cpu_build.CACHE_VARIABLE: str(tmp_path / "cache"),
        "CC": str(compiler),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen([sys.executable, "-c", GENERATE], env=merged, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [p.communicate(timeout=250)[0].strip() for p in started] == [b"CpuKernels"] * 3
    assert counter.read_text().count("x") == 1


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_give_right_values(tmp_path: Path, isa: str) -> None:
    """Their bits differ from those of AVX-512; the golden values hold for all."""
    code = (
        "from tests.core.model.golden import all_cases, assert_quantized\n"
        "case = next(c for c in all_cases() if c.name == 'c10')\n"
        "for numerics in ('exact', 'served'):\n"
        "    case.load(numerics=numerics).full_logits([case.ids(0)])\n"
        "got = case.load().full_logits([case.ids(0)], chunk_size=7)[0]\n"
        "assert_quantized(got, case.values['0.logits'])\n"
        "print(case.load().kernels.toolchain.isa)\n"
    )
    merged = os.environ | {
        cpu_build.CACHE_VARIABLE: str(tmp_path),
        cpu_build.ISA_VARIABLE: isa,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=merged,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    if "was asked for, this CPU has" in done.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    assert done.stdout.strip() == isa, done.stderr


@pytest.mark.parametrize("value", ["sse9", "AVX2"])
def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(cpu_build.ISA_VARIABLE, value)
    with pytest.raises(cpu_build.BuildError, match="none of avx512, avx2, portable"):
        cpu_build.load()


def test_two_python_threads_may_compute_at_once() -> None:
    """The pool belongs to one caller at a time; the other runs alone and gets the same bits."""
    from concurrent.futures import ThreadPoolExecutor

    from deepinfer.checkpoint import StoredTensor

    kernels = compiled("exact", "v41")
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(600, 300, generator=generator)
    weight = kernels.prepare_linear([StoredTensor("w", "plain", (600, 300), w, None, None)])
    x = torch.randn(64, 300, generator=generator)
    want = kernels.linear(x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: kernels.linear(x, weight), range(200)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(got, want) for got in results)
