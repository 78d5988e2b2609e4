"""Matrix products in which a row's bits depend on that row alone.

`linear` and `matmul` give each row the same bits whatever the rows beside it, the number of rows and
the number of threads. Three backends hold to that:

- the kernels (`kernels/linear.cpp`), where every element is one fixed sequence of arithmetic;
- on a GPU, the kernel in Triton (`kernels/triton/linear.py`), the same;
- torch, where no kernel serves: its choice of method depends on the number of rows and of threads, so
  rows are multiplied in tiles of constant heights, and a probe finds heights that give equal bits.

They round differently, so the backend is part of the numerics key. No gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels
from verbatim.model.elementwise import SUFFIX, declared
from verbatim.model.integers import integer_linear
from verbatim.model.quantize import unpack
from verbatim.model.weight_packing import WeightPacking

_Function = Callable[..., None]


def _name(backend: str) -> str | None:
    """Return the instruction set that `backend` stands for; None is torch."""
    if backend == "torch":
        return None
    if backend in ("auto", "kernel"):
        chosen = kernels.instruction_set()
        if chosen is None and backend == "kernel":
            raise ValueError("backend='kernel': no kernels were built for this processor")
        return chosen
    if backend not in kernels.available():
        known = ["auto", "kernel", "torch", *kernels.available()]
        raise ValueError(f"backend={backend!r}: must be one of {known}")
    return backend


@functools.cache
def _functions(name: str | None) -> Mapping[tuple[torch.dtype, bool], _Function]:
    """Return the kernel for each dtype and each layout of the weight (True: stored [K, N])."""
    if name is None:
        return {}
    library = kernels.load(name)
    arguments = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 6, *[ctypes.c_int] * 2]
    return {
        (dtype, transposed): declared(library, kernel, dtype, arguments)
        for dtype in SUFFIX
        for kernel, transposed in (("vb_linear", False), ("vb_linear_t", True))
    }


@kernels.without_overrides
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
    float32: bool = False,
) -> Tensor:
    """Compute `x @ weight.T + bias`, each row by itself.

    x is [..., K], weight [N, K] with any strides (rows or columns contiguous are used in place,
    anything else is copied), bias [N]; the result is [..., N] in x's dtype, or in float32 where
    `float32` asks for it (logits). `backend` is "auto", "kernel", "torch" or one of
    `kernels.available()`. The kernels take float32 and bfloat16 on the CPU; other dtypes, mixed
    ones and other devices go to torch under any backend. Shapes that do not fit raise ValueError.
    """
    functions = _functions(_name(backend))
    dtype = x.dtype
    num_out, depth = weight.shape
    if x.shape[-1] != depth or (bias is not None and bias.shape != (num_out,)):
        shapes = [tuple(t.shape) for t in (x, weight, bias) if t is not None]
        raise ValueError(f"linear: shapes {shapes} do not fit [..., K], [N, K], [N]")
    row_stride, column_stride = weight.stride()
    # Decided by how the weight lies and not by its width: a product whose "weight" has a column for
    # each token must not change its method when there is one token.
    transposed = row_stride == 1 and depth > 1
    if not transposed and (column_stride != 1 or row_stride == 0):  # one row, expanded to many
        weight = weight.contiguous()
        row_stride = depth
    function = functions.get((dtype, transposed))
    if (
        function is None
        or weight.dtype is not dtype
        or not (x.is_cpu and weight.is_cpu)
        or not (bias is None or (bias.dtype is dtype and bias.is_cpu))
    ):
        return _other_linear(x, weight, bias, backend, float32)

    if x.dim() != 2:
        shape = x.shape[:-1]
        rows = x.reshape(shape.numel(), depth)
    else:
        shape = x.shape[:1]
        rows = x
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    out = torch.empty((*shape, num_out), dtype=torch.float32 if float32 else dtype)
    num_rows = rows.shape[0]
    if num_rows and num_out:
        function(
            out.data_ptr(),
            rows.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            num_rows,
            num_out,
            depth,
            rows.stride(0),
            column_stride if transposed else row_stride,
            num_out,
            float32,
            torch.get_num_threads(),
        )
    return out


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


@functools.cache
def _multiply(name: str | None, dtype: torch.dtype) -> _Function | None:
    """Return the kernel that takes several matrices, packed or not; None without one."""
    if name is None or dtype not in SUFFIX:
        return None
    pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [*[pointer] * 2, *[length] * 2, pointer, number, length, *[number] * 2]
    return declared(kernels.load(name), "vb_multiply", dtype, arguments)


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized weight, one matrix, as `quantize.pack` makes it; or interleaved."""

    data: Tensor
    packing: WeightPacking


def packed_linear(
    x: Tensor,
    packed: Tensor,
    packing: WeightPacking,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
    float32: bool = False,
) -> Tensor:
    """Compute `linear(x, unpack(packed, packing), bias)`, bit for bit, without that matrix in memory.

    packed is `[packing.nbytes]` uint8 at any address, so an expert's slice of a stack serves;
    `packing.shape` is [N, K], or [K, N] with `packing.columns`. The rest is as in `linear`. With
    `packing.interleaved` activations become codes, too (`integers.py`).
    """
    return linear_many(x, [Packed(packed, packing)], [bias], backend=backend, float32=float32)


def linear_many(
    x: Tensor,
    weights: Sequence[Tensor | Packed],
    biases: Sequence[Tensor | None] | None = None,
    *,
    backend: str = "auto",
    float32: bool = False,
) -> Tensor:
    """Compute `linear` of x with each weight, side by side: [..., N1 + N2 + ...], in one pass of the
    threads.

    A weight is a matrix [N, K] or a quantized one; `biases` has one or None for each. Every number has
    the bits that it has alone.
    """
    if biases is None:
        biases = [None] * len(weights)
    depth = x.shape[-1]
    width, held = 0, []
    function = _multiply(_name(backend), x.dtype) if x.is_cpu else None
    matrices = (Matrix * len(weights))()
    for matrix, weight, bias in zip(matrices, weights, biases, strict=True):
        if isinstance(weight, Packed):
            packing = weight.packing
            shape = packing.shape[::-1] if packing.columns else packing.shape
            served = weight.data.is_cpu and packing.dtype is x.dtype
        else:
            shape, served = tuple(weight.shape), weight.is_cpu and weight.dtype is x.dtype
            served = served and weight.dim() == 2 and weight.stride(1) == 1 and weight.stride(0) > 0
        if len(shape) != 2 or shape[1] != depth or (bias is not None and bias.shape != shape[:1]):
            raise ValueError(
                f"linear: shapes {tuple(x.shape)}, {shape} and "
                f"{None if bias is None else tuple(bias.shape)} do not fit [..., K], [N, K], [N]"
            )
        if not served or not (bias is None or (bias.dtype is x.dtype and bias.is_cpu)):
            function = None
        width += shape[0]
        if function is None:
            continue
        if bias is not None:
            bias = bias.contiguous()
            held.append(bias)
            matrix.bias = bias.data_ptr()
        matrix.cols, matrix.depth = shape
        if isinstance(weight, Packed):
            assert weight.data.is_contiguous() and weight.data.shape == (weight.packing.nbytes,)
            matrix.data = weight.data.data_ptr()
            matrix.format = weight.packing.format
            matrix.group = weight.packing.quantization.group_size
        else:
            matrix.data, matrix.stride = weight.data_ptr(), weight.stride(0)
            matrix.format = 1 if x.dtype is torch.bfloat16 else 0
    if function is None:
        outs = []
        for weight, bias in zip(weights, biases, strict=True):
            if isinstance(weight, Packed) and weight.packing.interleaved:
                outs.append(integer_linear(x, weight.data, weight.packing, bias, float32))
                continue
            if isinstance(weight, Packed):
                columns = weight.packing.columns
                weight = unpack(weight.data, weight.packing)
                weight = weight.t() if columns else weight
            outs.append(linear(x, weight, bias, backend=backend, float32=float32))
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)
    rows = x.reshape(x.shape[:-1].numel(), depth)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], width), dtype=torch.float32 if float32 else x.dtype)
    if out.numel():
        function(
            out.data_ptr(),
            rows.data_ptr(),
            rows.shape[0],
            rows.stride(0),
            ctypes.addressof(matrices),
            len(weights),
            width,
            float32,
            torch.get_num_threads(),
        )
    return out


def matmul(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """Compute `x @ weight` for x [..., K] and weight [K, N], or batched for [B, M, K] and [B, K, N]."""
    if weight.dim() == 2:
        return linear(x, weight.t(), backend=backend)
    if x.dim() != 3 or weight.dim() != 3 or x.shape[0] != weight.shape[0]:
        raise ValueError(
            f"matmul: shapes {tuple(x.shape)} and {tuple(weight.shape)} do not fit "
            "[..., K] and [K, N], nor [B, M, K] and [B, K, N]"
        )
    out = x.new_empty(x.shape[0], x.shape[1], weight.shape[2])
    for result, rows, matrix in zip(out, x, weight, strict=True):
        result.copy_(linear(rows, matrix.t(), backend=backend))
    return out


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The numbers of rows in which torch multiplies, so that a row's bits do not depend on how many there
    are.

    Rows go in as many tiles of `heights[0]` as they fill, then in tiles of the next height, and what is
    left of the last height is filled with zeros. So only products of these heights are ever made, and
    a probe of each of them covers every number of rows.
    """

    heights: tuple[int, ...]
    one_thread: bool = False

    def apply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute `product` of x [M, K], tile by tile: [M, N]."""
        if not self.one_thread or torch.get_num_threads() == 1:
            return self._tiles(product, x)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._tiles(product, x)
        finally:
            torch.set_num_threads(before)

    def _tiles(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % self.heights[-1]
        if missing:
            x = torch.cat([x, x.new_zeros(missing, x.shape[1])])
        out, start = [], 0
        for height in self.heights:
            while x.shape[0] - start >= height:
                # Cloned, so that every tile also starts at the same alignment.
                out.append(product(x[start : start + height].clone()))
                start += height
        return torch.cat(out)[:num_rows]


# Cheapest first. The last one can't fail: one shape, one thread.
_CANDIDATES = (
    RowTiles((256, 16)),
    RowTiles((16,)),
    RowTiles((256, 16), one_thread=True),
    RowTiles((16,), one_thread=True),
    RowTiles((1,), one_thread=True),
)

_Key = tuple[tuple[int, int], torch.dtype, torch.device, bool, bool, int]
_found: dict[_Key, RowTiles] = {}


def _other_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, backend: str, float32: bool
) -> Tensor:
    """Compute `linear` without a compiled CPU kernel."""
    if backend == "auto" and x.device == weight.device and kernels.triton_serves(x.device):
        from verbatim.kernels.triton import linear as triton_linear

        if triton_linear.served(x, weight, bias):
            return triton_linear.linear(x, weight, bias, float32=float32)
    out = _torch_linear(x, weight, bias)
    return out.float() if float32 else out


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_out, depth = weight.shape
    rows = x.reshape(x.shape[:-1].numel(), depth).contiguous()
    if not rows.numel() or not num_out or rows.dtype is not weight.dtype:
        return F.linear(x, weight, bias)  # nothing to multiply, or torch's own complaint
    key = (
        (num_out, depth),
        x.dtype,
        x.device,
        weight.stride(0) == 1,
        bias is not None,
        torch.get_num_threads(),
    )
    # A mode that watches torch functions must see neither the probe nor the product.
    with torch._C.DisableTorchFunction():
        tiles = _found.get(key)
        if tiles is None:
            tiles = _found[key] = _probe(weight, bias)
        out = tiles.apply(lambda tile: F.linear(tile, weight, bias), rows)
    return out.view(*x.shape[:-1], num_out)


def _probe(weight: Tensor, bias: Tensor | None) -> RowTiles:
    """Return the first candidate with which a row's bits depend on neither its position nor the number of
    threads.
    """
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
        return next(tiles for tiles in _CANDIDATES if holds(tiles, product, x))


def holds(tiles: RowTiles, product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether every position in every tile gives a row the bits of the first position, on one thread.

    x is [256, K]. All shapes that `tiles` will ever multiply are tried, at each of their places.
    """
    last = tiles.heights[-1]
    one = RowTiles((last,), one_thread=True)
    expected = one.apply(product, x)
    for shift in range(1, last):
        if not torch.equal(
            tiles.apply(product, x[:last].roll(shift, 0)).roll(-shift, 0), expected[:last]
        ):
            return False
    return torch.equal(tiles.apply(product, x), expected) and torch.equal(
        RowTiles((last,), tiles.one_thread).apply(product, x), expected
    )


def probe_report() -> list[tuple[tuple[int, int], torch.dtype, RowTiles]]:
    """Return the results of the probe so far: weight shape [N, K], dtype, tiles."""
    return [(key[0], key[1], tiles) for key, tiles in _found.items()]
