"""From the model argument to a folder: a path, or an id of the Hugging Face hub.

Source: docs/checkpoint.md 7.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from deepinfer.config.fields import shown
from deepinfer.errors import ConfigError

from .download import HUB_ID, download_model

__all__ = ["DEFAULT_MODEL", "MODEL_DIR_VARIABLE", "choose_model", "resolve_model"]

DEFAULT_MODEL = "deepseek-ai/DeepSeek-V4.1-Flash-1017"
MODEL_DIR_VARIABLE = "DEEPINFER_HF_MODEL_DIR"


def choose_model(explicit: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The model to use: an explicit one, else the environment's folder, else the default id.

    Raises:
        ConfigError: the variable is set but is no folder; it never falls back.
    """
    if explicit is not None:
        return explicit
    folder = environ.get(MODEL_DIR_VARIABLE)
    if folder is None:
        return DEFAULT_MODEL
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{MODEL_DIR_VARIABLE}: found {shown(folder)}, allowed: an existing folder; "
            "unset it or name the model explicitly"
        )
    return folder


def resolve_model(model: str | Path, *, offline: bool = False, revision: str | None = None) -> Path:
    """The folder of a model, downloaded into the hub's own cache if need be.

    Args:
        model: an existing folder, taken as it is; otherwise a hub id such as ``owner/name``.
        offline: use what the cache holds and do not touch the network. The hub's own variables
            (``HF_HUB_OFFLINE``, ``HF_HOME`` and others) are honoured as well.
        revision: branch, tag or commit of a hub id.

    Raises:
        ConfigError: neither a folder nor the form of a hub id, or a revision of a folder.
        CheckpointError: the hub does not have it, or a file of it is not in the cache when offline.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model: found {shown(model)}, allowed: the folder of a checkpoint or a hub id such as "
            "owner/name"
        )
    name = os.fspath(model)
    # os.path, since Path("") is the current folder and Path.is_dir raises on some odd names
    if os.path.isdir(name):
        if revision is not None:
            raise ConfigError(
                f"revision: found {shown(revision)} for the folder {name}, allowed: only with a "
                "hub id"
            )
        return Path(name)
    if isinstance(model, Path) or not HUB_ID.fullmatch(name) or os.path.exists(name):
        raise ConfigError(
            f"model: found {shown(name, 300)}, there is no such folder; allowed: the folder of a "
            "checkpoint or a hub id such as owner/name"
        )
    return download_model(name, offline=offline, revision=revision)
