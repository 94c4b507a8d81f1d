"""`CacheLayout`: which pools a model needs and how large they are. Pure arithmetic, no torch.

A sequence owns one *state slot* (window rings of every layer, compressor state) and a list of
*blocks* of `BLOCK_TOKENS` tokens (compressed entries and index keys of the layers that own them).
Slot 0 and block 0 are never given out: their rows mean "none", and row 0 of each pool stays zero.
Source: docs/formats.md 2.4-2.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from deepinfer.cache.records import KvFormat, RecordFormat, RecordKind
from deepinfer.config.model_config import ModelConfig

__all__ = ["BLOCK_TOKENS", "CacheLayout"]

BLOCK_TOKENS = 128
"""Tokens per block; a block holds 128/ratio entries of each owner."""


@dataclass(frozen=True)
class CacheLayout:
    """Record formats and row counts of the caches of one model.

    Args:
        config: the model.
        kv_format: how records are stored.
        backtrack: rows of a sequence that a later step may take back (rejected drafts and the row
            that replaces the first of them); the rings are that much longer than what a row can
            see.
    """

    config: ModelConfig
    kv_format: KvFormat = "v41"
    backtrack: int | None = None

    @cached_property
    def max_backtrack(self) -> int:
        """`backtrack`, or draft block size + 1, or 1 without drafts."""
        if self.backtrack is not None:
            return self.backtrack
        return self.config.dspark.block_size + 1 if self.config.dspark is not None else 1

    @property
    def ring_rows(self) -> int:
        """Rows of one window ring."""
        return self.config.sliding_window + self.max_backtrack

    @property
    def state_rows(self) -> int:
        """Rows of one compressor-state ring (ratio 2): the open token plus those that may be taken
        back.
        """
        return 2 + max(0, self.max_backtrack - 1)

    @property
    def num_window_layers(self) -> int:
        """Layers with a window ring: the backbone's, then the drafts'."""
        return self.config.num_hidden_layers + self.config.num_draft_layers

    def entries_per_block(self, layer: int) -> int:
        """Compressed entries of `layer` in one block."""
        return BLOCK_TOKENS // self.config.compress_ratios[layer]

    def _record(self, kind: RecordKind, dim: int, entries_per_block: int = 1) -> RecordFormat:
        if self.kv_format == "bf16":
            kind = RecordKind.BF16
        elif self.kv_format == "none":
            kind = RecordKind.COMPUTE
        sectioned = kind is RecordKind.FP4_INDEX
        return RecordFormat(kind, dim, entries_per_block if sectioned else 1)

    @property
    def window_format(self) -> RecordFormat:
        """Record of one window key."""
        return self._record(RecordKind.FP8, self.config.head_dim)

    @property
    def entry_format(self) -> RecordFormat:
        """Record of one compressed entry."""
        kind = RecordKind.FP4_KV if self.config.use_fp4_sparse_kv else RecordKind.FP8
        return self._record(kind, self.config.head_dim)

    def index_key_format(self, layer: int) -> RecordFormat:
        """Record of one index key of owner `layer`."""
        return self._record(
            RecordKind.FP4_INDEX, self.config.index_head_dim, self.entries_per_block(layer)
        )

    @cached_property
    def entry_layers(self) -> tuple[int, ...]:
        """Layers that own compressed entries."""
        return tuple(plan.layer for plan in self.config.layers if plan.owns_kv)

    @cached_property
    def index_key_layers(self) -> tuple[int, ...]:
        """Layers that own index keys."""
        return tuple(plan.layer for plan in self.config.layers if plan.owns_index_keys)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that carry compressor state from one step to the next."""
        return tuple(
            layer for layer in self.entry_layers if self.config.compress_ratios[layer] == 2
        )

    def bytes_per_block(self, compute_bytes: int = 4) -> int:
        """Bytes that one block takes over all owners."""
        entries = sum(
            self.entries_per_block(layer) * self.entry_format.num_bytes(compute_bytes)
            for layer in self.entry_layers
        )
        keys = sum(
            self.entries_per_block(layer) * self.index_key_format(layer).num_bytes(compute_bytes)
            for layer in self.index_key_layers
        )
        return entries + keys

    def bytes_per_slot(self, compute_bytes: int = 4) -> int:
        """Bytes of the fixed state of one sequence: window rings and compressor state."""
        rings = (
            self.num_window_layers * self.ring_rows * self.window_format.num_bytes(compute_bytes)
        )
        state = len(self.state_layers) * self.state_rows * 2 * self.config.head_dim * compute_bytes
        return rings + state

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the entries of `num_tokens` tokens; 0 where no layer is compressed."""
        return -(-num_tokens // BLOCK_TOKENS) if self.entry_layers else 0

    def bytes_per_token(self) -> float:
        """Bytes that a sequence grows by per token (890 for the published model)."""
        return self.bytes_per_block() / BLOCK_TOKENS
