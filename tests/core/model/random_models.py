"""Small models of random but valid shape, written as checkpoint folders with the published names.

Everything follows from one seed. `RandomModel.traits` names what a model has, so that a test can
show that its seeds reach every feature.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.core.model.plain_model import e2m1, e4m3, engram_primes, grouped, power_of_two_above
from torch import Tensor

STORAGES = ("fp32", "bf16", "quantised")


@dataclass(frozen=True)
class RandomModel:
    """A checkpoint folder and what is needed to use it."""

    folder: Path
    config: dict
    engram_token_map: Tensor | None
    seed: int
    storage: str

    @property
    def text(self) -> dict:
        return self.config["text_config"]

    @property
    def decoder_start(self) -> int:
        ratios = self.text["compress_ratios"][: self.text["num_hidden_layers"]]
        return ratios.index(1) if 1 in ratios else len(ratios)

    @property
    def targets_on_one_side(self) -> bool:
        """Whether bounded replay may be combined with the draft module (3.9 of docs/model.md)."""
        targets = self.text.get("dspark_target_layer_ids", [])
        return len({t >= self.decoder_start for t in targets}) < 2

    @property
    def traits(self) -> set[str]:
        t = self.text
        ratios = t["compress_ratios"][: t["num_hidden_layers"]]
        sources, index = t["kv_source_layer_ids"], t["index_source_layer_ids"]
        engram, decoder = t.get("engram_layer_ids", []), self.decoder_start
        targets, candidate = t.get("dspark_target_layer_ids", []), t["candidate_source_layer_id"]
        has_candidates = candidate is not None and candidate >= 0
        found = {
            "ratios " + "".join(str(r) for r in sorted(set(ratios))): True,
            f"storage {self.storage}": True,
            f"streams {t['hc_mult']}": True,
            "first layer compressed": ratios[0] > 0,
            "window layer behind a compressed one": any(
                b == 0 < a for a, b in zip(ratios, ratios[1:], strict=False)
            ),
            "several KV sources": len(sources) > 1,
            "index source without keys": set(index) > set(sources),
            "index keys of its own": len(t.get("index_k_source_layer_ids", [])) > len(sources),
            "candidates": has_candidates and index[-1] > candidate,
            "candidates of ratio 2": has_candidates and ratios[candidate] == 2,
            "ragged head": t["head_dim"] % 32 > 0,
            "all of the head rotated": t["qk_rope_head_dim"] == t["head_dim"],
            "no YaRN": t["rope_scaling"] is None,
            "window 1": t["sliding_window"] == 1,
            "one Sinkhorn pass": t["hc_sinkhorn_iters"] == 1,
            "all experts": t["n_routed_experts"] == t["num_experts_per_tok"],
            "clamped experts": t["swiglu_limit"] < 1,
            "Engram": bool(engram),
            "Engram in the decoder": any(layer >= decoder for layer in engram),
            "targets before the decoder": bool(targets) and min(targets) < decoder,
            "targets in the decoder": bool(targets) and max(targets) >= decoder,
            "drafts of one": t.get("dspark_block_size") == 1,
            "FP8 entries": not t.get("use_fp4_sparse_kv", True),
        }
        return {name for name, is_so in found.items() if is_so}


def random_ratios(rng: random.Random) -> list[int]:
    """Compress ratios of the backbone: ratio 0 and 2 layers, then 1 and 0; either may miss."""
    kind = rng.choice(["0", "1", "2", "02", "01", "21", "021", "021", "021"])
    encoder = [int(r) for r in kind if r != "1"]
    count = rng.randint(1, 4) if encoder else 0
    ratios = [rng.choice(encoder) for _ in range(count)]
    if "1" in kind:
        ratios += [1] + [rng.choice([1, 1, 1, 0]) for _ in range(rng.randint(0, 3))]
    return ratios


def random_text_config(rng: random.Random, storage: str, record_multiple: int) -> dict:
    """A valid `text_config`. Cached vectors are as wide as a multiple of `record_multiple`."""
    ratios = random_ratios(rng)
    layers = len(ratios)
    compressed = [i for i, r in enumerate(ratios) if r]
    more = {i for i in compressed if ratios[i] == 2 and rng.random() < 0.4}
    kv = [i for i in compressed if ratios[i] not in ratios[:i] or i in more]
    index = [i for i in compressed if i in kv or rng.random() < 0.65]
    even = 2 if storage == "quantised" else 1
    groups = rng.randint(1, 3)
    head_dim = record_multiple * rng.randint(1, max(1, 48 // record_multiple))
    index_dim = record_multiple * rng.randint(1, max(1, 32 // record_multiple))
    rope_dim = 2 * rng.randint(1, min(head_dim, index_dim) // 2)
    experts, vocab = rng.randint(1, 9), rng.randint(24, 60)
    topk, block = rng.randint(1, 10), rng.randint(1, 4)
    config = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "hidden_size": even * rng.randint(8 // even, 40 // even),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * rng.randint(1, 3),
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": rng.randint(2, 40),
        "o_groups": groups,
        "o_lora_rank": rng.randint(1, 24),
        "moe_intermediate_size": even * rng.randint(1, 40 // even),
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": rng.choice([experts, rng.randint(1, experts)]),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": rng.choice([1.5, 1.0, 2.5]),
        "swiglu_limit": rng.choice([10.0, 1.0, 0.5, 0.25]),
        "rms_norm_eps": rng.choice([1e-20, 1e-20, 1e-6, 1e-2]),
        "sliding_window": rng.choice([1, 2, 3, 5, 8, 12]),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": rng.choice([-1, None]),
        "candidate_topk_blocks": -(-topk // block) + rng.choice([0, 0, 1]),
        "candidate_block_size": block,
        "index_n_heads": rng.randint(1, 5),
        "index_head_dim": index_dim,
        "index_topk": topk,
        "rope_theta": rng.choice([10000.0, 100.0, 5e5]),
        "compress_rope_theta": rng.choice([160000.0, 10000.0, 50.0]),
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "hc_mult": rng.randint(1, 6),
        "hc_sinkhorn_iters": rng.choice([1, 2, 3, 7, 20]),
        "hc_eps": rng.choice([1e-6, 1e-3]),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "engram_layer_ids": [],
        "num_nextn_predict_layers": 0,
    }
    if rng.random() < 0.8:
        config["rope_scaling"] = random_yarn(rng, rope_dim, config["compress_rope_theta"])
    if rng.random() < 0.3:
        config["index_k_source_layer_ids"] = [i for i in index if i in kv or rng.random() < 0.5]
    if kv and rng.random() < 0.6:
        last = [i for i in index if i >= kv[-1]]
        config["candidate_source_layer_id"] = rng.choice([last[0], last[0], rng.choice(last)])
    if rng.random() < 0.3:
        config["use_fp4_sparse_kv"] = rng.random() < 0.3
    if rng.random() < 0.5:
        add_engram(rng, config)
    if rng.random() < 0.5:
        add_drafts(rng, config)
    return config


def random_yarn(rng: random.Random, size: int, base: float) -> dict:
    """A stretch whose ramp does not run backwards (`high` capped below `low` is no ramp)."""
    while True:
        yarn = {
            rng.choice(["rope_type", "rope_type", "type"]): "yarn",
            "factor": rng.choice([16, 4.0, 40]),
            "beta_fast": rng.choice([32, 4, 2]),
            "beta_slow": rng.choice([1, 1, 0.5]),
            "original_max_position_embeddings": rng.choice([16, 64, 256, 65536]),
        }
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi * yarn["beta_fast"])
        if math.floor(size * math.log(turns) / (2 * math.log(base))) < size:
            return yarn


def add_engram(rng: random.Random, config: dict) -> None:
    layers = range(config["num_hidden_layers"])
    config |= {
        "engram_layer_ids": rng.sample(layers, rng.randint(1, min(3, len(layers)))),
        "engram_max_ngram_size": rng.randint(2, 5),
        "engram_n_heads": rng.randint(1, 3),
        "engram_head_dim": rng.choice([2, 6, 32, 40]),
        "engram_vocab_size": rng.choice([2, 10, 60]),
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": rng.randint(3, config["vocab_size"]),
    }
    config["engram_num_embeddings"] = [sum(p) for p in engram_primes(config).values()]


def add_drafts(rng: random.Random, config: dict) -> None:
    layers, stages, experts = config["num_hidden_layers"], rng.randint(1, 3), rng.randint(1, 5)
    targets = sorted(rng.sample(range(layers), rng.randint(1, min(3, layers))))
    config |= {
        "num_nextn_predict_layers": stages,
        "compress_ratios": config["compress_ratios"] + [0] * stages,
        "dspark_block_size": rng.randint(1, 6),
        "dspark_noise_token_id": rng.randrange(config["vocab_size"]),
        "dspark_target_layer_ids": targets,
        "dspark_markov_rank": rng.randint(1, 12),
        "dspark_n_routed_experts": experts,
        "dspark_num_experts_per_tok": rng.randint(1, experts),
    }


class TensorWriter:
    """Random tensors by published name, in one of the storages."""

    def __init__(self, seed: int, storage: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.storage = storage
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*shape, generator=self.generator)

    def plain(self, name: str, value: Tensor) -> None:
        """A tensor that no storage quantises: bfloat16 unless the checkpoint is float32."""
        self.tensors[name] = value if self.storage == "fp32" else value.bfloat16()

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        self.plain(f"{name}.weight", self.normal(rows, columns, scale=scale * columns**-0.5))

    def gain(self, name: str, *shape: int) -> None:
        self.plain(name, self.normal(*shape, scale=0.2, mean=1.0))

    def float32(self, name: str, value: Tensor) -> None:
        self.tensors[name] = value

    def fp8(self, name: str, rows: int, columns: int, *, per_row: bool = False) -> None:
        """FP8 with one power of two per 32 x 32 block, or per 32 columns of a row."""
        value = self.normal(rows, columns, scale=1.0 if per_row else columns**-0.5)
        if self.storage != "quantised":
            self.plain(f"{name}.weight", value)
            return
        g = grouped(value, 32)
        largest = g.abs().amax(-1)
        if not per_row:
            largest = grouped(largest.T, 32).amax(-1).T
        scale = power_of_two_above(largest.clamp(min=1e-4) / 448)
        full = scale if per_row else scale.repeat_interleave(32, 0)[:rows]
        codes = e4m3(g / full.unsqueeze(-1)).flatten(-2)[:, :columns]
        self.tensors[f"{name}.weight"] = codes.to(torch.float8_e4m3fn)
        self.tensors[f"{name}.scale"] = exponent_bytes(scale)

    def fp4(self, name: str, rows: int, columns: int) -> None:
        """Two e2m1 codes per byte, low nibble first, one power of two per 32 columns of a row."""
        value = self.normal(rows, columns, scale=columns**-0.5)
        if self.storage != "quantised":
            self.plain(f"{name}.weight", value)
            return
        g = grouped(value, 32)
        scale = power_of_two_above(g.abs().amax(-1) / 6)
        value = e2m1(g / scale.unsqueeze(-1)).flatten(-2)[:, :columns]
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.searchsorted(magnitudes, value.abs()) + 8 * (value < 0)
        pairs = (codes[:, 0::2] + 16 * codes[:, 1::2]).byte()
        self.tensors[f"{name}.weight"] = pairs.view(torch.int8)
        self.tensors[f"{name}.scale"] = exponent_bytes(scale)


def exponent_bytes(scale: Tensor) -> Tensor:
    return (torch.frexp(scale).exponent + 126).byte().contiguous().view(torch.float8_e8m0fnu)


def write_layer(w: TensorWriter, rng: random.Random, c: dict, at: str, experts: int) -> None:
    """What backbone and draft layers have in common."""
    d, streams = c["hidden_size"], c["hc_mult"]
    heads, size = c["num_attention_heads"], c["head_dim"]
    for kind in ("attn", "ffn"):
        w.gain(f"{at}.{kind}_norm.weight", d)
        mixes = (2 + streams) * streams
        w.float32(f"{at}.hc_{kind}_fn", w.normal(mixes, streams * d, scale=(streams * d) ** -0.5))
        w.float32(f"{at}.hc_{kind}_base", w.normal(mixes, scale=rng.choice([0.5, 2.0])))
        w.float32(f"{at}.hc_{kind}_scale", w.normal(3, scale=0.3, mean=0.7))
    attn, ffn = f"{at}.attn", f"{at}.ffn"
    w.fp8(f"{attn}.wq_a", c["q_lora_rank"], d)
    w.fp8(f"{attn}.wq_b", heads * size, c["q_lora_rank"])
    w.fp8(f"{attn}.wkv", size, d)
    w.fp8(f"{attn}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * size // c["o_groups"])
    w.fp8(f"{attn}.wo_b", d, c["o_groups"] * c["o_lora_rank"])
    w.gain(f"{attn}.q_norm.weight", c["q_lora_rank"])
    w.gain(f"{attn}.kv_norm.weight", size)
    w.float32(f"{attn}.attn_sink", w.normal(heads))
    w.matrix(f"{ffn}.gate", experts, d, scale=rng.choice([1.0, 1.0, 25.0]))
    for bias in ("bias", "bias_vl"):
        w.float32(f"{ffn}.gate.{bias}", w.normal(experts, scale=rng.choice([0.05, 0.5])))
    width = c["moe_intermediate_size"]
    for e in range(experts):
        w.fp4(f"{ffn}.experts.{e}.w1", width, d)
        w.fp4(f"{ffn}.experts.{e}.w3", width, d)
        w.fp4(f"{ffn}.experts.{e}.w2", d, width)
    w.fp8(f"{ffn}.shared_experts.w1", width, d)
    w.fp8(f"{ffn}.shared_experts.w3", width, d)
    w.fp8(f"{ffn}.shared_experts.w2", d, width)


def write_backbone(w: TensorWriter, rng: random.Random, c: dict) -> None:
    d, size, index_size = c["hidden_size"], c["head_dim"], c["index_head_dim"]
    w.plain("embed.weight", w.normal(c["vocab_size"], d))
    w.matrix("head", c["vocab_size"], d, scale=3.0)
    w.gain("norm.weight", d)
    tables = engram_primes(c) if c["engram_layer_ids"] else {}
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}"
        write_layer(w, rng, c, at, c["n_routed_experts"])
        if layer in c["kv_source_layer_ids"]:
            w.matrix(f"{at}.attn.compressor.wkv", size, d)
            w.gain(f"{at}.attn.compressor.norm.weight", size)
            if c["compress_ratios"][layer] == 2:
                w.matrix(f"{at}.attn.compressor.wgate", size, d)
        if layer in c.get("index_k_source_layer_ids", c["kv_source_layer_ids"]):
            w.matrix(f"{at}.attn.indexer.wk", index_size, size)
            w.gain(f"{at}.attn.indexer.k_norm.weight", index_size)
        if layer in c["index_source_layer_ids"]:
            w.fp8(f"{at}.attn.indexer.wq_b", c["index_n_heads"] * index_size, c["q_lora_rank"])
            w.matrix(f"{at}.attn.indexer.weights_proj", c["index_n_heads"], d)
        if layer in tables:
            columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
            rows, width = sum(tables[layer]), c["engram_head_dim"]
            w.fp8(f"{at}.engram.embed", rows, width, per_row=True)
            w.fp8(f"{at}.engram.wkv", (c["hc_mult"] + 1) * d, columns * width)
            w.gain(f"{at}.engram.q_weight", c["hc_mult"], d)
            w.gain(f"{at}.engram.k_weight", c["hc_mult"], d)


def write_drafts(w: TensorWriter, rng: random.Random, c: dict) -> None:
    d, rank, last = c["hidden_size"], c["dspark_markov_rank"], c["num_nextn_predict_layers"] - 1
    for stage in range(last + 1):
        write_layer(w, rng, c, f"mtp.{stage}", c["dspark_n_routed_experts"])
    w.fp8("mtp.0.main_proj", d, d * len(c["dspark_target_layer_ids"]))
    w.gain("mtp.0.main_norm.weight", d)
    w.gain(f"mtp.{last}.norm.weight", d)
    w.plain(f"mtp.{last}.markov_head.embed.weight", w.normal(c["vocab_size"], rank))
    w.matrix(f"mtp.{last}.markov_head.head", c["vocab_size"], rank)
    w.matrix(f"mtp.{last}.confidence_head.proj", 1, d + rank)


def make_model(
    seed: int, folder: Path, *, storage: str | None = None, record_multiple: int = 32
) -> RandomModel:
    """Write the model of a seed into an empty folder."""
    rng = random.Random(seed)
    storage = storage or rng.choice(STORAGES)
    text = random_text_config(rng, storage, record_multiple)
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32" if storage == "fp32" else "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": text["vocab_size"] - 2,
        "text_config": text,
    }
    if storage == "quantised":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    w = TensorWriter(seed, storage)
    write_backbone(w, rng, text)
    if text["num_nextn_predict_layers"]:
        write_drafts(w, rng, text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(w.tensors, folder / "model.safetensors")
    token_map = None
    if text["engram_layer_ids"]:
        size = text["engram_compressed_vocab_size"]
        ids = list(range(size)) + [rng.randrange(size) for _ in range(text["vocab_size"] - size)]
        rng.shuffle(ids)
        token_map = torch.tensor(ids)
    return RandomModel(folder, config, token_map, seed, storage)


@dataclass(frozen=True)
class RandomPrompts:
    """Sequences for one model, with image rows and their embeddings."""

    ids: list[list[int]]
    masks: list[Tensor | None]
    embeds: list[Tensor | None]


def make_prompts(model: RandomModel, seed: int, *, longest: int = 60) -> RandomPrompts:
    """One to three sequences of 1 to `longest` tokens; a third of them with image spans."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab, image = model.text["vocab_size"], model.config["image_token_id"]
    prompts = RandomPrompts([], [], [])
    for _ in range(rng.randint(1, 3)):
        count = rng.choice([rng.randint(1, 8), rng.randint(1, longest)])
        ids = [rng.choice([t for t in range(vocab) if t != image]) for _ in range(count)]
        mask = embeds = None
        if rng.random() < 0.33:
            for _ in range(rng.randint(1, 2)):
                start = rng.randrange(count)
                for t in range(start, min(count, start + rng.randint(1, 6))):
                    ids[t] = image
            mask = torch.tensor([t == image for t in ids])
            if rng.random() < 0.7:
                shape = (int(mask.sum()), model.text["hidden_size"])
                embeds = torch.randn(shape, generator=generator)
        prompts.ids.append(ids)
        prompts.masks.append(mask)
        prompts.embeds.append(embeds)
    return prompts
