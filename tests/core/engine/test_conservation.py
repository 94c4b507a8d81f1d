"""Whatever happens, every block, slot and reference comes back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.engine.scripted import engine_of, leftovers, llm_of

from deepinfer.cache.layout import BLOCK_TOKENS
from deepinfer.engine.sequence import Request
from deepinfer.errors import CheckpointError
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel


def blocks_bytes(model: ScriptedModel, blocks: int, seqs: int) -> int:
    """Cache memory for so many blocks and sequences, those that mean "none" included."""
    layout = model.layout
    return (blocks + 1) * layout.bytes_per_block() + (seqs + 1) * layout.bytes_per_slot()


class Traffic:
    """Random arrivals and aborts around an engine; keeps the books on what must come back."""

    def __init__(self, seed: int, *, is_async: bool, num_blocks: int, fails: bool) -> None:
        self.draw = random.Random(seed)
        self.model = ScriptedModel(after="hash", scripts={}, eos_share=0.01, check_every=4)
        self.fails = fails
        if fails:
            self.model.on_forward = self.maybe_fail
        self.llm = llm_of(
            self.model,
            max_num_seqs=6,
            max_num_batched_tokens=48,
            max_model_len=3 * BLOCK_TOKENS,
            kv_cache_memory_bytes=blocks_bytes(self.model, num_blocks, 6 + 3),
            snapshot_memory_bytes=3 * self.model.layout.bytes_per_slot(),
            async_scheduling=is_async,
        )
        self.engine = engine_of(self.llm)
        assert self.llm.config.num_blocks == num_blocks
        self.results: dict[str, RequestOutput] = {}
        self.live: list[str] = []
        self.prompts: list[np.ndarray] = []
        self.num_submitted = self.num_failed_steps = 0
        self.num_seen_in: dict[str, int] = {"half": 0, "waiting": 0, "running": 0}

    def maybe_fail(self, step: Any) -> None:
        if self.draw.random() < 0.004:
            self.num_failed_steps += 1
            raise CheckpointError("a row is damaged")

    def submit(self) -> None:
        name = str(self.num_submitted)
        self.num_submitted += 1
        length = self.draw.choice([1, 2, 9, 60, 129, 300])
        prompt = np.array([self.draw.randrange(200) for _ in range(length)], dtype=np.int32)
        if self.prompts and self.draw.random() < 0.4:  # begins like an earlier one
            earlier = self.draw.choice(self.prompts)
            prompt[: len(earlier)] = earlier[: len(prompt)]
        self.prompts.append(prompt)
        params = SamplingParams(
            temperature=self.draw.choice([0, 1]),
            n=self.draw.choice([1, 1, 1, 3]),
            max_tokens=self.draw.randint(1, 150),
        )
        self.engine.submit(
            Request(
                request_id=name,
                index=0,
                prompt_token_ids=prompt,
                params=params,
                seed=self.num_submitted,
                max_len=min(len(prompt) + (params.max_tokens or 1), 3 * BLOCK_TOKENS),
                priority=self.draw.choice([0, 0, 0, -1, 4]),
                on_finish=self.finish,
            )
        )
        self.live.append(name)

    def finish(self, output: RequestOutput) -> None:
        assert output.request_id not in self.results
        self.results[output.request_id] = output
        self.live.remove(output.request_id)

    def is_half_prefilled(self, name: str) -> bool:
        table = self.engine._table  # noqa: SLF001
        return any(
            seq.slot and 0 < table.num_computed[seq.slot] < table.num_prompt[seq.slot]
            for seq in self.engine._requests[name].sequences  # noqa: SLF001
        )

    def abort(self) -> None:
        half = [name for name in self.live if self.is_half_prefilled(name)]
        name = self.draw.choice(half if half and self.draw.random() < 0.5 else self.live)
        for seq in self.engine._requests[name].sequences:  # noqa: SLF001
            if not seq.slot:
                self.num_seen_in["waiting"] += 1
            elif self.is_half_prefilled(name):
                self.num_seen_in["half"] += 1
            else:
                self.num_seen_in["running"] += 1
        assert self.engine.abort(name)
        assert name in self.results

    def books(self) -> None:
        """Blocks, slots and the table agree with each other, at any time."""
        engine = self.engine
        table, blocks = engine._table, engine._blocks  # noqa: SLF001
        held = Counter(
            b for s in table.running for b in table.blocks[s, : table.num_blocks[s]].tolist()
        )
        assert 0 not in held
        assert all(blocks.references(b) == held[b] for b in range(1, blocks.num_blocks + 1))
        assert len(held) + blocks.num_free == blocks.num_blocks
        assert len(table.running) + engine._slots.num_free == engine._slots.num_slots  # noqa: SLF001

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.draw.random() < 0.15 and len(self.live) < 20:
                self.submit()
            if self.live and self.draw.random() < 0.04:
                self.abort()
            self.engine.step()
            self.books()
        while self.engine.has_work:
            self.engine.step()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fails", [False, True], ids=["healthy", "failing"])
def test_after_ten_thousand_steps_everything_is_back(fails: bool, is_async: bool) -> None:
    traffic = Traffic(1, is_async=is_async, num_blocks=7, fails=fails)
    traffic.run(2_000 if fails else 10_000)
    assert leftovers(traffic.llm) == []
    assert len(traffic.results) == traffic.num_submitted > 100
    assert min(traffic.num_seen_in.values()) > 0, traffic.num_seen_in
    preempted = sum(o.stats.num_preemptions for o in traffic.results.values())
    assert preempted > 20
    reasons = {o.finish_reason for o in traffic.results.values()}
    assert {"stop", "length", "abort"} <= reasons
    if fails:
        assert traffic.num_failed_steps > 0
    traffic.llm.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    is_async=st.booleans(),
    num_blocks=st.integers(3, 12),
    fails=st.booleans(),
    steps=st.integers(1, 120),
)
def test_any_traffic_gives_everything_back(
    seed: int, is_async: bool, num_blocks: int, fails: bool, steps: int
) -> None:
    traffic = Traffic(seed, is_async=is_async, num_blocks=num_blocks, fails=fails)
    traffic.run(steps)
    assert leftovers(traffic.llm) == []
    assert len(traffic.results) == traffic.num_submitted
    traffic.llm.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_snapshots", [0, 8])
def test_urgent_requests_without_end_starve_nobody(num_snapshots: int, is_async: bool) -> None:
    """Memory for so few blocks that a long prompt is preempted while it is computed: it gets on
    all the same, and so does what waits behind it.
    """
    model = ScriptedModel(after="hash", scripts={}, check_every=50)
    slot = model.layout.bytes_per_slot()
    llm = llm_of(
        model,
        max_num_seqs=3,
        max_num_batched_tokens=3,
        max_model_len=9 * BLOCK_TOKENS,
        kv_cache_memory_bytes=blocks_bytes(model, 10, 3 + num_snapshots),
        snapshot_memory_bytes=num_snapshots * slot,
        async_scheduling=is_async,
    )
    engine, done, num_urgent = engine_of(llm), set(), 0

    def submit(name: str, length: int, priority: int, outputs: int) -> None:
        prompt = np.arange(length, dtype=np.int32) % 190 + len(name) % 7
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        engine.submit(
            Request(
                *(name, 0, prompt, params, 0, length + outputs),
                priority=priority,
                on_finish=lambda output: done.add(output.request_id),
            )
        )

    submit("long", 700, 0, 5)
    submit("behind", 300, 1, 5)
    for _ in range(30_000):
        live = num_urgent - sum(name.startswith("u") for name in done)
        for _ in range(2 - live):
            submit(f"u{num_urgent}", 1, -1, 500)
            num_urgent += 1
        engine.step()
        if {"long", "behind"} <= done:
            break
    assert {"long", "behind"} <= done, f"{num_urgent} urgent requests came before"
    assert num_urgent > 2
