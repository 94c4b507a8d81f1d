"""Cache records, byte for byte, against values worked out from the definition (docs/formats.md
2.4-2.6).
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from deepinfer.cache.records import RecordFormat, RecordKind
from deepinfer.kernels.number_formats import round_to_q8
from deepinfer.kernels.records import (
    Pool,
    decode_record,
    encode_record,
    gather_records,
    scatter_records,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_values() -> list[float]:
    """All finite non-negative e4m3 numbers, by code."""
    return [
        (m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    ]


def nearest(value: float, grid: list[float]) -> int:
    """Code of the nearest grid value, ties to the even code; the plain definition in exact
    arithmetic.
    """
    v = abs(Fraction(value))
    return min(range(len(grid)), key=lambda c: (abs(Fraction(grid[c]) - v), c % 2))


def power_of_two_at_least(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def expected_fp8(row: list[float]) -> tuple[list[int], list[int]]:
    """Codes and scale bytes of one FP8 record."""
    grid, codes, scales = e4m3_values(), [], []
    for at in range(0, len(row), 32):
        group = row[at : at + 32]
        amax = torch.tensor(max(1e-4, *map(abs, group)), dtype=torch.float32)
        scale = power_of_two_at_least(float(amax / 448))
        scales.append(127 + int(math.log2(scale)))
        codes += [nearest(v / scale, grid) | (128 if math.copysign(1, v) < 0 else 0) for v in group]
    return codes, scales


def rows(seed: int, n: int, dim: int) -> torch.Tensor:
    """Values over many octaves, with zeros, exact powers and a group of nothing."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g) * 2.0 ** torch.randint(-12, 8, (n, dim), generator=g)
    x[0] = 0
    x[1, ::3] = 448.0 * 2.0**-5
    return x.to(torch.bfloat16).float()


@pytest.mark.parametrize("dim", [32, 64, 96, 40])
def test_fp8_record_bytes(dim: int) -> None:
    fmt, x = RecordFormat(RecordKind.FP8, dim), rows(1, 24, dim)
    record = encode_record(x, fmt)
    assert record.shape == (24, dim + -(-dim // 32)) == (24, fmt.num_bytes())
    for row, got in zip(x.tolist(), record.tolist(), strict=True):
        codes, scales = expected_fp8(row)
        assert got[dim:] == scales
        assert got[:dim] == codes


@pytest.mark.parametrize("dim", [32, 48, 64])
def test_fp4_entry_record_bytes(dim: int) -> None:
    fmt, x, grid = RecordFormat(RecordKind.FP4_KV, dim), rows(2, 24, dim), e4m3_values()
    record = encode_record(x, fmt)
    assert record.shape[1] == dim // 2 + dim // 16 == fmt.num_bytes()
    for row, got in zip(x.tolist(), record.tolist(), strict=True):
        nibbles = [n for byte in got[: dim // 2] for n in (byte & 15, byte >> 4)]
        for g in range(dim // 16):
            group = row[16 * g : 16 * g + 16]
            amax = torch.tensor(max(map(abs, group)), dtype=torch.float32)
            code = nearest(min(max(float(amax / 6), 2.0**-9), 448.0), grid)
            assert got[dim // 2 + g] == code
            for value, nibble in zip(group, nibbles[16 * g :], strict=False):
                want = nearest(float(torch.tensor(value) / grid[code]), E2M1)
                assert nibble & 7 == want
                assert nibble >> 3 == (1 if value < 0 else 0) or want == 0


@pytest.mark.parametrize("dim", [32, 64])
def test_fp4_index_record_bytes(dim: int) -> None:
    fmt, x = RecordFormat(RecordKind.FP4_INDEX, dim), rows(3, 24, dim)
    record = encode_record(x, fmt)
    assert record.shape[1] == dim // 2 + dim // 32 == fmt.num_bytes()
    for row, got in zip(x.tolist(), record.tolist(), strict=True):
        nibbles = [n for byte in got[: dim // 2] for n in (byte & 15, byte >> 4)]
        for g in range(dim // 32):
            group = row[32 * g : 32 * g + 32]
            amax = torch.tensor(max(6.0 * 2.0**-126, *map(abs, group)), dtype=torch.float32)
            scale = power_of_two_at_least(float(amax / 6))
            assert got[dim // 2 + g] == 127 + int(math.log2(scale))
            for value, nibble in zip(group, nibbles[32 * g :], strict=False):
                assert nibble & 7 == nearest(value / scale, E2M1)


@pytest.mark.parametrize("kind", [RecordKind.FP8, RecordKind.FP4_KV, RecordKind.FP4_INDEX])
@pytest.mark.parametrize("dim", [32, 64, 72])
def test_what_was_stored_is_read_back_and_stored_the_same(kind: RecordKind, dim: int) -> None:
    """Decoded values are exact in bfloat16, and encoding them again gives the same values."""
    fmt = RecordFormat(kind, dim)
    once = decode_record(encode_record(rows(4, 16, dim), fmt), fmt)
    assert torch.equal(once, once.to(torch.bfloat16).float())
    if (
        kind is not RecordKind.FP4_KV
    ):  # its scales are rounded to nearest, so a group may gain a new largest value
        assert torch.equal(decode_record(encode_record(once, fmt), fmt), once)


def test_index_records_of_a_block_are_sectioned() -> None:
    """All values of a block first, then all its scales; neighbours are left alone."""
    fmt = RecordFormat(RecordKind.FP4_INDEX, 64, entries_per_block=8)
    pool = Pool(torch.zeros((24, fmt.num_bytes()), dtype=torch.uint8), fmt)
    x = rows(5, 3, 64) + 1.0
    slots = torch.tensor([9, 15, 22])
    scatter_records(pool, slots, encode_record(x, fmt))
    record = encode_record(x, fmt)
    blocks = pool.data.reshape(3, -1)
    assert torch.equal(blocks[1, 32:64], record[0, :32])
    assert torch.equal(blocks[1, 8 * 32 + 2 : 8 * 32 + 4], record[0, 32:])
    assert torch.equal(blocks[2, 6 * 32 : 7 * 32], record[2, :32])
    assert not blocks[0].any()
    assert int((pool.data != 0).sum()) == int((record != 0).sum())
    assert torch.equal(gather_records(pool, slots), decode_record(record, fmt))
    assert not gather_records(pool, torch.tensor([0, 10])).any()


def test_q8_is_the_window_records_rounding() -> None:
    x, fmt = rows(6, 16, 64), RecordFormat(RecordKind.FP8, 64)
    assert torch.equal(round_to_q8(x), decode_record(encode_record(x, fmt), fmt))


def test_unpacked_formats() -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))
    assert torch.equal(encode_record(x, RecordFormat(RecordKind.COMPUTE, 32)), x)
    assert encode_record(x, RecordFormat(RecordKind.BF16, 32)).dtype == torch.bfloat16
