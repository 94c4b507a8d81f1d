"""The Ascend backend: what it offers, and the reasons it gives when it cannot run."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import deepinfer_kernels_ascend.backend as backend_module
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer_kernels_ascend import create_backend
from deepinfer_kernels_ascend.backend import device_nodes
from deepinfer_kernels_ascend.kernels import AscendKernels


@pytest.fixture
def machine(monkeypatch):
    """Pretends a machine: device nodes, and torch_npu as a device count, an error or None."""

    def pretend(nodes, torch_npu):
        def load(name):
            if isinstance(torch_npu, Exception):
                raise torch_npu
            return SimpleNamespace(npu=SimpleNamespace(device_count=lambda: torch_npu))

        found = None if torch_npu is None else object()
        monkeypatch.setattr(backend_module, "device_nodes", lambda: nodes)
        monkeypatch.setattr(backend_module.importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(backend_module.importlib, "import_module", load)
        return create_backend().probe()

    return pretend


def test_backend_describes_itself_without_touching_a_device():
    backend = create_backend()
    assert (backend.name, backend.device_type) == ("ascend", "npu")


def test_a_visible_device_with_torch_npu_is_usable(machine):
    probe = machine(["davinci0"], 1)
    assert probe.usable
    assert probe.reason == ""


@pytest.mark.parametrize(
    ("nodes", "torch_npu", "said"),
    [
        ([], 1, "no Ascend device on this machine"),
        (["davinci0"], None, "torch_npu is not installed"),
        (["davinci0"], ImportError("libascendcl.so"), "cannot be imported (libascendcl.so)"),
        (["davinci0"], 0, "sees no Ascend device"),
    ],
)
def test_unusable_machines_are_told_the_reason_in_one_sentence(machine, nodes, torch_npu, said):
    probe = machine(nodes, torch_npu)
    assert not probe.usable
    assert said in probe.reason
    assert "\n" not in probe.reason


def test_device_nodes_are_the_numbered_ones(tmp_path):
    for name in ("davinci0", "davinci10", "davinci_manager", "nvidia0"):
        (tmp_path / name).touch()
    assert device_nodes(tmp_path) == ["davinci0", "davinci10"]


def test_probe_answers_fast():
    start = time.perf_counter()
    probe = create_backend().probe()
    assert time.perf_counter() - start < 2.0
    assert probe.usable != bool(probe.reason)


def test_importing_the_package_imports_neither_torch_nor_torch_npu():
    code = (
        "import sys, deepinfer_kernels_ascend;"
        "sys.exit(bool({'torch', 'torch_npu'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_are_the_reference_until_operations_are_overridden():
    create = create_backend().create
    kernels = create(numerics="served", kv_format="v41", device=torch.device("cpu"))
    assert isinstance(kernels, AscendKernels)
    assert isinstance(kernels, ReferenceKernels)
    assert [name for name in vars(AscendKernels) if not name.startswith("_")] == []
