"""Attention inputs of many shapes, and the expected outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from support.backends import by
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kernels.packing import Packing
from verbatim.kv.attention import paged_attention, write_kv

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    block_size: int


_LONGEST = 2200  # positions of a story
SHAPES = [
    Shape(4, 2, 64, 64, 16),
    Shape(16, 8, 128, 128, 16),
    Shape(3, 3, 12, 12, 8),
    Shape(6, 2, 20, 24, 5),
    Shape(5, 1, 25, 25, 16),
    Shape(24, 1, 80, 80, 32),  # enough heads that keys are transposed even for a single row
    Shape(9, 3, 96, 96, 7),
    Shape(2, 2, 100, 100, 48),
    Shape(8, 2, 192, 128, 16),
    Shape(80, 1, 32, 32, 64),  # more heads than fit into a tile
    Shape(2, 1, 256, 256, 16),
    Shape(2, 1, 72, 64, 1),
]
INVARIANT_SHAPES = [SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[8]]
OPTIONS = ["plain", "window", "chunk", "softcap", "sinks", "row sinks", "alibi", "bias", "all"]


def options(kind: str, shape: Shape, window: int = 70) -> AttentionOptions:
    """Return options; those that differ by row are for the positions of a story."""
    every = kind == "all"
    by_row, bias_size = (_LONGEST, shape.heads), 1 + window // 2
    generator = torch.Generator().manual_seed(3)
    return AttentionOptions(
        scale=shape.key_size**-0.5,
        window=window if every or kind == "window" else 0,
        chunk=window if kind == "chunk" else 0,
        softcap=3.0 if every or kind == "softcap" else 0.0,
        sinks=torch.randn(shape.heads, generator=generator)
        if kind == "sinks"
        else torch.randn(by_row, generator=generator)
        if every or kind == "row sinks"
        else None,
        alibi=torch.rand(shape.heads, generator=generator) if every or kind == "alibi" else None,
        bias=torch.randn(*by_row, bias_size, generator=generator)
        if every or kind == "bias"
        else None,
    )


@dataclass(frozen=True)
class Story:
    """One sequence: queries, keys and values of all its positions."""

    q: Tensor  # [L, H, Dk]
    k: Tensor  # [L, Hkv, Dk]
    v: Tensor  # [L, Hkv, Dv]


def story(shape: Shape, length: int, seed: int = 0, q_dtype=F32, kv_dtype=F32) -> Story:
    generator = torch.Generator().manual_seed(seed)

    def rows(heads: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(length, heads, size, generator=generator).to(dtype)

    return Story(
        rows(shape.heads, shape.key_size, q_dtype),
        rows(shape.kv_heads, shape.key_size, kv_dtype),
        rows(shape.kv_heads, shape.value_size, kv_dtype),
    )


def hard_rows(width: int, seed: int = 0) -> Tensor:
    """Return rows `[16, 2, width]` of many magnitudes, with values that are hard to quantize."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 2, width, generator=generator)
    x *= torch.randn(16, 2, 1, generator=generator).mul(5).exp()
    x[0], x[1], x[2] = 0, -0.0, -5
    x[3] = x[3] * 1e-4 - 100  # a narrow range far from zero
    x[4], x[5] = x[4].sign() * 1e-40, x[5].sign() * 1.6e38
    x[6, :, 0] = 1e6
    return x


def attend(
    backend: str,
    opts: AttentionOptions,
    block_size: int,
    *pieces: tuple[Story, int, int],
    seed: int = 0,
    packing: Packing | None = None,
) -> list[Tensor]:
    """Return the output of rows [start, stop) of each story, batched, over shuffled blocks in a NaN store.

    Args:
        backend: a CPU backend, or "triton", where Triton's kernels also write K and V.
        packing: format of keys and values in the store, which is then filled with 255 instead of NaN.
    """
    first, device = pieces[0][0], torch.device("cpu")
    write, compute = write_kv, paged_attention
    if backend == "triton":
        from support.triton_here import DEVICE as device
        from verbatim.kernels.triton.attention import paged_attention as compute
        from verbatim.kernels.triton.rope import write_kv as write
    else:
        compute = by(backend, compute)
    write = partial(write, packing=packing)
    compute = partial(compute, packing=packing, value_size=first.v.shape[2])
    blocks = [-(-stop // block_size) for _, _, stop in pieces]
    shuffled = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(seed)) + 1
    tables = torch.zeros(len(pieces), max(blocks), dtype=torch.int32)
    stores = []
    for x in (first.k, first.v):
        size, fill, dtype = x.shape[2], torch.nan, x.dtype
        if packing is not None:
            size, fill, dtype = packing.row_bytes(size), 255, torch.uint8
        shape = (sum(blocks) + 1, x.shape[1], block_size, size)
        stores.append(torch.full(shape, fill, dtype=dtype, device=device))
    for s, ((what, _, stop), ids) in enumerate(zip(pieces, shuffled.split(blocks), strict=True)):
        tables[s, : len(ids)] = ids
        positions = torch.arange(stop)
        slots = ids[positions // block_size] * block_size + positions % block_size
        write(what.k[:stop].to(device), what.v[:stop].to(device), *stores, slots.to(device))
    lens = [stop - start for _, start, stop in pieces]
    ends = torch.tensor([stop for _, _, stop in pieces], dtype=torch.int32)
    q = torch.cat([what.q[start:stop] for what, start, stop in pieces])
    tensors = {
        name: x for name in ("sinks", "alibi", "bias") if (x := getattr(opts, name)) is not None
    }
    for name in ("sinks", "bias") if opts.differs_by_row else ():
        if name in tensors and len(tensors[name]) == _LONGEST:
            rows = [tensors[name][start:stop] for _, start, stop in pieces]
            tensors[name] = torch.cat(rows).to(q.dtype if name == "bias" else F32)
    tensors = {name: x.to(device) for name, x in tensors.items()}
    batch = (x.to(device) for x in (torch.tensor([0, *lens]).cumsum(0).int(), ends, tables))
    out = compute(q.to(device), *stores, AttentionBatch(*batch), replace(opts, **tensors))
    return list(out.cpu().split(lens))


def whole(backend: str, opts: AttentionOptions, shape: Shape, what: Story) -> Tensor:
    return attend(backend, opts, shape.block_size, (what, 0, len(what.q)))[0]


def dense(what: Story, opts: AttentionOptions) -> Tensor:
    """Return attention by its definition, in float64, with one matrix of scores."""
    group = what.q.shape[1] // what.k.shape[1]
    q = what.q.double().transpose(0, 1)
    k = what.k.double().transpose(0, 1).repeat_interleave(group, 0)
    v = what.v.double().transpose(0, 1).repeat_interleave(group, 0)
    scores = q @ k.mT * opts.scale
    if opts.softcap:
        scores = opts.softcap * torch.tanh(scores / opts.softcap)
    position = torch.arange(len(what.q))
    behind = position[:, None] - position
    if opts.alibi is not None:
        scores = scores - opts.alibi.double()[:, None, None] * behind
    if opts.bias is not None:
        rows = opts.bias[: len(position)].to(what.q.dtype).double().transpose(0, 1)
        size = rows.shape[2]
        biases = rows.gather(2, behind.clamp(0, size - 1).expand(len(rows), -1, -1))
        scores = scores + biases.masked_fill((behind < 0) | (behind >= size), 0)
    hidden = behind < 0
    if opts.window:
        hidden |= behind >= opts.window
    if opts.chunk:
        hidden |= position < (position // opts.chunk * opts.chunk)[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    if opts.sinks is not None:
        sinks = opts.sinks.double().expand(_LONGEST, -1)[: len(position)].mT[..., None]
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : len(position)] @ v).transpose(0, 1)


def excess(out: Tensor, what: Story, opts: AttentionOptions, backend: str) -> float:
    """Return the largest error of `out` against `dense`, beyond the tolerance of its dtypes.

    In bf16 the result is rounded. The kernels also round each attention weight, by at most 2^-9 of itself,
    and so may err by twice that of the weighted mean of |v|.
    """
    want = dense(what, opts)
    allowed = torch.zeros_like(want)
    if out.dtype == BF16:
        allowed += want.abs() * 2**-8
        if backend != "none" and what.k.dtype == BF16:
            allowed += dense(replace(what, v=what.v.abs()), opts) * 2**-8
    return float(((out.double() - want).abs() - allowed).max())


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    whole_numbers = torch.int32 if a.dtype == F32 else torch.int16
    different = (a.view(whole_numbers) != b.view(whole_numbers)).flatten(1).any(1)
    assert not different.any(), f"rows {different.nonzero().flatten().tolist()} differ"
