"""From a hub id to a folder in the hub's own cache, whole or refused by the name of what lacks.

The cache, resuming and the checks of content are huggingface_hub's; what is ours is which files are
wanted and the words for what goes wrong.

Source: docs/checkpoint.md 7.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from deepinfer.errors import CheckpointError, ConfigError

from .locate import INDEX_NAME, SINGLE_NAME, Located, read_index

__all__ = ["HUB_ID", "MODEL_FILES", "download_model", "missing_files"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
"""The form of a hub id, owner/name."""

MODEL_FILES = ("config.json", "tokenizer*.json", "*.safetensors.index.json", "*.safetensors")
"""What a model is made of."""

_MAX_NAMES = 4


def download_model(
    name: str,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = MODEL_FILES,
    offline: bool = False,
) -> Path:
    """The folder of a hub's model in the hub's cache; what is missing there is fetched.

    A connection that breaks is taken up again where it stopped, a few times. What a later call
    finds whole it keeps; a file that was not whole it fetches from its start.

    Args:
        name: hub id, ``owner/name``.
        revision: branch, tag or commit; the main branch by default.
        patterns: files to fetch; with the default the model must be whole in the end.
        offline: use what the cache holds and do not touch the network.

    Raises:
        ConfigError: not the form of a hub id.
        CheckpointError: the hub cannot be reached, refuses it, or does not have all of it; offline:
            a file is not in the cache.
    """
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"model: found {ascii(name)[:100]}, allowed: a hub id such as owner/name")
    folder = _snapshot(name, revision, patterns, offline=offline)
    missing = missing_files(folder) if tuple(patterns) == MODEL_FILES else []
    if missing:
        where = "the hub's cache" if offline else "what the hub has"
        raise CheckpointError(
            f"{_listed(missing)}: not in {where}; run `{_command(name, revision)}` with a network",
            where=name,
        )
    return folder


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a model's folder lacks, as far as its own files tell."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    index = folder / INDEX_NAME
    if index.exists():
        shards = set((read_index(index, Located()) or {}).values())
        missing += sorted(shard for shard in shards if not (folder / shard).exists())
    elif not (folder / SINGLE_NAME).exists():
        missing.append(INDEX_NAME)
    return missing


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _command(name: str, revision: str | None) -> str:
    return f"deepinfer download {name}" + (f" --revision {revision}" if revision else "")


def _snapshot(name: str, revision: str | None, patterns: Sequence[str], *, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    # the base class of the HTTP library, which is another one from release to release
    broken_off = tuple(
        base
        for base in HfHubHTTPError.__bases__
        if issubclass(base, Exception) and base is not OSError
    )
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(patterns), local_files_only=offline
            )
        )
    except HFValidationError as err:
        raise ConfigError(f"model: {err}; allowed: a folder or a hub id") from err
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as err:
        raise CheckpointError(_not_cached(name, revision, offline=offline), where=name) from err
    except HfHubHTTPError as err:
        first = str(err).strip().splitlines()[0]
        raise CheckpointError(
            f"there is no such folder, and the hub refused it ({first})", where=name
        ) from err
    except broken_off as err:
        raise CheckpointError(
            f"the download broke off ({err}); run `{_command(name, revision)}` again: files that "
            "are whole are kept",
            where=name,
        ) from err


def _not_cached(name: str, revision: str | None, *, offline: bool) -> str:
    """What to say of a model that is not whole in the cache and cannot be fetched."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config, str):
        why = "not in the hub's cache" if offline else "neither in the hub's cache nor reachable"
        return (
            f"there is no such folder, and as a hub id its config.json is {why}; correct the path, "
            f"or run `{_command(name, revision)}` once with a network"
        )
    missing = missing_files(Path(config).parent) or ["a file"]
    return (
        f"{_listed(missing)}: not in the hub's cache; run `{_command(name, revision)}` with a "
        "network"
    )
