"""Matrix products in which a row's bits depend on that row alone.

`linear` and `matmul` give each row one result, bit for bit, whatever the rows beside it, their number and the
number of threads. Three backends hold to that:

- the kernels (`kernels/linear.cpp`), where every element is one fixed sequence of arithmetic;
- on a GPU, the kernel in Triton (`kernels/triton/linear.py`), the same;
- torch, where no kernel serves: its choice of method depends on the number of rows and of threads, so
  rows are multiplied in tiles of constant heights, and a probe finds heights that give equal bits.

They round differently, so the backend is part of the numerics key. No gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels
from verbatim.kernels.functions import kernel
from verbatim.model.differential import differential_check
from verbatim.model.integers import integer_linear
from verbatim.model.quantize import layout_of, unpack
from verbatim.model.weight_packing import WeightPacking


class Matrix(ctypes.Structure):
    """`vb::Matrix` of kernels/matrix.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("cols", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("transposed", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized weight, one matrix, as `quantize.pack` makes it.

    Attributes:
        data: `[packing.nbytes]` uint8 at any address, so an expert's slice of a stack serves.
        packing: `packing.shape` is [N, K], or [K, N] with `packing.columns`. With `packing.interleaved`
            activations become codes, too (`integers.py`).
    """

    data: Tensor
    packing: WeightPacking

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], also of a parameter [K, N]."""
        return self.packing.shape[::-1] if self.packing.columns else self.packing.shape


@kernels.without_overrides
def linear(
    x: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None = None,
    *,
    float32: bool = False,
) -> Tensor:
    """Compute `x @ weight.T + bias`, each row by itself.

    x is [..., K], weight [N, K] with any strides (rows or columns contiguous are used in place,
    anything else is copied), or quantized, with the bits of the unpacked matrix; bias is [N]. The result
    is [..., N] in x's dtype, or in float32 where `float32` asks for it (logits). The kernels take float32
    and bfloat16 on the CPU; other dtypes, mixed ones and other devices go to torch. Shapes that do not fit
    raise ValueError.
    """
    depth, shape = x.shape[-1], weight.shape
    if len(shape) != 2 or shape[1] != depth or (bias is not None and bias.shape != shape[:1]):
        shapes = ", ".join(str(tuple(t.shape)) for t in (x, weight, bias) if t is not None)
        raise ValueError(f"linear: shapes {shapes} do not fit [..., K], [N, K], [N]")
    function = kernel("vb_multiply", x.dtype) if x.is_cpu else None
    if function is None or not _reads(weight, bias, x.dtype):
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


def _reads(weight: Tensor | Packed, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes a weight, for activations of `dtype`."""
    if bias is not None and not (bias.dtype is dtype and bias.is_cpu):
        return False
    if isinstance(weight, Tensor):
        return weight.dtype is dtype and weight.is_cpu
    return weight.data.is_cpu and weight.packing.dtype is dtype


def pointers_of(weight: Tensor | Packed, bias: Tensor | None) -> tuple[Matrix, tuple[Any, ...]]:
    """Return the kernel's view of a weight and its bias, and the tensors that it points to."""
    cols, depth = weight.shape
    bias = None if bias is None else bias.contiguous()
    at_bias = None if bias is None else bias.data_ptr()
    if isinstance(weight, Packed):
        data, packing = weight.data, weight.packing
        assert data.is_contiguous() and data.shape == (packing.nbytes,)
        group = packing.quantization.group_size
        return Matrix(data.data_ptr(), at_bias, cols, depth, 0, packing.format, group), (data, bias)
    stride, column_stride = weight.stride()
    # Decided by how the weight lies and not by its width: a product whose "weight" has a column for
    # each token must not change its method when there is one token.
    transposed = stride == 1 and depth > 1
    if transposed:
        stride = column_stride
    elif column_stride != 1 or stride == 0:  # one row, expanded to many
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
    if function is None or not _reads(weight, None, x.dtype) or not (out.numel() and x.numel()):
        for result, rows, matrix in zip(out, x, weight, strict=True):
            result.copy_(linear(rows, matrix.t()))
        return out
    x, weight = x.contiguous(), weight.mT
    if pointers_of(weight[0], None)[0].data != weight.data_ptr():  # read from a copy
        weight = weight.contiguous()
    matrix, _held = pointers_of(weight[0], None)
    apart = weight.stride(0) * weight.element_size()
    first = ctypes.byref(matrix)
    function(out.data_ptr(), x.data_ptr(), x.shape[1], first, len(x), apart)
    return out


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run the block with `count` threads in torch's pool; None changes nothing."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Heights = tuple[int, ...]  # of tiles of rows, falling


@threads(1)
def in_tiles(heights: Heights, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute `product` of x [M, K], tile by tile, on one thread: [M, N].

    Rows go in as many tiles of `heights[0]` as they fill, then in tiles of the next height, and what is
    left of the last height is filled with zeros. So only products of these heights are ever made, and
    a probe of each of them covers every number of rows.
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


# Cheapest first. The last one can't fail: one shape, one thread. More threads are not tried: on a CPU without
# bf16 instructions, products in bf16 passed the trial and had other bits in use.
_CANDIDATES: tuple[Heights, ...] = ((256, 16), (16,), (1,))

_Key = tuple[tuple[int, int], torch.dtype, torch.device, bool, bool]
_found: dict[_Key, Heights] = {}


def _other_linear(x: Tensor, weight: Tensor | Packed, bias: Tensor | None, float32: bool) -> Tensor:
    """Compute `linear` where the compiled CPU kernel does not take the weight as it is."""
    if isinstance(weight, Packed):
        return _packed_linear(x, weight.data, weight.packing, bias, float32)
    if _triton_takes(x, weight, weight.dtype, bias):
        from verbatim.kernels.triton import linear as triton_linear

        return triton_linear.linear(x, weight, bias, float32=float32)
    out = _torch_linear(x, weight, bias)
    return out.float() if float32 else out


def _packed_linear(
    x: Tensor, data: Tensor, packing: WeightPacking, bias: Tensor | None, float32: bool
) -> Tensor:
    if _triton_takes(x, data, packing.dtype, bias):
        from verbatim.kernels.triton import integers as triton_integers
        from verbatim.kernels.triton import linear as triton_linear

        layout = layout_of(packing, x.device)
        if packing.interleaved:
            return triton_integers.linear(x, data, layout, bias, float32=float32)
        return triton_linear.linear(x, data, bias, float32=float32, layout=layout)
    if packing.interleaved:
        return integer_linear(x, data, packing, bias, float32)
    matrix = unpack(data, packing)
    return linear(x, matrix.t() if packing.columns else matrix, bias, float32=float32)


def _triton_takes(x: Tensor, data: Tensor, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Return whether the kernels in Triton multiply x with a matrix of `dtype`, held as `data`."""
    if x.device != data.device or not kernels.triton_serves(x.device):
        return False
    from verbatim.kernels.triton import linear as triton_linear

    return triton_linear.served(x, dtype, bias)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, depth = weight.shape
    rows = x.reshape(x.shape[:-1].numel(), depth).contiguous()
    if not rows.numel() or not num_out or rows.dtype is not weight.dtype:
        return F.linear(x, weight, bias)  # nothing to multiply, or torch's own complaint
    key = (num_out, depth), x.dtype, x.device, weight.stride(0) == 1, bias is not None
    # A mode that watches torch functions must see neither the probe nor the product.
    with torch._C.DisableTorchFunction():
        heights = _found.get(key)
        if heights is None:
            heights = _found[key] = _probe(weight, bias)
        out = in_tiles(heights, lambda tile: F.linear(tile, weight, bias), rows)
    return out.view(*x.shape[:-1], num_out)


def _probe(weight: Tensor, bias: Tensor | None) -> Heights:
    """Return the first candidate with which a row's bits do not depend on its position."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(256, weight.shape[1], generator=noise).to(weight.device, weight.dtype)
    # Zeros, and numbers that are all one, would hide every difference; NaN would make one of all.
    made_up = 0 in weight.stride() or int(weight.count_nonzero()) * 2 < weight.numel()
    if made_up or not weight.isfinite().all():
        filled = torch.randn(weight.shape, generator=noise).to(weight.device, weight.dtype)
        weight = torch.empty_like(weight).copy_(filled)
    if bias is not None and not bias.isfinite().all():
        bias = torch.randn(bias.shape, generator=noise).to(bias.device, bias.dtype)

    def product(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    with torch.no_grad():
        return next(heights for heights in _CANDIDATES if holds(heights, product, x))


def holds(heights: Heights, product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether every position in every tile gives a row the bits of the first position.

    x is [256, K]. All shapes that tiles of `heights` will ever multiply are tried, at each of their places.
    """
    last = heights[-1]
    expected = in_tiles((last,), product, x)

    def shifted(by: int) -> list[Tensor]:
        return [in_tiles(heights, product, x[:last].roll(by, 0)).roll(-by, 0)]

    return not (
        differential_check(shifted, lambda _: [expected[:last]], range(1, last))
        or differential_check(lambda _: [in_tiles(heights, product, x)], lambda _: [expected], [0])
    )


def probe_report() -> list[tuple[tuple[int, int], torch.dtype, Heights]]:
    """Return the results of the probe so far: weight shape [N, K], dtype, heights of tiles."""
    return [(key[0], key[1], heights) for key, heights in _found.items()]
