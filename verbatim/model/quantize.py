"""Weight quantization in 8 or 4 bits: packing and unpacking of matrices.

A matrix is cut into groups of neighbours along its contraction dimension (the last group of a row may be
short), and an element of a group is stored as an integer:

    code = round((w - low) / scale)        w is read back as low + scale * code

with `low` the group's smallest element and `scale` its range over 2^bits - 1, both bf16 and rounded outwards,
so that no element is more than half a step off. `scale * code` is exact in float32 (8 bits times 8), so an
element is read back with one rounding to float32, and one more to bf16 if the model is in bf16: the same
bits by every backend and number of threads.

At equal bytes, bf16 heads and smaller groups err less than float32 heads and larger groups, and `low` is
worth its two bytes at 8 bits as well as at 4 (benchmarks/quantize.py --formats).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from verbatim.kernels.functions import SUFFIX, addresses, kernel
from verbatim.model import groups
from verbatim.model.groups import unfit
from verbatim.model.weight_packing import Encoding, WeightPacking


def pack(
    weight: Tensor, packing: WeightPacking, name: str = "a weight", *, backend: str = "auto"
) -> Tensor:
    """Quantize `weight` to `[packing.nbytes]` uint8.

    Args:
        name: name of the weight, for errors.
        backend: as in `unpack`; encodings of checkpoints are packed by torch. All are bit-identical.

    Raises:
        ModelError: a NaN, an infinity, or a number too large.
    """
    return _pack(weight, packing, name, backend)[0]


def pack_and_measure(
    weight: Tensor, packing: WeightPacking, name: str = "a weight"
) -> tuple[Tensor, tuple[float, float]]:
    """Run `pack` and `squared_error`, in one pass if the kernel supports it."""
    packed, squares = _pack(weight, packing, name, "auto")
    return packed, squares or squared_error(weight, packed, packing)


def _pack(
    weight: Tensor, packing: WeightPacking, name: str, backend: str
) -> tuple[Tensor, tuple[float, float] | None]:
    assert tuple(weight.shape) == packing.shape
    out = torch.empty(packing.nbytes, dtype=torch.uint8)
    if not weight.numel():
        return out, (0.0, 0.0)
    if packing.columns:
        sums = []
        for rows, part, one in _by_rows(weight, out, packing):
            made, own = _pack(rows, one, name, backend)
            part.copy_(made)
            sums.append(own)
        measured = [own for own in sums if own is not None]
        return out, _total(measured) if len(measured) == len(sums) else None
    by_torch = packing.encoding is not Encoding.AFFINE
    function = None if by_torch else kernel("vb_pack_rows", backend=backend)
    with torch.no_grad():
        if function is not None and weight.is_cpu and weight.dtype in SUFFIX:
            squares = (ctypes.c_double * 2)()
            rows = weight.contiguous()
            kind, is_bf16 = packing.quantization, weight.dtype is torch.bfloat16
            sizes = packing.vectors, packing.depth, kind.bits, kind.group_size
            if not function(*addresses(out, rows), *sizes, is_bf16, squares):
                raise unfit(name)
            return out, (squares[0], squares[1])
        groups.pack_rows(weight, packing, name, out)
    return out, None


def _by_rows(
    weight: Tensor, packed: Tensor, packing: WeightPacking
) -> Iterator[tuple[Tensor, Tensor, WeightPacking]]:
    """Yield each matrix `[K, N]` as a view `[N, K]`, its bytes, and the layout of such rows."""
    one = replace(packing, shape=(packing.width, packing.depth), columns=False)
    count = math.prod(packing.shape[:-2])
    matrices = weight.reshape(count, packing.depth, packing.width)
    for matrix, part in zip(matrices, packed.view(count, one.nbytes), strict=True):
        yield matrix.t(), part, one


def _total(squares: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(wrong for wrong, _ in squares), sum(every for _, every in squares)


def unpack(
    packed: Tensor, packing: WeightPacking, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Dequantize `[packing.nbytes]` uint8 to the parameter.

    Args:
        out: contiguous tensor to fill and return; None allocates one.
        backend: "kernel", "torch", "auto" for the kernel if it supports the tensors, or one of
            `kernels.available()`. All are bit-identical.
    """
    assert packed.dtype == torch.uint8 and packed.shape == (packing.nbytes,)
    assert not packing.interleaved
    if out is None:
        out = torch.empty(packing.shape, dtype=packing.dtype)
    assert out.is_contiguous() and tuple(out.shape) == packing.shape and out.dtype == packing.dtype
    if not out.numel():
        return out
    if packing.columns:
        for rows, part, one in _by_rows(out, packed, packing):
            rows.copy_(unpack(part, one, backend=backend))
        return out
    function = kernel("vb_unpack_rows", backend=backend) if packing.dtype in SUFFIX else None
    if function is None:
        groups.unpack_rows(packed, packing, out)
        return out
    assert packed.is_contiguous() and packed.is_cpu and out.is_cpu
    sizes = packing.vectors, packing.depth, packing.format, packing.quantization.group_size
    function(*addresses(out, packed), *sizes, packing.dtype is torch.bfloat16)
    return out


def unpack_rows(packed: Tensor, packing: WeightPacking, rows: Tensor) -> Tensor:
    """Dequantize the rows `rows` `[n]` of a quantized matrix: `[n, K]`."""
    assert not packing.columns and len(packing.shape) == 2
    some = packed.view(packing.vectors, packing.vector_bytes)[rows]
    return unpack(some.flatten(), replace(packing, shape=(len(some), packing.depth)))


def rounded(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """Return `weight`, a parameter or some rows of one, after packing and unpacking."""
    packing = replace(packing, shape=tuple(weight.shape))
    return unpack(pack(weight, packing, name), packing)


def squared_error(weight: Tensor, packed: Tensor, packing: WeightPacking) -> tuple[float, float]:
    """Return the sums of (unpacked - weight)^2 and of weight^2, computed in pieces."""
    if packing.columns:
        return _total([squared_error(*matrix) for matrix in _by_rows(weight, packed, packing)])
    rows = weight.reshape(packing.vectors, packing.depth)
    step = max(1, groups.PIECE // max(1, packing.depth))
    wrong = all_of_it = 0.0
    for true, part in zip(rows.split(step), packed.split(step * packing.vector_bytes), strict=True):
        piece = replace(packing, shape=tuple(true.shape))
        off = unpack(part, piece).float().sub_(true.float())
        wrong += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        all_of_it += float(torch.linalg.vector_norm(true.float(), dtype=torch.float64)) ** 2
    return wrong, all_of_it
