"""Shared beginnings are computed once, exactly, and nothing of them is lost or kept too long."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.core.engine.scripted import engine_of, greedy, leftovers, llm_of

import deepinfer
from deepinfer.cache.block_pool import BlockPool
from deepinfer.cache.layout import BLOCK_TOKENS as BLOCK
from deepinfer.cache.prefix_cache import PrefixCache, block_digests
from deepinfer.checkpoint import synthesize
from deepinfer.kernels.cpu import CpuKernels
from deepinfer.llm import LLM
from deepinfer.outputs import RequestOutput
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing import ScriptedModel

LOOPS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(200) for _ in range(count)]


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.stats.num_cached_tokens for output in outputs]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    assert all(output.error is None for output in outputs)
    return [(output.token_ids, output.logprobs) for output in outputs]


# ---- on a scripted model, which notices every wrong record ----


@LOOPS
@pytest.mark.parametrize("rows", [16, 50, 1000])
def test_prompts_around_block_ends_hit_what_they_can(rows: int, is_async: bool) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": rows, "async_scheduling": is_async}
    llm = llm_of(ScriptedModel(after="hash", scripts={}), **options)
    plain = llm_of(ScriptedModel(after="hash", scripts={}), enable_prefix_caching=False, **options)
    lengths = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
    prompts = [tokens(length, length) for length in lengths]
    twice = [prompt for prompt in prompts for _ in range(2)]
    want = answers(plain.generate(twice, greedy(max_tokens=5, logprobs=0)))
    hits = [(length - 1) // BLOCK * BLOCK for length in lengths]  # one token has to be computed
    first = llm.generate(twice, greedy(max_tokens=5, logprobs=0))
    assert answers(first) == want
    assert cached(first) == [hit for h in hits for hit in (0, h)]
    second = llm.generate(twice, greedy(max_tokens=5, logprobs=0))
    assert answers(second) == want
    assert cached(second) == [hit for h in hits for hit in (h, h)]
    assert leftovers(llm) == []


@LOOPS
def test_requests_that_come_together_compute_their_beginning_once(is_async: bool) -> None:
    model = ScriptedModel(after="hash", scripts={})
    llm = llm_of(
        model,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        async_scheduling=is_async,
    )
    prefix = tokens(1, 1024)
    prompts = [prefix + tokens(100 + i, i % 20 + 1) for i in range(32)]
    outputs = llm.generate(prompts, greedy(max_tokens=3))
    assert cached(outputs) == [0] + [1024] * 31
    counts = llm.statistics.counts
    assert counts.cached_tokens == 31 * 1024
    assert counts.prefill_tokens == sum(map(len, prompts)) - 31 * 1024


@LOOPS
def test_a_beginning_longer_than_a_tail_is_shared_from_the_third_request_on(
    is_async: bool,
) -> None:
    llm = llm_of(
        ScriptedModel(after="hash", scripts={}),
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        async_scheduling=is_async,
    )
    prompts = [tokens(1, 512) + tokens(100 + i, 300) for i in range(6)]
    assert cached(llm.generate(prompts, greedy(max_tokens=3))) == [0, 0] + [512] * 4


def test_a_preempted_sequence_goes_on_from_its_own_snapshot() -> None:
    model = ScriptedModel(after="hash", scripts={})
    layout = model.layout
    memory = 7 * layout.bytes_per_block() + (5 + 8) * layout.bytes_per_slot()
    llm = llm_of(
        model,
        kv_cache_memory_bytes=memory,
        snapshot_memory_bytes=8 * layout.bytes_per_slot(),
        max_num_batched_tokens=512,
    )
    assert llm.config.num_blocks == 6
    prompts = [tokens(i, BLOCK + 100) for i in range(3)]
    outputs = llm.generate(prompts, greedy(max_tokens=40))
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    alone = llm_of(ScriptedModel(after="hash", scripts={}), enable_prefix_caching=False)
    want = [alone.generate([prompt], greedy(max_tokens=40))[0].token_ids for prompt in prompts]
    assert [output.token_ids for output in outputs] == want
    assert leftovers(llm) == []


def test_an_aborted_builder_leaves_the_others_able_to_go_on() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_batched_tokens=16)
    prompt = tokens(3, 400)
    seen: dict[int, RequestOutput] = {}
    prompts = [prompt, prompt, [1], prompt]
    stream = llm.stream(prompts, greedy(max_tokens=30), priority=[0, 0, -1, 0])
    for delta in stream:
        if delta.output is not None:
            seen[delta.index] = delta.output
        elif delta.index == 2 and 0 not in seen:
            llm.abort("0")  # half of its prompt is computed
    assert seen[0].finish_reason == "abort"
    assert seen[0].token_ids == []
    assert seen[1].token_ids == seen[3].token_ids != []
    assert seen[3].stats.num_cached_tokens == 384
    assert leftovers(llm) == []


def test_a_failed_step_makes_everything_forgotten() -> None:
    model = ScriptedModel(after="hash", scripts={}, fails_at=4, raises=OSError("io"))
    llm = llm_of(model, max_num_batched_tokens=64)
    prompts = [tokens(1, 200), tokens(2, 200)]
    outputs = llm.generate(prompts, greedy(max_tokens=4))
    assert sum(output.finish_reason == "error" for output in outputs) <= 1
    again = llm.generate(prompts, greedy(max_tokens=4))
    plain = llm_of(ScriptedModel(after="hash", scripts={}), enable_prefix_caching=False)
    assert answers(again) == answers(plain.generate(prompts, greedy(max_tokens=4)))
    assert leftovers(llm) == []


def test_snapshots_keep_to_their_memory() -> None:
    model = ScriptedModel(after="hash", scripts={})
    slot = model.layout.bytes_per_slot()
    llm = llm_of(model, snapshot_memory_bytes=3 * slot + slot // 2, max_num_batched_tokens=256)
    assert llm.config.num_snapshots == 3
    prompts = [tokens(i, BLOCK + 10) for i in range(9)]
    llm.generate(prompts, greedy(max_tokens=2))
    assert engine_of(llm)._prefixes.num_snapshots == 3  # noqa: SLF001
    hits = cached(llm.generate(prompts[::-1], greedy(max_tokens=2)))
    assert hits[:3] == [BLOCK] * 3  # the newest ones were kept
    off = llm_of(ScriptedModel(after="hash", scripts={}), snapshot_memory_bytes=0)
    assert cached(off.generate([prompts[0]] * 2, greedy(max_tokens=2))) == [0, 0]


def test_snapshots_of_one_step_do_not_take_each_others_slot() -> None:
    llm = llm_of(
        ScriptedModel(after="hash", scripts={}),
        snapshot_memory_bytes=ScriptedModel().layout.bytes_per_slot(),
        max_num_seqs=8,
        max_num_batched_tokens=2000,
    )
    prompts = [tokens(i, BLOCK + 5) for i in range(5)]
    want = answers(llm.generate(prompts, greedy(max_tokens=3)))
    for _ in range(2):
        for prompt, answer in zip(prompts, want, strict=True):
            assert answers(llm.generate([prompt], greedy(max_tokens=3))) == [answer]


def test_priority_and_deferral_do_not_starve_a_request() -> None:
    llm = llm_of(ScriptedModel(after="hash", scripts={}), max_num_seqs=2)
    prompt = tokens(5, 300)
    outputs = llm.generate(
        [prompt] * 6 + [[7]] * 6, greedy(max_tokens=4), priority=[3] * 6 + [0] * 6
    )
    assert all(len(output.token_ids) == 4 for output in outputs)
    assert sorted(cached(outputs[:6])) == [0] + [256] * 5


class Tree:
    """Random trees of prompts, one after the other, against a plain model of what is known."""

    def __init__(self, seed: int, *, is_async: bool) -> None:
        self.draw = random.Random(seed)
        self.llm = llm_of(
            ScriptedModel(after="hash", scripts={}),
            max_num_batched_tokens=self.draw.choice([7, 100, 2000]),
            max_model_len=1500,
            max_num_seqs=2,
            snapshot_memory_bytes=5 * 10**7,
            async_scheduling=is_async,
        )
        self.plain = llm_of(
            ScriptedModel(after="hash", scripts={}, check_every=0),
            enable_prefix_caching=False,
            max_num_batched_tokens=1000,
            max_model_len=1500,
        )
        self.prompts = [tokens(seed, 5)]
        self.known: set[tuple[int, ...]] = set()  # beginnings whose blocks are known
        self.snapshots: set[tuple[int, ...]] = set()
        self.num_hit = self.num_prompt = 0

    def prompt(self) -> list[int]:
        """A prompt that begins like an earlier one."""
        earlier, draw = self.draw.choice(self.prompts), self.draw
        keep = draw.choice([len(earlier), len(earlier) // BLOCK * BLOCK, draw.randrange(99)])
        more = draw.choice([0, 1, 60, BLOCK, BLOCK + 1, 300])
        return (earlier[:keep] + tokens(draw.randrange(10**6), more))[:1200] or [1]

    def foreseen(self, prompt: list[int]) -> tuple[int, int]:
        """Blocks of a hit, and blocks that are known."""
        shared = 0
        while (shared + 1) * BLOCK <= len(prompt):
            if tuple(prompt[: (shared + 1) * BLOCK]) not in self.known:
                break
            shared += 1
        usable = range(1, min(shared, (len(prompt) - 1) // BLOCK) + 1)
        ends = [n for n in usable if tuple(prompt[: n * BLOCK]) in self.snapshots]
        return max(ends, default=0), shared

    def ask(self) -> None:
        prompt = self.prompt()
        hit, shared = self.foreseen(prompt)
        params = greedy(max_tokens=self.draw.choice([1, 5, 150]), logprobs=0)
        (output,) = found = self.llm.generate([prompt], params)
        assert output.stats.num_cached_tokens == hit * BLOCK
        assert answers(found) == answers(self.plain.generate([prompt], params))
        last = (len(prompt) - 1) // BLOCK
        ends = {min(shared, last), last}
        self.snapshots |= {tuple(prompt[: n * BLOCK]) for n in ends if n > hit}
        whole = prompt + output.token_ids  # all but the last token was computed
        for number in range(1, (len(whole) - 1) // BLOCK + 1):
            self.known.add(tuple(whole[: number * BLOCK]))
        self.prompts.append(whole if self.draw.random() < 0.5 else prompt)
        self.num_hit, self.num_prompt = self.num_hit + hit * BLOCK, self.num_prompt + len(prompt)
        counts = self.llm.statistics.counts
        assert counts.cached_tokens == self.num_hit
        assert counts.prefill_tokens == self.num_prompt - self.num_hit
        assert leftovers(self.llm) == []


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), is_async=st.booleans())
def test_hits_are_exactly_those_of_a_plain_model_of_the_cache(seed: int, is_async: bool) -> None:
    tree = Tree(seed, is_async=is_async)
    for _ in range(25):
        tree.ask()
    tree.llm.close()


class Crowd:
    """Random trees of prompts, many at once in little memory: what is foreseen are the answers."""

    def __init__(self, seed: int, *, is_async: bool, num_blocks: int, num_snapshots: int) -> None:
        self.draw = random.Random(seed)
        model = ScriptedModel(after="hash", scripts={})
        layout = model.layout
        self.memory = (num_blocks + 1) * layout.bytes_per_block()
        self.memory += (4 + num_snapshots) * layout.bytes_per_slot()
        self.llm = llm_of(
            model,
            max_num_seqs=3,
            max_num_batched_tokens=self.draw.choice([7, 100, 600]),
            max_model_len=6 * BLOCK,
            snapshot_memory_bytes=num_snapshots * layout.bytes_per_slot(),
            kv_cache_memory_bytes=self.memory,
            async_scheduling=is_async,
        )
        self.prompts: list[list[int]] = [tokens(seed, 3)]
        self.want: dict[tuple[int, ...], list[int]] = {}
        self.plain = llm_of(
            ScriptedModel(after="hash", scripts={}, check_every=0),
            enable_prefix_caching=False,
            max_num_batched_tokens=1000,
            max_model_len=6 * BLOCK,
        )

    def prompt(self) -> list[int]:
        """A prompt that begins like an earlier one."""
        earlier = self.draw.choice(self.prompts)
        keep = self.draw.choice([0, len(earlier), len(earlier) // BLOCK * BLOCK])
        more = self.draw.choice([1, 60, BLOCK, BLOCK + 1, 2 * BLOCK])
        made = (earlier[:keep] + tokens(self.draw.randrange(10**6), more))[: 6 * BLOCK - 10]
        self.prompts.append(made)
        return made

    def round(self) -> None:
        batch = [
            self.draw.choice(self.prompts) if self.draw.random() < 0.4 else self.prompt()
            for _ in range(self.draw.randint(1, 5))
        ]
        outputs = self.llm.generate(batch, greedy(max_tokens=6))
        for prompt, output in zip(batch, outputs, strict=True):
            key = tuple(prompt)
            if key not in self.want:
                self.want[key] = self.plain.generate([prompt], greedy(max_tokens=6))[0].token_ids
            assert output.token_ids == self.want[key]
            assert output.stats.num_cached_tokens <= len(prompt) - 1
        assert leftovers(self.llm) == []
        assert self.llm.config.cache_bytes <= self.memory
        prefixes = engine_of(self.llm)._prefixes  # noqa: SLF001
        assert prefixes.num_snapshots <= self.llm.config.num_snapshots


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    is_async=st.booleans(),
    num_blocks=st.integers(6, 20),
    num_snapshots=st.integers(1, 6),
)
def test_random_trees_of_prompts_give_the_answers_of_a_miss(
    seed: int, is_async: bool, num_blocks: int, num_snapshots: int
) -> None:
    crowd = Crowd(seed, is_async=is_async, num_blocks=num_blocks, num_snapshots=num_snapshots)
    for _ in range(5):
        crowd.round()
    crowd.llm.close()


# ---- the bookkeeping alone ----


def test_digests_chain_over_everything_before() -> None:
    ids = np.array(tokens(1, 3 * BLOCK + 5), dtype=np.int32)
    digests = block_digests(ids)
    assert len(digests) == 3
    assert block_digests(ids, digests[:1]) == digests
    other = ids.copy()
    other[0] += 1
    assert not set(block_digests(other)) & set(digests)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_the_cache_agrees_with_a_plain_model_of_it(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache([101, 102, 103])
    pool = BlockPool(8, is_useful=cache.is_known, on_reuse=cache.forget_block)
    chains = [[bytes([c, n]) for n in range(5)] for c in range(4)]
    for chain in chains[1:]:
        chain[0] = chains[0][0]  # all begin with the same block
    block_of: dict[bytes, int] = {}
    snapshots: list[bytes] = []
    held: list[int] = []
    for _ in range(60):
        chain, action = draw.choice(chains), draw.random()
        if action < 0.4 and pool.num_free:
            (block,) = pool.allocate(1)
            block_of = {d: b for d, b in block_of.items() if b != block}
            digest = draw.choice(chain)
            cache.add_block(digest, block)
            block_of.setdefault(digest, block)
            held.append(block)
        elif action < 0.6 and held:
            pool.release([held.pop(draw.randrange(len(held)))])
        elif action < 0.8:
            digest = draw.choice(chain)
            cache.begin_step()
            slot = cache.add_snapshot(digest)
            assert (slot == 0) == (digest in snapshots)
            snapshots = [d for d in snapshots if d != digest][-2 if slot else -3 :] + [digest]
        else:
            limit = draw.choice([0, BLOCK, 3 * BLOCK, 99 * BLOCK])
            hit = cache.lookup(chain, limit)
            known = next((i for i, d in enumerate(chain) if d not in block_of), len(chain))
            usable = max(
                (i + 1 for i in range(known) if chain[i] in snapshots and (i + 1) * BLOCK <= limit),
                default=0,
            )
            assert hit.num_known == known
            assert hit.blocks == tuple(block_of[d] for d in chain[:usable])
            assert (hit.snapshot > 0) == (usable > 0)
        assert cache.num_snapshots == len(snapshots) <= 3
        assert cache.num_blocks == len(block_of)
    cache.clear()
    assert (cache.num_blocks, cache.num_snapshots) == (0, 0)


# ---- on a real model: bit for bit ----


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> deepinfer.Model:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    synthesize(folder, config="tiny", seed=3)
    return deepinfer.load_model(folder, kernels=CpuKernels(numerics="served"))


@LOOPS
@pytest.mark.parametrize("rows", [9, 64, 700])
def test_a_hit_gives_the_bits_of_a_miss(model: deepinfer.Model, rows: int, is_async: bool) -> None:
    limits: dict[str, Any] = {"max_model_len": 600, "kv_cache_memory_bytes": 10**9}
    miss = LLM(model, enable_prefix_caching=False, max_num_batched_tokens=700, **limits)
    prefix = tokens(1, 2 * BLOCK)
    prompts = [
        prefix[:BLOCK],
        prefix,
        prefix + [5],
        prefix + tokens(2, 70),
        prefix + tokens(3, 200),
    ]
    params = [
        SamplingParams(max_tokens=12, temperature=i % 2, seed=i, logprobs=2)
        for i in range(len(prompts))
    ]
    want = [answers(miss.generate([p], s))[0] for p, s in zip(prompts, params, strict=True)]
    hit = LLM(
        model,
        max_num_batched_tokens=rows,
        max_num_seqs=min(rows, 6),
        async_scheduling=is_async,
        **limits,
    )
    first = hit.generate(prompts + prompts, params + params)
    assert answers(first) == want + want
    second = hit.generate(prompts, params)
    assert answers(second) == want
    assert cached(second) == [0, BLOCK, 2 * BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert leftovers(hit) == []


@LOOPS
def test_a_hit_gives_the_bits_of_a_miss_under_memory_pressure(
    model: deepinfer.Model, is_async: bool
) -> None:
    layout = model.layout
    prompts = [tokens(i % 3, 2 * BLOCK - 20) + tokens(50 + i, 10 + i) for i in range(9)]
    params = SamplingParams(max_tokens=25, temperature=0, logprobs=0)
    miss = LLM(model, enable_prefix_caching=False, max_model_len=600, kv_cache_memory_bytes=10**9)
    want = [answers(miss.generate([prompt], params))[0] for prompt in prompts]
    tight = LLM(
        model,
        max_model_len=3 * BLOCK,
        max_num_seqs=5,
        max_num_batched_tokens=40,
        snapshot_memory_bytes=3 * layout.bytes_per_slot(),
        kv_cache_memory_bytes=7 * layout.bytes_per_block() + 9 * layout.bytes_per_slot(),
        async_scheduling=is_async,
    )
    preemptions = 0
    for _ in range(2):
        outputs = tight.generate(prompts, params)
        assert answers(outputs) == want
        preemptions += sum(output.stats.num_preemptions for output in outputs)
    assert preemptions > 0
    assert sum(cached(outputs)) > 0
    assert leftovers(tight) == []
