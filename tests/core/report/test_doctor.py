"""What the doctor finds, on machines as they are and as they might be."""

import re
import stat
import tomllib
from pathlib import Path

import pytest
import torch

from deepinfer.kernels import registry
from deepinfer.kernels.cpu_build import BuildError
from deepinfer.report import backends, doctor, examine
from deepinfer.report.backends import kernel_operations, report_backends
from deepinfer.report.compiler import find_compiler
from deepinfer.report.self_test import SelfTest, run_self_test

ROOT = Path(__file__).parents[3]


def found(report, section, name=None):
    """The findings of a section."""
    return [f for f in report.findings if f.section == section and name in (None, f.name)]


@pytest.fixture(scope="module")
def healthy():
    return examine({})


def test_a_healthy_machine_is_usable_and_every_section_is_there(healthy):
    assert healthy.is_usable
    assert healthy.verdict.startswith("usable: cpu")
    sections = {finding.section for finding in healthy.findings}
    assert sections >= {
        *("python", "torch", "compiler", "cpu kernels", "backend", "optional", "folders"),
        *("memory", "self test"),
    }


def test_versions_and_instruction_set_are_told(healthy):
    assert torch.__version__ in found(healthy, "torch")[0].found
    kernels = found(healthy, "cpu kernels")[0]
    if kernels.status == "ok":  # there is a compiler here
        assert "instruction set" in kernels.found
        assert any(isa in kernels.found for isa in ("avx512", "avx2", "portable"))


def test_what_is_not_ok_says_what_to_do(healthy):
    for finding in healthy.findings:
        assert "\n" not in finding.found
        if finding.status == "warning" or (
            finding.section == "optional" and finding.status == "note"
        ):
            assert finding.remedy


def test_optional_libraries_are_those_of_the_extras_and_name_them(healthy):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    told = {finding.name: finding.remedy for finding in found(healthy, "optional")}
    for extra in ("chat", "structured", "plot", "metrics", "moe"):
        for requirement in extras.get(extra, []):
            name = re.match(r"[\w.-]+", requirement)[0]
            assert name in told
            assert told[name] in ("", f"the extra `{extra}` brings it")


def test_the_self_test_computes_the_same_token_twice(healthy):
    (finding,) = found(healthy, "self test")
    assert finding.status == "ok"
    assert run_self_test().passed
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("wrong", [{"reference_token": 8}, {"difference": 0.1}])
def test_a_self_test_that_differs_fails(monkeypatch, wrong):
    values = {"token": 7, "reference_token": 7, "difference": 0.0, "kernels": "CpuKernels"}
    result = SelfTest(**values | wrong)
    monkeypatch.setattr("deepinfer.report.self_test.run_self_test", lambda: result)
    report = examine({})
    assert not report.is_usable
    assert "self test" in report.verdict


def test_a_self_test_that_breaks_is_a_finding_and_no_crash(monkeypatch):
    def broken():
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr("deepinfer.report.self_test.run_self_test", broken)
    (finding,) = found(examine({}), "self test")
    assert (finding.status, finding.found) == ("failed", "RuntimeError: illegal instruction")


def compiler(folder, first_line, *, code=0):
    """A made-up compiler that tells a version."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\necho '{first_line}'\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("line", "kind", "version", "problem"),
    [
        ("cc (Debian 12.2.0-14) 12.2.0", "gcc", (12, 2), ""),
        ("gcc (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)", "gcc", (4, 8), "4.8 is too old"),
        ("cc (GCC) 8.5.0", "gcc", (8, 5), "gcc 8.5 is too old, needed is 9.0 or newer"),
        ("Debian clang version 14.0.6", "clang", (14, 0), ""),
        ("clang version 9.0.1", "clang", (9, 0), "clang 9.0 is too old, needed is 10.0 or newer"),
        ("some compiler", "unknown", None, ""),
    ],
)
def test_versions_of_compilers_are_read(tmp_path, line, kind, version, problem):
    read = find_compiler(compiler(tmp_path, line))
    assert (read.kind, read.version) == (kind, version)
    assert problem in read.problem
    assert bool(problem) == bool(read.problem)


def test_a_compiler_that_fails_is_told(tmp_path):
    assert "exit code 3" in find_compiler(compiler(tmp_path, "x", code=3)).problem


@pytest.mark.parametrize("environ", [{"PATH": "/none"}, {"PATH": "/none", "CC": "mycc"}])
def test_no_compiler_is_a_warning_with_the_remedy(environ):
    (finding,) = found(examine(environ, self_test=False), "compiler")
    assert finding.status == "warning"
    assert finding.found.startswith("no C compiler found (looked for ")
    assert environ.get("CC", "clang") in finding.found
    assert "install gcc 9 or clang 10 or newer" in finding.remedy
    assert "several times slower" in finding.remedy


def test_kernels_that_cannot_be_built_are_a_warning(monkeypatch):
    def fail():
        raise BuildError("cc cannot build the CPU kernels: error: unknown flag")

    monkeypatch.setattr("deepinfer.kernels.cpu_build.load", fail)
    report = examine({}, self_test=False)
    (finding,) = found(report, "cpu kernels")
    assert finding.status == "warning"
    assert "unknown flag" in finding.found
    assert report.is_usable


def test_the_environment_is_shown_and_its_faults_fail():
    report = examine({"DEEPINFER_CPU_ISA": "avx51", "DEEPINFER_NOPE": "1"}, self_test=False)
    failed = [finding for finding in report.findings if finding.status == "failed"]
    assert [finding.name for finding in failed] == ["DEEPINFER_CPU_ISA", "DEEPINFER_NOPE"]
    assert "did you mean avx512?" in failed[0].found
    assert not report.is_usable


def test_an_accelerator_that_is_asked_for_and_not_there_fails():
    report = examine({"DEEPINFER_ACCELERATOR": "ascend"}, self_test=False)
    (failed,) = [finding for finding in report.findings if finding.status == "failed"]
    assert failed.name == "DEEPINFER_ACCELERATOR"
    assert "asked for" in failed.found


def test_names_without_effect_are_a_warning():
    report = examine({"DEEPINFER_ENFORCE_EAGER": "1"}, self_test=False)
    (warning,) = [f for f in found(report, "environment") if f.status == "warning"]
    assert "DEEPINFER_ENFORCE_EAGER has no effect here" in warning.found


def test_without_torch_the_rest_is_still_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    report = examine({})
    assert found(report, "torch")[0].status == "failed"
    assert found(report, "torch")[0].remedy == "pip install torch"
    assert found(report, "memory")
    assert report.backends == ()


@pytest.fixture
def platforms(monkeypatch):
    """Pretends installed platforms by name."""

    def pretend(**made):
        monkeypatch.setattr(backends, "installed_backends", lambda: dict.fromkeys(made))
        monkeypatch.setattr(backends, "load_backend", lambda name: made[name]())
        return {report.name: report for report in report_backends()}

    return pretend


def test_every_platform_tells_its_reason_and_its_operations(platforms):
    from deepinfer_kernels_ascend import create_backend

    reports = platforms(cpu=registry.cpu_backend, ascend=create_backend)
    cpu, ascend, nvidia = (reports[name] for name in ("cpu", "ascend", "nvidia"))
    assert cpu.is_usable
    assert {"linear", "attention", "routed_experts"} <= set(cpu.overrides)
    assert not set(cpu.overrides) & set(cpu.inherits)
    assert set(cpu.overrides) | set(cpu.inherits) == set(kernel_operations())
    if not ascend.is_usable:
        assert ascend.reason
    assert ascend.inherits is not None
    assert not nvidia.is_installed
    assert "./build.sh" in nvidia.reason


def test_a_platform_that_is_broken_is_told_and_the_others_stay(platforms):
    def broken():
        raise ImportError("cannot import name 'x'")

    reports = platforms(cpu=registry.cpu_backend, nvidia=broken)
    assert reports["cpu"].is_usable
    assert not reports["nvidia"].is_usable
    assert "ImportError: cannot import name 'x'" in reports["nvidia"].reason


def test_operations_are_those_of_the_interface():
    names = kernel_operations()
    assert len(names) > 20
    assert "attention" in names
    assert not [name for name in names if name.startswith(("_", "prepare"))]


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    (finding,) = found(examine({}, self_test=False), "folders", "built kernels")
    assert (finding.status, finding.remedy) == (
        "warning",
        "name another one in DEEPINFER_CACHE_DIR",
    )
