"""`load_model`: from a folder or hub id to a model that can run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.cache.records import KvFormat
from deepinfer.checkpoint import Checkpoint, resolve_model
from deepinfer.config import ModelConfig
from deepinfer.config.fields import shown
from deepinfer.errors import BackendError, ConfigError
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.kernels.interface import Kernels, Numerics
from deepinfer.kernels.registry import backend_for_device, installed_backends, load_backend
from deepinfer.model.model import Model
from deepinfer.model.transformer import Transformer
from deepinfer.model.weights import WeightReader
from deepinfer.report.memory import require_memory
from deepinfer.tokenizer import Tokenizer
from deepinfer.tokenizer import engram_token_map as map_of_tokenizer

__all__ = ["load_model"]

logger = logging.getLogger(__name__)

_REFERENCE_DEVICES = ("cpu", "cuda", "npu")
"""Device types whose torch has all that the reference needs; a backend may serve others."""

TokenMap = Sequence[int] | npt.NDArray[np.int64] | torch.Tensor


def load_model(
    path: str | Path,
    *,
    numerics: Numerics = "exact",
    device: str | torch.device = "cpu",
    kernels: str | Kernels = "auto",
    kv_format: KvFormat = "v41",
    engram_token_map: TokenMap | None = None,
    offline: bool = False,
    revision: str | None = None,
    ignore_unexpected: bool = False,
) -> Model:
    """Load a checkpoint and prepare its weights for one device.

    Args:
        path: a folder in the published layout, or a hub id to download (`owner/name`).
        numerics: `exact` (plain float32, weights dequantised) or `served` (rounded where
            accelerators round).
        device: where the model runs.
        kernels: `auto` takes the kernels that belong to the device; else the name of an installed
            backend (`reference`, `cpu`, `nvidia`, `ascend`), or a kernels object, whose own
            numerics, format and device count.
        kv_format: cache records `v41` (as published), `bf16`, or `none` (compute precision).
        engram_token_map: compressed id of each token id, int64 (vocab_size,), for a folder with
            Engram and without tokenizer; wins over the tokenizer's own.
        offline: use only what is on this machine.
        revision: revision of a hub id.
        ignore_unexpected: accept tensors that the config does not explain.

    Raises:
        CheckpointError: files missing, damaged or not what the config says; every fault found, by
            name.
        ConfigError: a config key is missing or not allowed.
        BackendError: the kernels asked for are not installed or not usable.

    Source: docs/checkpoint.md 6, 7.
    """
    started = time.perf_counter()
    _check_choice("numerics", numerics, get_args(Numerics))
    _check_choice("kv_format", kv_format, get_args(KvFormat))
    ops = _kernels(kernels, numerics, kv_format, _device(device))
    folder = resolve_model(path, offline=offline, revision=revision)
    config = ModelConfig.from_folder(folder)
    if ops.device.type == "cpu":
        require_memory(config, is_stored_form=isinstance(ops, CpuKernels))
    tokenizer = (
        Tokenizer.from_folder(folder, config) if (folder / "tokenizer.json").exists() else None
    )
    with Checkpoint.open(folder, config, ignore_unexpected=ignore_unexpected) as checkpoint:
        token_map_v = _token_map(config, tokenizer, engram_token_map, ops.device)
        with torch.inference_mode():
            transformer = Transformer.load(WeightReader(checkpoint, ops, config), token_map_v)
    logger.info("loaded %s in %.1f s", folder.name, time.perf_counter() - started)
    return Model(transformer, tokenizer)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def _device(name: str | torch.device) -> torch.device:
    """The device, if it exists and this torch can use it.

    Raises:
        BackendError: it does not, or torch was built without it.
    """
    if not isinstance(name, str | torch.device):
        raise BackendError(f"device={shown(name)} is no device; give its name, such as 'cpu'")
    kind = str(name).partition(":")[0]
    if kind not in _REFERENCE_DEVICES and kind not in (known := _device_types()):
        raise BackendError(
            f"device {shown(str(name))} is of a kind that no installed backend serves "
            f"(known: {', '.join(known)}); use device='cpu'"
        )
    reason = "this torch knows no such device"
    try:
        device = torch.device(name)
        reason = ""
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as problem:  # torch has no single error for it
        reason = reason or str(problem).partition("\n")[0].partition(". ")[0][:100]
        raise BackendError(
            f"device {shown(str(name))} cannot be used here ({reason}); use device='cpu'"
        ) from problem
    return device


def _device_types() -> list[str]:
    """Device types that an installed backend serves or the reference runs on."""
    found = set(_REFERENCE_DEVICES)
    for name in installed_backends():
        with suppress(Exception):  # a broken package of others serves nothing
            found.add(load_backend(name).device_type)
    return sorted(found - {"any"})


def _kernels(
    choice: str | Kernels, numerics: Numerics, kv_format: KvFormat, device: torch.device
) -> Kernels:
    if isinstance(choice, Kernels):
        return choice
    if not isinstance(choice, str):
        raise BackendError(
            f"kernels={shown(choice)} is neither the name of a backend nor a Kernels object"
        )
    backend = backend_for_device(device.type) if choice == "auto" else load_backend(choice)
    if backend.device_type not in (device.type, "any"):
        raise BackendError(
            f"backend {backend.name!r} runs on {backend.device_type!r} devices, "
            f"device={str(device)!r} was asked for; set device={backend.device_type!r} or "
            f"kernels='auto'"
        )
    probe = backend.probe()
    if not probe.usable:
        raise BackendError(f"backend {backend.name!r} cannot run here: {probe.reason}")
    return backend.create(numerics=numerics, kv_format=kv_format, device=device)


def _token_map(
    config: ModelConfig, tokenizer: Tokenizer | None, given: TokenMap | None, device: torch.device
) -> torch.Tensor | None:
    """Engram's map of token ids, int64 (V,); None for a model without Engram."""
    if config.engram is None:
        return None
    if given is not None:
        values = _integers(given)
    elif tokenizer is not None:
        values = map_of_tokenizer(tokenizer, config)
    else:
        raise ConfigError(
            "this model has Engram layers, whose lookups depend on the tokenizer, and the folder "
            "has no tokenizer.json; add the model's own (in Python, engram_token_map may stand for "
            "it: the compressed id of each id)"
        )
    want = config.engram.compressed_vocab_size
    if values.ndim != 1 or len(values) < config.vocab_size:
        raise ConfigError(
            f"the Engram token map has shape {values.shape}, all {config.vocab_size} ids "
            f"must be mapped"
        )
    distinct = len(np.unique(values))
    if distinct != want or int(values.min()) != 0 or int(values.max()) != want - 1:
        raise ConfigError(
            f"the Engram token map has {distinct} distinct ids in {values.min()}..{values.max()}, "
            f"the config says engram_compressed_vocab_size={want}; this tokenizer belongs to "
            f"another model"
        )
    return torch.from_numpy(values.copy()).to(device)


def _integers(given: TokenMap) -> npt.NDArray[np.int64]:
    """The token map that the caller gave, as an array of integers."""
    try:
        values = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError):  # lists of unequal lengths
        values = np.empty(0, dtype=object)
    if values.dtype.kind not in "iu":
        raise ConfigError(
            f"engram_token_map is {shown(given)}, allowed: the compressed id of each token id, "
            f"as integers"
        )
    return values.astype(np.int64)
