"""Facts about NVIDIA devices straight from the driver, without torch and without a context.

Source: CUDA driver API: cuInit, cuDeviceGetCount, cuDeviceGet, cuDeviceGetAttribute.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["DriverError", "compute_capabilities"]

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


class DriverError(RuntimeError):
    """The NVIDIA driver is absent or does not start; the message is one sentence."""


def compute_capabilities() -> list[tuple[int, int]]:
    """Compute capability of every device that CUDA_VISIBLE_DEVICES leaves visible, in CUDA order.

    Starts the driver in this process (cuInit), which makes no context on any device; a process
    forked later cannot use CUDA, a spawned one can.

    Raises:
        DriverError: there is no driver, or it reports an error.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        raise DriverError(f"no NVIDIA driver on this machine ({name} cannot be loaded)") from None
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        return []
    _check("cuInit", code)
    count = ctypes.c_int()
    _check("cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    return [(_attribute(cuda, i, _MAJOR), _attribute(cuda, i, _MINOR)) for i in range(count.value)]


def _attribute(cuda: ctypes.CDLL, index: int, attribute: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    _check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
    code = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    _check("cuDeviceGetAttribute", code)
    return value.value


def _check(call: str, code: int) -> None:
    if code != 0:
        raise DriverError(f"the NVIDIA driver answers {call} with error {code}")
