"""Triton's kernels against their references, and the bits of a row in any company."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from support import attention_cases as cases
from support.attention_cases import Shape, story
from support.backends import by
from support.pairwise import slow_but
from support.triton_here import BF16, DEVICE, DTYPES, F16, F32, noise
from verbatim.batch import SamplePlan, SampleRow
from verbatim.kernels.options import NormKind
from verbatim.kernels.triton import attention, linear, norm, rope, sampling
from verbatim.kv import attention as kv
from verbatim.model import norms
from verbatim.model.differential import bit_equal
from verbatim.params import SamplingParams
from verbatim.sampling import gpu
from verbatim.sampling.noise import gumbel_row
from verbatim.sampling.sampler import sample_rows

SMALL = [Shape(4, 2, 20, 12, 5), Shape(3, 3, 16, 16, 8), Shape(20, 1, 8, 8, 16)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many splits and tiles in short contexts."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "KEYS", 16)


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
def test_attention_is_what_its_definition_says(dtypes: str, shape: Shape, kind: str) -> None:
    q_dtype, kv_dtype = (DTYPES[dtypes.split()[i]] for i in (0, -1))
    what = story(shape, 70, q_dtype=q_dtype, kv_dtype=kv_dtype)
    opts = cases.options(kind, shape, window=20)
    (out,) = attend(opts, shape.block_size, (what, 0, 70))
    if F16 in (q_dtype, kv_dtype):
        assert torch.allclose(out.double(), cases.dense(what, opts), rtol=1e-2, atol=2e-3)
    else:
        assert cases.excess(out, what, opts, "avx512_bf16") < 5e-6


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "all"])
def test_a_rows_attention_has_the_same_bits_in_every_company(kind: str) -> None:
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


@pytest.mark.slow
def test_how_many_splits_a_program_takes_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SMALL[0]
    what = story(shape, 200)
    opts = cases.options("sinks", shape)
    rows = []
    for programs in (0, *range(4, 64, 8), 1024):  # all splits at once, or one
        monkeypatch.setattr(attention, "_PROGRAMS", programs)
        rows.append(attend(opts, shape.block_size, (what, 190, 200))[0])
    assert all(bit_equal(rows[0], found) for found in rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_all_heights_have_the_same_bits_and_another_one_is_not_used(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heights() -> list[int]:
        return [linear.tile_for(rows, DTYPES[dtype], DEVICE).rows for rows in (1, 17, 300)]

    assert heights() == [tile.rows for tile in linear.TILES]
    multiply = linear.multiply

    def rounded_otherwise(*args: Any) -> None:
        multiply(*args)
        if args[-1] == linear.TILES[0]:
            args[3].mul_(1.0 + 2.0**-20)

    monkeypatch.setattr(linear, "multiply", rounded_otherwise)
    linear._equal_tiles.cache_clear()
    assert heights() == [linear.TILES[i].rows for i in (1, 1, 2)]
    linear._equal_tiles.cache_clear()


@pytest.mark.parametrize("counts", [[3, 0, 70, 1, 0, 6], [0, 0, 0, 0, 0, 2], [0] * 6])
@pytest.mark.parametrize("by_columns", [False, True])
def test_products_by_expert_have_the_bits_of_each(counts: list[int], by_columns: bool) -> None:
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
def test_linear_is_close_and_a_row_keeps_its_bits(dtype: str) -> None:
    x, weight = (noise(n, 75, dtype=DTYPES[dtype], seed=n) for n in (260, 37))
    bias = noise(37, dtype=DTYPES[dtype], seed=3)
    out = linear.linear(x, weight, bias)
    want = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(out.double(), want, rtol=2.0**-7 if x.itemsize == 2 else 1e-5, atol=1e-3)
    for first, last in ((0, 1), (69, 70), (63, 66), (5, 75)):
        assert bit_equal(linear.linear(x[first:last], weight, bias), out[first:last])
    beside = torch.cat([noise(5, 75, dtype=DTYPES[dtype], seed=9), x[:3]])
    assert bit_equal(linear.linear(beside, weight, bias)[5:], out[:3])
    lying = weight.T.contiguous().T  # [N, K], stored as [K, N]
    assert bit_equal(linear.linear(x[:2], lying, bias), out[:2])
    assert linear.linear(x[:1], weight, float32=True).dtype == F32
    assert linear.linear(x[None, :0], weight).shape == (1, 0, 37)


@pytest.mark.parametrize("kind", [*NormKind][1 : NormKind.CENTERED], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_the_formulas(dtype: str, kind: NormKind) -> None:
    x, more = (noise(5, 100, dtype=DTYPES[dtype], seed=seed) for seed in (0, 1))
    weight = None if kind is NormKind.BARE else noise(100, dtype=DTYPES[dtype], seed=2)
    out, same = norm.rms_norm(x, weight, 1e-5, kind)
    want = norms.formula(x, weight, 1e-5, kind)
    assert same is x
    assert torch.allclose(out.float(), want.float(), rtol=2.0**-7 if x.itemsize == 2 else 1e-5)
    # Sums in another order turn a rounding now and then, no more.
    assert dtype == "float32" or float((out != want).float().mean()) < 0.01
    both, summed = norm.rms_norm(x, weight, 1e-5, kind, residual=more)
    assert bit_equal(summed, x + more)
    assert bit_equal(both, norm.rms_norm(x + more, weight, 1e-5, kind)[0])
    assert bit_equal(norm.rms_norm(x[3:4], weight, 1e-5, kind)[0], out[3:4])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_turns_as_transformers_does_and_writes(dtype: str) -> None:
    made = DTYPES[dtype]
    tokens, heads, kv_heads, width, value, turned = 7, 6, 2, 20, 12, 16
    # As a product of all three makes them: the heads of a token in one run, tokens further apart.
    together = noise(tokens, heads * width + kv_heads * (width + value), dtype=made)
    q, k, v = together.split([heads * width, kv_heads * width, kv_heads * value], 1)
    q, k, v = q.unflatten(1, (heads, -1)), k.unflatten(1, (kv_heads, -1)), v.unflatten(1, (2, -1))
    angles = noise(tokens, turned // 2, seed=5).repeat(1, 2)
    cos, sin = angles.cos().to(made), angles.sin().to(made)
    stores = [
        torch.full((4, kv_heads, 5, size), torch.nan, dtype=made, device=DEVICE)
        for size in (width, value)
    ]
    slots = torch.tensor([5, 6, 19, 3, 0, 11, 12], device=DEVICE)
    out = rope.rope_and_write(q, k, v, cos, sin, *stores, slots)
    assert bit_equal(out, rope.rotated(q, cos, sin).contiguous())
    wanted = [torch.full_like(store, torch.nan) for store in stores]
    kv.write_kv(rope.rotated(k, cos, sin), v, *wanted, slots)
    assert all(bit_equal(a, b) for a, b in zip(stores, wanted, strict=True))


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
def test_draws_are_those_of_the_one_sampler(size: int, dtype: str) -> None:
    logits = (4 * noise(11, size)).to(DTYPES[dtype])
    logits[3], logits[4, 0], logits[5] = -torch.inf, torch.nan, 1.0  # nothing left, broken, ties
    rows, places = rows_of_all_kinds(12), [0, 0, *range(1, 11)]
    draws = gpu.sample_rows(logits, rows, places)
    want = by("none", sample_rows)(logits.cpu(), SamplePlan(rows, places))
    assert repr(draws) == repr(want)  # NaN equals NaN


def test_the_noise_is_that_of_the_cpu() -> None:
    """Over equal logits the winner is where the noise is largest."""
    logits = torch.zeros(6, 200, device=DEVICE)
    params = SamplingParams()
    rows = [SampleRow(params, 2**63 + i, i, 3 * i) for i in range(6)]
    draws = gpu.sample_rows(logits, rows, list(range(6)))
    assert [draw.id for draw in draws] == [
        int(gumbel_row(r.seed, r.sample_index, r.position, 200).argmax()) for r in rows
    ]


def test_a_winner_whose_rounding_is_in_doubt_is_left_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, logits = SampleRow(SamplingParams(), 5, 0, 9), torch.zeros(1, 64, device=DEVICE)
    assert None not in gpu.sample_rows(logits, [row], [0])
    # With so much doubt about every logarithm, two ids may have won.
    monkeypatch.setattr(sampling, "SLACK", 1.0)
    assert gpu.sample_rows(logits, [row], [0]) == [None]
