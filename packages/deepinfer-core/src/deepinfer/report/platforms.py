"""Which platform runs a model, and whether it has the devices that were asked for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from deepinfer.errors import BackendError, ConfigError
from deepinfer.kernels.registry import installed_backends, load_backend

__all__ = ["ACCELERATORS", "Platform", "choose_platform", "count_devices", "require_devices"]

ACCELERATORS = ("cpu", "nvidia", "ascend")
"""Platforms by the names that the environment variable and the backends use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """A platform that is installed and usable."""

    name: str
    device_type: str
    """As torch names it: cpu, cuda, npu."""
    num_devices: int


def choose_platform(accelerator: str | None) -> Platform:
    """The platform of a name; the CPU when none is given. It never falls back to another one.

    Raises:
        ConfigError: no such platform.
        BackendError: its package is not installed, or it cannot run here; with the reason.
    """
    name = accelerator or "cpu"
    if name not in ACCELERATORS:
        near = difflib.get_close_matches(name, ACCELERATORS, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one of these"
        raise ConfigError(
            f"accelerator: found {ascii(name)[:60]}, allowed: {', '.join(ACCELERATORS)}; {hint}"
        )
    if name == "cpu":
        return Platform(name="cpu", device_type="cpu", num_devices=1)
    asked = f"the accelerator {name!r} was asked for (DEEPINFER_ACCELERATOR)"
    if name not in installed_backends():
        raise BackendError(
            f"{asked}, but its kernels are not installed: run `DEEPINFER_ACCELERATOR={name} "
            f"./build.sh` in a checkout, or unset it to run on the CPU"
        )
    backend = load_backend(name)
    probe = backend.probe()
    if not probe.usable:
        raise BackendError(
            f"{asked}, but it cannot run here: {probe.reason}; unset it to run on the CPU"
        )
    return Platform(
        name=name, device_type=backend.device_type, num_devices=count_devices(backend.device_type)
    )


def require_devices(ep: int, platform: Platform) -> None:
    """Refuse more ranks of expert parallelism than the platform has devices.

    Raises:
        ConfigError: `ep` is below 1.
        BackendError: there are fewer devices.
    """
    if ep < 1:
        raise ConfigError(f"ep={ep}: allowed is a number of devices from 1; 1 uses one device")
    if ep > platform.num_devices:
        have = f"{platform.num_devices} device{'s' * (platform.num_devices != 1)}"
        hint = f"lower it to {platform.num_devices}"
        if platform.name == "cpu":
            hint += ", or name an accelerator in DEEPINFER_ACCELERATOR"
        else:
            hint += ", or make more devices visible"
        raise BackendError(
            f"ep={ep} needs {ep} devices, the platform {platform.name!r} has {have} here; {hint}"
        )


def count_devices(device_type: str) -> int:
    """Devices of a usable accelerator that this process sees."""
    import torch

    module = torch.get_device_module(device_type)
    return int(module.device_count())
