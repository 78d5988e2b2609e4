"""Integer products: quantized weights and activations in 8 bits."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from support.backends import BACKENDS, by
from support.products import multiply_together
from verbatim import kernels
from verbatim.model.integers import activation_codes, integer_linear
from verbatim.model.products import Packed, linear
from verbatim.model.quantization import GROUP_SIZES, Quantization
from verbatim.model.quantize import interleave, pack, plain_rows, unpack, unpack_rows
from verbatim.model.weight_packing import WeightPacking

KINDS = [Quantization(bits, size, activation_bits=8) for bits in (8, 4) for size in GROUP_SIZES]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=[k.name for k in KINDS])
SHAPES = [(1, 1), (5, 7), (33, 60), (64, 128), (70, 333), (100, 1000)]  # N, K


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape, generator=generator) ** 4
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


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
    packing = WeightPacking(tuple(weight.shape), weight.dtype, kind)
    return pack(weight, packing), packing


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """But for the bits of a NaN."""
    whole = {4: torch.int32, 2: torch.int16}[a.element_size()]
    nan = a.isnan()
    a, b = a.masked_fill(nan, 0), b.masked_fill(b.isnan() & nan, 0)
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


# ---- How it lies ----


@EVERY_KIND
def test_laying_a_matrix_out_changes_no_number(kind: Quantization) -> None:
    for shape in SHAPES:
        weight = random(*shape)
        packing = WeightPacking(shape, weight.dtype, kind)
        packed = pack(weight, packing.plain)
        data = by("none", interleave)(packed, packing)
        assert data.shape == (packing.nbytes,) and torch.equal(pack(weight, packing), data)
        assert all(torch.equal(by(b, interleave)(packed, packing), data) for b in BACKENDS)
        assert torch.equal(plain_rows(data, packing).flatten(), packed)
        assert torch.equal(unpack(data, packing), unpack(packed, packing.plain))
        some = torch.tensor([0, shape[0] - 1, 0, shape[0] // 2])
        assert torch.equal(unpack_rows(data, packing, some), unpack(packed, packing.plain)[some])


def test_it_takes_the_bytes_of_rows_where_all_comes_out_even() -> None:
    for kind in KINDS:
        packing = WeightPacking((64, 256), torch.bfloat16, kind)
        assert packing.nbytes == packing.plain.nbytes


# ---- What it is ----


def test_the_definition_in_whole_numbers() -> None:
    """Against arithmetic without any rounding but the one of each step."""

    def near(x: Fraction) -> Fraction:
        return Fraction(float(torch.tensor(float(x), dtype=torch.float64).float()))

    kind = KINDS[3]
    weight, x = random(3, 70), random(2, 70, seed=1)
    data, laid = laid_out(weight, kind)
    packed = pack(weight, laid.plain)
    made = integer_linear(x, data, laid, None, True)
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
                by = near(Fraction(127) / peak)
                own = [round(near(v * by)) for v in part]
                dot = sum(a * b for a, b in zip(own, codes[32 * g :], strict=False))
                scale, low = map(Fraction, heads[g])
                both = near(near(scale * dot) + near(low * sum(own)))
                total = near(total + near(near(peak / 127) * both))
            assert float(total) == float(made[r, n])


def halves(codes: list[int]) -> list[int]:
    return [c & 15 for c in codes] + [c >> 4 for c in codes]


def test_codes_of_a_row() -> None:
    x = torch.tensor([[127, -2.5, 3.5, 0.5, 1e-40], [0, 1e-31, 0, 0, 0], [torch.nan, 1, 2, 3, 4]])
    codes, scales, sums = activation_codes(x, 64)
    assert codes.tolist() == [[127, -2, 4, 0, 0], [0] * 5, [0] * 5]
    assert scales[:2].tolist() == [[1.0], [0.0]] and scales[2].isnan().all()
    assert sums.tolist() == [[129.0], [0.0], [0.0]]


@EVERY_KIND
def test_it_is_near_the_product_of_numbers(kind: Quantization) -> None:
    weight, x = torch.randn(96, 512), torch.randn(8, 512)
    data, laid = laid_out(weight, kind)
    exact = x @ unpack(data, laid).t()
    error = (linear(x, Packed(data, laid)) - exact).norm() / exact.norm()
    assert 0.001 < error < 0.01  # half a step of 127 to a largest of three deviations or so


# ---- The same bits ----


@EVERY_KIND
def test_every_backend_has_the_bits_of_the_definition(backend: str, kind: Quantization) -> None:
    for (num_out, depth), dtype in zip(SHAPES, [torch.float32, torch.bfloat16] * 3, strict=True):
        data, laid = laid_out(random(num_out, depth, dtype=dtype), kind)
        x = rows_of_all_kinds(20, depth, dtype)
        for bias in (None, random(num_out, dtype=dtype, seed=2)):
            for wide in (False, True):
                expected = integer_linear(x, data, laid, bias, wide)
                assert not expected[7:].isnan().any() and expected[3:5].isnan().all()
                made = linear(x, Packed(data, laid), bias, float32=wide)
                assert bit_equal(made, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_has_its_bits_in_any_company(backend: str, bits: int) -> None:
    depth = 1000 if backend == "none" else 2500  # cut along K where there are many rows
    data, laid = laid_out(random(70, depth, dtype=torch.bfloat16), Quantization(bits, 64, 8, 8))
    x = rows_of_all_kinds(150, depth, torch.bfloat16)
    bias = random(70, dtype=torch.bfloat16, seed=3)
    expected = linear(x, Packed(data, laid), bias)
    for count in [*range(1, 20), 64, 70, 129, 149]:
        for start in (0, 150 - count):
            some = x[start : start + count]
            made = linear(some, Packed(data, laid), bias)
            assert bit_equal(made, expected[start : start + count]), count


def test_neither_threads_nor_strides_show() -> None:
    data, laid = laid_out(random(2000, 700), KINDS[1])
    x = random(300, 700, seed=1)
    wide = torch.zeros(300, 900)
    wide[:, :700] = x
    expected = linear(x[:7], Packed(data, laid))
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        made = linear(wide[:, :700], Packed(data, laid))
        assert bit_equal(made[:7], expected)
        assert bit_equal(linear(x.t().contiguous().t(), Packed(data, laid)), made)


@pytest.mark.skipif(not kernels.available(), reason="no kernels were built")
def test_side_by_side_with_matrices_of_other_kinds() -> None:
    """A matrix that is too small to be packed keeps its activations as they are."""
    x = random(9, 192, dtype=torch.bfloat16)
    plain = random(24, 192, dtype=torch.bfloat16, seed=1)
    weights: list[Tensor | Packed] = [Packed(*laid_out(plain, KINDS[1])), plain]
    weights += [Packed(*laid_out(plain, kind)) for kind in (KINDS[4], KINDS[2], KINDS[2])]
    packing = WeightPacking((24, 192), plain.dtype, Quantization(4))
    weights.append(Packed(pack(plain, packing), packing))
    alone = [linear(x, w) for w in weights]
    assert bit_equal(multiply_together(x, weights, [None] * len(weights)), torch.cat(alone, 1))


_SCRIPT = """
import torch
from verbatim.model.products import Packed, linear
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import pack
from verbatim.model.weight_packing import WeightPacking

torch.manual_seed(0)
x = torch.randn(20, 333)
for bits in (8, 4):
    packing = WeightPacking((70, 333), x.dtype, Quantization(bits, 64, activation_bits=8))
    print(linear(x, Packed(pack(torch.randn(70, 333), packing), packing)).view(torch.int32).tolist())
"""


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
