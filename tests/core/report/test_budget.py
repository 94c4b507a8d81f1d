"""What fits is exact to the byte: the pools themselves are compared with the arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.checkpoint.small import small_config
from tests.core.config.published import published

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.config import ModelConfig, engine_config
from deepinfer.config.engine_config import CPU_MEMORY_SHARE, EngineConfig, resolve
from deepinfer.errors import ConfigError
from deepinfer.report import describe_model, fit_cache

SMALL = ModelConfig.from_dict(small_config())
FORMATS = ("v41", "bf16", "none")


def pool_bytes(layout, num_slots, num_blocks):
    pools = CachePools.allocate(
        layout, num_slots=num_slots, num_blocks=num_blocks, device=torch.device("meta")
    )
    return pools.num_bytes()


@given(
    budget=st.integers(0, 3 * 10**6),
    length=st.integers(1, SMALL.max_position_embeddings),
    kv_format=st.sampled_from(FORMATS),
)
@settings(deadline=None)
def test_what_fits_is_what_the_pools_take_and_one_more_does_not_fit(budget, length, kv_format):
    layout = CacheLayout(SMALL, kv_format)
    fit = fit_cache(layout, budget_bytes=budget, max_model_len=length)
    each = layout.blocks_for(length)
    smallest = pool_bytes(layout, 1, each)
    if fit.num_sequences == 0:
        assert budget < smallest
        return
    used = pool_bytes(layout, fit.num_sequences, fit.num_blocks)
    assert used == fit.used_bytes <= budget
    assert fit.num_blocks >= fit.num_sequences * each
    assert fit.num_tokens == fit.num_blocks * 128
    assert pool_bytes(layout, fit.num_sequences, fit.num_blocks + 1) > budget
    more = fit.num_sequences + 1
    assert pool_bytes(layout, more, more * each) > budget
    assert fit.bytes_per_sequence == pool_bytes(layout, 2, 2 * each) - smallest


def test_published_model_takes_890_bytes_per_token():
    config = ModelConfig.from_dict(published())
    report = describe_model(config, kv_cache_memory_bytes=10**10, max_model_len=2**20)
    assert report.cache["bytes_per_token"] == 890
    assert report.cache["bytes_per_block"] == 890 * 128
    assert report.cache["window_record_bytes"] == 528
    assert report.cache["entry_record_bytes"] == 288
    assert set(report.cache["index_key_record_bytes"].values()) == {68}
    layout = CacheLayout(config)
    assert report.fits.bytes_per_sequence == layout.bytes_per_slot() + 2**20 * 890
    assert report.fits.num_sequences == 10


def test_default_budget_is_a_stated_share_of_what_the_weights_leave():
    report = describe_model(SMALL, available_bytes=10**9)
    left = 10**9 - report.weights["resident_bytes"]
    assert report.fits.budget_bytes == int(left * CPU_MEMORY_SHARE)
    assert report.budget_source == "40% of the free memory that the weights leave"
    assert report.weights_fit is True


def test_the_engine_decides_the_same(monkeypatch):
    """Share of the free memory, and blocks for a budget."""
    monkeypatch.setattr(engine_config, "free_memory_bytes", lambda device="cpu": 10**7)
    layout = CacheLayout(SMALL)
    share = EngineConfig(device_memory_utilization=CPU_MEMORY_SHARE)
    assert resolve(EngineConfig(), layout) == resolve(share, layout)
    for budget in (10**6, 1_234_567, 10**7):
        fit = fit_cache(layout, budget_bytes=budget, max_model_len=512)
        asked = EngineConfig(
            kv_cache_memory_bytes=budget,
            max_num_seqs=fit.num_sequences,
            max_model_len=512,
            enable_prefix_caching=False,
        )
        needed = fit.num_sequences * layout.blocks_for(512)
        assert resolve(asked, layout).num_blocks == min(fit.num_blocks, needed)


@pytest.mark.parametrize("budget", [10**6, 10**9, 10**10])
def test_what_info_tells_of_the_engine_is_what_it_decides(budget):
    config = ModelConfig.from_dict(published())
    report = describe_model(
        config, kv_cache_memory_bytes=budget, max_model_len=8192, available_bytes=10**12
    )
    asked = EngineConfig(kv_cache_memory_bytes=budget, max_model_len=8192)
    if budget == 10**6:
        assert "raise kv_cache_memory_bytes" in report.engine["error"]
        return
    found = resolve(asked, CacheLayout(config), free_bytes=budget)
    assert report.engine == {name: getattr(found, name) for name in report.engine}
    assert report.engine["cache_bytes"] <= budget


def test_weights_that_do_not_fit_are_told():
    report = describe_model(ModelConfig.from_dict(published()), available_bytes=16 * 10**9)
    assert report.weights_fit is False
    assert report.fits.budget_bytes == int(16 * 10**9 * CPU_MEMORY_SHARE)
    assert report.budget_source == "40% of the free memory"


@pytest.mark.parametrize("length", [0, 513])
def test_a_length_outside_the_context_is_refused(length):
    with pytest.raises(ConfigError, match=rf"max_model_len={length} is not in 1..512"):
        fit_cache(CacheLayout(SMALL), budget_bytes=10**9, max_model_len=length)


def test_a_model_without_compression_has_no_blocks():
    values = small_config(
        compress_ratios=[0] * 7, kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=None,
    )  # fmt: skip
    layout = CacheLayout(ModelConfig.from_dict(values))
    fit = fit_cache(layout, budget_bytes=10**6, max_model_len=512)
    assert (fit.num_blocks, fit.num_tokens) == (0, None)
    assert pool_bytes(layout, fit.num_sequences, 0) == fit.used_bytes <= 10**6
    assert pool_bytes(layout, fit.num_sequences + 1, 0) > 10**6
