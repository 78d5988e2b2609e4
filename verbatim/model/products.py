"""Matrix products in which a row's bits depend on that row alone.

`linear` and `matmul` give each row the same bits whatever the rows beside it, the number of rows and
the number of threads. Two backends hold to that:

- the kernels (`kernels/linear.cpp`), where every element is one fixed sequence of arithmetic;
- torch, where no kernel serves: rows are padded until torch's choice of method, which depends on the
  number of rows, no longer shows in the bits. How much padding that takes is found by a probe.

The two backends round differently, so the backend is part of the numerics key. No gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels

_Function = Callable[..., None]
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def _functions(backend: str) -> Mapping[tuple[torch.dtype, bool], _Function]:
    """The kernel for each dtype and each way the weight may lie (True: stored [K, N])."""
    if backend == "torch":
        return {}
    name = backend
    if backend in ("auto", "kernel"):
        chosen = kernels.instruction_set()
        if chosen is None:
            if backend == "auto":
                return {}
            raise ValueError("backend='kernel': no kernels were built for this processor")
        name = chosen
    elif backend not in kernels.available():
        known = ["auto", "kernel", "torch", *kernels.available()]
        raise ValueError(f"backend={backend!r}: must be one of {known}")
    library = kernels.load(name)
    found: dict[tuple[torch.dtype, bool], _Function] = {}
    for dtype, suffix in _SUFFIX.items():
        for transposed in (False, True):
            function = getattr(library, f"vb_linear{'_t' if transposed else ''}_{suffix}")
            function.restype = None
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 6 + [ctypes.c_int] * 2
            found[dtype, transposed] = function
    return found


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
    float32: bool = False,
) -> Tensor:
    """`x @ weight.T + bias`, each row by itself.

    x is [..., K], weight [N, K] with any strides (rows or columns contiguous are used in place,
    anything else is copied), bias [N]; the result is [..., N] in x's dtype, or in float32 where
    `float32` asks for it (logits). `backend` is "auto", "kernel", "torch" or one of
    `kernels.available()`. The kernels take float32 and bfloat16 on the CPU; other dtypes, mixed
    ones and other devices go to torch under any backend. Shapes that do not fit raise ValueError.
    """
    functions = _functions(backend)
    dtype = x.dtype
    num_out, depth = weight.shape
    if x.shape[-1] != depth or (bias is not None and bias.shape != (num_out,)):
        shapes = [tuple(t.shape) for t in (x, weight, bias) if t is not None]
        raise ValueError(f"linear: shapes {shapes} do not fit [..., K], [N, K], [N]")
    row_stride, column_stride = weight.stride()
    # Decided by how the weight lies and not by its width: a product whose "weight" has a column for
    # each token must not change its method when there is one token.
    transposed = row_stride == 1 and depth > 1
    if not transposed and column_stride != 1:
        weight = weight.contiguous()
        row_stride = depth
    function = functions.get((dtype, transposed))
    if (
        function is None
        or weight.dtype is not dtype
        or not (x.is_cpu and weight.is_cpu)
        or not (bias is None or (bias.dtype is dtype and bias.is_cpu))
    ):
        out = _torch_linear(x, weight, bias)
        return out.float() if float32 else out

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


def matmul(x: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """`x @ weight` for x [..., K] and weight [K, N], or batched for [B, M, K] and [B, K, N]."""
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
class RowPadding:
    """What is done to the rows before torch multiplies them, so that their number does not show.

    At least `least` rows and a multiple of `multiple`, with rows of zeros added; or, where `tile`
    is not 0, products of exactly `tile` rows each.
    """

    least: int = 1
    multiple: int = 1
    tile: int = 0

    def apply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`product` of x [M, K], padded; the result has M rows."""
        num_rows = x.shape[0]
        wanted = max(num_rows, self.least)
        wanted += -wanted % (self.tile or self.multiple)
        if wanted != num_rows:
            x = torch.cat([x, x.new_zeros(wanted - num_rows, x.shape[1])])
        if not self.tile:
            return product(x)[:num_rows]
        # Cloned, so that every tile also starts at the same alignment.
        return torch.cat([product(tile.clone()) for tile in torch.split(x, self.tile)])[:num_rows]


# Cheapest first. The last one cannot fail: each row by itself.
_CANDIDATES = (
    RowPadding(),
    RowPadding(least=2),
    RowPadding(multiple=4),
    RowPadding(multiple=8),
    RowPadding(multiple=16),
    RowPadding(tile=16),
    RowPadding(tile=1),
)
_PROBED_COUNTS = (*range(1, 18), 31, 33, 64, 100, 128, 300)

_Key = tuple[tuple[int, int], torch.dtype, torch.device, bool, bool, int]
_found: dict[_Key, RowPadding] = {}


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
        padding = _found.get(key)
        if padding is None:
            padding = _found[key] = _probe(weight, bias)
        out = padding.apply(lambda tile: F.linear(tile, weight, bias), rows)
    return out.view(*x.shape[:-1], num_out)


def _probe(weight: Tensor, bias: Tensor | None) -> RowPadding:
    """The cheapest padding with which every number of rows, and one thread, give the same bits."""
    noise = torch.Generator().manual_seed(0)
    depth = weight.shape[1]
    x = torch.randn(max(_PROBED_COUNTS), depth, generator=noise).to(weight.device, weight.dtype)
    if int(weight.count_nonzero()) * 2 < weight.numel():  # zeros would hide every difference
        filled = torch.randn(weight.shape, generator=noise).to(weight.device, weight.dtype)
        weight = torch.empty_like(weight).copy_(filled)

    def product(rows: Tensor) -> Tensor:
        return F.linear(rows, weight, bias)

    num_threads = torch.get_num_threads()
    with torch.no_grad():
        for padding in _CANDIDATES[:-1]:
            reference = RowPadding(tile=16).apply(product, x)
            try:
                same = _same(padding, product, x, reference)
                if same and num_threads > 1:
                    torch.set_num_threads(1)
                    same = _same(padding, product, x, reference)
            finally:
                if torch.get_num_threads() != num_threads:
                    torch.set_num_threads(num_threads)
            if same:
                return padding
    return _CANDIDATES[-1]


def _same(
    padding: RowPadding, product: Callable[[Tensor], Tensor], x: Tensor, reference: Tensor
) -> bool:
    # The first rows, and the last: a row must not depend on its place either.
    return all(
        torch.equal(padding.apply(product, x[:count]), reference[:count])
        and torch.equal(padding.apply(product, x[-count:]), reference[-count:])
        for count in _PROBED_COUNTS
    )


def probe_report() -> list[tuple[tuple[int, int], torch.dtype, RowPadding]]:
    """What the probe found so far: weight shape [N, K], dtype, padding."""
    return [(key[0], key[1], padding) for key, padding in _found.items()]
