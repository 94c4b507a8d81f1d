"""Cache sizes are arithmetic: checked to the byte against the figures of the published model and of
real pools.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.core.config.published import published as published_keys

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.config import ModelConfig


@pytest.fixture(scope="module")
def published() -> ModelConfig:
    return ModelConfig.from_dict(published_keys())


def test_published_model_takes_890_bytes_per_token(published: ModelConfig) -> None:
    """3 owners of ratio 2 and one of ratio 1, 288 + 68 bytes an entry (docs/formats.md 2.7)."""
    assert CacheLayout(published).bytes_per_token() == 890


def test_published_model_with_fp8_entries_takes_1490_bytes_per_token(
    published: ModelConfig,
) -> None:
    config = dataclasses.replace(published, use_fp4_sparse_kv=False)
    assert CacheLayout(config).bytes_per_token() == 1490


def test_published_ring_and_state_sizes(published: ModelConfig) -> None:
    layout = CacheLayout(published)
    assert layout.window_format.num_bytes() == 528
    assert layout.entry_format.num_bytes() == 288
    assert layout.index_key_format(2).num_bytes() == 68
    assert layout.ring_rows == 134
    assert layout.ring_rows * layout.window_format.num_bytes() == 70_752
    assert layout.state_rows * 2 * published.head_dim * 4 == 28_672
    assert layout.bytes_per_slot() == 43 * 70_752 + 3 * 28_672


def test_sources_own_and_others_share(published: ModelConfig) -> None:
    layout = CacheLayout(published)
    assert layout.entry_layers == layout.index_key_layers == (2, 8, 14, 20)
    assert layout.state_layers == (2, 8, 14)
    assert layout.num_window_layers == 43
    assert [layout.entries_per_block(layer) for layer in (2, 20)] == [64, 128]


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1_048_576])
def test_blocks_cover_the_tokens(published: ModelConfig, tokens: int) -> None:
    blocks = CacheLayout(published).blocks_for(tokens)
    assert blocks * 128 >= tokens > (blocks - 1) * 128 or tokens == blocks == 0


@pytest.mark.parametrize("kv_format", ["v41", "bf16", "none"])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float64])
def test_pools_are_as_large_as_the_layout_says(kv_format: str, compute_dtype: torch.dtype) -> None:
    raw = published_keys()
    raw["text_config"] |= {
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "index_head_dim": 64,
    }
    layout = CacheLayout(ModelConfig.from_dict(raw), kv_format)  # type: ignore[arg-type]
    pools = CachePools.allocate(
        layout, num_slots=2, num_blocks=3, device="cpu", compute_dtype=compute_dtype
    )
    size = torch.finfo(compute_dtype).bits // 8
    # the null slot and the null block come on top
    assert pools.num_bytes() == 3 * layout.bytes_per_slot(size) + 4 * layout.bytes_per_block(size)
