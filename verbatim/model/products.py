"""Batch-invariant matrix products.

A row's result of `linear` and `matmul` is bit-identical for any other rows in the batch, any batch size and
any number of threads. There are three backends:

- the CPU kernels (`kernels/linear.cpp`), which compute every element by a fixed sequence of operations;
- the Triton kernel on a GPU (`kernels/triton/linear.py`), which does the same;
- torch in all other cases: its algorithm depends on the number of rows and threads, so rows are multiplied
  in tiles of constant heights, and a probe finds heights with bit-identical results.

They round differently, so the backend is part of the numerics key. No gradients.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels
from verbatim.kernels.functions import kernel, struct_layout
from verbatim.kernels.packing import WeightPacking
from verbatim.model.differential import bit_equal, noise
from verbatim.options import default_threads
from verbatim.quantization.integers import integer_linear
from verbatim.quantization.matrix import QuantizedMatrix, unpack


@struct_layout("P data bias\nL cols depth stride\nI format group transposed")
class Matrix(ctypes.Structure):
    """`vb::Matrix` of kernels/matrix.h."""


@kernels.without_overrides
def linear(
    x: Tensor,
    weight: Tensor | QuantizedMatrix,
    bias: Tensor | None = None,
    *,
    float32: bool = False,
) -> Tensor:
    """Compute `x @ weight.T + bias`, batch-invariant.

    x is [..., K], weight [N, K], bias [N], and the result [..., N] in x's dtype, or with `float32` in float32
    (for logits). A plain weight is copied unless its rows or columns are contiguous; a quantized one gives
    the result of the unpacked matrix. The CPU kernels support float32 and bfloat16; other or mixed dtypes and
    other devices use Triton or torch. Raises ValueError if the shapes do not match.
    """
    depth, shape = x.shape[-1], weight.shape
    if len(shape) != 2 or shape[1] != depth or (bias is not None and bias.shape != shape[:1]):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, bias) if t is not None)
        raise ValueError(f"linear: shapes {shapes} do not fit [..., K], [N, K], [N]")
    function = kernel("vb_multiply", x.dtype) if x.is_cpu else None
    if function is None or not _supports(weight, bias, x.dtype):
        return _other_linear(x, weight, bias, float32)
    rows, count, stride = x, x.numel() // depth if depth else 0, depth
    if not x.is_contiguous() or not depth:
        rows = x.reshape(x.shape[:-1].numel(), depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        count, stride = rows.shape[0], rows.stride(0)
    matrix, _held = pointers_of(weight, bias)
    out = torch.empty((*x.shape[:-1], shape[0]), dtype=torch.float32 if float32 else x.dtype)
    if out.numel():
        function(
            out.data_ptr(),
            rows.data_ptr(),
            count,
            stride,
            ctypes.byref(matrix),
            1,
            shape[0],
            float32,
        )
    return out


def _supports(weight: Tensor | QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the kernel supports a weight for activations of `dtype`."""
    if bias is not None and not (bias.dtype is dtype and bias.is_cpu):
        return False
    if isinstance(weight, Tensor):
        return weight.dtype is dtype and weight.is_cpu
    return weight.data.is_cpu and weight.packing.dtype is dtype


def pointers_of(
    weight: Tensor | QuantizedMatrix, bias: Tensor | None
) -> tuple[Matrix, tuple[Any, ...]]:
    """Return the kernel struct of a weight and its bias, and the tensors it points to, to keep alive."""
    cols, depth = weight.shape
    bias = None if bias is None else bias.contiguous()
    at_bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, QuantizedMatrix):
        data, packing = weight.data, weight.packing
        assert data.is_contiguous() and data.shape == (packing.nbytes,)
        matrix = Matrix(
            data.data_ptr(), at_bias, cols, depth, 0, packing.format, packing.rows.group
        )
        return matrix, (data, bias)
    stride, column_stride = weight.stride()
    # Depends on the weight's layout, not its width: a product with one column per token must use the same
    # algorithm if there is only one token.
    transposed = stride == 1 and depth > 1
    if transposed:
        stride = column_stride
    elif column_stride != 1 or stride == 0:  # stride 0: an expanded row
        weight, stride = weight.contiguous(), depth
    number = 1 if weight.dtype is torch.bfloat16 else 0
    matrix = Matrix(weight.data_ptr(), at_bias, cols, depth, stride, number, 0, transposed)
    return matrix, (weight, bias)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `x @ weight` for x [..., K] and weight [K, N], or batched for [B, M, K] and [B, K, N]."""
    if weight.dim() == 2:
        return linear(x, weight.t())
    if x.dim() != 3 or weight.dim() != 3 or x.shape[0] != weight.shape[0]:
        raise ValueError(
            f"matmul: shapes {tuple(x.shape)} and {tuple(weight.shape)} do not fit "
            "[..., K] and [K, N], nor [B, M, K] and [B, K, N]"
        )
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    function = kernel("vb_multiply_batch", x.dtype) if x.is_cpu else None
    if function is None or not _supports(weight, None, x.dtype) or not (out.numel() and x.numel()):
        for result, rows, matrix in zip(out, x, weight, strict=True):
            result.copy_(linear(rows, matrix.t()))
        return out
    x, weight = x.contiguous(), weight.mT
    if pointers_of(weight[0], None)[0].data != weight.data_ptr():  # read from a copy
        weight = weight.contiguous()
    matrix, _held = pointers_of(weight[0], None)
    step = weight.stride(0) * weight.element_size()
    first = ctypes.byref(matrix)
    function(out.data_ptr(), x.data_ptr(), x.shape[1], first, len(x), step)
    return out


_block = threading.local()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the block with `count` threads in torch's pool.

    None: those of the enclosing block of this function, if any, or `default_threads`.
    """
    before, is_inner = torch.get_num_threads(), getattr(_block, "is_inner", False)
    count = count or (before if is_inner else default_threads())
    _block.is_inner = True
    try:
        if count != before:
            torch.set_num_threads(count)
        yield
    finally:
        _block.is_inner = is_inner
        if count != before:
            torch.set_num_threads(before)


Heights = tuple[int, ...]  # of tiles of rows, descending


@threads(1)
def in_tiles(heights: Heights, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute `product` of x [M, K] in tiles, on one thread; returns [M, N].

    The rows fill as many tiles of `heights[0]` as possible, then tiles of the next height, and so on. The
    last tile is padded with zeros, so a probe of these heights covers every batch size.
    """
    num_rows = x.shape[0]
    missing = -num_rows % heights[-1]
    if missing:
        x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
    out, start = [], 0
    for height in heights:
        while x.shape[0] - start >= height:
            # Cloned, so that every tile also starts at the same alignment.
            out.append(product(x[start : start + height].clone()))
            start += height
    return torch.cat(out)[:num_rows]


# Fastest first; the last can't fail. All use one thread: with several, on a CPU without bf16 instructions,
# bf16 products passed the probe but later gave different bits.
_CANDIDATES: tuple[Heights, ...] = ((256, 16), (16,), (1,))

_Key = tuple[tuple[int, int], torch.dtype, torch.device, bool, bool]
_heights_by_key: dict[_Key, Heights] = {}


def _other_linear(
    x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None, float32: bool
) -> Tensor:
    """Compute `linear` for a weight that the compiled CPU kernel does not support."""
    packing: WeightPacking | None = None
    if isinstance(weight, QuantizedMatrix):
        data, packing, dtype = weight.data, weight.packing, weight.packing.dtype
    else:
        data, dtype = weight, weight.dtype
    if x.device == data.device and kernels.uses_triton(x.device):
        from verbatim.kernels.triton import integers as triton_integers
        from verbatim.kernels.triton import linear as triton_linear

        if triton_linear.supports(x, dtype, bias):
            if packing is not None and packing.interleaved:
                return triton_integers.linear(x, data, packing, bias, float32=float32)
            return triton_linear.linear(x, data, bias, float32=float32, packing=packing)
    if isinstance(weight, Tensor):
        out = _torch_linear(x, weight, bias)
        return out.float() if float32 else out
    if weight.packing.interleaved:
        return integer_linear(x, weight, bias, float32)
    matrix = unpack(data, weight.packing)
    return linear(x, matrix.t() if weight.packing.columns else matrix, bias, float32=float32)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, depth = weight.shape
    rows = x.reshape(x.shape[:-1].numel(), depth).contiguous()
    if not rows.numel() or not num_out or rows.dtype is not weight.dtype:
        return F.linear(x, weight, bias)  # nothing to multiply, or torch raises
    key = (num_out, depth), x.dtype, x.device, weight.stride(0) == 1, bias is not None
    # An active TorchFunctionMode must see neither the probe nor the product.
    with torch._C.DisableTorchFunction():
        heights = _heights_by_key.get(key)
        if heights is None:
            heights = _heights_by_key[key] = _probe(weight, bias)
        out = in_tiles(heights, lambda tile: F.linear(tile, weight, bias), rows)
    return out.view(*x.shape[:-1], num_out)


def _probe(weight: Tensor, bias: Tensor | None) -> Heights:
    """Return the first candidate for which a row's bits do not depend on its position."""
    x = noise((256, weight.shape[1]), weight.dtype).to(weight.device)
    # Expanded, mostly zero or NaN weights would hide differences.
    is_degenerate = 0 in weight.stride() or int(weight.count_nonzero()) * 2 < weight.numel()
    if is_degenerate or not weight.isfinite().all():
        weight = torch.empty_like(weight).copy_(noise(tuple(weight.shape), weight.dtype, 1))
    if bias is not None and not bias.isfinite().all():
        bias = noise(tuple(bias.shape), bias.dtype, 2).to(bias.device)
    product = partial(F.linear, weight=weight, bias=bias)
    with torch.no_grad():
        return next(h for h in _CANDIDATES if is_position_invariant(h, product, x))


def is_position_invariant(heights: Heights, product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether a row's result is bit-identical at every position of every tile.

    x is [256, K]. All tile shapes of `heights` are tried, with the row at every position.
    """
    last = heights[-1]
    expected = in_tiles((last,), product, x)
    rolled = (in_tiles(heights, product, x[:last].roll(n, 0)).roll(-n, 0) for n in range(1, last))
    return all(bit_equal(tile, expected[:last]) for tile in rolled) and bit_equal(
        in_tiles(heights, product, x), expected
    )


def probe_report() -> list[tuple[tuple[int, int], torch.dtype, Heights]]:
    """Return the results of all probes so far: weight shape [N, K], dtype, tile heights."""
    return [(key[0], key[1], heights) for key, heights in _heights_by_key.items()]
