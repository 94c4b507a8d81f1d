"""How an engine's limits are decided, to the byte."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import deepinfer
from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.cache.pools import CachePools
from deepinfer.checkpoint import synthesize
from deepinfer.checkpoint.synth_configs import named_config
from deepinfer.config import ModelConfig
from deepinfer.config.engine_config import EngineConfig, free_memory_bytes, resolve
from deepinfer.errors import ConfigError
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.llm import LLM

LAYOUT = CacheLayout(ModelConfig.from_dict(named_config("tiny")))


@settings(max_examples=60, deadline=None)
@given(
    memory=st.integers(400_000, 30_000_000),
    seqs=st.none() | st.integers(1, 40),
    length=st.none() | st.integers(2, 4096),
)
def test_pools_take_what_was_computed_and_never_more_than_allowed(
    memory: int, seqs: int | None, length: int | None
) -> None:
    config = EngineConfig(kv_cache_memory_bytes=memory, max_num_seqs=seqs, max_model_len=length)
    try:
        found = resolve(config, LAYOUT)
    except ConfigError as problem:
        assert "raise kv_cache_memory_bytes" in str(problem)  # noqa: PT017
        return
    pools = CachePools.allocate(
        LAYOUT,
        num_slots=found.max_num_seqs + found.num_snapshots,
        num_blocks=found.num_blocks,
        device="cpu",
    )
    assert pools.num_bytes() == found.cache_bytes <= memory
    assert found.num_blocks * BLOCK_TOKENS >= found.max_model_len
    chains = found.max_num_seqs + found.num_snapshots  # that sequences and snapshots can hold
    most = chains * LAYOUT.blocks_for(found.max_model_len)
    assert found.num_blocks <= most
    one_more = found.cache_bytes + LAYOUT.bytes_per_block()
    assert found.num_blocks == most or one_more > memory
    assert found.max_num_batched_tokens >= found.max_num_seqs


def test_pools_start_as_zeros_and_their_rows_can_be_written() -> None:
    pools = CachePools.allocate(LAYOUT, num_slots=2, num_blocks=2, device="cpu")
    for pool in (*pools.window, *pools.entries.values(), *pools.index_keys.values()):
        assert not pool.data.any()
        pool.data[1:] = 1
        assert not pool.data[0].any()
    for state in pools.states.values():
        assert not state.any()


def test_every_decision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepinfer")
    found = resolve(EngineConfig(), LAYOUT)
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        assert f"{name}={getattr(found, name)}" in caplog.text
    assert "that are free" in caplog.text
    assert f"{found.num_blocks} blocks" in caplog.text


def test_a_context_that_does_not_fit_is_lowered_unless_it_was_asked_for() -> None:
    memory = 3 * LAYOUT.bytes_per_slot() + 4 * LAYOUT.bytes_per_block()
    config = EngineConfig(kv_cache_memory_bytes=memory, max_num_seqs=2, enable_prefix_caching=False)
    assert resolve(config, LAYOUT).max_model_len == 3 * BLOCK_TOKENS
    asked = dataclasses.replace(config, max_model_len=1000)
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        resolve(asked, LAYOUT)


def test_few_rows_a_step_mean_few_sequences() -> None:
    assert resolve(EngineConfig(max_num_batched_tokens=7), LAYOUT).max_num_seqs == 7


def test_the_share_of_free_memory_is_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deepinfer.config.engine_config.free_memory_bytes", lambda device="cpu": 10_000_000
    )
    found = resolve(EngineConfig(device_memory_utilization=0.5), LAYOUT)
    assert found.cache_bytes <= 5_000_000 < found.cache_bytes + LAYOUT.bytes_per_block()
    assert free_memory_bytes() > 0


def test_the_compute_type_counts(tmp_path: Path) -> None:
    """Records in compute precision and compressor state take 8 bytes a number in float64."""
    folder = synthesize(tmp_path / "model", config="tiny")
    kernels = ReferenceKernels(compute_dtype=torch.float64, kv_format="none")
    model = deepinfer.load_model(folder, kernels=kernels)
    llm = LLM(model, kv_cache_memory_bytes=12_000_000)
    pools = model.new_cache(
        num_slots=llm.config.max_num_seqs + llm.config.num_snapshots,
        num_blocks=llm.config.num_blocks,
    )
    assert pools.num_bytes() == llm.config.cache_bytes <= 12_000_000


@pytest.mark.parametrize("seqs", [1, 2, 4])
def test_few_sequences_still_have_a_prefix_cache(seqs: int) -> None:
    found = resolve(
        EngineConfig(kv_cache_memory_bytes=10**8, max_num_seqs=seqs, max_model_len=512), LAYOUT
    )
    assert found.num_snapshots == 32
    assert found.num_blocks == (seqs + 32) * 4
