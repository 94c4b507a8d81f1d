"""Rotary frequencies: plain, and stretched by YaRN (docs/model.md 3.2). Shape letters: R = rotary
pairs.
"""

from __future__ import annotations

import math

import torch

from deepinfer.config.model_config import ModelConfig, YarnConfig

__all__ = ["entry_frequencies", "plain_frequencies", "yarn_frequencies"]


def plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """theta^(-2i/rotary_dim), float32 (R,)."""
    i_r = torch.arange(rotary_dim // 2, dtype=torch.float64)
    return (theta ** (-2.0 * i_r / rotary_dim)).to(torch.float32)


def yarn_frequencies(theta: float, rotary_dim: int, yarn: YarnConfig) -> torch.Tensor:
    """Fast pairs stay, slow pairs are divided by the factor, a linear ramp lies between; float32
    (R,).

    The ramp's ends are the pairs that make `beta_fast` and `beta_slow` rotations over the trained
    length.
    """

    def pair_of(rotations: float) -> float:
        length = yarn.original_max_position_embeddings / (rotations * 2.0 * math.pi)
        return rotary_dim * math.log(length) / (2.0 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), rotary_dim - 1)
    i_r = torch.arange(rotary_dim // 2, dtype=torch.float64)
    width = high - low or 1e-3  # a ramp of no length is a step
    slow_r = ((i_r - low) / width).clamp(0.0, 1.0)
    plain_r = theta ** (-2.0 * i_r / rotary_dim)
    return (slow_r * plain_r / yarn.factor + (1.0 - slow_r) * plain_r).to(torch.float32)


def entry_frequencies(config: ModelConfig) -> torch.Tensor:
    """Frequencies of every layer with a compress ratio: queries, window keys, entries, index
    vectors.
    """
    if config.yarn is None:
        return plain_frequencies(config.compress_rope_theta, config.qk_rope_head_dim)
    return yarn_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, config.yarn)
