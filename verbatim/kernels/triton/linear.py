"""Products of rows with a matrix in tiles of one fixed size, summed along K in one fixed order.

Every number of rows runs through the same compiled kernel with the same tile shapes, and each element
is one sequence of tile products from k = 0 on, so a row's bits depend neither on how many rows there are
nor on its place among them. One row pays for a tile of them; what that costs is for benchmarks to say.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.triton.numbers import DTYPES, EXACT, product, rounded, widened
from verbatim.kernels.triton.packed import Layout, decode_tile

ROWS = 64
COLUMNS = 32
DEPTH = 128  # of one tile product
# Rows, columns and depth of a tile of few rows with a quantized matrix: decoding it takes longer than the
# product, so tiles are many, and deep. The order of the sums is the same.
FEW = (16, 16, 256)
_GROUP = 8  # tiles of rows that run side by side and share a tile of the matrix in the cache


def served(x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Return whether the kernel multiplies these with a matrix of `dtype`: all equal, float32, bfloat16
    or float16.
    """
    return x.dtype in DTYPES and dtype is x.dtype and (bias is None or bias.dtype is x.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    out,
    x,
    weight,
    table,
    bias,
    num_rows,
    num_columns,
    depth,
    x_stride,
    column_stride,
    depth_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute one tile of the result.

    `weight` is read as [num_columns, depth] with any strides, or decoded (`FORMAT`).
    """
    program = tl.program_id(0)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    column_tiles = (num_columns + COLUMNS - 1) // COLUMNS
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(GROUP, row_tiles - first)
    row_tile = first + program % (GROUP * column_tiles) % height
    column_tile = program % (GROUP * column_tiles) // height
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    held_row, held_column = row < num_rows, column < num_columns
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_column = weight + column.to(tl.int64)[None, :] * column_stride
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + at
        a = tl.load(x_row + k[None, :], mask=held_row[:, None] & (k < depth)[None, :], other=0.0)
        if FORMAT is None:
            b = tl.load(
                w_column + k.to(tl.int64)[:, None] * depth_stride,
                mask=held_column[None, :] & (k < depth)[:, None],
                other=0.0,
            )
        else:
            columns = column, num_columns, column_stride
            b = decode_tile(weight, table, columns, start, depth, x.dtype.element_ty, DEPTH, FORMAT)
        total = product(a, b, total)
    if HAS_BIAS:
        total += widened(tl.load(bias + column, mask=held_column, other=0.0))[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * num_columns + column[None, :],
        rounded(total, OUT),
        mask=held_row[:, None] & held_column[None, :],
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    float32: bool = False,
    layout: Layout | None = None,
) -> Tensor:
    """Compute `x @ weight.T + bias`, each row by itself, for tensors on one GPU; `served` must hold.

    `x` is [..., K], `weight` [N, K] with any strides, or the bytes of a quantized matrix of this layout, with
    the bits of the decoded one. `bias` is [N]; the result is [..., N] in `x`'s dtype, or in float32.
    """
    num_columns, depth = weight.shape if layout is None else layout[:2]
    strides = weight.stride() if layout is None else (layout.stride, 1)
    table = None if layout is None else layout.table
    rows = x.reshape(-1, depth).contiguous()
    num_rows = rows.shape[0]
    out = rows.new_empty((num_rows, num_columns), dtype=torch.float32 if float32 else x.dtype)
    if out.numel():
        tile_rows, columns, deep = (ROWS, COLUMNS, DEPTH)
        if layout is not None and num_rows <= FEW[0]:
            tile_rows, columns, deep = FEW
        if x.element_size() > 2:  # bytes of a row of a tile are the same for all dtypes
            deep //= 2
        tiles = triton.cdiv(num_rows, tile_rows) * triton.cdiv(num_columns, columns)
        _linear[(tiles,)](
            out,
            rows,
            weight,
            out if table is None else table,
            out if bias is None else bias.contiguous(),
            num_rows,
            num_columns,
            depth,
            depth,
            *strides,
            ROWS=tile_rows,
            COLUMNS=columns,
            DEPTH=deep,
            GROUP=_GROUP,
            HAS_BIAS=bias is not None,
            OUT=DTYPES[out.dtype],
            FORMAT=None if layout is None else layout.format(weight, deep),
            num_warps=4,
            num_stages=4,
            **EXACT,
        )
    return out.view(*x.shape[:-1], num_columns)
