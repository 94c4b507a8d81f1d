"""From a folder to located tensors: which file holds which name, with every fault noted.

Source: docs/checkpoint.md 1, 5.1 (prefix), 5.3 (the Ascend variant's files), 6.2 (checks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deepinfer.config.fields import is_integer
from deepinfer.config.untrusted import parse_json, read_bounded, shown_name

from .container import Entry, Shard

__all__ = ["INDEX_NAME", "SINGLE_NAME", "Located", "locate", "read_index"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 100_000_000
_FOREIGN_FILES = {
    "quant_model_description.json": "the W8A8 (int8) variant",
    "quant_model_weights.safetensors.index.json": "the W8A8 (int8) variant",
    "pytorch_model.bin.index.json": "pickled weights",
    "pytorch_model.bin": "pickled weights",
}


@dataclass(slots=True)
class Located:
    """The tensors of a folder by name without the `model.` prefix.

    Attributes:
        tensors: where each tensor lies.
        unlisted: names that a shard holds and the index does not list.
        lost: names that the index lists and that could not be located; their fault is noted.
        problems: one line per fault.
        shards: every file opened, by file name.
        stated_bytes: size of all tensors as the index states it, if it does.
    """

    tensors: dict[str, tuple[Shard, Entry]] = field(default_factory=dict)
    unlisted: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    shards: dict[str, Shard] = field(default_factory=dict)
    stated_bytes: int | None = None


def locate(folder: Path) -> Located:
    """Open the files that the index of `folder` names (or the single file) and pair the names."""
    located = Located()
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():
        weight_map = read_index(index, located)
        if weight_map is not None:
            _open_shards(folder, weight_map, located)
    elif (folder / SINGLE_NAME).exists():
        shard = Shard(folder / SINGLE_NAME)
        located.shards[SINGLE_NAME] = shard
        located.problems += shard.problems
        _pair(dict.fromkeys([*shard.entries, *shard.broken], SINGLE_NAME), located)
    else:
        located.problems.append(_nothing_found(folder))
    return located


def _nothing_found(folder: Path) -> str:
    foreign = [name for name in _FOREIGN_FILES if (folder / name).exists()]
    found = f"; found {foreign[0]}, that is {_FOREIGN_FILES[foreign[0]]}" if foreign else ""
    return f"no {INDEX_NAME} and no {SINGLE_NAME} in the folder{found}; expected safetensors files"


def read_index(path: Path, located: Located) -> dict[str, str] | None:
    """The index's map from stored name to file name; None, and the fault noted, when unusable."""
    file = f"file {path.name}"
    try:
        values = parse_json(read_bounded(path, _MAX_INDEX_BYTES), brackets_per_byte=0.05)
    except OSError as err:
        located.problems.append(f"{file}: cannot be read ({err.strerror or err})")
        return None
    except ValueError as err:
        located.problems.append(f"{file}: no usable JSON ({err})")
        return None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        located.problems.append(f"{file}: weight_map is missing, empty or no object")
        return None
    metadata = values.get("metadata") if isinstance(values, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    located.stated_bytes = total if is_integer(total) else None
    sound: dict[str, str] = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and _is_plain_file_name(shard):
            sound[name] = shard
            continue
        found = ascii(shard)[:80]
        located.problems.append(
            f"{file}, tensor {shown_name(name)}: file name {found} is not a plain "
            "*.safetensors name inside the folder"
        )
        located.lost.add(logical_name(name))
    return sound


def _is_plain_file_name(name: str) -> bool:
    """Whether a file name of the index names a file of the folder itself and nothing else."""
    return (
        len(name) <= 255
        and name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and not any(char in name for char in "/\\:")
    )


def logical_name(stored: str) -> str:
    """The published name: one leading `model.` is optional."""
    return stored.removeprefix("model.")


def _open_shards(folder: Path, weight_map: dict[str, str], located: Located) -> None:
    counts: dict[str, int] = {}
    for shard_name in weight_map.values():
        counts[shard_name] = counts.get(shard_name, 0) + 1
    for shard_name in sorted(counts):
        shard = Shard(folder / shard_name)
        located.shards[shard_name] = shard
        lines = shard.problems
        if not shard.has_header:
            tail = f"; the index places {counts[shard_name]} tensors in it"
            lines = [line + tail for line in lines]
        located.problems += lines
    _pair(weight_map, located)


def _pair(weight_map: dict[str, str], located: Located) -> None:
    """Bring the names of the index and of the shards together."""
    actual: dict[str, str] = {}
    for shard_name, shard in located.shards.items():
        for stored in shard.entries:
            if stored in actual:
                located.problems.append(
                    f"tensor {shown_name(stored)}: both in file {shown_name(actual[stored])} "
                    f"and in file {shown_name(shard_name)}"
                )
            actual[stored] = shard_name
    for stored, shard_name in weight_map.items():
        name, shard = logical_name(stored), located.shards[shard_name]
        if name in located.tensors or name in located.lost:
            located.problems.append(f"tensor {shown_name(name)}: both with and without `model.`")
        elif stored in shard.entries:
            located.tensors[name] = (shard, shard.entries[stored])
        else:
            located.lost.add(name)
            if shard.has_header and stored not in shard.broken:
                elsewhere = actual.get(stored)
                where = f", it is in {shown_name(elsewhere)}" if elsewhere else ""
                located.problems.append(
                    f"tensor {shown_name(stored)}: the index places it in file "
                    f"{shown_name(shard_name)}, which does not hold it{where}"
                )
    for stored, shard_name in actual.items():
        name = logical_name(stored)
        if stored not in weight_map and name not in located.lost:
            located.unlisted[name] = shard_name
