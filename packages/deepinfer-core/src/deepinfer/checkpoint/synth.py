"""Made-up checkpoints in exactly the published layout: random weights, a tokenizer, a config.

Weights are drawn, quantised and written a few megabytes at a time, so that the size of a
checkpoint is bounded by the disk and not by memory.

Source: docs/checkpoint.md 1, 3, 6.1 and 8; docs/model.md 9.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.config import ModelConfig
from deepinfer.config.fields import shown
from deepinfer.config.untrusted import parse_json, read_bounded
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer, compressed_token_map

from .formats import quantize_fp4, quantize_fp8
from .locate import INDEX_NAME
from .schema import TensorSpec, expected_tensors
from .storage import stored_form
from .synth_configs import QUANTIZATION, named_config, names
from .synth_tokenizer import build_tokenizer, tokenizer_files
from .synth_values import random_rows

__all__ = ["synthesize"]

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}

Bytes = npt.NDArray[np.uint8]


def synthesize(
    out: str | Path,
    *,
    config: str | Path | dict[str, Any] = "tiny",
    seed: int = 0,
    format: Literal["served", "plain"] = "served",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write a random checkpoint with its tokenizer; the same arguments give the same bytes.

    Args:
        out: folder to make; it must not exist, or be empty. It appears whole or not at all.
        config: ``tiny`` (every feature), ``bench-tiny``, ``bench-small``, the contents of a
            `config.json`, or the path of one. Its storage keys follow `format`, and
            `engram_compressed_vocab_size` the tokenizer made.
        seed: of the weights, not negative.
        format: ``served``: FP8, FP4, BF16 and F32 as published. ``plain``: no quantisation.
        dtype: of a plain checkpoint's weights; gains and biases of the published format's F32
            tensors stay F32.

    Returns:
        `out`.

    Raises:
        ConfigError: a wrong config or argument, a folder that is not empty, or one that cannot be
            made or written.
    """
    out = Path(out)
    _check_arguments(out, seed, format, dtype)
    values = _load(config)
    values.pop("quantization_config", None)
    values["dtype"] = "bfloat16" if format == "served" else dtype
    if format == "served":
        values["quantization_config"] = dict(QUANTIZATION)
    parsed = ModelConfig.from_dict(values)
    with _appearing_whole(out) as folder:
        raw = build_tokenizer(parsed)
        if parsed.engram is not None:
            tokenizer = Tokenizer(raw, bos_token_id=None, eos_token_id=None, pad_token_id=None)
            distinct = int(compressed_token_map(tokenizer, parsed.vocab_size).max()) + 1
            values["text_config"]["engram_compressed_vocab_size"] = distinct
            parsed = ModelConfig.from_dict(values)
        _write_weights(folder, parsed, seed)
        for file_name, text in tokenizer_files(raw).items():
            (folder / file_name).write_text(text, encoding="utf-8", newline="\n")
        _write_json(folder / "config.json", values)
    return out


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A folder to write into, whose contents become those of `out`, or vanish on an error.

    An empty folder that is there stays the same one: it may be somebody's current folder, or a
    mount.

    Raises:
        ConfigError: the system refuses to make or write it; the message names `out`.
    """
    target = Path(os.path.realpath(out))  # a link to an empty folder fills that folder
    partial = None
    try:
        is_there = target.is_dir()
        home = target if is_there else target.parent
        home.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=home))
        partial.chmod(0o777 & ~_umask())
        yield partial
        if is_there:
            # config.json last: without it nobody takes the folder for a checkpoint
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(target / path.name)
            partial.rmdir()
        else:
            partial.rename(target)
    except BaseException as err:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(err, OSError):
            raise ConfigError(
                f"{out}: cannot be written ({err.strerror or err}); choose another OUT"
            ) from err
        raise


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _check_arguments(out: Path, seed: int, format: str, dtype: str) -> None:
    if format not in ("served", "plain"):
        raise ConfigError(f"format: found {shown(format)}, allowed: 'served' or 'plain'")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype: found {shown(dtype)}, allowed: 'float32' or 'bfloat16'")
    if seed < 0:
        raise ConfigError(f"seed: found {seed}, allowed: a number that is not negative")
    if os.path.lexists(out) and not _is_empty_folder(out):
        raise ConfigError(f"{out}: exists and is not an empty folder; choose another OUT")


def _is_empty_folder(path: Path) -> bool:
    """Whether `path` is a folder without entries, as far as one may look."""
    try:
        return not any(path.iterdir())
    except OSError:
        return False


def _load(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The config as a dictionary of our own."""
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if isinstance(config, str) and config in names():
        return named_config(config)
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        values = parse_json(read_bounded(path, 2**24), brackets_per_byte=0.25)
    except (OSError, ValueError) as err:
        known = ", ".join(names())
        raise ConfigError(
            f"config: found {shown(str(path))} ({err}), allowed: {known} or a config.json"
        ) from err
    if not isinstance(values, dict):
        raise ConfigError(f"config: found {shown(values)} in {path}, expected a JSON object")
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8", newline="\n")


@dataclass(slots=True)
class _ShardPlan:
    """What one file will hold: stored name -> (dtype, shape), and the tensors behind it."""

    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    stored: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


def _write_weights(folder: Path, config: ModelConfig, seed: int) -> None:
    plans = _plan(config)
    weight_map: dict[str, str] = {}
    total = 0
    for number, plan in enumerate(plans, start=1):
        file_name = f"model-{number:05d}-of-{len(plans):05d}.safetensors"
        total += _write_shard(folder / file_name, plan, config, seed)
        weight_map |= dict.fromkeys(plan.stored, file_name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: weight_map[name] for name in sorted(weight_map)},
    }
    _write_json(folder / INDEX_NAME, index)


def _plan(config: ModelConfig) -> list[_ShardPlan]:
    """One file for what stands alone, one per layer, per Engram layer and per draft stage."""
    plans: dict[str, _ShardPlan] = {}
    for name, spec in expected_tensors(config).items():
        parts = name.split(".")
        group = ""
        if parts[0] in ("layers", "mtp"):
            kind = "engram" if parts[2] == "engram" else parts[0]
            group = f"{kind}.{parts[1]}"
        plan = plans.setdefault(group, _ShardPlan())
        plan.tensors[name] = spec
        plan.stored |= stored_form(name, spec, config)
    order = {"": 0, "layers": 1, "engram": 2, "mtp": 3}
    return [plans[group] for group in sorted(plans, key=lambda key: _rank(key, order))]


def _rank(group: str, order: dict[str, int]) -> tuple[int, int]:
    kind, _, number = group.partition(".")
    return order[kind], int(number or 0)


def _write_shard(path: Path, plan: _ShardPlan, config: ModelConfig, seed: int) -> int:
    """Write one file; returns the number of payload bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in plan.stored.items():
        size = prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, spec in plan.tensors.items():
            _write_tensor(file, name, spec, config, seed)
    return at


def _write_tensor(
    file: BinaryIO, name: str, spec: TensorSpec, config: ModelConfig, seed: int
) -> None:
    """Write the values of one tensor, and its scale behind them."""
    scales = []
    for piece in _encoded(name, spec, config, seed):
        file.write(piece[0].data)
        if piece[1] is not None:
            scales.append(piece[1])
    for scale in scales:
        file.write(scale.data)


def _encoded(
    name: str, spec: TensorSpec, config: ModelConfig, seed: int
) -> Iterator[tuple[Bytes, Bytes | None]]:
    """Stored bytes of the values, and of the scales where there are any, piece by piece."""
    dtype = next(iter(stored_form(name, spec, config).values()))[0]
    for rows in random_rows(name, spec, seed, config.hc_mult):
        values = torch.from_numpy(rows)
        if dtype == "I8":
            packed, scale = quantize_fp4(values)
            yield _raw(packed), _raw(scale)
        elif dtype == "F8_E4M3":
            codes, scale = quantize_fp8(values, (1, 32) if spec.role == "table" else (32, 32))
            yield _raw(codes), _raw(scale)
        else:
            yield _raw(values if dtype == "F32" else values.to(torch.bfloat16)), None


def _raw(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
