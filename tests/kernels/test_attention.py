"""Attention over KV blocks: accurate against dense float64, and bit-identical in every schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.attention_cases import (
    BF16,
    F32,
    INVARIANT_SHAPES,
    OPTIONS,
    SHAPES,
    Shape,
    assert_same_bits,
    attend,
    dense,
    excess,
    options,
    story,
    whole,
)
from support.backends import BACKENDS
from support.pairwise import parametrize_combinations, slow_but
from verbatim import kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kernels.packing import Packing
from verbatim.kv import attention
from verbatim.kv.attention import paged_attention, write_kv
from verbatim.quantization.formats import KV_PACKINGS

EVERY_KIND = [(kind, SHAPES[0]) for kind in OPTIONS]
KERNELS = [*itertools.product(BACKENDS, (F32, BF16))]

# ---- Accuracy ----


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "shape"),
    slow_but(
        EVERY_KIND + list(zip(itertools.cycle(("all", "plain")), SHAPES[1:])),
        EVERY_KIND + [(kind, shape) for shape in SHAPES[1:] for kind in ("plain", "all")],
    ),
    ids=str,
)
def test_attention_agrees_with_dense_float64(backend: str, kind: str, shape: Shape) -> None:
    opts = options(kind, shape)
    mixed = [(F32, BF16), (BF16, F32)] if shape is SHAPES[0] else []
    for q_dtype, kv_dtype in [(F32, F32), (BF16, BF16), *mixed]:
        what = story(shape, 147, q_dtype=q_dtype, kv_dtype=kv_dtype)
        out = whole(backend, opts, shape, what)
        assert out.dtype == q_dtype
        assert excess(out, what, opts, backend) < 3e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_error_of_bf16_attention_is_below_twice_the_rounding_of_its_output(backend: str) -> None:
    shape = SHAPES[1]
    what = story(shape, 200, q_dtype=BF16, kv_dtype=BF16)
    opts = options("plain", shape)
    want = dense(what, opts)
    error = (whole(backend, opts, shape, what).double() - want).square().mean().sqrt()
    rounding = (want.to(BF16).double() - want).square().mean().sqrt()
    assert error < 2 * rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_extreme_scores_agree_with_dense_float64(backend: str, softcap: float) -> None:
    shape = SHAPES[0]
    plain = story(shape, 130)
    for factor in (1e-4, 30.0):
        what = replace(plain, q=plain.q * factor)
        opts = replace(options("plain", shape), softcap=softcap)
        out = whole(backend, opts, shape, what)
        torch.testing.assert_close(out.double(), dense(what, opts), rtol=0, atol=3e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_of_minus_infinity_equals_no_sink(backend: str) -> None:
    shape = SHAPES[0]
    what = story(shape, 70)
    opts = replace(options("plain", shape), sinks=torch.full((shape.heads,), -torch.inf))
    assert_same_bits(
        whole(backend, opts, shape, what), whole(backend, options("plain", shape), shape, what)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_query_gives_the_same_bits(backend: str) -> None:
    shape = SHAPES[0]
    what = story(shape, 40)
    fused = torch.zeros(40, shape.heads + 3, shape.key_size + 8)
    fused[:, 2:-1, 4:-4] = what.q
    opts = options("plain", shape)
    assert_same_bits(
        whole(backend, opts, shape, replace(what, q=fused[:, 2:-1, 4:-4])),
        whole(backend, opts, shape, what),
    )
    (one,) = attend(backend, opts, 16, (replace(what, q=fused[:, 2:-1, 4:-4]), 39, 40))
    assert_same_bits(one, whole(backend, opts, shape, what)[39:])


# ---- The same bits in every schedule ----


@parametrize_combinations(kind=["plain", "all"], kernel=KERNELS, shape=INVARIANT_SHAPES)
def test_every_chunking_gives_the_same_bits(
    kind: str, kernel: tuple[str, torch.dtype], shape: Shape
) -> None:
    length, (backend, dtype) = 141, kernel
    what = story(shape, length, q_dtype=dtype, kv_dtype=dtype)
    opts = options(kind, shape)
    want = whole(backend, opts, shape, what)
    for size in (1, 2, 3, 7, 50):
        # Short chunks of the whole length would take long; they matter around the edges of tiles.
        first = 0 if size > 3 else 118
        for start in range(first, length, size):
            stop = min(start + size, length)
            (out,) = attend(backend, opts, shape.block_size, (what, start, stop), seed=start)
            assert_same_bits(out, want[start:stop])


@parametrize_combinations(
    kernel=KERNELS, shape=INVARIANT_SHAPES, packing=[None, *KV_PACKINGS.values()]
)
def test_bits_do_not_depend_on_batch_blocks_or_threads(
    kernel: tuple[str, torch.dtype], shape: Shape, packing: Packing | None
) -> None:
    backend, dtype = kernel
    lengths = [1, 130, 16, 200, 64, 33]
    stories = [story(shape, n, seed=n, q_dtype=dtype, kv_dtype=dtype) for n in lengths]
    opts = options("all", shape)
    pieces = [
        (what, max(0, n - chunk), n)
        for what, n, chunk in zip(stories, lengths, [1, 1, 16, 40, 2, 1], strict=True)
    ]
    some = partial(attend, backend, opts, shape.block_size, packing=packing)
    alone = [some(piece)[0] for piece in pieces]
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        together = some(*pieces, seed=threads)
        backwards = some(*pieces[::-1], seed=threads + 9)[::-1]
        for a, b, c in zip(alone, together, backwards, strict=True):
            assert_same_bits(a, b)
            assert_same_bits(a, c)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    slow_but(
        list(zip(kernels.available(), itertools.cycle((BF16, F32)))),
        itertools.product(kernels.available(), (F32, BF16)),
    ),
)
def test_bits_do_not_depend_on_segments_split_over_threads(
    backend: str, dtype: torch.dtype
) -> None:
    shape = Shape(2, 1, 24, 40, 16)
    stories = [story(shape, n, seed=n, q_dtype=dtype, kv_dtype=dtype) for n in (2100, 1025, 70)]
    opts = options("all", shape, window=1500)
    last = [(what, max(0, len(what.q) - 1100), len(what.q)) for what in stories]
    wants = [attend(backend, opts, shape.block_size, piece)[0] for piece in last]
    assert excess(wants[1], stories[1], opts, backend) < 3e-6
    for threads, rows in ((2, 1), (7, 3)):
        torch.set_num_threads(threads)
        pieces = [(what, len(what.q) - rows, len(what.q)) for what in stories]
        outs = attend(backend, opts, shape.block_size, *pieces, seed=threads)
        for out, want in zip(outs, wants, strict=True):
            assert_same_bits(out, want[-rows:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_changed_row_affects_only_rows_that_attend_to_it(backend: str, dtype: torch.dtype) -> None:
    shape = SHAPES[1]
    what = story(shape, 150, q_dtype=dtype, kv_dtype=dtype)
    opts = options("window", shape)
    want = whole(backend, opts, shape, what)

    q = what.q.clone()
    q[40] += 1
    out = whole(backend, opts, shape, replace(what, q=q))
    assert (out[40] != want[40]).any()
    others = torch.arange(150) != 40
    assert_same_bits(out[others], want[others])

    # Not even NaN and infinities affect rows before a position, or rows whose window is past it.
    for position in (40, 41, 65):
        k, v = what.k.clone(), what.v.clone()
        k[position], v[position] = torch.nan, torch.inf
        out = whole(backend, opts, shape, replace(what, k=k, v=v))
        assert out[position : position + opts.window].isnan().all()
        rows = torch.arange(150)
        unaffected = (rows < position) | (rows >= position + opts.window)
        assert_same_bits(out[unaffected], want[unaffected])


@settings(max_examples=30)
@given(st.data())
def test_any_shape_is_accurate_and_bit_identical_at_any_cut(data: st.DataObject) -> None:
    draw = data.draw
    backend = draw(st.sampled_from(BACKENDS))
    kv_heads = draw(st.integers(1, 3))
    shape = Shape(
        kv_heads * draw(st.integers(1, 26)),
        kv_heads,
        draw(st.integers(1, 70)),
        draw(st.integers(1, 70)),
        draw(st.sampled_from([1, 3, 8, 16, 24, 64])),
    )
    length = draw(st.integers(1, 140))
    cut = draw(st.integers(0, length - 1))
    dtype = draw(st.sampled_from([F32, BF16]))
    opts = options(draw(st.sampled_from(OPTIONS)), shape, window=draw(st.integers(1, 90)))
    what = story(shape, length, q_dtype=dtype, kv_dtype=dtype)
    other = story(shape, 30, seed=1, q_dtype=dtype, kv_dtype=dtype)
    want = whole(backend, opts, shape, what)
    assert excess(want, what, opts, backend) < 3e-6
    _, out = attend(backend, opts, shape.block_size, (other, 20, 30), (what, cut, length))
    assert_same_bits(out, want[cut:])


# ---- Writes and errors ----


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize("store_dtype", [F32, BF16], ids=str)
def test_write_kv_fills_its_slots_and_no_others(
    use_kernel: bool, store_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_kernel:
        monkeypatch.setattr(attention, "has_kernels", lambda device: False)
    fused = torch.randn(9, 2, 20)
    k, v = fused[:, :, :12], fused[:, :, 13:]  # strided rows
    k_store = torch.full((4, 2, 5, 12), torch.nan, dtype=store_dtype)
    v_store = torch.full((4, 2, 5, 7), torch.nan, dtype=store_dtype)
    slots = torch.randperm(20)[:9]
    write_kv(k, v, k_store, v_store, slots)
    for rows, kept in ((k, k_store), (v, v_store)):
        by_slot = kept.transpose(1, 2).flatten(0, 1)
        assert torch.equal(by_slot[slots], rows.to(store_dtype))
        untouched = torch.ones(20, dtype=torch.bool).index_fill(0, slots, False)
        assert by_slot[untouched].isnan().all()


def test_invalid_options_are_rejected_and_float16_queries_are_accepted() -> None:
    with pytest.raises(ValueError, match="window=-1"):
        AttentionOptions(1.0, window=-1)
    with pytest.raises(ValueError, match=r"sinks must be float32.*float64"):
        AttentionOptions(1.0, sinks=torch.zeros(2, dtype=torch.float64))
    store = torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    rows = AttentionBatch(*(torch.tensor(x).int() for x in ([0, 1], [1], [[0]])))
    q = torch.zeros(1, 1, 8, dtype=torch.float16)
    for packing in (None, *KV_PACKINGS.values()):
        if packing is not None:
            store = torch.zeros(1, 1, 4, packing.row_bytes(8), dtype=torch.uint8)
        batch = (q, store, store, rows, AttentionOptions(1.0))
        settings = dict(value_size=8, packing=packing)
        assert torch.equal(paged_attention(*batch, **settings), q)
