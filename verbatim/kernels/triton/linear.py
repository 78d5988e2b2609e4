"""Products of rows with a matrix in tiles of fixed sizes, summed along K in one fixed order.

Each element is one sequence of products of 16 numbers (one number in float32) from k = 0 on, whatever the
tile, so a row's bits depend neither on how many rows there are nor on its place among them. Few rows get a
low tile, and many a tall one. A tensor core may sum a tile of another size
by another instruction: before tiles are used, a trial on the device compares their bits, and a tile that
differs from the tallest is not used there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.triton.numbers import DTYPES, EXACT, INTERPRETED, product, rounded, widened
from verbatim.kernels.triton.packed import MatrixLayout, decode_tile


class Tile(NamedTuple):
    """Sizes of what one program computes at once; numbers of its warps, and of loads on their way."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By height.
TILES: tuple[Tile, ...] = (
    Tile(16, 32, 256, 2, 4),
    Tile(64, 32, 128, 4, 4),
    Tile(256, 128, 64, 8, 3),
)
_MOST_ROWS = (32, 384)  # that each of them is for; the last one is for all
WIDE = Tile(64, 32, 64, 4, 4)  # of float32, whose products are not tensor cores'
if INTERPRETED.value:  # it adds up the depth of a tile before it adds that to the total
    TILES = tuple(tile._replace(depth=32) for tile in TILES)  # a product has at most 2**20 elements
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
    starts,
    num_experts,
    expert_stride,
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
    EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute one tile of the result.

    `weight` is read as [num_columns, depth] with any strides, or decoded (`FORMAT`).
    With EXPERTS, a power of two that is at least `num_experts`, there is a matrix for each expert e, and it
    has the rows `starts[e]` to `starts[e + 1]`.
    """
    program = tl.program_id(0)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    if EXPERTS:  # most that there can be
        row_tiles += tl.minimum(num_experts, num_rows)
    column_tiles = (num_columns + COLUMNS - 1) // COLUMNS
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(GROUP, row_tiles - first)
    row_tile = first + program % (GROUP * column_tiles) % height
    column_tile = program % (GROUP * column_tiles) // height
    first_row, last_row = row_tile * ROWS, num_rows
    if EXPERTS:
        number = tl.arange(0, EXPERTS)
        known = number < num_experts
        begins = tl.load(starts + number, mask=known, other=0).to(tl.int32)
        ends = tl.load(starts + number + 1, mask=known, other=0).to(tl.int32)
        tiles = (ends - begins + ROWS - 1) // ROWS
        tiles_to = tl.cumsum(tiles, 0)
        expert = tl.sum((tiles_to <= row_tile).to(tl.int32), 0)
        if expert >= num_experts:
            return
        its = number == expert
        tile_of_it = row_tile - tl.sum(tl.where(its, tiles_to - tiles, 0), 0)
        first_row = tl.sum(tl.where(its, begins, 0), 0) + tile_of_it * ROWS
        last_row = tl.sum(tl.where(its, ends, 0), 0)
        weight += expert.to(tl.int64) * expert_stride
        bias += expert.to(tl.int64) * num_columns
    row = first_row + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    held_row, held_column = row < last_row, column < num_columns
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
    layout: MatrixLayout | None = None,
) -> Tensor:
    """Compute `x @ weight.T + bias`, each row by itself, for tensors on one GPU; `served` must hold.

    `x` is [..., K], `weight` [N, K] with any strides, or the bytes of a quantized matrix of this layout, with
    the bits of the decoded one. `bias` is [N]; the result is [..., N] in `x`'s dtype, or in float32.
    """
    num_columns, depth = weight.shape if layout is None else layout[:2]
    rows = x.reshape(-1, depth).contiguous()
    out = rows.new_empty((len(rows), num_columns), dtype=torch.float32 if float32 else x.dtype)
    if out.numel():
        tile = tile_for(len(rows), x.dtype, x.device, packed=layout is not None)
        multiply(rows, weight, bias, out, tile, layout=layout)
    return out.view(*x.shape[:-1], num_columns)


def tile_for(
    num_rows: int, dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> Tile:
    """Return the lowest tile for so many rows, of those that have the bits of the tallest.

    Args:
        packed: the matrix is quantized. Decoded in registers, it gets the middle tile: in a low one, the
            compiler multiplies 32 elements of a row in another order.
    """
    if dtype.itemsize > 2:
        return WIDE
    equal = _equal_tiles(dtype, device, TILES)
    by_rows = [tile for tile, most in zip(TILES, _MOST_ROWS, strict=False) if num_rows <= most]
    fitting = [TILES[1]] if packed else by_rows
    return next((tile for tile in fitting if tile in equal), TILES[-1])


@functools.cache
def _equal_tiles(
    dtype: torch.dtype, device: torch.device, tiles: tuple[Tile, ...]
) -> frozenset[Tile]:
    """Return the tiles that have the bits of the last one on a device, by a trial."""
    noise = torch.Generator().manual_seed(0)
    float32: Any = {"generator": noise, "dtype": torch.float32}

    def numbers(count: int) -> Tensor:  # of many sizes, so that every rounding shows
        exponents = torch.randint(-6, 7, (count, 512), generator=noise)
        return (torch.randn(count, 512, **float32) * torch.exp2(exponents.float())).to(
            device, dtype
        )

    x, weight = numbers(40), numbers(96)
    made = [torch.empty(40, 96, dtype=torch.float32, device=device) for _ in tiles]
    for tile, out in zip(tiles, made, strict=True):
        multiply(x, weight, None, out, tile)
    return frozenset(tile for tile, out in zip(tiles, made, strict=True) if out.equal(made[-1]))


def linear_by_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, with the matrices of their experts, in one launch.

    Args:
        rows: `[R, K]`.
        weight: `[E, N, K]` with any strides.
        bias: `[E, N]` or None.
        starts: `[E + 1]` int64 on the device, the first row of each expert, and the end of the last one.

    Returns:
        `[R, N]`; rows of no expert are not written.
    """
    out = rows.new_empty(len(rows), weight.shape[1])
    each = -(-len(rows) // len(weight))
    multiply(rows.contiguous(), weight, bias, out, tile_for(each, rows.dtype, rows.device), starts)
    return out


def multiply(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    starts: Tensor | None = None,
    layout: MatrixLayout | None = None,
) -> None:
    """Write the product of `rows` `[R, K]` with `weight` to `out` `[R, N]`, in tiles of one size."""
    *experts, num_columns, depth = weight.shape if layout is None else layout[:2]
    strides = weight.stride()[-2:] if layout is None else (layout.stride, 1)
    table = None if layout is None else layout.table
    row_tiles = triton.cdiv(len(rows), tile.rows) + sum(min(count, len(rows)) for count in experts)
    _linear[(row_tiles * triton.cdiv(num_columns, tile.columns),)](
        out,
        rows,
        weight,
        out if table is None else table,
        out if bias is None else bias.contiguous(),
        out if starts is None else starts,
        sum(experts),
        weight.stride(0) if experts else 0,
        len(rows),
        num_columns,
        depth,
        depth,
        *strides,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        GROUP=_GROUP,
        HAS_BIAS=bias is not None,
        OUT=DTYPES[out.dtype],
        EXPERTS=triton.next_power_of_2(sum(experts)) if experts else 0,
        FORMAT=None if layout is None else layout.format(weight, tile.depth),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
