"""`CachePools`: the tensors of one model's caches, sized by `CacheLayout`. Rows of slot 0 and block
0 stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.records import RecordFormat, RecordKind
from deepinfer.kernels.records import Pool

__all__ = ["CachePools"]


@dataclass(frozen=True, slots=True)
class CachePools:
    """All pools, by layer.

    Draft layer i has the window ring of layer `num_hidden_layers + i`.
    """

    layout: CacheLayout
    num_slots: int
    """State slots that can be given out: 1..num_slots."""
    num_blocks: int
    """Blocks that can be given out: 1..num_blocks."""
    window: tuple[Pool, ...]
    """Per layer: slot s, position p is row s * ring_rows + p mod ring_rows."""
    entries: dict[int, Pool]
    """Per owner: block b, entry j is row b * entries_per_block + j mod entries_per_block."""
    index_keys: dict[int, Pool]
    """Per owner, rows as for `entries`."""
    states: dict[int, torch.Tensor]
    """Per ratio-2 owner: (rows, [gate, value], head_dim); slot s, position p is row s * state_rows
    + p mod state_rows.
    """

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        *,
        num_slots: int,
        num_blocks: int,
        device: torch.device | str,
        compute_dtype: torch.dtype = torch.float32,
    ) -> CachePools:
        """Zeroed pools for `num_slots` sequences and `num_blocks` blocks (the null ones come on
        top).
        """

        def pool(rows: int, fmt: RecordFormat) -> Pool:
            if fmt.is_packed:
                return Pool(_zeros((rows, fmt.num_bytes()), torch.uint8, device), fmt)
            dtype = torch.bfloat16 if fmt.kind is RecordKind.BF16 else compute_dtype
            return Pool(_zeros((rows, fmt.dim), dtype, device), fmt)

        slots, blocks = num_slots + 1, num_blocks + 1
        state_shape = (slots * layout.state_rows, 2, layout.config.head_dim)
        return cls(
            layout=layout,
            num_slots=num_slots,
            num_blocks=num_blocks,
            window=tuple(
                pool(slots * layout.ring_rows, layout.window_format)
                for _ in range(layout.num_window_layers)
            ),
            entries={
                layer: pool(blocks * layout.entries_per_block(layer), layout.entry_format)
                for layer in layout.entry_layers
            },
            index_keys={
                layer: pool(
                    blocks * layout.entries_per_block(layer), layout.index_key_format(layer)
                )
                for layer in layout.index_key_layers
            },
            states={
                layer: _zeros(state_shape, compute_dtype, device) for layer in layout.state_layers
            },
        )

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the state of slots (window rings, compressor state) to other slots, in place."""
        assert len({*targets}) == len(targets), f"two states for one slot: {targets}"
        for tensor in (*(pool.data for pool in self.window), *self.states.values()):
            slots = tensor.unflatten(0, (self.num_slots + 1, -1))
            slots[targets] = slots[sources]

    def num_bytes(self) -> int:
        """Bytes of all pools together."""
        tensors = [
            pool.data for pool in (*self.window, *self.entries.values(), *self.index_keys.values())
        ]
        return sum(t.numel() * t.element_size() for t in (*tensors, *self.states.values()))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Zeros. On the CPU their memory is taken when they are first used: a pool that is larger than
    a run needs costs nothing.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
