"""Operations of a step: closed forms against sums over rows, layers and what each row looks at."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from tests.core.config.published import published

from deepinfer.checkpoint.synth_configs import named_config
from deepinfer.config import ModelConfig
from deepinfer.engine.flops import NO_CAP, StepFlops, sum_looked_at
from deepinfer.errors import ConfigError

CONFIGS = {name: ModelConfig.from_dict(named_config(name)) for name in ("tiny", "bench-tiny")}
CONFIGS["published"] = ModelConfig.from_dict(published())
CONFIGS["no candidates, odd numbers"] = replace(
    CONFIGS["tiny"], candidates=None, index_topk=7, sliding_window=5, hidden_size=96
)
CONFIGS["window only"] = replace(CONFIGS["tiny"], compress_ratios=(0,) * 7, candidates=None)


def by_rows(config, q_s, k_s, prefill_s, length_s, first_key_s, mode, keep, num_logits):
    """The definition: every row of every layer by itself. Returns attention and total."""
    attention = total = 0
    for q, k, is_prefill, length, first_key in zip(
        q_s, k_s, prefill_s, length_s, first_key_s, strict=True
    ):
        narrows = is_prefill and mode != "off" and config.has_decoder
        cut = length - keep if narrows else 0
        computed = [p for p in range(k - q, k) if mode != "compact" or not narrows or p >= cut]
        computed = computed or [k - 1]
        for plan in config.layers:
            rows = computed if plan.is_decoder else range(k - q, k)
            first = max(first_key, cut) if plan.is_decoder else first_key
            attention += stored(config, plan, k - q, k, is_prefill)
            for position in rows:
                attention += projected(config, plan) + looked_at(config, plan, position, first)
                total += beside_attention(config, plan)
        h, c = config.hidden_size, config.hc_mult
        total += 8 * c * h * (len(computed) if config.has_decoder else q)  # last mix
        total -= 8 * c * h * q  # first mix
        if config.has_decoder:  # the entry of the first decoder layer, for rows it does not compute
            total += (8 * c * c * (c + 2) * h + 8 * c * h) * (q - len(computed))
    return attention, attention + total + 4 * config.hidden_size * config.vocab_size * num_logits


def stored(config, plan, begin, end, is_prefill):
    flops = 0
    if plan.owns_kv:
        projections = 1 if plan.ratio == 1 else 2
        flops += 4 * config.hidden_size * projections * config.head_dim * (end - begin)
    if plan.owns_index_keys:
        keys = max(1, end // plan.ratio - begin // plan.ratio) if is_prefill else end - begin
        flops += 4 * config.head_dim * config.index_head_dim * keys
    return flops


def projected(config, plan):
    kappa = 2 if config.quantization else 4
    h, d, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    flops = kappa * h * (config.q_lora_rank + d)
    flops += kappa * config.q_lora_rank * heads * d
    flops += 2 * heads * d * config.o_lora_rank
    flops += kappa * config.o_groups * config.o_lora_rank * h
    if plan.selects:
        flops += kappa * config.q_lora_rank * config.index_n_heads * config.index_head_dim
        flops += 4 * h * config.index_n_heads
    return flops


def looked_at(config, plan, position, first):
    """Window keys and entries attended to, index keys scored."""
    window = max(0, position - max(first, position - config.sliding_window + 1) + 1)
    core = 8 * config.num_attention_heads * config.head_dim
    if not plan.ratio:
        return core * window
    entries = (position + 1) // plan.ratio
    flops = core * (window + min(entries, config.index_topk))
    if plan.selects:
        scored = entries
        if plan.uses_candidates:
            size = config.candidates.block_size
            scored = size * min(-(-entries // size), config.candidates.topk_blocks)
        flops += config.index_n_heads * config.index_head_dim * scored
    return flops


def beside_attention(config, plan):
    kappa = 2 if config.quantization else 4
    h, c = config.hidden_size, config.hc_mult
    flops = 3 * kappa * h * config.moe_intermediate_size * (config.num_experts_per_tok + 1)
    flops += 4 * h * config.n_routed_experts
    flops += 2 * (8 * c * c * (c + 2) * h + 8 * c * h + 8 * c * (c + 1) * h)
    if plan.has_engram:
        width = (config.engram.max_ngram_size - 1) * config.engram.n_heads * config.engram.head_dim
        flops += kappa * width * h * (c + 1) + 8 * c * h
    return flops


def random_step(draw: np.random.Generator, longest: int):
    size = int(draw.integers(1, 6))
    k_s = draw.integers(1, longest, size)
    q_s = np.array([draw.integers(1, min(k, 24) + 1) for k in k_s])
    first_key_s = np.array([draw.integers(0, k - q + 1) for k, q in zip(k_s, q_s, strict=True)])
    length_s = k_s + draw.integers(0, 40, size)
    return q_s, k_s, draw.random(size) < 0.5, length_s, first_key_s


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
@pytest.mark.parametrize("name", CONFIGS)
def test_step_is_the_sum_over_its_rows(name, mode):
    config = CONFIGS[name]
    draw = np.random.default_rng([len(name), len(mode)])
    for at in range(60):
        step = random_step(draw, (40, 400, 5000)[at % 3])
        keep, num_logits = int(draw.integers(1, 60)), int(draw.integers(0, 9))
        counter = StepFlops(config, replay_mode=mode, replay_keep=keep)
        q_s, k_s, prefill_s, length_s, first_key_s = step
        found = counter(
            q_s,
            k_s,
            is_prefill_s=prefill_s,
            length_s=length_s,
            first_key_s=first_key_s,
            num_logits=num_logits,
        )
        assert found == by_rows(config, *step, mode, keep, num_logits)


def test_sums_are_those_of_a_loop():
    draw = np.random.default_rng(3)
    for _ in range(1000):
        ratio, cap = int(draw.integers(1, 9)), int(draw.integers(0, 30))
        begin_s = draw.integers(-5, 200, 3)
        end_s = begin_s + draw.integers(0, 60, 3)
        want = sum(
            max(0, t // ratio) if cap == NO_CAP else max(0, min(t // ratio, cap))
            for begin, end in zip(begin_s, end_s, strict=True)
            for t in range(begin + 1, end + 1)
        )
        assert sum_looked_at(begin_s, end_s, ratio, cap) == want, (begin_s, end_s, ratio, cap)


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_chunks_of_a_prompt_look_at_as_much_as_the_whole(mode):
    """What a chunk costs beside: the least it computes, though the prompt needs less."""
    config, length, keep = CONFIGS["tiny"], 700, 90
    counter = StepFlops(config, replay_mode=mode, replay_keep=keep)
    ends = [1, 2, 64, 300, 610, 700]  # the last but one is where replay begins

    def attention(q, k):
        return counter([q], [k], is_prefill_s=[True], length_s=[length], num_logits=0)[0]

    begins = [0, *ends[:-1]]
    chunks = sum(attention(end - begin, end) for begin, end in zip(begins, ends, strict=True))
    # the chunk of one token works out an index key at ratio 2, although its pair is not complete
    beside = 4 * config.head_dim * config.index_head_dim
    if mode == "compact":  # every chunk before the cut computes its last row
        decoder = [plan for plan in config.layers if plan.is_decoder]
        beside += sum(
            projected(config, plan) + looked_at(config, plan, end - 1, length - keep)
            for end in ends[:-1]
            for plan in decoder
        )
    assert chunks == attention(length, length) + beside


def test_replay_that_leaves_rows_out_costs_less_than_replay_that_hides_keys():
    config = CONFIGS["published"]
    found = [
        StepFlops(config, replay_mode=mode, replay_keep=140)(
            [8192], [8192], is_prefill_s=[True], length_s=[20_000]
        )[1]
        for mode in ("off", "mask", "compact")
    ]
    assert found[2] < found[1] < found[0]
    assert found[2] < 0.6 * found[0]


def test_replay_changes_nothing_for_decoding_nor_for_prompts_it_keeps_whole():
    config = CONFIGS["published"]
    plain, compact = (
        StepFlops(config, replay_mode=mode, replay_keep=140) for mode in ("off", "compact")
    )
    assert compact([1, 6], [500, 9000]) == plain([1, 6], [500, 9000])
    prompt = {"is_prefill_s": [True], "length_s": [140]}
    assert compact([140], [140], **prompt) == plain([140], [140], **prompt)


def test_decoded_token_of_the_published_model_costs_what_its_parameters_say():
    """16.1e9 active parameters at 2 operations each, the wider formats on top."""
    attention, total = StepFlops(CONFIGS["published"])([1], [1])
    assert 2 * 16.1e9 < total < 2 * 16.1e9 * 1.1
    assert 0.1 < attention / total < 0.5


def test_logits_are_counted_once_per_prompt_and_per_decoded_row():
    config = CONFIGS["tiny"]
    counter = StepFlops(config)
    step = {"q_s": [5, 3], "k_s": [9, 30], "is_prefill_s": [True, False]}
    row = 4 * config.hidden_size * config.vocab_size
    assert counter(**step)[1] - counter(**step, num_logits=0)[1] == (1 + 3) * row


def test_replay_needs_tokens_to_keep():
    with pytest.raises(ConfigError, match="replay_keep=0"):
        StepFlops(CONFIGS["tiny"], replay_mode="compact")


def test_counting_a_step_of_256_sequences_is_cheap():
    """Measured at 25 us on a quiet core; the bound leaves room for a busy machine."""
    draw = np.random.default_rng(0)
    k_s = draw.integers(100, 1_000_000, 256)
    q_s, counter = np.full(256, 6), StepFlops(CONFIGS["published"])
    best_s = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            counter(q_s, k_s)
        best_s = min(best_s, (time.perf_counter() - start) / 20)
    assert best_s < 100e-6, f"{best_s * 1e6:.1f} us"
