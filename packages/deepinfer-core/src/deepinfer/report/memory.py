"""Whether a model's weights fit into memory, said before they are loaded.

Without this, the system would end the process, or start to swap, and say nothing about why.
"""

from __future__ import annotations

from math import prod

from deepinfer.checkpoint.schema import expected_tensors, is_vision
from deepinfer.checkpoint.storage import KEEP_TABLE_BYTES, stored_bytes
from deepinfer.config.machine import available_memory_bytes, shown_bytes
from deepinfer.config.model_config import ModelConfig
from deepinfer.errors import ConfigError

__all__ = ["require_memory", "resident_bytes"]


def resident_bytes(config: ModelConfig, *, is_stored_form: bool = True) -> int:
    """Bytes of the weights once loaded: all but the vision tower and large tables.

    Args:
        config: of the model.
        is_stored_form: whether kernels keep weights as they are stored, as those of the CPU do;
            otherwise they hold float32.
    """
    total = 0
    for name, spec in expected_tensors(config).items():
        size = stored_bytes(name, spec, config)
        if is_vision(name) or (spec.role == "table" and size > KEEP_TABLE_BYTES):
            continue
        total += size if is_stored_form else 4 * prod(spec.shape)
    return total


def require_memory(
    config: ModelConfig,
    *,
    cache_bytes: int = 0,
    is_stored_form: bool = True,
    available_bytes: int | None = None,
) -> None:
    """Refuse to start what cannot end well: weights and caches against the free memory.

    Args:
        config: of the model.
        cache_bytes: what the caches will take.
        is_stored_form: see `resident_bytes`.
        available_bytes: free memory; asked of the system by default.

    Raises:
        ConfigError: says what is needed, what is there, and what to change.
    """
    free = available_memory_bytes() if available_bytes is None else available_bytes
    weights = resident_bytes(config, is_stored_form=is_stored_form)
    if free is None or weights + cache_bytes <= free:
        return
    caches = f" and {shown_bytes(cache_bytes)} of caches" if cache_bytes else ""
    if weights > free:
        remedy = "use a machine with more memory, end other programs, or choose a smaller model"
    else:
        remedy = (
            f"lower kv_cache_memory_bytes to {free - weights} or less, or lower max_num_seqs or "
            "max_model_len"
        )
    raise ConfigError(
        f"not enough memory: {shown_bytes(weights)} of weights{caches} are needed, "
        f"{shown_bytes(free)} are free; {remedy}"
    )
