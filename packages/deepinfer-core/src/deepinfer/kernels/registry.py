"""Finding kernels: which platforms are installed, which are usable, and why the others are not.

A platform package registers a zero-argument factory under the entry-point group
`deepinfer.kernels`; it returns a `Backend`. Names are listed without importing anything; only the
chosen one is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Protocol

from deepinfer.errors import BackendError

if TYPE_CHECKING:
    import torch

    from deepinfer.cache.records import KvFormat
    from deepinfer.kernels.interface import Kernels, Numerics

__all__ = [
    "API_VERSION",
    "Backend",
    "CreateKernels",
    "Probe",
    "backend_for_device",
    "cpu_backend",
    "installed_backends",
    "load_backend",
    "reference_backend",
]

logger = logging.getLogger(__name__)

API_VERSION = 1
"""Version of the kernel interface; a package made for another one is refused."""

ENTRY_POINT_GROUP = "deepinfer.kernels"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a platform can run here, and why not."""

    usable: bool
    reason: str


class CreateKernels(Protocol):
    """Makes the kernels of a platform for one device."""

    def __call__(
        self, *, numerics: Numerics, kv_format: KvFormat, device: torch.device
    ) -> Kernels: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """One platform."""

    name: str
    api_version: int
    device_type: str
    """`torch.device.type` that it serves; `any` serves every device."""
    probe: Callable[[], Probe]
    """Fast, allocates nothing on a device."""
    create: CreateKernels


def installed_backends() -> dict[str, EntryPoint]:
    """Registered platforms by name; imports none of them.

    Raises:
        BackendError: two distributions register one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise BackendError(
                f"two distributions register the backend {entry.name!r}: {other.value} and "
                f"{entry.value}; uninstall one of them"
            )
    return dict(sorted(found.items()))


def load_backend(name: str) -> Backend:
    """Import the platform `name`; the others are not touched.

    Raises:
        BackendError: it is not installed, or speaks another version of the interface.
    """
    found = installed_backends()
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
        if name in ("nvidia", "ascend"):
            hint = f"pip install packages/deepinfer-kernels-{name} in a checkout"
        raise BackendError(
            f"backend {name!r} is not installed (have: {', '.join(found) or 'none'}); {hint}"
        )
    backend: Backend = found[name].load()()
    if backend.api_version != API_VERSION:
        raise BackendError(
            f"backend {name!r} speaks kernel interface {backend.api_version}, this core speaks "
            f"{API_VERSION}; install packages of one version"
        )
    return backend


def backend_for_device(device_type: str) -> Backend:
    """The usable platform whose kernels belong to a device; the reference where there is none.

    Raises:
        BackendError: two usable platforms serve the device.
    """
    usable = []
    for name in installed_backends():
        try:
            backend = load_backend(name)
            if backend.device_type == device_type and backend.probe().usable:
                usable.append(backend)
        except Exception as problem:  # a package of others that is broken must not stop this device
            logger.warning("backend %r is left out: %s", name, problem)
    if len(usable) > 1:
        names = ", ".join(backend.name for backend in usable)
        raise BackendError(
            f"several backends serve {device_type!r} devices: {names}; name one of them"
        )
    if usable:
        return usable[0]
    # in a source tree that was never installed, core's own kernels are not registered
    return cpu_backend() if device_type == "cpu" else reference_backend()


def _always_usable() -> Probe:
    return Probe(True, "plain torch runs everywhere")


def _create_reference(*, numerics: Numerics, kv_format: KvFormat, device: torch.device) -> Kernels:
    from deepinfer.kernels.reference import ReferenceKernels

    return ReferenceKernels(numerics=numerics, kv_format=kv_format, device=device)


def reference_backend() -> Backend:
    """The definition in plain torch, on any device."""
    return Backend("reference", API_VERSION, "any", _always_usable, _create_reference)


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _create_cpu(*, numerics: Numerics, kv_format: KvFormat, device: torch.device) -> Kernels:
    from deepinfer.kernels.cpu import CpuKernels
    from deepinfer.kernels.cpu_build import BuildError
    from deepinfer.kernels.padded import PaddedKernels

    try:
        return CpuKernels(numerics=numerics, kv_format=kv_format, device=device)
    except BuildError as problem:
        _say_once(
            f"CPU kernels are not compiled ({problem}); running on torch, many times slower. "
            f"Install a C compiler, or name one in the environment variable CC"
        )
        return PaddedKernels(numerics=numerics, kv_format=kv_format, device=device)


def cpu_backend() -> Backend:
    """Compiled kernels of the CPU; torch where there is no compiler."""
    return Backend("cpu", API_VERSION, "cpu", _always_usable, _create_cpu)
