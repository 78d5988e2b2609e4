"""Matrix products: accurate within their dtype, and bit-identical for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from support.backends import by
from support.products import multiply_together
from verbatim import kernels
from verbatim.errors import NotSupported
from verbatim.kernels.packing import BLOCK, BLOCKS, Encoding, Packing, WeightPacking
from verbatim.model import products
from verbatim.model.products import (
    in_tiles,
    is_position_invariant,
    linear,
    matmul,
    probe_report,
    threads,
)
from verbatim.quantization.formats import GROUP_SIZES
from verbatim.quantization.matrix import QuantizedMatrix, pack, unpack

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (3, 17), (17, 3), (33, 65), (65, 33), (60, 100), (100, 60), (1, 1000), (1000, 33)]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=noise).to(dtype)


def assert_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), weight.double().abs())  # rounding errors are relative to it
    if bias is not None:
        size = size + bias.double().abs()
    assert out.shape == exact.shape
    assert ((out.double() - exact).abs() <= TOLERANCE[x.dtype] * size).all()


def differing_rows(product: Callable[[Tensor], Tensor], x: Tensor, counts: list[int]) -> list[int]:
    """The row counts at which some row's bits differ from those of that row alone."""
    alone = torch.cat([product(row) for row in x.split(1)])
    differing = []
    for count in counts:
        start = (x.shape[0] - count) // 2  # not the first rows
        if not torch.equal(product(x[start : start + count]), alone[start : start + count]):
            differing.append(count)
    return differing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_close_to_float64(backend: str, dtype: torch.dtype) -> None:
    # Without kernels, each shape is probed.
    for num_out, depth in SHAPES[:4] if backend == "none" else SHAPES:
        x = rand(7, depth, dtype=dtype)
        weight, bias = rand(num_out, depth, dtype=dtype), rand(num_out, dtype=dtype)
        assert_close(linear(x, weight), x, weight)
        assert_close(linear(x, weight, bias), x, weight, bias)
        stored = weight.t().contiguous()  # [K, N]
        assert_close(matmul(x, stored), x, weight)
        assert_close(linear(x, stored.t(), bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_change_the_bits(backend: str, dtype: torch.dtype) -> None:
    x, weight, bias = rand(9, 65, dtype=dtype), rand(33, 65, dtype=dtype), rand(33, dtype=dtype)
    expected = linear(x, weight, bias)
    wide_x = torch.full((9, 100), torch.nan, dtype=dtype)
    wide_x[:, 3:68] = x
    wide_weight = torch.full((33, 80), torch.nan, dtype=dtype)
    wide_weight[:, 5:70] = weight
    scattered = torch.full((33, 130), torch.nan, dtype=dtype)
    scattered[:, ::2] = weight
    every_other = torch.full((9, 130), torch.nan, dtype=dtype)
    every_other[:, ::2] = x
    for rows in (wide_x[:, 3:68], every_other[:, ::2], x.t().contiguous().t()):
        assert torch.equal(linear(rows, weight, bias), expected)
    for matrix in (wide_weight[:, 5:70], scattered[:, ::2]):
        assert torch.equal(linear(x, matrix, bias), expected)
    cube = x.view(3, 3, 65)
    assert torch.equal(linear(cube, weight, bias), expected.view(3, 3, 33))
    assert torch.equal(linear(x[0], weight, bias), expected[0])
    stored = weight.t().contiguous()
    wide_stored = torch.full((65, 50), torch.nan, dtype=dtype)
    wide_stored[:, 7:40] = stored
    assert torch.equal(matmul(x, wide_stored[:, 7:40]), matmul(x, stored))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", kernels.available(), indirect=True)
def test_row_major_and_column_major_weights_give_the_same_bits(
    backend: str, dtype: torch.dtype
) -> None:
    # Rows of 1024 numbers lie 4096 or 2048 bytes apart, which changes how they are read.
    shapes = ((1, 1), (5, 33), (70, 100), (33, 1024), (200, 70), (130, 4300), (9, 2048))
    for num_out, depth in shapes:
        weight, bias = rand(num_out, depth, dtype=dtype), rand(num_out, dtype=dtype)
        stored = weight.t().contiguous()
        for count in (1, 2, 5, 7, 8, 9, 20, 270):
            x = rand(count, depth, dtype=dtype)
            expected = linear(x, weight, bias)
            with threads(2 if count == 20 else 1):
                assert torch.equal(linear(x, stored.t(), bias), expected), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_empty_batched_and_nan_inputs(backend: str, dtype: torch.dtype) -> None:
    weight = rand(5, 60, dtype=dtype)
    assert linear(rand(0, 60, dtype=dtype), weight).shape == (0, 5)
    assert linear(rand(2, 0, 60, dtype=dtype), weight).shape == (2, 0, 5)
    no_depth = linear(rand(2, 0, dtype=dtype), rand(5, 0, dtype=dtype))
    assert torch.equal(no_depth, torch.zeros(2, 5, dtype=dtype))
    precise = linear(rand(3, 60, dtype=dtype), weight, float32=True)
    assert precise.dtype is torch.float32
    assert torch.equal(precise.to(dtype), linear(rand(3, 60, dtype=dtype), weight))
    x, cube = rand(3, 2, 60, dtype=dtype).transpose(0, 1), rand(2, 60, 5, dtype=dtype)
    scattered = rand(2, 60, 10, dtype=dtype)[..., ::2]
    for matrices in (cube, cube.mT.contiguous().mT, scattered, cube[:1].expand(2, -1, -1)):
        batched = matmul(x, matrices)
        for rows, matrix, result in zip(x, matrices, batched, strict=True):
            assert torch.equal(result, matmul(rows, matrix))
    x = rand(2, 60, dtype=dtype)
    x[0, 59] = torch.nan
    assert linear(x, weight).isnan().tolist() == [[True] * 5, [False] * 5]


def test_mismatched_shapes_and_unknown_kernels_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\), \(3, 4\)"):
        linear(rand(2, 5), rand(3, 4))
    with pytest.raises(ValueError, match="do not fit"):
        linear(rand(2, 4), rand(3, 4), rand(4))
    with pytest.raises(ValueError, match="do not fit"):
        matmul(rand(2, 4), rand(3, 4, 5))
    with pytest.raises(NotSupported, match="quantum"), kernels.using("quantum"):
        linear(rand(2, 4), rand(3, 4))
    monkeypatch.setattr(
        kernels, "_select", kernels._select.__wrapped__
    )  # not what it returned before
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotSupported, match="TRITON_INTERPRET=1"), kernels.using("triton"):
        linear(rand(2, 4), rand(3, 4))


def test_other_dtypes_are_multiplied_by_torch() -> None:
    x, weight = rand(3, 60).double(), rand(5, 60).double()
    assert torch.allclose(linear(x, weight), F.linear(x, weight), rtol=1e-12)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, weight.float())


def test_tiles_hide_dependence_on_the_number_of_rows() -> None:
    def count_dependent(rows: Tensor) -> Tensor:
        return rows * (1 + rows.shape[0] % 4)

    x = rand(256, 8)
    assert differing_rows(count_dependent, x, [1, 2, 4, 8]) == [2, 4, 8]
    for heights in ((16,), (1,), (32, 8)):
        tiled = partial(in_tiles, heights, count_dependent)
        assert differing_rows(tiled, x, [*range(1, 100)]) == []
        assert is_position_invariant(heights, count_dependent, x)
    assert differing_rows(partial(in_tiles, (7, 2), count_dependent), x, [7]) == [7]
    assert not is_position_invariant((7, 2), count_dependent, x)


def test_probe_detects_dependence_on_position_and_tiles_run_on_one_thread() -> None:
    x = rand(256, 8)

    def by_place(rows: Tensor) -> Tensor:
        return rows + torch.arange(rows.shape[0])[:, None].eq(11)

    def by_threads(rows: Tensor) -> Tensor:
        return rows * torch.get_num_threads()

    with threads(2):
        assert not is_position_invariant((16,), by_place, x)
        assert is_position_invariant((1,), by_place, x)
        assert torch.equal(in_tiles((16,), by_threads, x), x)
        assert torch.get_num_threads() == 2


def test_probe_report_lists_shape_dtype_and_tile_heights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_heights_by_key", {})
    by("none", linear)(rand(3, 100), rand(33, 100))
    ((shape, dtype, heights),) = probe_report()
    assert (shape, dtype) == ((33, 100), torch.float32)
    assert heights in products._CANDIDATES


def test_products_with_kernels_disabled_equal_the_torch_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = rand(3, 100), rand(33, 100)
    expected = by("none", linear)(x, weight)
    monkeypatch.setattr(kernels, "requested", lambda: "none")
    assert torch.equal(linear(x, weight), expected)


# ---- quantized weights ----

KINDS = [Packing(bits, size) for bits in (8, 4) for size in GROUP_SIZES]
OF_CHECKPOINTS = [
    Packing(8, 128, Encoding.ZERO_POINT),
    Packing(8, 64, Encoding.SIGNED),
    *(Packing(8, size, Encoding.FP8) for size in GROUP_SIZES),
    Packing(4, 128, Encoding.ZERO_POINT),
    Packing(4, 64, Encoding.SIGNED),
    Packing(4, 64, Encoding.NF4),
    Packing(4, 128, Encoding.FP4),
    Packing(4, 32, Encoding.MXFP4),
    Packing(8, 32, Encoding.HALF),
    Packing(4, 32, Encoding.HALF),
    Packing(4, 128, Encoding.CENTERED),
    *(Packing(8, 32, encoding) for encoding in BLOCKS),
]


def in_few_bits(weight: Tensor, kind: Packing, columns: bool = False) -> QuantizedMatrix:
    packing = WeightPacking(tuple(weight.shape), weight.dtype, kind, columns)
    return QuantizedMatrix(pack(weight, packing), packing)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", KINDS + OF_CHECKPOINTS, ids=lambda k: f"{k.bits}-{k.group}-{k.encoding.name}"
)
def test_packed_product_is_bit_identical_to_the_unpacked_one(
    backend: str, dtype: torch.dtype, kind: Packing
) -> None:
    for num_out, depth in ((5, 33), (70, 100), (33, 1000), (140, 256)):
        depth = -(-depth // BLOCK) * BLOCK if kind.encoding in BLOCKS else depth
        wide = rand(num_out, depth)
        wide[: num_out // 3] *= 1e-37  # numbers that the quick rounding would lose
        x, bias = rand(70, depth, dtype=dtype), rand(num_out, dtype=dtype)
        packed = in_few_bits(wide.to(dtype), kind)
        weight = by("none", unpack)(packed.data, packed.packing)
        for float32 in (False, True):
            expected = linear(x, weight, bias, float32=float32)
            for count in (1, 70) if backend == "none" else (1, 2, 5, 6, 7, 8, 9, 13, 33, 70):
                out = linear(x[-count:], packed, bias, float32=float32)
                assert torch.equal(out, expected[-count:]), count


LAYOUTS: dict[str, Callable[[Tensor], Tensor | QuantizedMatrix]] = {
    "N,K": lambda weight: weight,
    "K,N": lambda weight: weight.t().contiguous().t(),
    "int8": lambda weight: in_few_bits(weight, KINDS[1]),
    "int4": lambda weight: in_few_bits(weight, KINDS[4]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, pytest.param("N,K of a real model", marks=pytest.mark.slow)]
)
def test_numbers_of_rows_and_threads_do_not_change_the_bits(
    backend: str, dtype: torch.dtype, layout: str
) -> None:
    shapes = ((33, 100), (1000, 100), (65, 3001))
    if layout == "N,K of a real model":
        layout, shapes = "N,K", ((3072, 1024),)
    for num_out, depth in shapes:
        if depth > 100 and backend == "none":  # then each shape is probed
            continue
        x, bias = rand(300, depth, dtype=dtype), rand(num_out, dtype=dtype)
        weight = LAYOUTS[layout](rand(num_out, depth, dtype=dtype))
        expected = linear(x, weight, bias)
        every = range(1, 301, 1 if num_out == 33 and backend != "none" else 37)
        for num_threads in (1, 2) if backend == "none" else (1, 2, 3, 7):
            with threads(num_threads):
                for count in every if num_threads == 1 else (1, 5, 8, 16, 33, 70):
                    start = (300 - count) // (1 + count % 2)
                    some = linear(x[start : start + count], weight, bias)
                    assert torch.equal(some, expected[start : start + count]), (count, num_threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", kernels.available(), indirect=True)
def test_several_matrices_in_one_call_give_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    wide, bias = rand(90, 200, dtype=dtype), rand(65, dtype=dtype)
    weights = [
        rand(65, 100, dtype=dtype),
        wide[:, 50:150],
        in_few_bits(rand(33, 100, dtype=dtype), KINDS[0]),
        in_few_bits(rand(300, 100, dtype=dtype), KINDS[4]),
    ]
    biases = [bias, None, None, None]
    for count in (1, 4, 20):
        x = rand(count, 100, dtype=dtype)
        each = zip(weights, biases, strict=True)
        alone = [linear(x, w, b) for w, b in each]
        with threads(2):
            together = multiply_together(x, weights, biases)
        assert torch.equal(together, torch.cat(alone, -1))


def test_packed_column_major_weight_equals_its_unpacked_product(backend: str) -> None:
    columns, x = in_few_bits(rand(100, 40), KINDS[3], columns=True), rand(3, 100)
    out = linear(x, columns)
    expected = matmul(x, unpack(columns.data, columns.packing))
    assert torch.equal(out, expected)


def test_packed_weight_of_mismatched_shape_is_rejected() -> None:
    packed = in_few_bits(rand(6, 60), KINDS[0])
    with pytest.raises(ValueError, match=r"\(2, 61\), \(6, 60\)"):
        linear(rand(2, 61), packed)
    with pytest.raises(ValueError, match=r"\(5,\) do not fit"):
        linear(rand(2, 60), packed, rand(5))
