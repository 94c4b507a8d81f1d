"""Bounded replay: which models can do it, and how many tokens it has to keep.

Source: docs/model.md 3.9.
"""

from __future__ import annotations

from typing import Literal

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError

__all__ = ["ReplayMode", "check_replay", "replay_obstacle"]

ReplayMode = Literal["off", "mask", "compact"]


def replay_obstacle(config: ModelConfig) -> str | None:
    """Why a model cannot leave decoder rows out; None when it can."""
    if not config.has_decoder:
        return "this model has no layer of ratio 1, there is nothing to skip"
    cut = config.num_encoder_layers
    if config.dspark is not None:
        targets = config.dspark.target_layer_ids
        if min(targets) < cut <= max(targets):
            return (
                f"the draft targets {targets} lie on both sides of layer {cut}, where the decoder "
                f"begins"
            )
    return None


def check_replay(mode: ReplayMode, keep: int | None, layout: CacheLayout) -> int | None:
    """The number of tokens to keep; None where replay is off.

    Args:
        mode: what was asked for.
        keep: tokens of a prompt's end whose windows the decoder sees; None: as few as possible.
        layout: windows and backtracking.

    Raises:
        ConfigError: the model cannot do it, or `keep` is too small.
    """
    if mode == "off":
        if keep is not None:
            raise ConfigError(f"swa_replay_keep={keep} needs swa_replay='mask' or 'compact'")
        return None
    obstacle = replay_obstacle(layout.config)
    if obstacle is not None:
        raise ConfigError(f"swa_replay={mode!r}: {obstacle}; use swa_replay='off'")
    window, backtrack = layout.config.sliding_window, layout.max_backtrack
    least = window + backtrack
    if keep is None:
        return least
    if keep < least:
        raise ConfigError(
            f"swa_replay_keep={keep} is below window + backtracking = {window} + {backtrack} = "
            f"{least}: a decoded token could read a window key that was left out; give {least} or "
            f"more"
        )
    return keep
