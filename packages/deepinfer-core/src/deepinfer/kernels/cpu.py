"""`CpuKernels`: the operations that cost time, in C (`cpu.c`), for one or many CPU threads.

A row gets the same bits whatever else runs: any number of rows, any order, any chunk, any number of
threads. Weights stay in the form they are stored in (float32, bfloat16, FP8, FP4). Operations that
are not here run the reference.

The file is long because every operation is here; each method only makes room for the result and
hands pointers to the C code, which holds the formulas.

Shape letters: see `deepinfer.kernels.interface`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from deepinfer.cache.records import KvFormat, RecordFormat, RecordKind
from deepinfer.checkpoint.formats import StoredTensor
from deepinfer.kernels import cpu_build
from deepinfer.kernels.cpu_weights import pack_experts, pack_linear
from deepinfer.kernels.interface import (
    Candidates,
    Experts,
    HyperConnectionWeights,
    Linear,
    Mix,
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
        *[(n, ctypes.c_int32) for n in ("served", "quantized")],
        ("out", _Pointer),
    ]


_SIGNATURES = {  # of the functions in cpu.c: p pointer, l int64, i int, f float
    "di_linear": "pllplip",
    "di_quantize_rows": "plllp",
    "di_rms_norm": "plllpfip",
    "di_mix_streams": "pplllip",
    "di_hc_post": "ppppplp",
    "di_hc_pre": "ppplpppp",
    "di_rotation": "ppllpp",
    "di_rotate": "pllllppliip",
    "di_records": "pllpfpplipp",
    "di_store_rows": "plpplp",
    "di_pool_pairs": "pllpplplppplip",
    "di_index_queries": "plllppliip",
    "di_attention": "p",
    "di_select": "p",
    "di_route": "pllppplfpp",
    "di_experts": "p",
    "di_combine": "pplllip",
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

    @property
    def _c(self) -> ctypes.CDLL:
        """The library, told how many threads torch has now."""
        self._num_threads.value = torch.get_num_threads()
        return self._library

    # ---- weights and linears ----

    def prepare_linear(self, parts: Sequence[StoredTensor]) -> Linear:
        n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        return Linear(n, k, any(part.kind != "plain" for part in parts), pack_linear(parts))

    def prepare_experts(
        self, experts: Iterable[tuple[StoredTensor, StoredTensor, StoredTensor]], num_experts: int
    ) -> Experts:
        gate_up, down, width, quantized = pack_experts(experts, num_experts)
        return Experts(num_experts, width, quantized, (gate_up, down))

    def _input(self, x_tk: torch.Tensor, quantizes: bool) -> torch.Tensor:
        """Rows as the C code takes them, quantised where `served` does so."""
        x_tk = _rows(x_tk)
        if not (self._served and quantizes):
            return x_tk
        out = torch.empty(x_tk.shape, dtype=torch.float32)
        t, k = x_tk.shape
        self._c.di_quantize_rows(x_tk.data_ptr(), x_tk.stride(0), t, k, out.data_ptr())
        return out

    def linear(
        self, x_tk: torch.Tensor, weight: Linear, *, wide: bool = False, is_quantized: bool = False
    ) -> torch.Tensor:
        x_tk = self._input(x_tk, weight.quantizes_input and not is_quantized)
        return self._run_linear(x_tk, weight, 1, self._served and not wide)

    def grouped_linear(self, x_tg: torch.Tensor, weight: Linear, num_groups: int) -> torch.Tensor:
        x_tg = _rows(x_tg)
        if self._served and weight.quantizes_input:  # groups of 32 do not cross the row blocks
            t, k = x_tg.shape
            x_tg = self._input(x_tg.reshape(t * num_groups, k // num_groups), True).view(t, k)
        return self._run_linear(x_tg, weight, num_groups, self._served)

    def _run_linear(
        self, x_tk: torch.Tensor, weight: Linear, groups: int, rounds: int
    ) -> torch.Tensor:
        t = x_tk.shape[0]
        out = torch.empty((t, weight.out_features), dtype=torch.float32)
        self._c.di_linear(
            x_tk.data_ptr(), x_tk.stride(0), t, weight.data.address, groups, rounds, out.data_ptr()
        )
        return out

    # ---- streams ----

    def rms_norm(self, x_td: torch.Tensor, norm: Norm) -> torch.Tensor:
        x_td = _rows(x_td)
        out = torch.empty(x_td.shape, dtype=torch.float32)
        t, d = x_td.shape
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
        seam = self._seam(weights, norm, x_tcm)
        return self._enter(ctypes.addressof(seam), x_tcm, pre_tc)

    def hc_post(self, y_tm: torch.Tensor, x_tcm: torch.Tensor, mix: Mix) -> torch.Tensor:
        x_tcm = _whole(x_tcm)
        seam = _Seam(served=self._served, C=x_tcm.shape[1], M=x_tcm.shape[2])
        return self._leave(ctypes.addressof(seam), y_tm, x_tcm, mix)

    def hc_seam(
        self,
        y_tm: torch.Tensor,
        x_tcm: torch.Tensor,
        mix: Mix,
        weights: HyperConnectionWeights,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor, Mix]:
        x_tcm = _whole(x_tcm)
        seam = self._seam(weights, norm, x_tcm)
        x_tcm = self._leave(ctypes.addressof(seam), y_tm, x_tcm, mix)
        return x_tcm, *self._enter(ctypes.addressof(seam), x_tcm, _whole(mix.pre_tc))

    def _enter(
        self, seam: int, x_tcm: torch.Tensor, pre_tc: torch.Tensor
    ) -> tuple[torch.Tensor, Mix]:
        """Input and mix of the sub-layer that the structure at `seam` describes."""
        t, c, m = x_tcm.shape
        f32 = torch.float32
        u, pre = torch.empty((t, m), dtype=f32), torch.empty((t, c), dtype=f32)
        post, comb = torch.empty((t, c), dtype=f32), torch.empty((t, c, c), dtype=f32)
        self._c.di_hc_pre(
            seam,
            x_tcm.data_ptr(),
            pre_tc.data_ptr(),
            t,
            u.data_ptr(),
            pre.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
        )
        return u, Mix(pre, post, comb)

    def _leave(self, seam: int, y_tm: torch.Tensor, x_tcm: torch.Tensor, mix: Mix) -> torch.Tensor:
        """The streams after a sub-layer's output."""
        y_tm, post, comb = _whole(y_tm), _whole(mix.post_tc), _whole(mix.comb_tcc)
        out = torch.empty_like(x_tcm)
        self._c.di_hc_post(
            seam,
            y_tm.data_ptr(),
            x_tcm.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            x_tcm.shape[0],
            out.data_ptr(),
        )
        return out

    def _seam(self, weights: HyperConnectionWeights, norm: Norm, x_tcm: torch.Tensor) -> _Seam:
        return _Seam(
            weights.fn.data_ptr(),
            weights.base.data_ptr(),
            weights.scale.data_ptr(),
            norm.weight_d.data_ptr(),
            weights.eps,
            weights.norm_eps,
            norm.eps,
            weights.sinkhorn_iters,
            self._served,
            x_tcm.shape[1],
            x_tcm.shape[2],
        )

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
        q_thd, record_tb, window_tw = _whole(q_thd), record_tb.contiguous(), rows.window_tw
        slots_tk = selection.slots_tk if selection is not None else window_tw[:, :0]
        ring = _pool(window.data, window.format)
        others = _pool(entries.data, entries.format) if entries is not None else None
        t, h, d = q_thd.shape
        out = torch.empty((t, h, d), dtype=torch.float32)
        arguments = _Attention(
            q_thd.data_ptr(),
            sink_h.data_ptr(),
            rotation.cos_tr.data_ptr(),
            rotation.sin_tr.data_ptr(),
            record_tb.data_ptr(),
            rows.history_slots_x.data_ptr(),
            window_tw.data_ptr(),
            slots_tk.data_ptr(),
            ctypes.addressof(ring),
            ctypes.addressof(others) if others is not None else None,
            t,
            h,
            d,
            rotation.cos_tr.shape[1],
            rows.history_slots_x.shape[0],
            window_tw.shape[1],
            slots_tk.shape[1],
            self._served,
            out.data_ptr(),
        )
        self._c.di_attention(ctypes.addressof(arguments))
        return out

    # ---- experts ----

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
        x_tm = self._input(x_tm, experts.quantizes_input).contiguous()
        gate_up, down = experts.data
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
            self._served and experts.quantizes_input,
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


def _pool(data: torch.Tensor, fmt: RecordFormat) -> _Pool:
    return _Pool(data.data_ptr(), _KIND[fmt.kind], fmt.entries_per_block, fmt.dim)
