"""Located tensors against the tensors that the config calls for.

Each expected tensor ends as a `Binding` (where its values and its scale lie, and how they are
stored) or as a line that says what is wrong with it.

Source: docs/checkpoint.md 3, 5 and 6.2; name and dtype variants of 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer.config import ModelConfig
from deepinfer.config.untrusted import shown_name

from .container import Entry, Shard
from .formats import scale_shape
from .locate import Located
from .schema import TensorSpec, expected_tensors, is_known_extra

__all__ = ["Binding", "Place", "match"]

_SCALE_SUFFIXES = (".scale", ".weight_scale", ".weight_scale_inv")
_SCALE_DTYPES = ("F8_E8M0", "U8", "F32")
_PLAIN_DTYPES = ("F32", "BF16")
_ROW_BLOCK = (1, 32)
_FOREIGN_PARTS = (
    "q_a_proj",
    "q_b_proj",
    "o_a_proj",
    "kv_proj",
    "self_attn",
    "lm_head",
    "embed_tokens",
    "gate_proj",
    "input_layernorm",
    "markov_w1",
)

Place = tuple[Shard, Entry]
"""A file and where in it a tensor lies."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one expected tensor is stored, and in which form."""

    shape: tuple[int, ...]
    kind: Literal["plain", "fp8", "fp4"]
    values: Place
    scale: Place | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class _Storage:
    """What the format allows for one tensor."""

    kind: Literal["plain", "fp8", "fp4"]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    block: tuple[int, int] | None


def match(
    config: ModelConfig, located: Located, *, ignore_unexpected: bool
) -> tuple[dict[str, Binding], list[str]]:
    """Bind every expected tensor; the second value has one line per fault.

    Args:
        config: of the checkpoint.
        located: its tensors.
        ignore_unexpected: leave unknown extra tensors alone.
    """
    bindings: dict[str, Binding] = {}
    problems: list[str] = []
    used: set[str] = set()
    for name, spec in expected_tensors(config).items():
        storage = _storage(config, spec)
        binding = _bind(name, spec, storage, located, problems, used)
        if binding is not None:
            bindings[name] = binding
    problems += _extras(config, located, used, ignore_unexpected=ignore_unexpected)
    return bindings, problems


def _storage(config: ModelConfig, spec: TensorSpec) -> _Storage:
    """The form that the format prescribes for a tensor of this role."""
    if config.quantization is None:
        return _Storage("plain", _PLAIN_DTYPES, spec.shape, None)
    if spec.role == "expert" and config.quantization.expert_dtype == "fp4":
        packed = (spec.shape[0], spec.shape[1] // 2)
        return _Storage("fp4", ("I8", "U8"), packed, _ROW_BLOCK)
    if spec.role in ("linear", "expert"):
        return _Storage("fp8", ("F8_E4M3",), spec.shape, config.quantization.weight_block_size)
    if spec.role == "table":
        return _Storage("fp8", ("F8_E4M3",), spec.shape, _ROW_BLOCK)
    return _Storage("plain", ("BF16",) if spec.role == "bf16" else ("F32",), spec.shape, None)


def _bind(
    name: str,
    spec: TensorSpec,
    storage: _Storage,
    located: Located,
    problems: list[str],
    used: set[str],
) -> Binding | None:
    place = _find(name, located, problems, used)
    scale = None
    if storage.block is not None:
        scale = _find_scale(name, storage.block, spec.shape, located, problems, used)
    if place is None:
        return None
    fault = _difference(place[1], storage.dtypes, storage.shape)
    if fault:
        problems.append(f"tensor {name}: {fault}")
        return None
    if storage.block is None:
        return Binding(spec.shape, storage.kind, place, None, None)
    if scale is None:
        return None
    return Binding(spec.shape, storage.kind, place, scale, storage.block)


def _find(name: str, located: Located, problems: list[str], used: set[str]) -> Place | None:
    place = located.tensors.get(name)
    if place is not None:
        used.add(name)
    elif name in located.unlisted:
        used.add(name)
        file = shown_name(located.unlisted[name])
        problems.append(f"tensor {name}: in file {file}, but not in the index")
    elif name not in located.lost:
        problems.append(f"tensor {name}: missing")
    return place


def _find_scale(
    name: str,
    block: tuple[int, int],
    shape: tuple[int, ...],
    located: Located,
    problems: list[str],
    used: set[str],
) -> Place | None:
    """The scale of a quantised weight, under any of the certain spellings of its name."""
    base = name.removesuffix(".weight")
    names = [base + suffix for suffix in _SCALE_SUFFIXES]
    present = [each for each in names if each in located.tensors]
    if len(present) > 1:
        used.update(present)
        problems.append(f"tensor {name}: has several scales ({', '.join(present)})")
        return None
    known = present or [n for n in names if n in located.unlisted or n in located.lost] or names
    place = _find(known[0], located, problems, used)
    if place is None:
        return None
    fault = _difference(place[1], _SCALE_DTYPES, scale_shape(shape, block))
    if fault:
        problems.append(
            f"tensor {present[0]}: {fault} (one scale per {block[0]}x{block[1]} of {list(shape)})"
        )
        return None
    return place


def _difference(entry: Entry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """How a stored tensor differs from what is expected; empty when it does not."""
    faults = []
    if entry.dtype not in dtypes:
        faults.append(f"dtype {entry.dtype}, expected {' or '.join(dtypes)}")
    if entry.shape != shape:
        faults.append(f"shape {list(entry.shape)}, expected {list(shape)}")
    return "found " + " and ".join(faults) if faults else ""


def _extras(
    config: ModelConfig, located: Located, used: set[str], *, ignore_unexpected: bool
) -> list[str]:
    """Lines for tensors that nothing calls for."""
    problems = []
    for name in [*located.tensors, *located.unlisted]:
        if name in used:
            continue
        if _is_folded_norm(name):
            problems.append(
                f"tensor {shown_name(name)}: a separate norm of the hyper-connection; the "
                "published format has it folded into hc_*_fn, so computing without it is wrong"
            )
        elif not ignore_unexpected and not is_known_extra(name):
            problems.append(f"tensor {shown_name(name)}: unexpected{_hint(config, name)}")
    return problems


def _is_folded_norm(name: str) -> bool:
    return name.endswith(("hc_attn_norm.weight", "hc_ffn_norm.weight", "hc_head_norm.weight"))


def _hint(config: ModelConfig, name: str) -> str:
    """Why a tensor may be there, where it can be told from the name."""
    last = name.rsplit(".", 1)[-1]
    if last in ("weight_scale_2", "input_scale"):
        return "; NVFP4 storage is not read, use the official checkpoint"
    if last == "weight_offset":
        return "; W8A8 (int8) storage is not read, use the official checkpoint"
    if config.quantization is None and f".{last}" in _SCALE_SUFFIXES:
        return "; a scale, but the config has no quantization_config"
    if name.startswith("hc_head_"):
        return "; belongs to models with hc_shifted=false"
    if name.startswith(("vision.", "aligner.", "image_")) and config.vision is None:
        return "; the config has no vision_config"
    if name.startswith("mtp.") and config.dspark is None:
        return "; the config has num_nextn_predict_layers 0"
    if any(part in name for part in _FOREIGN_PARTS):
        return "; a name of another format, not the published one"
    return "; set ignore_unexpected=True if it may be left out"
