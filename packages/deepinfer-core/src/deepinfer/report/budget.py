"""What a memory budget holds: blocks, tokens and sequences, to the byte.

The pools of `deepinfer.cache.pools` have one row of null slot and one null block beside those that
are given out; both are counted here.

Source: docs/formats.md 2.4-2.7.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.errors import ConfigError

__all__ = ["CacheFit", "fit_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFit:
    """What fits into `budget_bytes`."""

    budget_bytes: int
    max_model_len: int
    """Length in tokens that every counted sequence may reach."""
    num_sequences: int
    """Sequences of that length that fit together."""
    num_blocks: int
    """Blocks beside the slots of those sequences; at least what they need."""
    num_tokens: int | None
    """Tokens that the blocks hold; None where no layer keeps more than its window."""
    used_bytes: int
    """Bytes of the pools, null rows included; not above the budget unless nothing fits."""
    bytes_per_sequence: int
    """One sequence of full length: its slot and its blocks."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit_cache(
    layout: CacheLayout, *, budget_bytes: int, max_model_len: int, compute_bytes: int = 4
) -> CacheFit:
    """How much fits into a number of bytes.

    Args:
        layout: of the model's caches.
        budget_bytes: for all pools together.
        max_model_len: prompt and output of one sequence, in tokens.
        compute_bytes: size of a value that is kept in compute precision.

    Raises:
        ConfigError: a length outside 1 to the model's context.
    """
    context = layout.config.max_position_embeddings
    if not 1 <= max_model_len <= context:
        raise ConfigError(
            f"max_model_len={max_model_len} is not in 1..{context}, the context of this model"
        )
    slot, block = layout.bytes_per_slot(compute_bytes), layout.bytes_per_block(compute_bytes)
    blocks_each = layout.blocks_for(max_model_len)
    each = slot + blocks_each * block
    num_sequences = max(0, (budget_bytes - slot - block) // each)
    num_blocks = 0
    if block:
        num_blocks = max(0, (budget_bytes - (num_sequences + 1) * slot) // block - 1)
    return CacheFit(
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        num_sequences=num_sequences,
        num_blocks=num_blocks,
        num_tokens=num_blocks * BLOCK_TOKENS if block else None,
        used_bytes=(num_sequences + 1) * slot + (num_blocks + 1) * block,
        bytes_per_sequence=each,
    )
