"""Weight quantization in 8 or 4 bits: packing and unpacking of matrices.

A matrix is cut into groups along its contraction dimension (`kernels/packed_rows.py`); what is read back is
rounded once more to bf16 if the model is in bf16.

At equal bytes, bf16 heads and smaller groups err less than float32 heads and larger groups, and `low` is
worth its two bytes at 8 bits as well as at 4 (benchmarks/quantize.py --formats).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from verbatim import kernels
from verbatim.kernels.functions import SUFFIX, addresses, kernel
from verbatim.kernels.packed_rows import fold, stretches, unfold
from verbatim.model import groups
from verbatim.model.groups import unfit
from verbatim.model.weight_packing import (
    BLOCK,
    BLOCKS,
    E2M1,
    INTERLEAVED,
    TABLES,
    Encoding,
    WeightPacking,
)

if TYPE_CHECKING:
    from verbatim.kernels.triton.packed import MatrixLayout


def pack(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """Quantize `weight` to `[packing.nbytes]` uint8, bit-identically with and without kernels.

    Args:
        name: name of the weight, for errors.

    Raises:
        ModelError: a NaN, an infinity, or a number too large.
    """
    return _pack(weight.cpu(), packing, name, None).to(weight.device)


def pack_and_measure(
    weight: Tensor, packing: WeightPacking, name: str = "a weight"
) -> tuple[Tensor, tuple[float, float]]:
    """Run `pack` on the CPU, and `squared_error`, in one pass if the kernel can."""
    squares: list[tuple[float, float]] = []
    packed = _pack(weight.cpu(), packing, name, squares)
    return packed, _total(squares)


def _pack(
    weight: Tensor, packing: WeightPacking, name: str, squares: list[tuple[float, float]] | None
) -> Tensor:
    """Run `pack` on the CPU (torch on a GPU divides by a number as it multiplies by its inverse).

    Args:
        squares: gets the `squared_error` of each matrix; None: it is not computed.
    """
    plain, by_torch = packing.plain, packing.encoding is not Encoding.AFFINE  # those of checkpoints
    function = None if by_torch or weight.dtype not in SUFFIX else kernel("vb_pack_rows")
    packed = torch.empty(plain.nbytes, dtype=torch.uint8)
    with torch.no_grad():
        for rows, out, one in _matrices(weight, packed, plain):
            if function is None:
                groups.pack_rows(rows, one, name, out)
                if squares is not None:
                    squares.append(squared_error(rows, out, one))
                continue
            sums, rows, kind = (ctypes.c_double * 2)(), rows.contiguous(), one.quantization
            sizes = one.vectors, one.depth, kind.bits, kind.group_size
            if not function(*addresses(out, rows), *sizes, rows.dtype is torch.bfloat16, sums):
                raise unfit(name)
            if squares is not None:
                squares.append((sums[0], sums[1]))
    return interleave(packed, packing) if packing.interleaved else packed


def _matrices(
    weight: Tensor, packed: Tensor, packing: WeightPacking
) -> Iterator[tuple[Tensor, Tensor, WeightPacking]]:
    """Yield each matrix of a weight as a view `[N, K]`, its bytes, and the layout of such rows."""
    assert tuple(weight.shape) == packing.shape and packed.shape == (packing.nbytes,)
    if not weight.numel():
        return
    one = replace(packing, shape=(packing.width, packing.depth), columns=False)
    matrices = weight.reshape(-1, *packing.shape[-2:])
    for matrix, part in zip(matrices, packed.view(-1, one.nbytes), strict=True):
        yield matrix.t() if packing.columns else matrix, part, one


def _total(squares: Iterable[tuple[float, float]]) -> tuple[float, float]:
    wrong, every = zip((0.0, 0.0), *squares, strict=True)
    return sum(wrong), sum(every)


def unpack(packed: Tensor, packing: WeightPacking, *, out: Tensor | None = None) -> Tensor:
    """Dequantize `[packing.nbytes]` uint8 to the parameter, bit-identically with and without kernels.

    Args:
        out: contiguous tensor to fill and return; None allocates one.
    """
    assert packed.dtype == torch.uint8
    packed = packed.contiguous()
    if packing.interleaved:
        packed, packing = plain_rows(packed, packing).flatten(), packing.plain
    if out is None:
        out = torch.empty(packing.shape, dtype=packing.dtype, device=packed.device)
    assert out.is_contiguous() and out.dtype == packing.dtype
    by_kernel = packing.dtype in SUFFIX and packed.is_cpu
    function = kernel("vb_unpack_rows") if by_kernel else None
    for rows, part, one in _matrices(out, packed, packing):
        target = (
            rows
            if rows.is_contiguous()
            else torch.empty_like(rows, memory_format=torch.contiguous_format)
        )
        if function is None:
            groups.unpack_rows(part, one, target)
        else:
            assert target.is_cpu
            sizes = one.vectors, one.depth, one.format, one.quantization.group_size
            function(*addresses(target, part), *sizes, one.dtype is torch.bfloat16)
        if target is not rows:
            rows.copy_(target)
    return out


def plain_rows(packed: Tensor, packing: WeightPacking, rows: Tensor | None = None) -> Tensor:
    """Return the bytes of each vector of K elements, uint8 `[n, vector_bytes]`, not interleaved.

    Args:
        rows: those of a matrix to return, `[n]`; None: all.
    """
    packed = packed.contiguous()
    if not packing.interleaved:
        data = packed.view(packing.vectors, packing.vector_bytes)
        return data if rows is None else data[rows]
    width, columns = packing.vector_words, INTERLEAVED
    blocks = packed.view(torch.int32).view(-1, -(-packing.width // columns), width, columns)
    if rows is None:
        words = blocks.transpose(-1, -2).flatten(1, 2)[:, : packing.width].reshape(-1, width)
    else:
        words = blocks[0, rows // columns, :, rows % columns]
    return packing.join(*_from_words(words, packing))


def interleave(packed: Tensor, packing: WeightPacking) -> Tensor:
    """Convert quantized matrices to the layout for integer products.

    Args:
        packed: the output of `pack` for `packing.plain`, of `[N, K]`, `[K, N]`, or a stack of either.
    """
    one, kind = packing.one, packing.quantization
    out = torch.empty(packing.nbytes, dtype=torch.uint8, device=packed.device)
    function = kernel("vb_interleave") if packed.is_cpu else None
    matrices = plain_rows(packed, packing.plain).split(one.width)
    for rows, target in zip(matrices, out.view(-1, one.nbytes), strict=True):
        if function is not None:
            function(*addresses(target, rows), one.width, one.depth, kind.bits, kind.group_size)
            continue
        words = _to_words(*one.split(rows), one)
        words = pad(words, (0, 0, 0, -len(words) % INTERLEAVED))
        blocks = words.view(-1, INTERLEAVED, words.shape[1]).transpose(1, 2).contiguous()
        target.copy_(blocks.view(torch.uint8).flatten())
    return out


def _to_words(code: Tensor, heads: Tensor, packing: WeightPacking) -> Tensor:
    """Return the words of rows, int32 `[n, packing.vector_words]`: of each group its head, then its codes."""
    parts, at, first, kind = [], 0, 0, packing.quantization
    for count, size in stretches(packing.depth, kind.group_size):
        data = code[:, at : at + count * size].unflatten(1, (count, size))
        data = fold(data, 4) if kind.bits == 4 else pad(data, (0, -size % 4))
        words = [heads[:, first : first + count, None], data.contiguous().view(torch.int32)]
        parts.append(torch.cat(words, -1).flatten(1))
        at, first = at + count * size, first + count
    return torch.cat(parts, 1)


def _from_words(words: Tensor, packing: WeightPacking) -> tuple[Tensor, Tensor]:
    """Return the codes and heads of words that `_to_words` made."""
    codes, heads, at, kind = [], [], 0, packing.quantization
    for count, size in stretches(packing.depth, kind.group_size):
        width = 1 + -(-size * kind.bits // 32)
        head, data = (
            words[:, at : at + count * width].unflatten(1, (count, width)).split([1, width - 1], -1)
        )
        heads.append(head.flatten(1))
        data = data.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        data = unfold(data, 4) if kind.bits == 4 else data
        codes.append(data[..., :size].flatten(1))
        at += count * width
    return torch.cat(codes, 1), torch.cat(heads, 1)


def unpack_rows(packed: Tensor, packing: WeightPacking, rows: Tensor) -> Tensor:
    """Dequantize the rows `rows` `[n]` of a quantized matrix: `[n, K]`."""
    assert not packing.columns and len(packing.shape) == 2
    if kernels.triton_serves(packed.device):
        from verbatim.kernels.triton import packed as triton_packed

        return triton_packed.unpack(packed, layout_of(packing, packed.device), rows)
    plain = replace(packing.plain, shape=(len(rows), packing.depth))
    return unpack(plain_rows(packed, packing, rows).flatten(), plain)


def layout_of(packing: WeightPacking, device: torch.device) -> MatrixLayout:
    """Return the layout of a quantized matrix as the kernels in Triton take it, on their device."""
    from verbatim.kernels.triton.packed import MatrixLayout

    kind, encoding = packing.quantization, packing.encoding
    return MatrixLayout(
        packing.width,
        packing.depth,
        packing.dtype,
        encoding.name,
        kind.bits,
        BLOCK if encoding in BLOCKS else kind.group_size,
        BLOCKS.get(encoding, 0),
        packing.vector_words if packing.interleaved else packing.vector_bytes,
        packing.interleaved,
        _table(encoding, device),
    )


@functools.cache
def _table(encoding: Encoding, device: torch.device) -> Tensor | None:
    """Return the numbers that codes stand for; of NVFP4, those of its scales as well."""
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    if encoding is Encoding.FP8:
        return fp8.to(device)
    if encoding is Encoding.NVFP4:
        return torch.cat([E2M1, fp8]).to(device)
    return TABLES[encoding].to(device) if encoding in TABLES else None


def rounded(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """Return `weight`, a parameter or some rows of one, after packing and unpacking."""
    packing = replace(packing, shape=tuple(weight.shape))
    return unpack(pack(weight, packing, name), packing)


def squared_error(weight: Tensor, packed: Tensor, packing: WeightPacking) -> tuple[float, float]:
    """Return the sums of (unpacked - weight)^2 and of weight^2, computed in pieces."""
    pieces = []
    step = max(1, groups.PIECE // max(1, packing.depth))
    for rows, part, one in _matrices(weight, packed, packing):
        for true, own in zip(rows.split(step), part.split(step * one.vector_bytes), strict=True):
            off = unpack(own, replace(one, shape=tuple(true.shape))).float().sub_(true.float())
            norms = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (off, true.float()))
            wrong, every = (float(norm) ** 2 for norm in norms)
            pieces.append((wrong, every))
    return _total(pieces)
