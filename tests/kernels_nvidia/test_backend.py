"""The NVIDIA backend: what it offers, and the reasons it gives when it cannot run."""

import subprocess
import sys
import time

import pytest
import torch

import deepinfer_kernels_nvidia.backend as backend_module
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer_kernels_nvidia import create_backend
from deepinfer_kernels_nvidia.driver import DriverError
from deepinfer_kernels_nvidia.kernels import NvidiaKernels


@pytest.fixture
def machine(monkeypatch):
    """Pretends a machine: devices by compute capability (or a DriverError), torch and triton."""

    def pretend(devices, *, cuda="13.0", has_triton=True):
        def capabilities():
            if isinstance(devices, DriverError):
                raise devices
            return devices

        monkeypatch.setattr(backend_module, "compute_capabilities", capabilities)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = object() if has_triton else None
        monkeypatch.setattr(backend_module.importlib.util, "find_spec", lambda name: found)
        return create_backend().probe()

    return pretend


def test_backend_describes_itself_without_touching_a_device():
    backend = create_backend()
    assert (backend.name, backend.device_type) == ("nvidia", "cuda")


@pytest.mark.parametrize("devices", [[(9, 0)], [(10, 0)], [(9, 0), (10, 3)]])
def test_hopper_and_newer_are_usable(machine, devices):
    probe = machine(devices)
    assert probe.usable
    assert probe.reason == ""


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        (DriverError("no NVIDIA driver on this machine"), {}, "no NVIDIA driver"),
        ([], {}, "shows no NVIDIA device"),
        ([(8, 0)], {}, "device 0 has compute capability 8.0, needed is 9.0"),
        ([(9, 0), (8, 9)], {}, "device 1 has compute capability 8.9"),
        ([(9, 0)], {"cuda": None}, "built without CUDA"),
        ([(9, 0)], {"has_triton": False}, "triton is not installed"),
    ],
)
def test_unusable_machines_are_told_the_reason_in_one_sentence(machine, devices, options, said):
    probe = machine(devices, **options)
    assert not probe.usable
    assert said in probe.reason
    assert "\n" not in probe.reason


def test_hidden_devices_are_named_in_the_reason(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in machine([]).reason


def test_probe_answers_fast_and_does_not_start_cuda_in_torch():
    start = time.perf_counter()
    probe = create_backend().probe()
    assert time.perf_counter() - start < 2.0
    assert isinstance(probe.usable, bool)
    assert probe.usable != bool(probe.reason)
    assert not torch.cuda.is_initialized()


def test_importing_the_package_imports_neither_torch_nor_triton():
    code = (
        "import sys, deepinfer_kernels_nvidia; sys.exit(bool({'torch', 'triton'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_are_the_reference_until_operations_are_overridden():
    create = create_backend().create
    kernels = create(numerics="served", kv_format="v41", device=torch.device("cpu"))
    assert isinstance(kernels, NvidiaKernels)
    assert isinstance(kernels, ReferenceKernels)
    assert [name for name in vars(NvidiaKernels) if not name.startswith("_")] == []


@pytest.mark.nvidia
def test_probe_makes_no_context_on_a_real_device():
    code = (
        "import ctypes, deepinfer_kernels_nvidia as k;"
        "assert k.create_backend().probe().usable;"
        "flags, active = ctypes.c_uint(), ctypes.c_int(-1);"
        "get_state = ctypes.CDLL('libcuda.so.1').cuDevicePrimaryCtxGetState;"
        "assert get_state(0, ctypes.byref(flags), ctypes.byref(active)) == 0;"
        "assert active.value == 0"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.nvidia
def test_reference_operations_run_on_a_real_device():
    kernels = create_backend().create(
        numerics="exact", kv_format="none", device=torch.device("cuda")
    )
    x = torch.linspace(-1, 1, 12, device="cuda").view(2, 2, 3)
    torch.testing.assert_close(kernels.mean_streams(x), x.mean(1))
