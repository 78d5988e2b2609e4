"""Integer products: quantized weights with 8-bit activations."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from support.backends import BACKENDS, by
from support.products import multiply_together, random
from verbatim import kernels
from verbatim.kernels.packing import WeightPacking
from verbatim.model.products import linear
from verbatim.quantization.formats import GROUP_SIZES, Quantization
from verbatim.quantization.integers import activation_codes, integer_linear
from verbatim.quantization.matrix import (
    QuantizedMatrix,
    interleave,
    pack,
    plain_rows,
    unpack,
    unpack_selected,
)

KINDS = [Quantization(bits, size, activation_bits=8) for bits in (8, 4) for size in GROUP_SIZES]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=[k.name for k in KINDS])
SHAPES = [(1, 1), (5, 7), (33, 60), (64, 128), (70, 333), (100, 1000)]  # N, K


def rows_of_all_kinds(count: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Ordinary rows, and among the first eight a zero one, a NaN, an infinity, huge and tiny ones."""
    x = random(count, depth, dtype=dtype, seed=1) * 10
    x[2] = 0
    x[3, depth // 2] = torch.nan
    x[4, 0] = -torch.inf
    x[5] *= 1e30
    x[6] *= 1e-33
    return x


def laid_out(weight: Tensor, kind: Quantization) -> tuple[Tensor, WeightPacking]:
    packing = kind.packing(weight.shape, weight.dtype)
    return pack(weight, packing), packing


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype and bits are the same, where every NaN counts as equal."""
    whole = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan()
    a, b = a.masked_fill(nan, 0), b.masked_fill(b.isnan() & nan, 0)
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


# ---- Layout ----


@EVERY_KIND
def test_interleaved_layout_keeps_every_weight(kind: Quantization) -> None:
    for shape in SHAPES:
        weight = random(*shape)
        packing = kind.packing(shape, weight.dtype)
        packed = pack(weight, packing.plain)
        data = by("none", interleave)(packed, packing)
        assert data.shape == (packing.nbytes,) and torch.equal(pack(weight, packing), data)
        assert all(torch.equal(by(b, interleave)(packed, packing), data) for b in BACKENDS)
        assert torch.equal(plain_rows(data, packing).flatten(), packed)
        assert torch.equal(unpack(data, packing), unpack(packed, packing.plain))
        some = torch.tensor([0, shape[0] - 1, 0, shape[0] // 2])
        assert torch.equal(
            unpack_selected(data, packing, some), unpack(packed, packing.plain)[some]
        )


def test_interleaved_layout_of_even_shapes_has_no_padding() -> None:
    for kind in KINDS:
        packing = kind.packing((64, 256), torch.bfloat16)
        assert packing.nbytes == packing.plain.nbytes


# ---- Definition ----


def test_integer_linear_equals_exact_arithmetic_with_float32_rounding() -> None:
    """Compared with exact fractions, rounded only once in each step."""

    def near(x: Fraction) -> Fraction:
        return Fraction(float(torch.tensor(float(x), dtype=torch.float64).float()))

    kind = KINDS[3]
    weight, x = random(3, 70), random(2, 70, seed=1)
    data, laid = laid_out(weight, kind)
    packed = pack(weight, laid.plain)
    out = integer_linear(x, QuantizedMatrix(data, laid), None, True)
    for n in range(3):
        row = packed.view(3, -1)[n]
        heads = row[35:].clone().view(torch.bfloat16).view(-1, 2).tolist()
        # 35 bytes of codes: of two whole groups of 32 and one of 6, halves of each side by side
        codes = [c for a, b in ((0, 16), (16, 32), (32, 35)) for c in halves(row[a:b].tolist())]
        for r in range(2):
            total = Fraction(0)
            for g in range(3):
                part = [Fraction(v) for v in x[r, 32 * g : 32 * g + 32].tolist()]
                peak = max(map(abs, part))
                inverse = near(Fraction(127) / peak)
                own = [round(near(v * inverse)) for v in part]
                dot = sum(a * b for a, b in zip(own, codes[32 * g :], strict=False))
                scale, low = map(Fraction, heads[g])
                both = near(near(scale * dot) + near(low * sum(own)))
                total = near(total + near(near(peak / 127) * both))
            assert float(total) == float(out[r, n])


def halves(codes: list[int]) -> list[int]:
    return [c & 15 for c in codes] + [c >> 4 for c in codes]


def test_activation_codes_scales_and_sums_of_rows() -> None:
    x = torch.tensor([[127, -2.5, 3.5, 0.5, 1e-40], [0, 1e-31, 0, 0, 0], [torch.nan, 1, 2, 3, 4]])
    codes, scales, sums = activation_codes(x, 64)
    assert codes.tolist() == [[127, -2, 4, 0, 0], [0] * 5, [0] * 5]
    assert scales[:2].tolist() == [[1.0], [0.0]] and scales[2].isnan().all()
    assert sums.tolist() == [[129.0], [0.0], [0.0]]


@EVERY_KIND
def test_integer_linear_is_close_to_the_float_product(kind: Quantization) -> None:
    weight, x = torch.randn(96, 512), torch.randn(8, 512)
    data, laid = laid_out(weight, kind)
    exact = x @ unpack(data, laid).t()
    error = (linear(x, QuantizedMatrix(data, laid)) - exact).norm() / exact.norm()
    assert 0.001 < error < 0.01  # half of 1/127 of a maximum of about three standard deviations


# ---- The same bits ----


@EVERY_KIND
def test_every_backend_is_bit_identical_to_the_definition(backend: str, kind: Quantization) -> None:
    for (num_out, depth), dtype in zip(SHAPES, [torch.float32, torch.bfloat16] * 3, strict=True):
        data, laid = laid_out(random(num_out, depth, dtype=dtype), kind)
        x = rows_of_all_kinds(20, depth, dtype)
        for bias in (None, random(num_out, dtype=dtype, seed=2)):
            for wide in (False, True):
                expected = integer_linear(x, QuantizedMatrix(data, laid), bias, wide)
                assert not expected[7:].isnan().any() and expected[3:5].isnan().all()
                out = linear(x, QuantizedMatrix(data, laid), bias, float32=wide)
                assert bit_equal(out, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_row_is_bit_identical_in_any_batch(backend: str, bits: int) -> None:
    depth = 1000 if backend == "none" else 2500  # split along K if there are many rows
    data, laid = laid_out(random(70, depth, dtype=torch.bfloat16), Quantization(bits, 64, 8, 8))
    x = rows_of_all_kinds(150, depth, torch.bfloat16)
    bias = random(70, dtype=torch.bfloat16, seed=3)
    expected = linear(x, QuantizedMatrix(data, laid), bias)
    for count in [*range(1, 20), 64, 70, 129, 149]:
        for start in (0, 150 - count):
            some = x[start : start + count]
            out = linear(some, QuantizedMatrix(data, laid), bias)
            assert bit_equal(out, expected[start : start + count]), count


def test_threads_and_strides_do_not_change_the_bits() -> None:
    data, laid = laid_out(random(2000, 700), KINDS[1])
    x = random(300, 700, seed=1)
    wide = torch.zeros(300, 900)
    wide[:, :700] = x
    expected = linear(x[:7], QuantizedMatrix(data, laid))
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        out = linear(wide[:, :700], QuantizedMatrix(data, laid))
        assert bit_equal(out[:7], expected)
        assert bit_equal(linear(x.t().contiguous().t(), QuantizedMatrix(data, laid)), out)


@pytest.mark.skipif(not kernels.available(), reason="no kernels were built")
def test_matrices_of_mixed_kinds_in_one_call_give_the_same_bits() -> None:
    """The activations of a matrix that is not packed are not quantized."""
    x = random(9, 192, dtype=torch.bfloat16)
    plain = random(24, 192, dtype=torch.bfloat16, seed=1)
    weights: list[Tensor | QuantizedMatrix] = [QuantizedMatrix(*laid_out(plain, KINDS[1])), plain]
    weights += [QuantizedMatrix(*laid_out(plain, kind)) for kind in (KINDS[4], KINDS[2], KINDS[2])]
    packing = Quantization(4).packing((24, 192), plain.dtype)
    weights.append(QuantizedMatrix(pack(plain, packing), packing))
    alone = [linear(x, w) for w in weights]
    assert bit_equal(multiply_together(x, weights, [None] * len(weights)), torch.cat(alone, 1))


_SCRIPT = """
import torch
from verbatim.model.products import linear
from verbatim.quantization.formats import Quantization
from verbatim.quantization.matrix import QuantizedMatrix, pack

torch.manual_seed(0)
x = torch.randn(20, 333)
for bits in (8, 4):
    packing = Quantization(bits, 64, activation_bits=8).packing((70, 333), x.dtype)
    matrix = QuantizedMatrix(pack(torch.randn(70, 333), packing), packing)
    print(linear(x, matrix).view(torch.int32).tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in kernels.available(), reason="the processor has no AVX-512")
def test_vnni_and_its_emulation_have_the_same_bits() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "VERBATIM_KERNELS": "avx512", **more},
            check=True,
            capture_output=True,
        ).stdout
        for more in ({}, {"VERBATIM_NO_VNNI": "1"})
    ]
    assert outputs[0] and outputs[0] == outputs[1]
