"""What the engine's tests share: an `LLM` over a `ScriptedModel`, and what it still owns."""

from __future__ import annotations

from typing import Any

from deepinfer.engine.core import Engine
from deepinfer.llm import LLM
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel

GREEDY: dict[str, Any] = {"temperature": 0}


def llm_of(model: ScriptedModel | None = None, **options: Any) -> LLM:
    """A small engine on a scripted model."""
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 10**9,
    }
    return LLM(model or ScriptedModel(tokenizer="bytes"), **(limits | options))


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**(GREEDY | params))


def engine_of(llm: LLM) -> Engine:
    return llm._driver.engine  # noqa: SLF001


def leftovers(llm: LLM) -> list[str]:
    """What an engine without work still holds; nothing, if all is well."""
    engine = engine_of(llm)
    blocks, slots, table = engine._blocks, engine._slots, engine._table  # noqa: SLF001
    found = []
    if blocks.num_free != blocks.num_blocks:
        found.append(f"{blocks.num_blocks - blocks.num_free} blocks")
    if any(blocks.references(block) for block in range(1, blocks.num_blocks + 1)):
        found.append("references to blocks")
    if slots.num_free != slots.num_slots:
        found.append(f"{slots.num_slots - slots.num_free} slots")
    if any(table.owner) or table.num_blocks.any() or table.blocks.any():
        found.append("rows of the table")
    if not engine._prefixes.is_balanced:  # noqa: SLF001
        found.append("digests")
    if len(engine._waiting) or engine._requests or engine._flights:  # noqa: SLF001
        found.append("requests, a queue or steps")
    return found
