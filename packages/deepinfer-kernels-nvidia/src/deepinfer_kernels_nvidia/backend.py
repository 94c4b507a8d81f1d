"""The NVIDIA backend: whether it can run here, and its kernels. Torch is imported when asked."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from deepinfer_kernels_nvidia.driver import DriverError, compute_capabilities

if TYPE_CHECKING:
    import torch

    from deepinfer.cache.records import KvFormat
    from deepinfer.kernels.interface import Numerics
    from deepinfer.kernels.registry import Backend, Probe
    from deepinfer_kernels_nvidia.kernels import NvidiaKernels

__all__ = ["MIN_CAPABILITY", "create_backend", "create_kernels", "probe"]

MIN_CAPABILITY = (9, 0)
"""Hopper (SM90), the oldest architecture these kernels are meant for."""


def create_backend() -> Backend:
    """Describe this backend to core; the entry point ``nvidia`` of ``deepinfer.kernels``."""
    from deepinfer.kernels.registry import API_VERSION, Backend

    return Backend(
        name="nvidia",
        api_version=API_VERSION,
        device_type="cuda",
        probe=probe,
        create=create_kernels,
    )


def create_kernels(
    *, numerics: Numerics, kv_format: KvFormat, device: torch.device
) -> NvidiaKernels:
    """Make the kernels for one device; weights and caches will live there."""
    from deepinfer_kernels_nvidia.kernels import NvidiaKernels

    return NvidiaKernels(numerics=numerics, kv_format=kv_format, device=device)


def probe() -> Probe:
    """Say whether the visible devices can run these kernels, or the first reason why not.

    Asks the driver and reads versions: no context is made and nothing is allocated on a device.
    Torch is imported only where a fitting device exists.
    """
    from deepinfer.kernels.registry import Probe

    reason = _device_problem() or _software_problem()
    return Probe(usable=not reason, reason=reason)


def _device_problem() -> str:
    """Why no visible device fits, or an empty string."""
    try:
        capabilities = compute_capabilities()
    except DriverError as err:
        return str(err)
    if not capabilities:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"the driver shows no NVIDIA device{hint}"
    for device, (major, minor) in enumerate(capabilities):
        if (major, minor) < MIN_CAPABILITY:
            return (
                f"NVIDIA device {device} has compute capability {major}.{minor}, needed is 9.0 "
                "(Hopper) or newer; hide it with CUDA_VISIBLE_DEVICES if another one fits"
            )
    return ""


def _software_problem() -> str:
    """Why the installed libraries cannot drive a device, or an empty string."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; the CUDA builds of torch for Linux bring it along"
    return ""
