"""`EngineConfig`: the limits of an engine, and `resolve`, which decides those left open.

The text under each field is its help, on the command line too. None means "decide for me"; every
decision is logged with its reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import get_args

from deepinfer.cache.layout import BLOCK_TOKENS, CacheLayout
from deepinfer.config.fields import is_integer, is_number, shown
from deepinfer.config.machine import available_memory_bytes
from deepinfer.config.replay import ReplayMode, check_replay
from deepinfer.errors import ConfigError

__all__ = ["CPU_MEMORY_SHARE", "EngineConfig", "ResolvedConfig", "free_memory_bytes", "resolve"]

logger = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.4
"""Part of the free memory that the caches get on a CPU where nothing else is said."""

_DEVICE_SHARE = 0.9
_MAX_SEQS = 256
_LEAST_SNAPSHOTS = 32
"""What the default share may take even beside few sequences."""
_CPU_TOKENS_PER_STEP = 512
_DEVICE_TOKENS_PER_STEP = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of an engine."""

    max_model_len: int | None = None
    """Most tokens of a prompt and its answer together. Default: the model's context, or what the
    cache memory holds if that is less."""

    max_num_seqs: int | None = None
    """Most sequences that run at a time. Default: 256, fewer where their state would take more than
    half of the cache memory."""

    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step, at least max_num_seqs; longer prompts are read in chunks.
    Default: 512 on a CPU, 8192 on an accelerator, or max_num_seqs if that is more."""

    kv_cache_memory_bytes: int | None = None
    """Bytes for the caches of all sequences. Default: device_memory_utilization of the free memory,
    or what max_num_seqs full sequences need if that is less."""

    device_memory_utilization: float | None = None
    """Share of the free memory that the caches may take, above 0 and at most 1. Default: 0.4 on a
    CPU, 0.9 on an accelerator."""

    enable_prefix_caching: bool = True
    """Compute beginnings that prompts share once, within a call and across calls; the tokens are
    the same either way."""

    snapshot_memory_bytes: int | None = None
    """Bytes, of those for the caches, for snapshots of the windows that a shared beginning goes on
    from. Default: an eighth, or two for each of max_num_seqs (and at least 32) if that is less."""

    swa_replay: ReplayMode = "off"
    """Bounded replay: the decoder layers see only the end of a prompt through their windows. mask
    computes all rows, compact leaves rows out; their answers are the same, and differ from off for
    prompts longer than swa_replay_keep."""

    swa_replay_keep: int | None = None
    """Tokens of a prompt's end that bounded replay keeps, at least window + backtracking. Default:
    as few as that."""

    async_scheduling: bool | None = None
    """Prepare the next step while the device computes this one; the tokens are the same either way.
    Default: on for an accelerator, off on a CPU, where the two would share the cores."""

    seed: int = 0
    """Seed from which requests without one of their own get theirs, 0 to 2^64 - 1."""

    log_interval_s: float | None = None
    """Seconds between two lines of statistics in the log. Default: no such lines."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("kv_cache_memory_bytes", 1),
            ("snapshot_memory_bytes", 0),
            ("swa_replay_keep", 1),
        ):
            value = getattr(self, name)
            if value is not None and not (is_integer(value) and value >= least):
                raise ConfigError(f"{name}={shown(value)} is not an integer of at least {least}")
        share = self.device_memory_utilization
        if share is not None and not (is_number(share) and 0 < share <= 1):
            raise ConfigError(
                f"device_memory_utilization={shown(share)} is not above 0 and at most 1"
            )
        if self.swa_replay not in get_args(ReplayMode):
            raise ConfigError(
                f"swa_replay={shown(self.swa_replay)} is not one of "
                f"{', '.join(get_args(ReplayMode))}"
            )
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching={shown(self.enable_prefix_caching)} is not True or False"
            )
        if self.async_scheduling not in (None, True, False):
            raise ConfigError(
                f"async_scheduling={shown(self.async_scheduling)} is not True, False or None"
            )
        if not is_integer(self.seed) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed={shown(self.seed)} is not an integer from 0 to 2^64 - 1")
        interval = self.log_interval_s
        if interval is not None and not (is_number(interval) and interval > 0):
            raise ConfigError(
                f"log_interval_s={shown(interval)} is not a number of seconds above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """The limits of an engine, all decided."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    """Blocks of the cache."""
    swa_replay: ReplayMode
    swa_replay_keep: int | None
    """None: bounded replay is off."""
    num_snapshots: int
    """State slots for snapshots of shared beginnings; 0: no prefix cache."""
    cache_bytes: int
    """What slots, snapshots and blocks take together."""
    async_scheduling: bool
    seed: int
    log_interval_s: float | None


def free_memory_bytes(device: str = "cpu") -> int | None:
    """Memory that can still be had: of the machine for the CPU, else of the device; None where the
    system does not tell.
    """
    if device.partition(":")[0] == "cpu":
        return available_memory_bytes()
    import torch

    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)


def resolve(
    config: EngineConfig,
    layout: CacheLayout,
    *,
    device: str = "cpu",
    compute_bytes: int = 4,
    free_bytes: int | None = None,
) -> ResolvedConfig:
    """Decide what `config` leaves open; logs each decision.

    Args:
        config: what was asked for.
        layout: sizes of the model's caches.
        device: where they lie.
        compute_bytes: bytes per number of the compute type.
        free_bytes: memory that can be had; asked of the system by default.

    Raises:
        ConfigError: limits that contradict each other, the model or the memory.
    """
    is_cpu = device.partition(":")[0] == "cpu"
    context = layout.config.max_position_embeddings
    max_len = config.max_model_len or context
    if max_len > context:
        raise ConfigError(
            f"max_model_len={max_len} is above {context}, the context of this model; lower it"
        )
    slot_bytes = layout.bytes_per_slot(compute_bytes)
    block_bytes = layout.bytes_per_block(compute_bytes)
    budget = _budget(config, device, is_cpu)
    null_bytes = slot_bytes + block_bytes  # slot 0 and block 0
    seqs = config.max_num_seqs
    if seqs is None:
        rows = config.max_num_batched_tokens or _MAX_SEQS
        affordable = (budget // 2 - null_bytes) // slot_bytes
        seqs = max(1, min(_MAX_SEQS, rows, affordable))
        logger.info(
            "max_num_seqs=%d (at most %d, their state in half of the cache)", seqs, _MAX_SEQS
        )
    batched = config.max_num_batched_tokens
    if batched is None:
        batched = max(seqs, _CPU_TOKENS_PER_STEP if is_cpu else _DEVICE_TOKENS_PER_STEP)
        logger.info("max_num_batched_tokens=%d", batched)
    if batched < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={batched} is below max_num_seqs={seqs}: not every running "
            f"sequence would have a row in a step; raise it to {seqs} or lower max_num_seqs"
        )
    num_snapshots = _num_snapshots(config, budget, seqs, slot_bytes)
    room = budget - null_bytes - (seqs + num_snapshots) * slot_bytes
    per_seq = layout.blocks_for(max_len)
    # more than running sequences and the chains behind snapshots hold would be of no use
    most = (seqs + num_snapshots) * per_seq
    blocks = min(room // block_bytes, most) if block_bytes else most
    if (
        room < 0
        or (blocks < per_seq and config.max_model_len is not None)
        or blocks < min(1, per_seq)
    ):
        need = null_bytes + (seqs + num_snapshots) * slot_bytes + per_seq * block_bytes
        raise ConfigError(
            f"the caches have {budget:,} bytes; {seqs} sequences, and one of "
            f"max_model_len={max_len} tokens, need {need:,}: raise kv_cache_memory_bytes, or "
            f"lower max_num_seqs or max_model_len"
        )
    if blocks < per_seq:
        max_len = blocks * BLOCK_TOKENS
        logger.info("max_model_len=%d: what the cache memory holds (context %d)", max_len, context)
    cache_bytes = null_bytes + (seqs + num_snapshots) * slot_bytes + blocks * block_bytes
    free = free_memory_bytes(device) if free_bytes is None else free_bytes
    if free is not None and cache_bytes > free:
        raise ConfigError(
            f"the caches would take {cache_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on "
            f"{device}; lower kv_cache_memory_bytes, max_num_seqs or max_model_len"
        )
    logger.info(
        "cache: %d sequences, %d blocks of %d tokens, %.3f GB",
        seqs,
        blocks,
        BLOCK_TOKENS,
        cache_bytes / 1e9,
    )
    is_async = config.async_scheduling if config.async_scheduling is not None else not is_cpu
    return ResolvedConfig(
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        num_blocks=blocks,
        num_snapshots=num_snapshots,
        swa_replay=config.swa_replay,
        swa_replay_keep=check_replay(config.swa_replay, config.swa_replay_keep, layout),
        cache_bytes=cache_bytes,
        async_scheduling=is_async,
        seed=config.seed,
        log_interval_s=config.log_interval_s,
    )


def _num_snapshots(config: EngineConfig, budget: int, seqs: int, slot_bytes: int) -> int:
    """How many snapshots of shared beginnings there is memory for."""
    if not config.enable_prefix_caching:
        return 0
    if config.snapshot_memory_bytes is not None:
        return config.snapshot_memory_bytes // slot_bytes
    found = max(0, min(budget // 8 // slot_bytes, max(2 * seqs, _LEAST_SNAPSHOTS)))
    logger.info("%d snapshots for the prefix cache, in an eighth of the cache memory", found)
    return found


def _budget(config: EngineConfig, device: str, is_cpu: bool) -> int:
    """Bytes that the caches may take."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    free = free_memory_bytes(device)
    if free is None:
        raise ConfigError(
            "the system does not tell how much memory is free; give kv_cache_memory_bytes"
        )
    share = config.device_memory_utilization or (CPU_MEMORY_SHARE if is_cpu else _DEVICE_SHARE)
    logger.info("cache memory: %.0f %% of %.2f GB that are free", share * 100, free / 1e9)
    return int(free * share)
