"""Number formats against their definitions, written out again here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint import StoredTensor, dequantize
from deepinfer.checkpoint.formats import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0_ceil,
    quantize_fp4,
    quantize_fp8,
    scale_shape,
)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = 2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return -size if sign else size


def e2m1(code: int) -> float:
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -size if code & 8 else size


def test_every_e4m3_code_has_its_value():
    found = decode_e4m3(torch.arange(256, dtype=torch.uint8)).tolist()
    for code, value in enumerate(found):
        wanted = e4m3(code)
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), code
        assert math.copysign(1, value) == math.copysign(1, wanted) or math.isnan(wanted), code


def test_every_e8m0_code_is_a_power_of_two_and_255_is_nan():
    found = decode_e8m0(torch.arange(256, dtype=torch.uint8)).tolist()
    assert found[:255] == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(found[255])


@pytest.mark.parametrize("code", [0, 120, 125, 127, 130, 140, 254])
def test_scale_bytes_are_reinterpreted_and_not_cast(code):
    assert decode_e8m0(torch.tensor([code], dtype=torch.uint8)).item() == 2.0 ** (code - 127)


def test_every_fp4_byte_holds_the_even_column_in_its_low_nibble():
    found = decode_e2m1(torch.arange(256, dtype=torch.uint8).view(16, 16)).view(-1, 2)
    assert found.tolist() == [[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)]


def test_values_of_the_published_checkpoint():
    """The worked example of docs/checkpoint.md 4.2: layer 0, attn.wkv, row 0."""
    codes = torch.tensor([list(bytes.fromhex("d871f2797069f0e5"))], dtype=torch.uint8)
    stored = StoredTensor(
        "layers.0.attn.wkv.weight", "fp8", (1, 8), codes.view(torch.float8_e4m3fn),
        torch.tensor([[0x73]], dtype=torch.uint8), (32, 32),
    )  # fmt: skip
    wanted = [
        -0.00390625, 0.03515625, -0.0390625, 0.0703125,
        0.03125, 0.017578125, -0.03125, -0.0126953125,
    ]  # fmt: skip
    assert dequantize(stored).tolist() == [wanted]


def nearest(value: float, codes: range, decode) -> set[float]:
    """Values at the least distance; a tie leaves those of even mantissa."""
    finite = [code for code in codes if not math.isnan(decode(code))]
    best = min(abs(decode(code) - value) for code in finite)
    ties = [code for code in finite if abs(decode(code) - value) == best]
    even = [code for code in ties if code % 2 == 0]
    return {decode(code) for code in (even if len({decode(c) for c in ties}) > 1 else ties)}


REALS = st.one_of(
    st.floats(-600, 600, width=32),
    st.floats(-7, 7, width=32),
    st.floats(-(2.0**-5), 2.0**-5, width=32),
    st.integers(-14336, 14336).map(lambda sixteenth: sixteenth / 32),
)


@settings(max_examples=500, deadline=None)
@given(REALS)
def test_e4m3_rounds_to_nearest_even_and_saturates(value):
    assert decode_e4m3(encode_e4m3(torch.tensor([value]))).item() in nearest(
        value, range(256), e4m3
    )


@settings(max_examples=500, deadline=None)
@given(REALS)
def test_fp4_rounds_to_nearest_even_and_saturates(value):
    found = decode_e2m1(encode_e2m1(torch.tensor([value, 0.0])))[0].item()
    assert found in nearest(value, range(16), e2m1)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_fp4_ties(value, rounded):
    assert decode_e2m1(encode_e2m1(torch.tensor([value, -value]))).tolist() == [rounded, -rounded]


@settings(max_examples=300, deadline=None)
@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_scale_is_the_smallest_power_of_two_that_suffices(factor):
    code = int(encode_e8m0_ceil(torch.tensor([factor]))[0])
    assert 2.0 ** (code - 127) >= factor > 2.0 ** (code - 128)


def test_exact_powers_keep_their_scale():
    exponents = range(-126, 128)
    factors = torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32)
    assert encode_e8m0_ceil(factors).tolist() == [exponent + 127 for exponent in exponents]


SHAPES = [(1, 2), (31, 32), (32, 30), (33, 34), (64, 96), (5, 130)]


def reference(stored: StoredTensor) -> torch.Tensor:
    """Value times scale, element by element."""
    n, k = stored.shape
    out = torch.empty(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            if stored.kind == "fp8":
                value = e4m3(int(stored.data.view(torch.uint8)[i, j]))
            else:
                value = e2m1(int(stored.data[i, j // 2]) >> (4 * (j % 2)) & 15)
            code = stored.scale[i // stored.block[0], j // stored.block[1]]
            scale = 2.0 ** (int(code) - 127) if code.dtype == torch.uint8 else float(code)
            out[i, j] = value * scale
    return out


def stored_at_random(kind: str, shape, block, *, float_scale=False) -> StoredTensor:
    generator = torch.Generator().manual_seed(1000 * shape[0] + shape[1])
    columns = shape[1] // 2 if kind == "fp4" else shape[1]
    data = torch.randint(0, 127, (shape[0], columns), dtype=torch.uint8, generator=generator)
    data += 128 * torch.randint(0, 2, data.shape, dtype=torch.uint8, generator=generator)
    grid = scale_shape(shape, block)
    scale = torch.randint(100, 140, grid, dtype=torch.uint8, generator=generator)
    if float_scale:
        scale = torch.rand(grid, generator=generator)
    data = data.view(torch.float8_e4m3fn) if kind == "fp8" else data
    return StoredTensor("w", kind, shape, data, scale, block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "block"), [("fp8", (32, 32)), ("fp8", (1, 32)), ("fp4", (1, 32)), ("fp8", (16, 64))]
)
def test_restored_values_are_exact_ragged_blocks_included(kind, block, shape):
    stored = stored_at_random(kind, shape, block)
    wanted = reference(stored)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize(stored, dtype)
        assert found.dtype == dtype
        assert torch.equal(found.double(), wanted)
    out = torch.full(shape, torch.nan)
    assert dequantize(stored, out=out) is out
    assert torch.equal(out.double(), wanted)


def test_float_scales_are_factors():
    stored = stored_at_random("fp8", (40, 70), (32, 32), float_scale=True)
    assert torch.equal(dequantize(stored), reference(stored).float())


def test_large_matrices_are_restored_piece_by_piece(monkeypatch):
    monkeypatch.setattr("deepinfer.checkpoint.formats._CHUNK_ELEMENTS", 200)
    for kind, block in (("fp8", (32, 32)), ("fp4", (1, 32))):
        stored = stored_at_random(kind, (75, 64), block)
        assert torch.equal(dequantize(stored).double(), reference(stored))


def test_plain_tensors_are_handed_on():
    data = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    stored = StoredTensor("w", "plain", (3, 5), data, None, None)
    assert dequantize(stored) is data
    assert dequantize(stored, torch.bfloat16).dtype == torch.bfloat16
    out = torch.empty(3, 5)
    assert dequantize(stored, out=out) is out
    assert torch.equal(out, data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_quantised_values_are_as_near_as_their_format_allows(kind, shape):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(shape, generator=generator) * 0.05
    w[0] = 0.0
    block = (32, 32) if kind == "fp8" else (1, 32)
    data, scale = quantize_fp8(w) if kind == "fp8" else quantize_fp4(w)
    stored = StoredTensor("w", kind, shape, data, scale, block)
    factors = reference(StoredTensor("w", "fp8", shape, _ones(shape), scale, block))
    limit, relative, smallest = (448, 2**-4, 2.0**-10) if kind == "fp8" else (6, 2**-2, 0.25)
    error = (dequantize(stored).double() - w.double()).abs()
    assert bool((w.double().abs() <= limit * factors).all()), "a value would saturate"
    assert bool((error <= torch.maximum(w.double().abs() * relative, smallest * factors)).all())
    again = quantize_fp8(dequantize(stored)) if kind == "fp8" else quantize_fp4(dequantize(stored))
    restored = dequantize(StoredTensor("w", kind, shape, *again, block))
    assert torch.equal(restored, dequantize(stored))


def _ones(shape) -> torch.Tensor:
    return torch.ones(shape).to(torch.float8_e4m3fn)


def test_rows_of_a_table():
    stored = stored_at_random("fp8", (50, 40), (1, 32))
    rows = torch.tensor([7, 0, 49, 7])
    part = stored.rows(rows)
    assert part.shape == (4, 40)
    assert torch.equal(dequantize(part), dequantize(stored)[rows])
