"""The records that caches are made of: how many bytes one row takes, by kind and width.

Pure arithmetic; the encoders and decoders are kernel operations (`deepinfer.kernels.reference`
defines them). Byte layouts: docs/formats.md 2.4 (window), 2.5 (compressed entries), 2.6 (index
keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

__all__ = ["KvFormat", "RecordFormat", "RecordKind"]

KvFormat = Literal["v41", "bf16", "none"]
"""`v41`: the published records; `bf16`: rounded to bfloat16 only; `none`: kept in compute
precision.
"""


class RecordKind(StrEnum):
    """How the values of one record are stored."""

    FP8 = "fp8"
    """e4m3 per value, then one UE8M0 scale per 32 values."""
    FP4_KV = "fp4_kv"
    """e2m1 pairs, then one e4m3 scale per 16 values."""
    FP4_INDEX = "fp4_index"
    """e2m1 pairs and one UE8M0 scale per 32 values; within a block all values come first, then all
    scales.
    """
    BF16 = "bf16"
    COMPUTE = "compute"
    """The dtype the kernels compute in."""


_GROUP = {RecordKind.FP8: 32, RecordKind.FP4_KV: 16, RecordKind.FP4_INDEX: 32}


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Kind and width of one record.

    Args:
        kind: how values are stored.
        dim: values per record.
        entries_per_block: records that share a block, where data and scales form separate sections
            (`FP4_INDEX` only; every other kind keeps a record's bytes together).
    """

    kind: RecordKind
    dim: int
    entries_per_block: int = 1

    @property
    def group(self) -> int:
        """Values that share a scale; 0 where there is none."""
        return _GROUP.get(self.kind, 0)

    @property
    def is_packed(self) -> bool:
        """Stored as bytes that need decoding."""
        return self.group > 0

    @property
    def data_bytes(self) -> int:
        """Bytes of the values of one packed record."""
        return self.dim if self.kind is RecordKind.FP8 else -(-self.dim // 2)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one packed record."""
        return -(-self.dim // self.group)

    def num_bytes(self, compute_bytes: int = 4) -> int:
        """Bytes of one record; `compute_bytes` is the size of a value that is kept in compute
        precision.
        """
        if self.is_packed:
            return self.data_bytes + self.scale_bytes
        return self.dim * (2 if self.kind is RecordKind.BF16 else compute_bytes)
