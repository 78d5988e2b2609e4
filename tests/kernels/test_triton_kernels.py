"""Triton kernels: compared with their references, and bit-identical for a row in any batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from support import attention_cases as cases
from support.attention_cases import Shape, hard_rows, story
from support.backends import by
from support.pairwise import slow_but
from support.triton_here import BF16, DEVICE, DTYPES, F16, F32, INTERPRETED, noise
from verbatim.batch import SamplePlan, SampleRow
from verbatim.kernels.options import NormKind
from verbatim.kernels.packing import BLOCKS, Encoding, Packing, WeightPacking
from verbatim.kernels.triton import attention, linear, norm, rope, sampling
from verbatim.kv import attention as kv
from verbatim.model import norms, products
from verbatim.model.differential import bit_equal
from verbatim.params import SamplingParams
from verbatim.quantization.formats import KV_PACKINGS, Quantization
from verbatim.quantization.matrix import QuantizedMatrix, pack, unpack, unpack_selected
from verbatim.quantization.rows import pack_rows, unpack_rows
from verbatim.sampling.fast import gpu_sample_rows
from verbatim.sampling.noise import gumbel_row
from verbatim.sampling.sampler import sample_rows

SMALL = [Shape(4, 2, 20, 12, 5), Shape(3, 3, 16, 16, 8), Shape(20, 1, 8, 8, 16)]
WIDE = Shape(2, 1, 70, 96, 5)  # several groups, of which the last is short


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small splits and tiles, so that short contexts have many."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "KEYS", 16)
    if INTERPRETED:
        monkeypatch.setattr("verbatim.kernels.requested", lambda: "triton")


attend = partial(cases.attend, "triton")


@pytest.mark.parametrize(
    ("dtypes", "shape", "kind"),
    slow_but(
        list(itertools.product(("float32", "bfloat16"), SMALL[:1], ("plain", "all"))),
        itertools.product(
            ("float32", "bfloat16", "float32 over bfloat16", "float16"), SMALL, cases.OPTIONS
        ),
    ),
    ids=str,
)
def test_attention_agrees_with_dense_float64(dtypes: str, shape: Shape, kind: str) -> None:
    q_dtype, kv_dtype = (DTYPES[dtypes.split()[i]] for i in (0, -1))
    what = story(shape, 70, q_dtype=q_dtype, kv_dtype=kv_dtype)
    opts = cases.options(kind, shape, window=20)
    (out,) = attend(opts, shape.block_size, (what, 0, 70))
    if F16 in (q_dtype, kv_dtype):
        assert torch.allclose(out.double(), cases.dense(what, opts), rtol=1e-2, atol=2e-3)
    else:
        assert cases.excess(out, what, opts, "triton") < 5e-6


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "all"])
def test_attention_of_a_row_is_bit_identical_in_any_batch(kind: str) -> None:
    shape = SMALL[0]
    one, other = (story(shape, 40, seed, BF16, BF16) for seed in (0, 1))
    opts = cases.options(kind, shape, window=25)
    (whole,) = attend(opts, shape.block_size, (one, 0, 40))
    assert bit_equal(attend(opts, shape.block_size, (one, 30, 34))[0], whole[30:34])
    beside = attend(
        opts, shape.block_size, (other, 3, 20), (one, 38, 40), (other, 8, 9), (one, 31, 32), seed=7
    )
    assert bit_equal(beside[1], whole[38:])
    assert bit_equal(beside[3], whole[31:32])


@pytest.mark.parametrize("packing", KV_PACKINGS.values(), ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    slow_but([("bfloat16", WIDE)], itertools.product(("float32", "bfloat16"), [*SMALL, WIDE])),
    ids=str,
)
def test_attention_to_quantized_kv_is_bit_identical_to_that_to_unpacked_kv(
    dtype: str, shape: Shape, packing: Packing
) -> None:
    what = story(shape, 40, q_dtype=DTYPES[dtype], kv_dtype=DTYPES[dtype])
    rows = (unpack_rows(pack_rows(x, packing), x.shape[2], packing) for x in (what.k, what.v))
    k, v = (x.to(what.q.dtype) for x in rows)
    opts = cases.options("all", shape, window=25)
    (out,) = attend(opts, shape.block_size, (what, 30, 40), packing=packing)
    assert bit_equal(out, attend(opts, shape.block_size, (replace(what, k=k, v=v), 30, 40))[0])
    assert bit_equal(attend(opts, shape.block_size, (what, 37, 38), packing=packing)[0], out[7:8])


@pytest.mark.slow
def test_number_of_splits_per_program_does_not_change_the_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = SMALL[0]
    what = story(shape, 200)
    opts = cases.options("sinks", shape)
    rows = []
    for programs in (0, *range(4, 64, 8), 1024):  # all splits at once, or one each
        monkeypatch.setattr(attention, "_PROGRAMS", programs)
        rows.append(attend(opts, shape.block_size, (what, 190, 200))[0])
    assert all(bit_equal(rows[0], found) for found in rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tile_height_that_gives_other_bits_is_not_used(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heights() -> list[int]:
        return [linear.tile_for(rows, DTYPES[dtype], DEVICE).rows for rows in (1, 33, 400)]

    assert heights() == [tile.rows for tile in linear.TILES]
    multiply = linear.multiply

    def rounded_otherwise(*args: Any, **packing: Any) -> None:
        multiply(*args, **packing)
        if args[4] == linear.TILES[0]:
            args[3].mul_(1.0 + 2.0**-20)

    monkeypatch.setattr(linear, "multiply", rounded_otherwise)
    linear._equal_tiles.cache_clear()
    assert heights() == [linear.TILES[i].rows for i in (1, 1, 2)]
    linear._equal_tiles.cache_clear()


@pytest.mark.parametrize("counts", [[3, 0, 70, 1, 0, 6], [0, 0, 0, 0, 0, 2], [0] * 6])
@pytest.mark.parametrize("by_columns", [False, True])
def test_linear_by_expert_is_bit_identical_to_linear_of_each_expert(
    counts: list[int], by_columns: bool
) -> None:
    rows, bias = noise(sum(counts) + 4, 40, dtype=BF16), noise(6, 20, dtype=BF16, seed=1)
    weight = noise(6, 20, 40, dtype=BF16, seed=2)
    if by_columns:
        weight = weight.mT.contiguous().mT
    starts = torch.tensor([0, *itertools.accumulate(counts)], device=DEVICE)
    found = linear.linear_by_expert(rows, weight, bias, starts)
    for expert, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        want = linear.linear(rows[first:last], weight[expert], bias[expert])
        assert bit_equal(found[first:last], want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_linear_is_accurate_and_bit_identical_for_a_row_in_any_batch(dtype: str) -> None:
    x, weight = (noise(n, 75, dtype=DTYPES[dtype], seed=n) for n in (260, 37))
    bias = noise(37, dtype=DTYPES[dtype], seed=3)
    out = linear.linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(out.double(), want, rtol=2.0**-7 if x.itemsize == 2 else 1e-5, atol=1e-3)
    for first, last in ((0, 1), (69, 70), (63, 66), (5, 75)):
        assert bit_equal(linear.linear(x[first:last], weight, bias), out[first:last])
    beside = torch.cat([noise(5, 75, dtype=DTYPES[dtype], seed=9), x[:3]])
    assert bit_equal(linear.linear(beside, weight, bias)[5:], out[:3])
    column_major = weight.T.contiguous().T  # [N, K], stored as [K, N]
    assert bit_equal(linear.linear(x[:2], column_major, bias), out[:2])
    assert linear.linear(x[:1], weight, float32=True).dtype == F32
    assert linear.linear(x[None, :0], weight).shape == (1, 0, 37)


ENCODINGS = [(e, 8 if e is Encoding.FP8 else 4) for e in Encoding]
ENCODINGS += [(e, 8) for e in list(Encoding)[:3]]


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float32"]))
@pytest.mark.parametrize(
    ("encoding", "bits"), slow_but([(Encoding.AFFINE, 4), (Encoding.ZERO_POINT, 8)], ENCODINGS)
)
def test_quantized_products_are_bit_identical_to_those_of_decoded_weights(
    encoding: Encoding, bits: int, dtype: str
) -> None:
    for depth, group in [(512, 32)] if encoding in BLOCKS else [(75, 32), (288, 96), (128, 64)]:
        weight = noise(37, depth, dtype=DTYPES[dtype]).cpu()
        packing = WeightPacking((37, depth), weight.dtype, Packing(bits, group, encoding))
        data = pack(weight, packing)
        whole = by("none", unpack)(data, packing).to(DEVICE)
        x, bias = noise(20, depth, dtype=weight.dtype), noise(37, dtype=weight.dtype)
        expected = linear.linear(x, whole, bias)
        rows = torch.tensor([36, 0, 5, 5], device=DEVICE)
        unaligned = torch.cat([data[:3], data]).to(DEVICE)[3:]
        for bytes_ in (data.to(DEVICE), unaligned):
            matrix = QuantizedMatrix(bytes_, packing)
            assert bit_equal(products.linear(x[:3], matrix, bias), expected[:3])
            assert bytes_ is unaligned or bit_equal(products.linear(x, matrix, bias), expected)
            assert bit_equal(unpack_selected(bytes_, packing, rows), whole[rows])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dtype", "group", "depth"), [("bfloat16", 32, 75), ("float32", 128, 200)])
def test_integer_products_are_bit_identical_to_the_cpu(
    dtype: str, group: int, depth: int, bits: int
) -> None:
    packing = Quantization(bits, group, activation_bits=8).packing((37, depth), DTYPES[dtype])
    data = pack(noise(37, depth, dtype=packing.dtype).cpu(), packing)
    x, bias = noise(70, depth, dtype=packing.dtype), noise(37, dtype=packing.dtype)
    x[1] *= 1e-38
    x[2, 3], x[3, 70], x[4] = torch.nan, torch.inf, 0
    exact = by("none", products.linear)(
        x.cpu(), QuantizedMatrix(data, packing), bias.cpu(), float32=True
    )
    weight, rows = QuantizedMatrix(data.to(DEVICE), packing), torch.tensor([36, 0], device=DEVICE)
    for some in (slice(None), slice(0, 1), slice(60, 70)):
        found = products.linear(x[some], weight, bias, float32=True).cpu()
        assert torch.equal(found.isnan(), exact[some].isnan())  # a NaN may have any bits
        assert bit_equal(found.nan_to_num(0), exact[some].nan_to_num(0))
    assert exact[2:4].isnan().all() and exact[60:].isfinite().all()
    assert bit_equal(
        unpack_selected(weight.data, packing, rows).cpu(), unpack(data, packing)[rows.cpu()]
    )


@pytest.mark.parametrize("kind", [*NormKind][1 : NormKind.CENTERED], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_kernels_agree_with_the_formula(dtype: str, kind: NormKind) -> None:
    x, more = (noise(5, 100, dtype=DTYPES[dtype], seed=seed) for seed in (0, 1))
    weight = None if kind is NormKind.BARE else noise(100, dtype=DTYPES[dtype], seed=2)
    out, same = norm.rms_norm(x, weight, 1e-5, kind)
    want = norms.formula(x, weight, 1e-5, kind)
    assert same is x
    assert torch.allclose(out.float(), want.float(), rtol=2.0**-7 if x.itemsize == 2 else 1e-5)
    # Another order of the sum changes a rounding now and then, no more.
    assert dtype == "float32" or float((out != want).float().mean()) < 0.01
    both, summed = norm.rms_norm(x, weight, 1e-5, kind, residual=more)
    assert bit_equal(summed, x + more)
    assert bit_equal(both, norm.rms_norm(x + more, weight, 1e-5, kind)[0])
    assert bit_equal(norm.rms_norm(x[3:4], weight, 1e-5, kind)[0], out[3:4])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `x` `[T, H, D]` rotated by `cos` and `sin` `[T, R]`."""
    width = cos.shape[1]
    turning, rest = x[..., :width], x[..., width:]
    rotated_half = torch.cat([-turning[..., width // 2 :], turning[..., : width // 2]], -1)
    return torch.cat([turning * cos[:, None] + rotated_half * sin[:, None], rest], -1)


@pytest.mark.parametrize("packing", [None, *KV_PACKINGS.values()], ids=str)
@pytest.mark.parametrize("widths", [(20, 12), (70, 33), (64, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_rope_and_write_is_bit_identical_to_separate_ones(
    dtype: str, widths: tuple[int, int], packing: Packing | None
) -> None:
    store_dtype = DTYPES[dtype]
    tokens, heads, kv_heads, (width, value), turned = 7, 6, 2, widths, 16
    # Laid out as by a fused QKV product: the heads of a token are contiguous, tokens are further apart.
    together = noise(tokens, heads * width + kv_heads * (width + value), dtype=store_dtype)
    q, k, v = together.split([heads * width, kv_heads * width, kv_heads * value], 1)
    q, k, v = q.unflatten(1, (heads, -1)), k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (2, -1))
    angles = noise(tokens, turned // 2, seed=5).repeat(1, 2)
    cos, sin = angles.cos().to(store_dtype), angles.sin().to(store_dtype)
    stores, wanted = (
        [empty_store(kv_heads, size, store_dtype, packing) for size in widths] for _ in "ab"
    )
    slots = torch.tensor([5, 6, 19, 3, 0, 11, 12], device=DEVICE)
    out = rope.rope_and_write(q, k, v, cos, sin, *stores, slots, packing)
    assert bit_equal(out, rotated(q, cos, sin).contiguous())
    by("none", kv.write_kv)(rotated(k, cos, sin), v, *wanted, slots, packing)
    assert all(bit_equal(a, b) for a, b in zip(stores, wanted, strict=True))


def empty_store(
    kv_heads: int, width: int, dtype: torch.dtype, packing: Packing | None
) -> torch.Tensor:
    shape = (4, kv_heads, 5, packing.row_bytes(width) if packing else width)
    fill, dtype = (255, torch.uint8) if packing else (torch.nan, dtype)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("packing", KV_PACKINGS.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extreme_kv_rows_are_quantized_to_the_same_bytes_as_the_reference(
    dtype: str, packing: Packing
) -> None:
    for width in (33, 128):
        rows = hard_rows(width).to(DEVICE, DTYPES[dtype])
        rows[7, 0, 0], rows[8, 1, -1], rows[9, 0, 3] = torch.nan, -torch.inf, torch.inf
        rows[1, 0, ::2] = 0.0  # zeros of both signs
        stores, wanted = ([empty_store(2, width, F32, packing) for _ in range(2)] for _ in range(2))
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:16].to(DEVICE)
        rope.write_kv(rows, rows, *stores, slots, packing)
        by("none", kv.write_kv)(rows, rows, *wanted, slots, packing)
        assert torch.equal(stores[0], wanted[0]) and torch.equal(stores[1], wanted[1])


def rows_of_all_kinds(count: int) -> list[SampleRow]:
    """Seeds, positions and indices up to their limits; also greedy rows and targets."""
    temperatures = (1.0, 0.7, 0.0, 1e-38, 2.5)
    return [
        SampleRow(
            SamplingParams(temperature=temperatures[i % 5]),
            2**64 - 1 - 977 * i if i % 2 else 7919 * i,
            i if i % 4 else 2**32 - 1 - i,
            2**32 - 1 - i if i % 3 == 0 else 100 * i,
            target=2 if i in (6, 8) else None,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        pytest.param(1030, "float32", marks=pytest.mark.slow),
        (333, "bfloat16"),
        pytest.param(32, "float16", marks=pytest.mark.slow),
        (3, "float32"),
    ],
)
def test_draws_equal_those_of_the_cpu_sampler(size: int, dtype: str) -> None:
    logits = (4 * noise(11, size)).to(DTYPES[dtype])
    logits[3], logits[4, 0], logits[5] = -torch.inf, torch.nan, 1.0  # all masked, NaN, ties
    rows, places = rows_of_all_kinds(12), [0, 0, *range(1, 11)]
    draws = gpu_sample_rows(logits, rows, places)
    want = by("none", sample_rows)(logits.cpu(), SamplePlan(rows, places))
    assert repr(draws) == repr(want)  # NaN equals NaN


def test_noise_selects_the_same_ids_as_on_the_cpu() -> None:
    """With equal logits, the winner is where the noise is largest."""
    logits = torch.zeros(6, 200, device=DEVICE)
    params = SamplingParams()
    rows = [SampleRow(params, 2**63 + i, i, 3 * i) for i in range(6)]
    draws = gpu_sample_rows(logits, rows, list(range(6)))
    assert [draw.id for draw in draws] == [
        int(gumbel_row(r.seed, r.sample_index, r.position, 200).argmax()) for r in rows
    ]


def test_winner_that_is_ambiguous_by_rounding_is_left_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, logits = SampleRow(SamplingParams(), 5, 0, 9), torch.zeros(1, 64, device=DEVICE)
    assert None not in gpu_sample_rows(logits, [row], [0])
    # With such a large error bound of the noise, two ids may have won.
    monkeypatch.setattr(sampling, "SLACK", 1.0)
    assert gpu_sample_rows(logits, [row], [0]) == [None]
