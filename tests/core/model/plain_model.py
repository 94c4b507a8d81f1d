"""The whole model for one sequence, as plainly as possible: no cache, chunks, batch or gathers.

All positions run at once and in float64; a key that a query may not read is masked. `exact` rounds
nowhere. In `served` every rounding point has a name, so that a test can leave one out (`without`)
or add one that should not be there (`extra`); float64 sums lie in the middle of all float32
summation orders. Section numbers are those of docs/model.md. It is one long file, so that the model
can be read from top to bottom.

Shape letters: T = positions, C = streams, d = hidden size, H, D = heads and their width, N = keys,
V = vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

# ---- 10.2, and 2 of docs/formats.md: number formats ----------------------------------------------


def round_float(x: Tensor, mantissa_bits: int, lowest_exponent: int, largest: float) -> Tensor:
    """Nearest value of a small float format, ties to even, saturating; subnormals included."""
    exponent = torch.frexp(x).exponent - 1
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=lowest_exponent) - mantissa_bits)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def e4m3(x: Tensor) -> Tensor:
    return round_float(x, 3, -6, 448.0)


def e2m1(x: Tensor) -> Tensor:
    return round_float(x, 1, 0, 6.0)


def power_of_two_above(x: Tensor) -> Tensor:
    """Smallest power of two that is not below x, decided on the float32 value."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def grouped(x: Tensor, size: int) -> Tensor:
    """[..., n] -> [..., groups, size], the last group filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def quantise(kind: str, x: Tensor) -> Tensor:
    """Quantise and restore along the last dimension: `Q8` and `Q4` in groups of 32, `Qkv4` of 16.

    A quantiser reads float32 values, and its divisions are float32 divisions.
    """
    g = grouped(x.float(), 16 if kind == "Qkv4" else 32)
    largest = g.abs().amax(-1, keepdim=True)
    if kind == "Q8":
        scale = power_of_two_above(largest.clamp(min=1e-4) / 448)
        g = e4m3((g / scale).clamp(-448, 448)) * scale
    elif kind == "Q4":
        scale = power_of_two_above(largest.clamp(min=6 * 2.0**-126) / 6)
        g = e2m1(g / scale) * scale
    else:
        scale = e4m3((largest / 6).clamp(2.0**-9, 448))
        g = e2m1(g / scale) * scale
    return g.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def restore(weight: Tensor, scale: Tensor, *, per_row: bool) -> Tensor:
    """Dequantise a stored matrix (4.2 of docs/checkpoint.md): FP8, or FP4 low nibble first."""
    value = weight.double()
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8).long()
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        value = magnitudes[codes & 7] * (1 - 2 * (codes >> 3))
    factor = 2.0 ** (scale.view(torch.uint8).double() - 127)
    if not per_row:
        factor = factor.repeat_interleave(32, 0)[: value.shape[0]]
    return value * factor.repeat_interleave(32, 1)[:, : value.shape[1]]


# ---- 3.2: rotary embedding -----------------------------------------------------------------------


def frequencies(config: dict, *, compressed: bool) -> Tensor:
    """Angle per position of each pair: plain, or YaRN and another base if compressed."""
    size, scaling = config["qk_rope_head_dim"], config.get("rope_scaling")
    base = config["compress_rope_theta" if compressed else "rope_theta"]
    pair = torch.arange(size // 2, dtype=torch.float64)
    plain = base ** (-2 * pair / size)
    if not compressed or not scaling:
        return plain
    length = scaling["original_max_position_embeddings"]
    low, high = (
        size * math.log(length / (2 * math.pi * scaling[turns])) / (2 * math.log(base))
        for turns in ("beta_fast", "beta_slow")
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
    ramp = ((pair - low) / ((high - low) or 1e-3)).clamp(0, 1)
    return ramp * plain / scaling["factor"] + (1 - ramp) * plain


def turn(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """Rotate pairs in the last dims of [T, ..., D] by positions [T]; float32 angles."""
    angle = (positions.float().unsqueeze(-1) * frequency.float()).double()
    angle = angle.view(len(angle), *(1,) * (x.dim() - 2), frequency.numel())
    start = x.shape[-1] - 2 * frequency.numel()
    a, b = x[..., start::2], x[..., start + 1 :: 2]
    turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    return torch.cat((x[..., :start], torch.stack(turned, -1).flatten(-2)), -1)


# ---- 5.1 to 5.4: Engram addressing ---------------------------------------------------------------


def is_prime(n: int) -> bool:
    return n > 1 and all(n % q for q in range(2, math.isqrt(n) + 1))


def engram_primes(config: dict) -> dict[int, list[int]]:
    """Table sizes of every column, per Engram layer; no prime is used twice."""
    used: set[int] = set()
    primes: dict[int, list[int]] = {layer: [] for layer in config["engram_layer_ids"]}
    for columns in primes.values():
        for _ in range(2, config["engram_max_ngram_size"] + 1):
            n = config["engram_vocab_size"] - 1
            for _ in range(config["engram_n_heads"]):
                n += 1
                while n in used or not is_prime(n):
                    n += 1
                used.add(n)
                columns.append(n)
    return primes


def engram_rows(
    config: dict, layer: int, token_map: Sequence[int], ids: Sequence[int], is_image: Sequence[bool]
) -> list[list[int]]:
    """Table rows of each position, shorter n-grams first."""
    longest, heads = config["engram_max_ngram_size"], config["engram_n_heads"]
    bound = max(1, ((2**63 - 1) // config["engram_compressed_vocab_size"]) // 2)
    random = np.random.default_rng(10007 * layer)
    factors = [2 * int(m) + 1 for m in random.integers(0, bound, size=longest, dtype=np.int64)]
    primes, pad = engram_primes(config)[layer], token_map[config["engram_pad_token_id"]]
    table = []
    for t in range(len(ids)):
        row, blocked, hashed = [], False, 0
        for back in range(longest):
            blocked = blocked or t - back < 0 or is_image[t - back]
            hashed ^= (pad if blocked else token_map[ids[t - back]]) * factors[back]
            for head in range(heads if back else 0):
                column = (back - 1) * heads + head
                row.append(hashed % primes[column] + sum(primes[:column]))
        table.append(row)
    return table


# ---- the model -----------------------------------------------------------------------------------


MODULES = ("layers", "mtp", "attn", "ffn")


@dataclass
class Outcome:
    """What one forward gives. Rows are positions where nothing else is said."""

    first_row: int = 0
    """Position of the first row of `logits`."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    streams: list[Tensor] = field(default_factory=list)
    """After each sub-layer, two for each layer, [T, C, d]."""
    window: dict[int, Tensor] = field(default_factory=dict)
    entries: dict[int, Tensor] = field(default_factory=dict)
    """[entries, D] of each KV source; likewise `latents` and `index_keys`."""
    latents: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    """Mask [T, entries] of each index source; `blocks` the same for candidate blocks."""
    blocks: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[str, Tensor] = field(default_factory=dict)
    """Chosen experts, best first, by the name of the module."""
    context: Tensor | None = None


class PlainModel:
    """Weights by published name, and a function for each section.

    Args:
        without: rounding points of `served` to leave out.
        extra: values that `served` keeps in float32, to be rounded to bfloat16 all the same.
        watch: is told of every cache record and index query, ("record", kind, values, positions),
            and of every choice, ("choice", number to take, ranking, positions).
    """

    def __init__(
        self,
        folder: Path,
        *,
        numerics: str = "exact",
        kv_format: str = "v41",
        engram_token_map: Tensor | None = None,
        without: Collection[str] = (),
        extra: Collection[str] = (),
        watch: Callable[[str, str | int, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.root = json.loads((folder / "config.json").read_text())
        self.config: dict = self.root["text_config"]
        self.served, self.kv_format, self.watch = numerics == "served", kv_format, watch
        self.without, self.extra = without, extra
        self.token_map = engram_token_map.tolist() if engram_token_map is not None else []
        stored = {}
        for file in sorted(folder.glob("*.safetensors")):
            stored |= load_file(file)
        self.weights: dict[str, Tensor] = {}
        self.quantised: set[str] = set()
        for name, value in stored.items():
            scale = stored.get(name.removesuffix("weight") + "scale")
            self.weights[name] = value.double()
            if name.endswith(".weight") and scale is not None:
                per_row = ".experts." in name or name.endswith("engram.embed.weight")
                self.weights[name] = restore(value, scale, per_row=per_row)
                self.quantised.add(name.removesuffix(".weight"))

    # -- rounding

    def bf16(self, x: Tensor, point: str) -> Tensor:
        """A rounding point of `served` (10.3)."""
        return x.bfloat16().double() if self.served and point not in self.without else x

    def wide(self, x: Tensor, value: str) -> Tensor:
        """A value that `served` does not round."""
        return x.bfloat16().double() if self.served and value in self.extra else x

    def record(self, kind: str, x: Tensor, positions: Tensor) -> Tensor:
        """What a cache holds, or an index query (10.1); `positions` are those that wrote it."""
        kind = "bf16" if self.kv_format == "bf16" else kind
        if self.kv_format == "none":
            return x
        if self.watch:
            self.watch("record", kind, x, positions)
        return x.bfloat16().double() if kind == "bf16" else quantise(kind, x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Product with a matrix; `served` quantises the input of one that is stored quantised."""
        return self.quantised_input(name, x) @ self.weights[name + ".weight"].T

    def quantised_input(self, name: str, x: Tensor) -> Tensor:
        """`Q8`, a rounding point named after the linear: `Q8 wq_a`, `Q8 experts.w2`."""
        short = ".".join(p for p in name.split(".") if not (p.isdigit() or p in MODULES))
        is_on = name in self.quantised and f"Q8 {short}" not in self.without
        is_on = is_on or f"Q8 {short}" in self.extra
        return quantise("Q8", x) if self.served and is_on else x

    # -- 2: streams and norms

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        x = self.wide(x * scale, "unweighted norm") * self.weights[name + ".weight"]
        return self.bf16(x, name.rpartition(".")[2])

    def start(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """2.1: every stream starts as the embedding; the first mix takes stream 0."""
        h, c = self.bf16(h, "embedding"), self.config["hc_mult"]
        return h.unsqueeze(1).repeat(1, c, 1), torch.eye(c, dtype=h.dtype)[:1].repeat(len(h), 1)

    def mix(self, pre: Tensor, streams: Tensor) -> Tensor:
        return self.bf16((pre.unsqueeze(-1) * streams).sum(1), "mix")

    def coefficients(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """2.3: the next sub-layer's pre [T, C]; post [T, C] and comb [T, source, destination]."""
        c, eps = self.config["hc_mult"], self.config["hc_eps"]
        scale, base = self.weights[name + "_scale"], self.weights[name + "_base"]
        flat = streams.flatten(1)
        m = flat @ self.weights[name + "_fn"].T
        m = m * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        m = self.wide(m, "coefficients")
        pre = torch.sigmoid(m[:, :c] * scale[0] + base[:c]) + eps
        post = 2 * torch.sigmoid(m[:, c : 2 * c] * scale[1] + base[c : 2 * c])
        comb = (m[:, 2 * c :] * scale[2] + base[2 * c :]).unflatten(-1, (c, c))
        comb = comb.softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def sublayer(
        self, at: str, kind: str, streams: Tensor, pre: Tensor, f: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """2.3: the pre-mix used is the one that the previous sub-layer left."""
        next_pre, post, comb = self.coefficients(f"{at}.hc_{kind}", streams)
        y = f(self.norm(f"{at}.{kind}_norm", self.mix(pre, streams)))
        moved = self.wide(torch.einsum("tij,tid->tjd", comb, streams), "moved")
        return self.bf16(post.unsqueeze(-1) * y.unsqueeze(1) + moved, "trunk"), next_pre

    # -- 3: attention

    def project(
        self, at: str, x: Tensor, positions: Tensor, frequency: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """3.1: query latent, rotated queries [T, H, D], and window keys [T, D]."""
        qa = self.norm(f"{at}.q_norm", self.bf16(self.linear(f"{at}.wq_a", x), "wq_a"))
        q = self.bf16(self.linear(f"{at}.wq_b", qa), "wq_b")
        q = q.unflatten(-1, (self.config["num_attention_heads"], -1))
        q = self.bf16(turn(q, positions, frequency), "turned query")
        return qa, q, self.window_keys(at, x, positions, frequency)

    def window_keys(self, at: str, x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
        kv = self.norm(f"{at}.kv_norm", self.bf16(self.linear(f"{at}.wkv", x), "wkv"))
        return self.record("Q8", self.bf16(turn(kv, positions, frequency), "turned key"), positions)

    def attend(self, q: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
        """3.7: one softmax over all visible keys and the sink; a key is its own value. [T, H, D]"""
        logits = torch.einsum("thd,nd->thn", q, keys) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~visible.unsqueeze(1), -torch.inf)
        sink = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
        share = torch.cat((logits, sink), -1).softmax(-1)[..., :-1]
        return torch.einsum("thn,nd->thd", self.wide(share, "probabilities"), keys)

    def output(self, at: str, o: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
        """3.8: inverse rotation, product per group of heads, joint product."""
        groups = self.config["o_groups"]
        o = self.bf16(turn(self.bf16(o, "attended"), -positions, frequency), "turned back")
        o = o.flatten(1).unflatten(-1, (groups, -1))
        o = self.quantised_input(f"{at}.wo_a", o)
        first = self.weights[f"{at}.wo_a.weight"].unflatten(0, (groups, -1))
        z = self.bf16(torch.einsum("tgk,grk->tgr", o, first).flatten(1), "wo_a")
        return self.bf16(self.linear(f"{at}.wo_b", z), "wo_b")

    def latents(self, at: str, x: Tensor, ratio: int) -> Tensor:
        """3.3: one unrotated latent for every complete group of `ratio` tokens."""
        values = self.linear(f"{at}.compressor.wkv", x)
        if ratio == 2:
            pairs = (len(x) // 2, 2)
            values = self.wide(values, "pair values")[: 2 * pairs[0]].unflatten(0, pairs)
            gates = self.linear(f"{at}.compressor.wgate", x)[: 2 * pairs[0]].unflatten(0, pairs)
            values = (self.wide(gates, "pair gates").softmax(1) * values).sum(1)
        return self.norm(f"{at}.compressor.norm", self.bf16(values, "latent"))

    def index_scores(
        self, at: str, qa: Tensor, x: Tensor, keys: Tensor, positions: Tensor, frequency: Tensor
    ) -> Tensor:
        """3.4: scores of all entries, visible or not, [T, N]."""
        heads, size = self.config["index_n_heads"], self.config["index_head_dim"]
        q = self.bf16(self.linear(f"{at}.indexer.wq_b", qa), "index query")
        q = turn(q.unflatten(-1, (heads, size)), positions, frequency)
        q = self.record("Q4", self.bf16(q, "turned index query"), positions)
        w = self.bf16(self.linear(f"{at}.indexer.weights_proj", x), "index weight")
        terms = self.wide(torch.einsum("thd,nd->thn", q, keys).relu(), "score terms")
        scores = (w.unsqueeze(-1) * terms).sum(1) * size**-0.5 * heads**-0.5
        return self.bf16(scores, "index score")

    def largest(self, ranking: Tensor, count: int, positions: Tensor) -> Tensor:
        """Indices of the `count` largest of each row, largest first, of equal ones the smaller."""
        if self.watch:
            self.watch("choice", count, ranking, positions)
        return ranking.sort(dim=-1, descending=True, stable=True).indices[:, :count]

    def marked(self, ranking: Tensor, count: int, positions: Tensor) -> Tensor:
        """Mask of the `count` largest of each row, never of one that is -inf."""
        marks = torch.zeros_like(ranking, dtype=torch.bool)
        marks.scatter_(1, self.largest(ranking, count, positions), True)
        return marks & (ranking != -torch.inf)

    def select(
        self, layer: int, scores: Tensor, visible: Tensor, positions: Tensor, out: Outcome
    ) -> Tensor:
        """3.4 to 3.6: mask [T, N] of the entries that the layers of this index source read."""
        candidate = self.config.get("candidate_source_layer_id")
        candidate = -1 if candidate is None else candidate
        size = self.config["candidate_block_size"]
        ranking = scores.masked_fill(~visible, -torch.inf)
        if candidate == layer:
            whole = torch.nn.functional.pad(
                ranking, (0, -ranking.shape[1] % size), value=-torch.inf
            )
            best = whole.unflatten(-1, (-1, size)).amax(-1)
            for t, count in enumerate(visible.sum(-1).tolist()):
                if count:
                    best[t, (count - 1) // size] = torch.finfo(best.dtype).max
            out.blocks[layer] = self.marked(best, self.config["candidate_topk_blocks"], positions)
        elif 0 <= candidate < layer:
            allowed = out.blocks[candidate].repeat_interleave(size, 1)[:, : scores.shape[1]]
            ranking = ranking.masked_fill(~allowed, -torch.inf)
        return self.marked(ranking, self.config["index_topk"], positions)

    def source(self, key: str, layer: int) -> int:
        """1.5: the latest source at or before a layer."""
        ids = self.config.get(key)
        ids = self.config["kv_source_layer_ids"] if ids is None and "index_k" in key else ids
        return max((s for s in ids if s <= layer), default=-1)

    def attention(
        self, x: Tensor, *, layer: int, positions: Tensor, low: int, out: Outcome
    ) -> Tensor:
        """3: window keys from position `low` on, and selected entries of the layer's KV source."""
        at, ratio = f"layers.{layer}.attn", self.config["compress_ratios"][layer]
        frequency = frequencies(self.config, compressed=ratio > 0)
        qa, q, keys = self.project(at, x, positions, frequency)
        out.window[layer] = keys
        past, now = positions.unsqueeze(0), positions.unsqueeze(1)
        visible = (past <= now) & (past > now - self.config["sliding_window"]) & (past >= low)
        if ratio:
            first = torch.arange(len(x) // ratio) * ratio
            last = first + ratio - 1
            kv = self.source("kv_source_layer_ids", layer)
            index_k = self.source("index_k_source_layer_ids", layer)
            index = self.source("index_source_layer_ids", layer)
            if kv == layer:
                out.latents[kv] = self.latents(at, x, ratio)
                entry = self.bf16(turn(out.latents[kv], first, frequency), "turned entry")
                kind = "Qkv4" if self.config.get("use_fp4_sparse_kv", True) else "Q8"
                out.entries[kv] = self.record(kind, entry, last)
            if index_k == layer:
                key = self.bf16(self.linear(f"{at}.indexer.wk", out.latents[kv]), "index key")
                key = turn(self.norm(f"{at}.indexer.k_norm", key), first, frequency)
                out.index_keys[layer] = self.record("Q4", self.bf16(key, "turned index key"), last)
            if index == layer:
                scores = self.index_scores(at, qa, x, out.index_keys[index_k], positions, frequency)
                out.selected[layer] = self.select(
                    layer, scores, last.unsqueeze(0) <= now, positions, out
                )
            keys = torch.cat((keys, out.entries[kv]))
            visible = torch.cat((visible, out.selected[index]), -1)
        o = self.attend(q, keys, visible, self.weights[f"{at}.attn_sink"])
        return self.output(at, o, positions, frequency)

    # -- 4: experts

    def expert(self, at: str, x: Tensor, weight: Tensor | None) -> Tensor:
        limit = self.config["swiglu_limit"]
        gate = self.bf16(self.linear(f"{at}.w1", x), "expert hidden").clamp(max=limit)
        up = self.bf16(self.linear(f"{at}.w3", x), "expert hidden").clamp(-limit, limit)
        v = gate * torch.sigmoid(gate) * up
        v = v if weight is None else v * weight.unsqueeze(-1)
        return self.bf16(self.linear(f"{at}.w2", self.wide(v, "activation")), "expert out")

    def moe(
        self, x: Tensor, *, at: str, count: int, is_image: Tensor, positions: Tensor, out: Outcome
    ) -> Tensor:
        g = self.wide(self.linear(f"{at}.gate", x), "router")
        score = torch.where(g > 20, g, torch.log1p(torch.exp(g.clamp(max=20)))).sqrt()
        bias, bias_vl = self.weights[f"{at}.gate.bias"], self.weights[f"{at}.gate.bias_vl"]
        biased = score + torch.where(is_image.unsqueeze(-1), bias_vl, bias)
        chosen = out.experts[at] = self.largest(biased, count, positions)
        weight = score.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-20)
        weight = weight * self.config["routed_scaling_factor"]
        parts = x.new_zeros(*chosen.shape, x.shape[1])
        for e in chosen.unique().tolist():
            t, slot = (chosen == e).nonzero(as_tuple=True)
            parts[t, slot] = self.expert(f"{at}.experts.{e}", x[t], weight[t, slot])
        y = self.expert(f"{at}.shared_experts", x, None)
        for slot in range(count):
            y = self.wide(y + parts[:, slot], "combine")
        return self.bf16(y, "moe")

    # -- 5.5: Engram

    def engram(self, layer: int, streams: Tensor, ids: Sequence[int], is_image: Tensor) -> Tensor:
        at, c, eps = f"layers.{layer}.engram", self.config["hc_mult"], self.config["rms_norm_eps"]
        rows = engram_rows(self.config, layer, self.token_map, ids, is_image.tolist())
        found = self.weights[f"{at}.embed.weight"][torch.tensor(rows)].flatten(1)
        # the table's FP8 rows go into the product as they are stored, so there is no `Q8`
        kv = self.bf16(found @ self.weights[f"{at}.wkv.weight"].T, "engram kv").unflatten(
            -1, (c + 1, -1)
        )
        keys, value = kv[:, :c], kv[:, c:]
        gains = self.weights[f"{at}.q_weight"] * self.weights[f"{at}.k_weight"]
        s = (streams * gains * keys).sum(-1, keepdim=True) * streams.shape[-1] ** -0.5
        for x in (streams, keys):
            s = s * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        gate = torch.sigmoid(torch.copysign(s.abs().clamp(min=1e-6).sqrt(), s))
        gate = gate.masked_fill(is_image.view(-1, 1, 1), 0.0)
        return self.bf16(streams + self.wide(gate, "engram gate") * value, "engram trunk")

    # -- 1.5, 6 and 11: the forward

    def forward(
        self,
        ids: Sequence[int],
        *,
        image_mask: Tensor | None = None,
        image_embeds: Tensor | None = None,
        replay_keep: int | None = None,
        given_streams: Sequence[Tensor] | None = None,
    ) -> Outcome:
        """All positions of one sequence.

        Args:
            replay_keep: bounded replay (3.9) in its `mask` form: all rows run, window keys of
                decoder layers begin at the kept rows, and only those rows are given.
            given_streams: replaces the streams after each sub-layer, so that each is judged alone.
        """
        config, out, positions = self.config, Outcome(), torch.arange(len(ids))
        layers, ratios = config["num_hidden_layers"], config["compress_ratios"]
        decoder = next((i for i in range(layers) if ratios[i] == 1), layers)
        if replay_keep is not None and decoder < layers:
            out.first_row = max(0, len(ids) - replay_keep)
        is_image = torch.tensor([t == self.root.get("image_token_id") for t in ids])
        is_image = is_image if image_mask is None else image_mask.bool()
        h = self.weights["embed.weight"][torch.tensor(ids)]
        if image_embeds is not None:
            h[is_image] = image_embeds.double()
        streams, pre = self.start(h)
        features = []
        experts = {"count": config["num_experts_per_tok"], "is_image": is_image}
        for layer in range(layers):
            at = f"layers.{layer}"
            if layer in config.get("engram_layer_ids", ()):
                streams = self.engram(layer, streams, ids, is_image)
            if config["num_nextn_predict_layers"] and layer in config["dspark_target_layer_ids"]:
                features.append(self.bf16(streams.mean(1), "feature"))
            low = out.first_row if layer >= decoder else 0
            f = partial(self.attention, layer=layer, positions=positions, low=low, out=out)
            g = partial(self.moe, at=f"{at}.ffn", positions=positions, out=out, **experts)
            for kind, function in (("attn", f), ("ffn", g)):
                streams, pre = self.sublayer(at, kind, streams, pre, function)
                out.streams.append(streams)
                if given_streams is not None:
                    streams = given_streams[len(out.streams) - 1].double()
        final = self.norm("norm", self.mix(pre, streams))
        out.logits = self.linear("head", final)[out.first_row :]
        if features:
            projected = self.linear("mtp.0.main_proj", torch.cat(features, -1))
            out.context = self.norm("mtp.0.main_norm", self.bf16(projected, "main_proj"))
        return out

    # -- 7: draft block

    def draft(self, context: Tensor, anchor: int, token: int, low: int = 0) -> dict[str, Tensor]:
        """Greedy block behind `anchor`, which `token` follows; context keys from `low` on."""
        config, size, out = self.config, self.config["dspark_block_size"], Outcome()
        block = [token] + [config["dspark_noise_token_id"]] * (size - 1)
        streams, pre = self.start(self.weights["embed.weight"][torch.tensor(block)])
        past = torch.arange(max(low, anchor - config["sliding_window"] + 1), anchor + 1)
        positions = torch.arange(anchor + 1, anchor + 1 + size)
        frequency, text = frequencies(config, compressed=False), torch.zeros(size, dtype=torch.bool)

        def attention(x: Tensor, at: str) -> Tensor:
            _, q, own = self.project(at, x, positions, frequency)
            keys = torch.cat((self.window_keys(at, context[past], past, frequency), own))
            visible = torch.ones(size, len(keys), dtype=torch.bool)
            o = self.attend(q, keys, visible, self.weights[f"{at}.attn_sink"])
            return self.output(at, o, positions, frequency)

        experts = {"count": config["dspark_num_experts_per_tok"], "is_image": text}
        for layer in range(config["num_nextn_predict_layers"]):
            at = f"mtp.{layer}"
            streams, pre = self.sublayer(
                at, "attn", streams, pre, partial(attention, at=f"{at}.attn")
            )
            f = partial(self.moe, at=f"{at}.ffn", positions=positions, out=out, **experts)
            streams, pre = self.sublayer(at, "ffn", streams, pre, f)
        hidden, last = self.mix(pre, streams), f"mtp.{config['num_nextn_predict_layers'] - 1}"
        base = self.linear("head", self.norm(f"{last}.norm", hidden))
        tokens, logits, conf = [token], [], []
        for i in range(size):
            r = self.weights[f"{last}.markov_head.embed.weight"][tokens[-1]]
            logits.append(base[i] + self.linear(f"{last}.markov_head.head", r))
            conf.append(self.linear(f"{last}.confidence_head.proj", torch.cat((hidden[i], r)))[0])
            tokens.append(int(logits[-1].argmax()))
        found = {
            "tokens": torch.tensor(tokens[1:]),
            "logits": torch.stack(logits),
            "hidden": hidden,
        }
        return found | {"conf": torch.stack(conf).clamp(-60, 60).sigmoid()}
