"""Encoding and decoding of cache records in torch: the definition of their bytes.

Shape letters: Z = leading dimensions, D = values of a record, N = records.
Source: docs/formats.md 2.4-2.6, docs/model.md 10.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.cache.records import RecordFormat, RecordKind
from deepinfer.checkpoint.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
)
from deepinfer.kernels import number_formats as nf

__all__ = ["Pool", "decode_record", "encode_record", "gather_records", "scatter_records"]

FP4_FLOOR = 6.0 * 2.0**-126
KV4_SCALE_MIN, KV4_SCALE_MAX = 2.0**-9, 448.0


@dataclass(frozen=True, slots=True)
class Pool:
    """One cache: `num_rows` records of one format. Row 0 means "none", is zero and is never
    written.

    `data` is (num_rows, bytes) uint8 for packed records, (num_rows, dim) of the stored dtype
    otherwise. For `FP4_INDEX` the bytes of `entries_per_block` consecutive rows form one block: all
    values, then all scales.
    """

    data: torch.Tensor
    format: RecordFormat

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]


def encode_record(x_zd: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """The record of each row: uint8 (Z, bytes), values first, or (Z, D) where the format is not
    packed.
    """
    if fmt.kind is RecordKind.FP8:
        byte_zg = nf.group_scales_ue8m0(x_zd, 32, E4M3_MAX, nf.Q8_FLOOR)
        values = encode_e4m3(nf.divided_by_scales(x_zd, byte_zg, 32)).view(torch.uint8)
        return torch.cat((values, byte_zg), dim=-1)
    if fmt.kind is RecordKind.FP4_INDEX:
        byte_zg = nf.group_scales_ue8m0(x_zd, 32, E2M1_MAX, FP4_FLOOR)
        return torch.cat((encode_e2m1(nf.divided_by_scales(x_zd, byte_zg, 32)), byte_zg), dim=-1)
    if fmt.kind is RecordKind.FP4_KV:
        scale_zg = (nf.group_amax(x_zd, 16) / E2M1_MAX).clamp(KV4_SCALE_MIN, KV4_SCALE_MAX)
        scale_zg = encode_e4m3(scale_zg)
        per_value = nf.scales_per_value(scale_zg.float(), 16, x_zd.shape[-1])
        values = encode_e2m1(x_zd.float() / per_value)
        return torch.cat((values, scale_zg.view(torch.uint8)), dim=-1)
    return x_zd.to(torch.bfloat16) if fmt.kind is RecordKind.BF16 else x_zd


def decode_record(record_zb: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """The values that `encode_record` stored, (Z, D), float32 (or the dtype that was kept)."""
    if not fmt.is_packed:
        return record_zb.float() if fmt.kind is RecordKind.BF16 else record_zb
    data, scales = record_zb.split((fmt.data_bytes, fmt.scale_bytes), dim=-1)
    number = decode_e4m3 if fmt.kind is RecordKind.FP8 else decode_e2m1
    scale = decode_e4m3 if fmt.kind is RecordKind.FP4_KV else decode_e8m0
    per_value = nf.scales_per_value(scale(scales.contiguous()), fmt.group, fmt.dim)
    return number(data.contiguous()) * per_value


def _sectioned(pool: Pool, slot_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks as flat bytes, (blocks, bytes); block of each slot; byte offsets (N, record bytes)
    inside it.
    """
    fmt = pool.format
    per_block = fmt.entries_per_block
    flat = pool.data.view(-1, per_block * fmt.num_bytes())
    block_n, at_n = slot_n // per_block, slot_n % per_block
    data = at_n[:, None] * fmt.data_bytes + torch.arange(fmt.data_bytes, device=slot_n.device)
    scales = at_n[:, None] * fmt.scale_bytes + torch.arange(fmt.scale_bytes, device=slot_n.device)
    return flat, block_n, torch.cat((data, per_block * fmt.data_bytes + scales), dim=1)


def scatter_records(pool: Pool, slot_n: torch.Tensor, record_nb: torch.Tensor) -> None:
    """Write records into `pool` (in place). Slots are distinct and not 0."""
    if pool.format.entries_per_block > 1:
        flat, block_n, offset_nb = _sectioned(pool, slot_n)
        flat[block_n[:, None], offset_nb] = record_nb
    else:
        pool.data[slot_n] = record_nb.to(pool.data.dtype)


def gather_records(pool: Pool, slot_n: torch.Tensor) -> torch.Tensor:
    """Values of the records at `slot_n` (int64, any leading shape), (N..., D)."""
    if pool.format.entries_per_block > 1:
        flat, block_n, offset_nb = _sectioned(pool, slot_n.reshape(-1))
        record = flat[block_n[:, None], offset_nb].unflatten(0, slot_n.shape)
    else:
        record = pool.data[slot_n]
    return decode_record(record, pool.format)
