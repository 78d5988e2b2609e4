"""Quantized matrices and stacks of them: packing, unpacking, and the layout for integer products.

A matrix is split into groups along its contraction dimension. Dequantized values are rounded to bf16 if the
model is in bf16. At equal size, bf16 heads (scale and `low`) with smaller groups have smaller errors than
float32 heads with larger groups, and `low` is worth its two bytes at 8 and 4 bits (benchmarks/quantize.py
--formats).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from verbatim import kernels
from verbatim.errors import ModelError
from verbatim.kernels.functions import SUFFIX, addresses, kernel
from verbatim.kernels.packing import BLOCKS, INTERLEAVED, Encoding, Packing, WeightPacking
from verbatim.quantization.blocks import pack_blocks, unpack_blocks
from verbatim.quantization.rows import encode, fold, heads_of, join, split, unfold, unpack_rows

LARGEST = 2.0**126  # largest absolute weight, so that a group's range is finite
PIECE = 1 << 20  # elements that torch packs at a time


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized weight matrix, as returned by `pack`.

    Attributes:
        data: `[packing.nbytes]` uint8, not necessarily aligned, such as an expert's slice of a stack.
        packing: the format; `packing.shape` is [N, K], or [K, N] with `packing.columns`.
    """

    data: Tensor
    packing: WeightPacking

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K], even if the parameter is [K, N]."""
        return self.packing.width, self.packing.depth


def pack(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """Quantize `weight` to `[packing.nbytes]` uint8, bit-identically with and without kernels.

    Args:
        name: name of the weight, for errors.

    Raises:
        ModelError: the weight has a NaN, an infinity or a number that is too large.
    """
    return pack_and_measure(weight, packing, name)[0].to(weight.device)


def pack_and_measure(
    weight: Tensor, packing: WeightPacking, name: str = "a weight"
) -> tuple[Tensor, tuple[float, float]]:
    """Run `pack` on the CPU, as torch divides differently on a GPU.

    Returns:
        The bytes, and the sums of (unpacked - weight)^2 and of weight^2.
    """
    plain, rows = packing.plain, packing.rows
    by_kernel = rows.encoding is Encoding.AFFINE and weight.dtype in SUFFIX
    function = kernel("vb_pack_rows") if by_kernel else None
    packed, errors, squares = torch.empty(plain.nbytes, dtype=torch.uint8), 0.0, 0.0
    with torch.no_grad():
        for matrix, out in _matrices(weight.cpu(), packed, plain):
            if function is None:
                error, square = _pack_by_torch(matrix, out, plain, name)
            else:
                sums, matrix = (ctypes.c_double * 2)(), matrix.contiguous()
                sizes = *matrix.shape, rows.bits, rows.group, matrix.dtype is torch.bfloat16
                if not function(*addresses(out, matrix), *sizes, sums):
                    raise _unquantizable(name)
                error, square = sums
            errors, squares = errors + error, squares + square
    return interleave(packed, packing) if packing.interleaved else packed, (errors, squares)


def _pack_by_torch(
    matrix: Tensor, out: Tensor, packing: WeightPacking, name: str
) -> tuple[float, float]:
    """Quantize a matrix `[N, K]` into `out`, and return the sums of squares."""
    rows, sums = packing.rows, torch.zeros(2, dtype=torch.float64)
    for piece, target in pieces(packing.depth, matrix, out):
        x = piece.float()
        if rows.encoding in BLOCKS:
            data, scale = pack_blocks(x, rows.encoding)
        else:
            code, scale, zero = encode(x, rows)
            data = join(code, heads_of(scale, zero, rows.encoding), rows)
        # The comparison fails for NaN, too. Scales may be beyond float16.
        if not (bool(x.abs().amax() <= LARGEST) and bool(scale.isfinite().all())):
            raise _unquantizable(name)
        target.copy_(data)
        off = _unpack_piece(data, packing.depth, rows).to(packing.dtype).float() - x
        norms = [torch.linalg.vector_norm(y, dtype=torch.float64) for y in (off, x)]
        sums += torch.stack(norms).square()
    return float(sums[0]), float(sums[1])


def _unpack_piece(data: Tensor, depth: int, rows: Packing) -> Tensor:
    if rows.encoding in BLOCKS:
        return unpack_blocks(data, rows.encoding)
    return unpack_rows(data, depth, rows)


def _unquantizable(name: str) -> ModelError:
    return ModelError(
        f"quantization: {name} has NaN, an infinity or a number beyond {LARGEST:.3g}, which can't be "
        "quantized"
    )


def _matrices(
    weight: Tensor, packed: Tensor, packing: WeightPacking
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each matrix of a weight as a view `[N, K]`, with the bytes of its rows."""
    assert tuple(weight.shape) == packing.shape and packed.shape == (packing.nbytes,)
    if not weight.numel():
        return
    matrices = weight.reshape(-1, *packing.shape[-2:])
    parts = packed.view(-1, packing.width, packing.row_bytes)
    for matrix, part in zip(matrices, parts, strict=True):
        yield matrix.t() if packing.columns else matrix, part


def pieces(depth: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of rows with `depth` elements into pieces, to limit memory."""
    step = max(1, PIECE // max(1, depth))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


def unpack(packed: Tensor, packing: WeightPacking) -> Tensor:
    """Dequantize `[packing.nbytes]` uint8 to the parameter, bit-identically with and without kernels."""
    assert packed.dtype == torch.uint8
    packed = packed.contiguous()
    if packing.interleaved:
        packed, packing = plain_rows(packed, packing).flatten(), packing.plain
    weight = torch.empty(packing.shape, dtype=packing.dtype, device=packed.device)
    by_kernel = packing.dtype in SUFFIX and packed.is_cpu
    function = kernel("vb_unpack_rows") if by_kernel else None
    for matrix, part in _matrices(weight, packed, packing):
        if function is None:
            for target, data in pieces(packing.depth, matrix, part):
                target.copy_(_unpack_piece(data, packing.depth, packing.rows))
            continue
        out = matrix if matrix.is_contiguous() else torch.empty(matrix.shape, dtype=packing.dtype)
        sizes = *matrix.shape, packing.format, packing.rows.group
        function(*addresses(out, part), *sizes, packing.dtype is torch.bfloat16)
        if out is not matrix:
            matrix.copy_(out)
    return weight


def unpack_selected(packed: Tensor, packing: WeightPacking, rows: Tensor) -> Tensor:
    """Dequantize the rows `rows` `[n]` of a quantized matrix: `[n, K]`."""
    assert not packing.columns and len(packing.shape) == 2
    if kernels.uses_triton(packed.device):
        from verbatim.kernels.triton import packed as triton_packed

        return triton_packed.unpack(packed, packing, rows)
    plain = replace(packing.plain, shape=(len(rows), packing.depth))
    return unpack(plain_rows(packed, packing, rows).flatten(), plain)


def rounded(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """Return `weight`, a parameter or some of its rows, after packing and unpacking."""
    packing = replace(packing, shape=tuple(weight.shape))
    return unpack(pack(weight, packing, name), packing)


def plain_rows(packed: Tensor, packing: WeightPacking, rows: Tensor | None = None) -> Tensor:
    """Return the bytes of all or some rows of K elements, uint8 `[n, row_bytes]`, not interleaved."""
    packed = packed.contiguous()
    if not packing.interleaved:
        data = packed.view(packing.num_rows, packing.row_bytes)
        return data if rows is None else data[rows]
    words, columns = packing.row_words, INTERLEAVED
    blocks = packed.view(torch.int32).view(-1, -(-packing.width // columns), words, columns)
    if rows is None:
        data = blocks.transpose(-1, -2).flatten(1, 2)[:, : packing.width].reshape(-1, words)
    else:
        data = blocks[0, rows // columns, :, rows % columns]
    return join(*_from_words(data, packing.depth, packing.rows), packing.rows)


def interleave(packed: Tensor, packing: WeightPacking) -> Tensor:
    """Convert matrices quantized by `pack` with `packing.plain` to the layout for integer products."""
    width, depth, rows = packing.width, packing.depth, packing.rows
    out = torch.empty(packing.nbytes, dtype=torch.uint8, device=packed.device)
    function = kernel("vb_interleave") if packed.is_cpu else None
    matrices = plain_rows(packed, packing.plain).split(width)
    for matrix, target in zip(matrices, out.view(len(matrices), -1), strict=True):
        if function is not None:
            function(*addresses(target, matrix), width, depth, rows.bits, rows.group)
            continue
        words = _to_words(*split(matrix, depth, rows), rows)
        words = pad(words, (0, 0, 0, -len(words) % INTERLEAVED))
        blocks = words.view(-1, INTERLEAVED, words.shape[1]).transpose(1, 2).contiguous()
        target.copy_(blocks.view(torch.uint8).flatten())
    return out


def _to_words(code: Tensor, heads: Tensor, packing: Packing) -> Tensor:
    """Return the words of rows, int32 `[n, row_words]`: the head of each group, then its codes."""
    parts, at, first = [], 0, 0
    for count, size in packing.group_sizes(code.shape[1]):
        data = code[:, at : at + count * size].unflatten(1, (count, size))
        data = fold(data, 4) if packing.bits == 4 else pad(data, (0, -size % 4))
        words = [heads[:, first : first + count, None], data.contiguous().view(torch.int32)]
        parts.append(torch.cat(words, -1).flatten(1))
        at, first = at + count * size, first + count
    return torch.cat(parts, 1)


def _from_words(words: Tensor, depth: int, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the codes and heads of rows of `depth` elements; the inverse of `_to_words`."""
    codes, heads, at = [], [], 0
    for count, size in packing.group_sizes(depth):
        width = 1 + -(-size * packing.bits // 32)
        group = words[:, at : at + count * width].unflatten(1, (count, width))
        heads.append(group[..., 0])
        data = group[..., 1:].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        data = unfold(data, 4) if packing.bits == 4 else data
        codes.append(data[..., :size].flatten(1))
        at += count * width
    return torch.cat(codes, 1), torch.cat(heads, 1)
