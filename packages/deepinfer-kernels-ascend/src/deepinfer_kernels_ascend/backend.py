"""The Ascend backend: whether it can run here, and its kernels. Torch is imported when asked.

Written from documentation; not yet run on a machine with an Ascend device.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepinfer.cache.records import KvFormat
    from deepinfer.kernels.interface import Numerics
    from deepinfer.kernels.registry import Backend, Probe
    from deepinfer_kernels_ascend.kernels import AscendKernels

__all__ = ["create_backend", "create_kernels", "device_nodes", "probe"]


def create_backend() -> Backend:
    """Describe this backend to core; the entry point ``ascend`` of ``deepinfer.kernels``."""
    from deepinfer.kernels.registry import API_VERSION, Backend

    return Backend(
        name="ascend",
        api_version=API_VERSION,
        device_type="npu",
        probe=probe,
        create=create_kernels,
    )


def create_kernels(
    *, numerics: Numerics, kv_format: KvFormat, device: torch.device
) -> AscendKernels:
    """Make the kernels for one device; weights and caches will live there."""
    from deepinfer_kernels_ascend.kernels import AscendKernels

    return AscendKernels(numerics=numerics, kv_format=kv_format, device=device)


def probe() -> Probe:
    """Say whether an Ascend device can be used here, or the first reason why not.

    Looks at device nodes and installed modules; torch_npu is imported only where a device exists,
    and nothing is allocated on it.
    """
    from deepinfer.kernels.registry import Probe

    reason = _problem()
    return Probe(usable=not reason, reason=reason)


def device_nodes(folder: Path = Path("/dev")) -> list[str]:
    """Names of the Ascend devices that the driver offers, davinci0 and so on."""
    return sorted(node.name for node in folder.glob("davinci[0-9]*"))


def _problem() -> str:
    """Why the package cannot be used here, or an empty string."""
    if not device_nodes():
        return "no Ascend device on this machine (/dev/davinci0 and the like do not exist)"
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; install the release that matches the installed torch"
    try:
        torch_npu = importlib.import_module("torch_npu")
    except (ImportError, OSError) as err:
        return f"torch_npu cannot be imported ({err}); is the CANN environment set?"
    if torch_npu.npu.device_count() == 0:
        return "torch_npu sees no Ascend device; is ASCEND_RT_VISIBLE_DEVICES set too narrowly?"
    return ""
