"""`CpuKernels`: the operations that cost time, in C (`cpu.c`), for one or many CPU threads.

A row gets the same bits whatever else runs: any number of rows, any order, any chunk, any number of
threads. Weights stay in the form they are stored in (float32, bfloat16, FP8, FP4). Operations that
are not here run the reference.

The file is long because every operation is here; each method only makes room for the result and
hands pointers to the C code, which holds the formulas. What the C code reads about a group of
weights is described to it once. Results are made by `new_empty`, which costs half of `torch.empty`
with a dtype: a decoded token runs a hundred operations of some microseconds each.

Shape letters: see `deepinfer.kernels.interface`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepinfer.cache.records import KvFormat, RecordFormat, RecordKind
from deepinfer.checkpoint.formats import StoredTensor
from deepinfer.kernels import cpu_build
from deepinfer.kernels.cpu_weights import WeightMemory, pack_experts, pack_linear
from deepinfer.kernels.interface import (
    AttentionWeights,
    Candidates,
    Experts,
    HyperConnectionWeights,
    Linear,
    Mix,
    MixtureWeights,
    Norm,
    Numerics,
    Rotation,
    Selection,
)
from deepinfer.kernels.records import Pool
from deepinfer.kernels.reference import ReferenceKernels
from deepinfer.step import EntryWrites, Rows

__all__ = ["CpuKernels"]

_Pointer = ctypes.c_void_p
_Long = ctypes.c_int64

# the numbers of the enum in cpu.c
_KIND = {
    RecordKind.COMPUTE: 0,
    RecordKind.BF16: 1,
    RecordKind.FP8: 2,
    RecordKind.FP4_KV: 4,
    RecordKind.FP4_INDEX: 5,
}


class _Pool(ctypes.Structure):
    _fields_ = [
        ("data", _Pointer),
        ("kind", ctypes.c_int32),
        ("per_block", ctypes.c_int32),
        ("dim", _Long),
    ]


class _Seam(ctypes.Structure):
    _fields_ = [
        *[(name, _Pointer) for name in ("fn", "base", "scale", "norm")],
        *[(name, ctypes.c_float) for name in ("eps", "norm_eps", "rms_eps")],
        *[(name, ctypes.c_int32) for name in ("iters", "served")],
        *[(name, _Long) for name in ("C", "M")],
    ]


class _AttentionWeights(ctypes.Structure):
    _fields_ = [
        *[(n, _Pointer) for n in ("wqkv_a", "wq_b", "wo_a", "wo_b", "q_norm", "kv_norm", "sink")],
        *[(n, ctypes.c_float) for n in ("q_eps", "kv_eps")],
        ("groups", _Long),
    ]


class _Mixture(ctypes.Structure):
    _fields_ = [
        *[
            (n, _Pointer)
            for n in ("gate", "gate_up", "down", "shared_gate_up", "shared_down", "bias")
        ],
        ("image_bias", _Pointer),
        *[(n, _Long) for n in ("E", "F", "shared_F", "A")],
        *[(n, ctypes.c_float) for n in ("scaling", "limit")],
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *[(n, _Pointer) for n in ("q", "sink", "cos", "sin", "step", "history", "window", "slots")],
        *[(n, _Pointer) for n in ("ring", "entries")],
        *[(n, _Long) for n in ("T", "H", "D", "R", "X", "W", "K")],
        ("served", ctypes.c_int32),
        ("out", _Pointer),
    ]


class _Select(ctypes.Structure):
    _fields_ = [
        *[
            (n, _Pointer)
            for n in ("q", "head_weight", "positions", "block_table", "cu_rows", "last")
        ],
        *[(n, _Pointer) for n in ("keys", "candidates")],
        *[(n, _Long) for n in ("T", "S", "I", "J", "B", "per_block", "ratio", "K")],
        *[
            (n, _Long)
            for n in ("candidate_count", "candidate_size", "publish_count", "publish_size")
        ],
        ("served", ctypes.c_int32),
        *[(n, _Pointer) for n in ("entries", "slots", "blocks")],
    ]


class _Experts(ctypes.Structure):
    _fields_ = [
        *[(n, _Pointer) for n in ("x", "weights", "ids", "gate_up", "down")],
        *[(n, _Long) for n in ("T", "A", "E", "F", "M")],
        ("limit", ctypes.c_float),
        ("served", ctypes.c_int32),
        ("out", _Pointer),
    ]


_SIGNATURES = {  # of the functions in cpu.c: p pointer, l int64, i int, f float
    "di_linear": "pllpliip",
    "di_rms_norm": "plllpfip",
    "di_mix_streams": "pplllip",
    "di_hc_post": "ppppplp",
    "di_hc_pre": "ppplpppp",
    "di_hc_seam": "pppppplppppp",
    "di_rotation": "ppllpp",
    "di_rotate": "pllllppliip",
    "di_records": "pllpfpplipp",
    "di_store_rows": "plpplp",
    "di_pool_pairs": "pllpplplppplip",
    "di_index_queries": "plllppliip",
    "di_attention": "p",
    "di_latents": "ppllipp",
    "di_attend": "ppplplpplp",
    "di_select": "p",
    "di_route": "pllppplfpp",
    "di_experts": "p",
    "di_combine": "pplllip",
    "di_mixture": "pplpippp",
    "di_engram_gate": "ppppplllfip",
}
_C_TYPES = {"p": _Pointer, "l": _Long, "i": ctypes.c_int, "f": ctypes.c_float}


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, letters in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [_C_TYPES[letter] for letter in letters]
        function.restype = None
    return library


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The same values as rows in one piece each: float32, two dimensions, the last of stride 1."""
    if x.dtype is torch.float32 and x.ndim == 2 and x.stride(1) == 1:
        return x
    x = x.to(torch.float32)
    inner = x.flatten(1) if x.ndim > 2 else x
    return inner if inner.stride(-1) == 1 or inner.shape[-1] == 1 else inner.contiguous()


def _whole(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values in one piece of memory."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


class CpuKernels(ReferenceKernels):
    """Compiled kernels of the CPU.

    Args:
        numerics: `exact` or `served`.
        kv_format: how cache records are stored.
        device: the CPU.

    Raises:
        BuildError: there is no compiler, or it does not work; the registry then falls back.
    """

    def __init__(
        self,
        *,
        numerics: Numerics = "exact",
        kv_format: KvFormat = "v41",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(numerics=numerics, kv_format=kv_format, device=device)
        library, self.toolchain = cpu_build.load()
        self._library = _declare(library)
        self._num_threads = ctypes.c_int.in_dll(library, "di_threads")
        self._served = int(numerics == "served")
        self._memory = WeightMemory()
        # what the C code reads about a group of weights, made once for each
        self._described: WeakKeyDictionary[Any, ctypes.Structure] = WeakKeyDictionary()

    @property
    def _c(self) -> ctypes.CDLL:
        """The library, told how many threads torch has now."""
        self._num_threads.value = torch.get_num_threads()
        return self._library

    # ---- weights and linears ----

    def prepare_linear(self, parts: Sequence[StoredTensor]) -> Linear:
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return Linear(
            n, k, any(part.kind != "plain" for part in parts), pack_linear(self._memory, parts)
        )

    def prepare_experts(
        self, experts: Iterable[tuple[StoredTensor, StoredTensor, StoredTensor]], num_experts: int
    ) -> Experts:
        gate_up, down, width, quantized = pack_experts(self._memory, experts, num_experts)
        return Experts(num_experts, width, quantized, (gate_up, down))

    def prepare_tensor(
        self, stored: StoredTensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        made = super().prepare_tensor(stored, dtype)
        return self._memory.empty(made.shape, made.dtype).copy_(made)

    def linear(
        self, x_tk: torch.Tensor, weight: Linear, *, wide: bool = False, is_quantized: bool = False
    ) -> torch.Tensor:
        served = self._served
        return self._run_linear(x_tk, weight, 1, served and not is_quantized, served and not wide)

    def grouped_linear(self, x_tg: torch.Tensor, weight: Linear, num_groups: int) -> torch.Tensor:
        return self._run_linear(x_tg, weight, num_groups, self._served, self._served)

    def _run_linear(
        self, x_tk: torch.Tensor, weight: Linear, groups: int, quantizes: int, rounds: int
    ) -> torch.Tensor:
        x_tk = _rows(x_tk)
        t = x_tk.shape[0]
        out = x_tk.new_empty(t, weight.out_features)
        self._c.di_linear(
            x_tk.data_ptr(),
            x_tk.stride(0),
            t,
            weight.data.address,
            groups,
            quantizes,
            rounds,
            out.data_ptr(),
        )
        return out

    # ---- streams ----

    def rms_norm(self, x_td: torch.Tensor, norm: Norm) -> torch.Tensor:
        x_td = _rows(x_td)
        t, d = x_td.shape
        out = x_td.new_empty(t, d)
        self._c.di_rms_norm(
            x_td.data_ptr(),
            x_td.stride(0),
            t,
            d,
            norm.weight_d.data_ptr(),
            norm.eps,
            self._served,
            out.data_ptr(),
        )
        return out

    def mix_streams(self, x_tcm: torch.Tensor, pre_tc: torch.Tensor) -> torch.Tensor:
        x_tcm, pre_tc = _whole(x_tcm), _whole(pre_tc)
        t, c, m = x_tcm.shape
        out = torch.empty((t, m), dtype=torch.float32)
        self._c.di_mix_streams(
            x_tcm.data_ptr(), pre_tc.data_ptr(), t, c, m, self._served, out.data_ptr()
        )
        return out

    def mean_streams(self, x_tcm: torch.Tensor) -> torch.Tensor:
        total_tm = x_tcm[:, 0].clone()
        for c in range(1, x_tcm.shape[1]):
            total_tm += x_tcm[:, c]
        return self._round(total_tm / x_tcm.shape[1])

    def hc_pre(
        self, x_tcm: torch.Tensor, pre_tc: torch.Tensor, weights: HyperConnectionWeights, norm: Norm
    ) -> tuple[torch.Tensor, Mix]:
        x_tcm, pre_tc = _whole(x_tcm), _whole(pre_tc)
        t, c, m = x_tcm.shape
        u, mix = x_tcm.new_empty(t, m), _empty_mix(x_tcm)
        self._c.di_hc_pre(
            self._seam(weights, norm, c, m),
            x_tcm.data_ptr(),
            pre_tc.data_ptr(),
            t,
            u.data_ptr(),
            mix.pre_tc.data_ptr(),
            mix.post_tc.data_ptr(),
            mix.comb_tcc.data_ptr(),
        )
        return u, mix

    def hc_post(self, y_tm: torch.Tensor, x_tcm: torch.Tensor, mix: Mix) -> torch.Tensor:
        y_tm, x_tcm = _whole(y_tm), _whole(x_tcm)
        post, comb = _whole(mix.post_tc), _whole(mix.comb_tcc)
        t, c, m = x_tcm.shape
        seam = _Seam(served=self._served, C=c, M=m)
        out = torch.empty((t, c, m), dtype=torch.float32)
        self._c.di_hc_post(
            ctypes.addressof(seam),
            y_tm.data_ptr(),
            x_tcm.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            t,
            out.data_ptr(),
        )
        return out

    def hc_seam(
        self,
        y_tm: torch.Tensor,
        x_tcm: torch.Tensor,
        mix: Mix,
        weights: HyperConnectionWeights,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor, Mix]:
        y_tm, x_tcm = _whole(y_tm), _whole(x_tcm)
        pre, post, comb = _whole(mix.pre_tc), _whole(mix.post_tc), _whole(mix.comb_tcc)
        t, c, m = x_tcm.shape
        out, u, new = x_tcm.new_empty(t, c, m), x_tcm.new_empty(t, m), _empty_mix(x_tcm)
        self._c.di_hc_seam(
            self._seam(weights, norm, c, m),
            y_tm.data_ptr(),
            x_tcm.data_ptr(),
            pre.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            t,
            out.data_ptr(),
            u.data_ptr(),
            new.pre_tc.data_ptr(),
            new.post_tc.data_ptr(),
            new.comb_tcc.data_ptr(),
        )
        return out, u, new

    def _seam(self, weights: HyperConnectionWeights, norm: Norm, c: int, m: int) -> int:
        """Address of what the C code reads about a sub-layer's mixing."""
        known = self._described.get(weights)
        if known is None or known.norm != norm.weight_d.data_ptr():
            known = _Seam(
                weights.fn.data_ptr(),
                weights.base.data_ptr(),
                weights.scale.data_ptr(),
                norm.weight_d.data_ptr(),
                weights.eps,
                weights.norm_eps,
                norm.eps,
                weights.sinkhorn_iters,
                self._served,
                c,
                m,
            )
            self._described[weights] = known
        return ctypes.addressof(known)

    # ---- rotation and records ----

    def rotation(self, positions_t: torch.Tensor, frequencies_r: torch.Tensor) -> Rotation:
        positions_t, frequencies_r = _whole(positions_t, torch.int64), _whole(frequencies_r)
        t, r = positions_t.shape[0], frequencies_r.shape[0]
        cos, sin = torch.empty((2, t, r), dtype=torch.float32)
        self._c.di_rotation(
            positions_t.data_ptr(), frequencies_r.data_ptr(), t, r, cos.data_ptr(), sin.data_ptr()
        )
        return Rotation(cos, sin)

    def rotate(
        self, x_thd: torch.Tensor, rotation: Rotation, *, inverse: bool = False
    ) -> torch.Tensor:
        shape, rows = x_thd.shape, _rows(x_thd)
        heads = shape[1] if len(shape) == 3 else 1
        out = torch.empty(shape, dtype=torch.float32)
        self._c.di_rotate(
            rows.data_ptr(),
            rows.stride(0),
            shape[0],
            heads,
            shape[-1],
            rotation.cos_tr.data_ptr(),
            rotation.sin_tr.data_ptr(),
            rotation.cos_tr.shape[1],
            inverse,
            self._served,
            out.data_ptr(),
        )
        return out

    def _records(
        self,
        x_td: torch.Tensor,
        norm: Norm | None,
        rotation: Rotation,
        pool: _Pool,
        slots: torch.Tensor | None,
    ) -> None:
        x_td = _rows(x_td)
        self._c.di_records(
            x_td.data_ptr(),
            x_td.stride(0),
            x_td.shape[0],
            norm.weight_d.data_ptr() if norm is not None else None,
            norm.eps if norm is not None else 0.0,
            rotation.cos_tr.data_ptr(),
            rotation.sin_tr.data_ptr(),
            rotation.cos_tr.shape[1],
            self._served,
            ctypes.addressof(pool),
            slots.data_ptr() if slots is not None else None,
        )

    def window_records(
        self, kv_td: torch.Tensor, norm: Norm, rotation: Rotation, pool: Pool
    ) -> torch.Tensor:
        record = pool.data.new_empty((kv_td.shape[0], pool.data.shape[1]))
        self._records(kv_td, norm, rotation, _pool(record, pool.format), None)
        return record

    def store_window(self, record_tb: torch.Tensor, rows: Rows, pool: Pool) -> None:
        writes, record_tb = rows.window_writes, record_tb.contiguous()
        self._c.di_store_rows(
            record_tb.data_ptr(),
            record_tb.shape[1] * record_tb.element_size(),
            writes.source_m.data_ptr(),
            writes.slot_m.data_ptr(),
            writes.slot_m.shape[0],
            pool.data.data_ptr(),
        )

    # ---- compressed entries ----

    def pool_pairs(
        self,
        gate_value_te: torch.Tensor,
        writes: EntryWrites,
        state_p2d: torch.Tensor,
    ) -> torch.Tensor:
        x = _rows(gate_value_te)
        n, d = writes.row_n.shape[0], x.shape[1] // 2
        out = torch.empty((n, d), dtype=torch.float32)
        self._c.di_pool_pairs(
            x.data_ptr(),
            x.stride(0),
            d,
            writes.row_n.data_ptr(),
            writes.partner_n.data_ptr(),
            n,
            writes.state_slots_x.data_ptr(),
            writes.state_slots_x.shape[0],
            state_p2d.data_ptr(),
            writes.state_writes.source_m.data_ptr(),
            writes.state_writes.slot_m.data_ptr(),
            writes.state_writes.slot_m.shape[0],
            self._served,
            out.data_ptr(),
        )
        return out

    def store_entries(
        self, latent_nd: torch.Tensor, rotation: Rotation, writes: EntryWrites, pool: Pool
    ) -> None:
        self._records(latent_nd, None, rotation, _pool(pool.data, pool.format), writes.slot_n)

    def store_index_keys(
        self,
        latent_nd: torch.Tensor,
        weight: Linear,
        norm: Norm,
        rotation: Rotation,
        writes: EntryWrites,
        pool: Pool,
    ) -> None:
        key_nj = self.linear(latent_nd, weight)
        self._records(key_nj, norm, rotation, _pool(pool.data, pool.format), writes.slot_n)

    def index_queries(self, q_tij: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q_tij = _whole(q_tij)
        t, i, j = q_tij.shape
        kind = {"v41": RecordKind.FP4_INDEX, "bf16": RecordKind.BF16, "none": RecordKind.COMPUTE}
        out = torch.empty((t, i, j), dtype=torch.float32)
        self._c.di_index_queries(
            q_tij.data_ptr(),
            t,
            i,
            j,
            rotation.cos_tr.data_ptr(),
            rotation.sin_tr.data_ptr(),
            rotation.cos_tr.shape[1],
            self._served,
            _KIND[kind[self.kv_format]],
            out.data_ptr(),
        )
        return out

    def select_entries(
        self,
        q_tij: torch.Tensor,
        head_weight_ti: torch.Tensor,
        rows: Rows,
        ratio: int,
        pool: Pool,
        entries_per_block: int,
        topk: int,
        candidates: Candidates | None,
        publish: tuple[int, int] | None,
    ) -> tuple[Selection, Candidates | None]:
        t, i, j = q_tij.shape
        q_tij = _whole(q_tij)
        weight_ti = _whole(head_weight_ti * (i * j) ** -0.5)
        host = torch.tensor([*rows.cu_seqlens_q, *rows.last_positions], dtype=torch.int64)
        num_seqs = len(rows.last_positions)
        keys = _pool(pool.data, pool.format)
        entries = torch.empty((t, topk), dtype=torch.int32)
        slots = torch.empty((t, topk), dtype=torch.int64)
        count, size = publish or (0, 1)
        blocks = torch.empty((t, count), dtype=torch.int32)
        chosen = _whole(candidates.blocks_tb, torch.int32) if candidates is not None else None
        arguments = _Select(
            q_tij.data_ptr(),
            weight_ti.data_ptr(),
            rows.positions_t.data_ptr(),
            rows.block_table_sb.data_ptr(),
            host.data_ptr(),
            host.data_ptr() + 8 * (num_seqs + 1),
            ctypes.addressof(keys),
            chosen.data_ptr() if chosen is not None else None,
            t,
            num_seqs,
            i,
            j,
            rows.block_table_sb.shape[1],
            entries_per_block,
            ratio,
            topk,
            chosen.shape[1] if chosen is not None else 0,
            candidates.block_size if candidates is not None else 1,
            count,
            size,
            self._served,
            entries.data_ptr(),
            slots.data_ptr(),
            blocks.data_ptr(),
        )
        self._c.di_select(ctypes.addressof(arguments))
        return Selection(entries, slots), Candidates(blocks, size) if publish is not None else None

    # ---- attention ----

    def attention(
        self,
        q_thd: torch.Tensor,
        record_tb: torch.Tensor,
        rows: Rows,
        window: Pool,
        entries: Pool | None,
        selection: Selection | None,
        sink_h: torch.Tensor,
        rotation: Rotation,
    ) -> torch.Tensor:
        q_thd, record_tb = _whole(q_thd), record_tb.contiguous()
        ring = _pool(window.data, window.format)
        others = _pool(entries.data, entries.format) if entries is not None else None
        arguments = self._attention(q_thd.shape, rows, ring, others, selection, rotation)
        out = torch.empty(q_thd.shape, dtype=torch.float32)
        arguments.q, arguments.sink = q_thd.data_ptr(), sink_h.data_ptr()
        arguments.step, arguments.out = record_tb.data_ptr(), out.data_ptr()
        self._c.di_attention(ctypes.addressof(arguments))
        return out

    def _attention(
        self,
        shape: Sequence[int],
        rows: Rows,
        ring: _Pool,
        others: _Pool | None,
        selection: Selection | None,
        rotation: Rotation,
    ) -> _Attention:
        """Everything but queries, sink, the step's own records and the result."""
        window_tw, history_x, cos_tr = rows.window_tw, rows.history_slots_x, rotation.cos_tr
        slots_tk = selection.slots_tk if selection is not None else window_tw[:, :0]
        return _Attention(
            None,
            None,
            cos_tr.data_ptr(),
            rotation.sin_tr.data_ptr(),
            None,
            history_x.data_ptr(),
            window_tw.data_ptr(),
            slots_tk.data_ptr(),
            ctypes.addressof(ring),
            ctypes.addressof(others) if others is not None else None,
            *shape,
            cos_tr.shape[1],
            history_x.shape[0],
            window_tw.shape[1],
            slots_tk.shape[1],
            self._served,
            None,
        )

    def attention_latents(
        self, x_tm: torch.Tensor, weights: AttentionWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_tm = _rows(x_tm)
        t, rank = x_tm.shape[0], weights.wq_b.in_features
        qa = x_tm.new_empty(t, rank)
        kv = x_tm.new_empty(t, weights.wqkv_a.out_features - rank)
        self._c.di_latents(
            self._attention_weights(weights),
            x_tm.data_ptr(),
            x_tm.stride(0),
            t,
            self._served,
            qa.data_ptr(),
            kv.data_ptr(),
        )
        return qa, kv

    def attend(
        self,
        qa_tq: torch.Tensor,
        kv_td: torch.Tensor,
        weights: AttentionWeights,
        rows: Rows,
        window: Pool,
        entries: Pool | None,
        selection: Selection | None,
        rotation: Rotation,
    ) -> torch.Tensor:
        qa_tq, kv_td, writes = _rows(qa_tq), _rows(kv_td), rows.window_writes
        t, (h, d) = qa_tq.shape[0], (weights.num_heads, kv_td.shape[1])
        ring = _pool(window.data, window.format)
        others = _pool(entries.data, entries.format) if entries is not None else None
        arguments = self._attention((t, h, d), rows, ring, others, selection, rotation)
        out = qa_tq.new_empty(t, weights.wo_b.out_features)
        self._c.di_attend(
            self._attention_weights(weights),
            ctypes.addressof(arguments),
            qa_tq.data_ptr(),
            qa_tq.stride(0),
            kv_td.data_ptr(),
            kv_td.stride(0),
            writes.source_m.data_ptr(),
            writes.slot_m.data_ptr(),
            writes.slot_m.shape[0],
            out.data_ptr(),
        )
        return out

    def _attention_weights(self, weights: AttentionWeights) -> int:
        """Address of what the C code reads about them."""
        known = self._described.get(weights)
        if known is None:
            linears = (weights.wqkv_a, weights.wq_b, weights.wo_a, weights.wo_b)
            known = self._described[weights] = _AttentionWeights(
                *[linear.data.address for linear in linears],
                weights.q_norm.weight_d.data_ptr(),
                weights.kv_norm.weight_d.data_ptr(),
                weights.sink_h.data_ptr(),
                weights.q_norm.eps,
                weights.kv_norm.eps,
                weights.num_groups,
            )
        return ctypes.addressof(known)

    # ---- experts ----

    def mixture_of_experts(
        self, x_tm: torch.Tensor, weights: MixtureWeights, is_image_t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_tm, is_image_t = _whole(x_tm), is_image_t.contiguous()
        t, m = x_tm.shape
        out, weight = x_tm.new_empty(t, m), x_tm.new_empty(t, weights.topk)
        ids = torch.empty((t, weights.topk), dtype=torch.int64)
        self._c.di_mixture(
            self._mixture(weights),
            x_tm.data_ptr(),
            t,
            is_image_t.data_ptr(),
            self._served,
            ids.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
        )
        return out, ids, weight

    def _mixture(self, weights: MixtureWeights) -> int:
        """Address of what the C code reads about them."""
        known = self._described.get(weights)
        if known is None:
            routed, shared, image_bias = weights.routed, weights.shared, weights.image_bias_e
            known = self._described[weights] = _Mixture(
                weights.gate.data.address,
                *[matrix.address for matrix in (*routed.data, *shared.data)],
                weights.bias_e.data_ptr(),
                image_bias.data_ptr() if image_bias is not None else None,
                routed.num_experts,
                routed.width,
                shared.width,
                weights.topk,
                weights.scaling,
                weights.limit,
            )
        return ctypes.addressof(known)

    def route(
        self,
        x_tm: torch.Tensor,
        gate: Linear,
        bias_e: torch.Tensor,
        image_bias_e: torch.Tensor | None,
        is_image_t: torch.Tensor,
        topk: int,
        scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, is_image_t = self.linear(x_tm, gate, wide=True), is_image_t.contiguous()
        t, e = logits.shape
        ids = torch.empty((t, topk), dtype=torch.int64)
        weights = torch.empty((t, topk), dtype=torch.float32)
        self._c.di_route(
            logits.data_ptr(),
            t,
            e,
            bias_e.data_ptr(),
            image_bias_e.data_ptr() if image_bias_e is not None else None,
            is_image_t.data_ptr(),
            topk,
            scaling,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

    def routed_experts(
        self,
        x_tm: torch.Tensor,
        ids_ta: torch.Tensor,
        weight_ta: torch.Tensor,
        experts: Experts,
        limit: float,
    ) -> torch.Tensor:
        return self._run_experts(
            x_tm, _whole(ids_ta, torch.int64), _whole(weight_ta), experts, limit
        )

    def shared_expert(self, x_tm: torch.Tensor, expert: Experts, limit: float) -> torch.Tensor:
        return self._run_experts(x_tm, None, None, expert, limit)[:, 0]

    def _run_experts(
        self,
        x_tm: torch.Tensor,
        ids_ta: torch.Tensor | None,
        weight_ta: torch.Tensor | None,
        experts: Experts,
        limit: float,
    ) -> torch.Tensor:
        x_tm, (gate_up, down) = _whole(x_tm), experts.data
        (t, m), a = x_tm.shape, ids_ta.shape[1] if ids_ta is not None else 1
        out = torch.empty((t, a, m), dtype=torch.float32)
        arguments = _Experts(
            x_tm.data_ptr(),
            weight_ta.data_ptr() if weight_ta is not None else None,
            ids_ta.data_ptr() if ids_ta is not None else None,
            gate_up.address,
            down.address,
            t,
            a,
            experts.num_experts,
            experts.width,
            m,
            limit,
            self._served,
            out.data_ptr(),
        )
        self._c.di_experts(ctypes.addressof(arguments))
        return out

    def combine_experts(self, shared_tm: torch.Tensor, routed_tam: torch.Tensor) -> torch.Tensor:
        shared_tm, routed_tam = _whole(shared_tm), _whole(routed_tam)
        t, a, m = routed_tam.shape
        out = torch.empty((t, m), dtype=torch.float32)
        self._c.di_combine(
            shared_tm.data_ptr(), routed_tam.data_ptr(), t, a, m, self._served, out.data_ptr()
        )
        return out

    # ---- Engram ----

    def engram_gate(
        self,
        x_tcm: torch.Tensor,
        kv_tm: torch.Tensor,
        q_weight_cm: torch.Tensor,
        k_weight_cm: torch.Tensor,
        is_image_t: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        x_tcm, kv_tm, is_image_t = _whole(x_tcm), _whole(kv_tm), is_image_t.contiguous()
        t, c, m = x_tcm.shape
        out = torch.empty((t, c, m), dtype=torch.float32)
        self._c.di_engram_gate(
            x_tcm.data_ptr(),
            kv_tm.data_ptr(),
            q_weight_cm.data_ptr(),
            k_weight_cm.data_ptr(),
            is_image_t.data_ptr(),
            t,
            c,
            m,
            eps,
            self._served,
            out.data_ptr(),
        )
        return out


def _empty_mix(x_tcm: torch.Tensor) -> Mix:
    t, c, _ = x_tcm.shape
    return Mix(x_tcm.new_empty(t, c), x_tcm.new_empty(t, c), x_tcm.new_empty(t, c, c))


def _pool(data: torch.Tensor, fmt: RecordFormat) -> _Pool:
    return _Pool(data.data_ptr(), _KIND[fmt.kind], fmt.entries_per_block, fmt.dim)
