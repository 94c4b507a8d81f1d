"""What each platform says of itself: usable or not with the reason, and which operations it has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.errors import BackendError
from deepinfer.kernels.registry import Backend, Probe, installed_backends, load_backend

__all__ = ["BackendReport", "kernel_operations", "report_backends"]

_PLATFORMS = ("cpu", "nvidia", "ascend")
"""Platforms that are reported also where they are not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendReport:
    """One platform."""

    name: str
    is_installed: bool
    is_usable: bool
    reason: str
    """Why it cannot run here, or what makes it run."""
    device_type: str | None
    overrides: tuple[str, ...] | None
    """Operations that it computes itself; None where its kernels could not be made."""
    inherits: tuple[str, ...] | None
    """Operations that run the reference."""

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for key in ("overrides", "inherits"):
            values[key] = None if values[key] is None else list(values[key])
        return values


def kernel_operations() -> tuple[str, ...]:
    """Names of the operations of the interface; preparing weights is none."""
    from deepinfer.kernels.interface import Kernels

    return tuple(
        name
        for name, value in vars(Kernels).items()
        if callable(value) and not name.startswith(("_", "prepare_"))
    )


def report_backends() -> list[BackendReport]:
    """Every installed platform, and those of ours that are not installed."""
    try:
        names = list(installed_backends())
    except BackendError as err:  # two distributions claim one name
        return [_absent("all", str(err))]
    reports = [_report(name) for name in names]
    for name in _PLATFORMS:
        if name not in names:
            hint = f"run `DEEPINFER_ACCELERATOR={name} ./build.sh` in a checkout"
            reports.append(_absent(name, f"not installed; {hint}"))
    return reports


def _absent(name: str, reason: str) -> BackendReport:
    return BackendReport(
        name=name,
        is_installed=False,
        is_usable=False,
        reason=reason,
        device_type=None,
        overrides=None,
        inherits=None,
    )


def _report(name: str) -> BackendReport:
    try:
        backend = load_backend(name)
        probe = backend.probe()
    except Exception as err:  # a platform that is broken is what this report is there to tell
        probe = Probe(False, f"it cannot be loaded: {type(err).__name__}: {err}")
        return _made(name, None, probe, None)
    return _made(name, backend, probe, _class_of_kernels(backend, is_usable=probe.usable))


def _made(name: str, backend: Backend | None, probe: Probe, kernels: type | None) -> BackendReport:
    overrides = inherits = None
    if kernels is not None:
        from deepinfer.kernels.reference import ReferenceKernels

        names = kernel_operations()
        own = {op for op in names if getattr(kernels, op) is not getattr(ReferenceKernels, op)}
        overrides = tuple(op for op in names if op in own)
        inherits = tuple(op for op in names if op not in own)
    return BackendReport(
        name=name,
        is_installed=True,
        is_usable=probe.usable,
        reason=probe.reason,
        device_type=None if backend is None else backend.device_type,
        overrides=overrides,
        inherits=inherits,
    )


def _class_of_kernels(backend: Backend, *, is_usable: bool) -> type | None:
    """The class that the platform makes; on the CPU where its own device cannot be used."""
    import torch

    device = backend.device_type if is_usable and backend.device_type != "any" else "cpu"
    try:
        kernels = backend.create(numerics="exact", kv_format="v41", device=torch.device(device))
    except Exception:  # not usable here, which its probe has said
        return None
    return type(kernels)
