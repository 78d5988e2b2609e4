"""Products of rows and a matrix, in tiles of fixed sizes, summed along K in one fixed order.

Each element is one sequence of sums of 16 products (one product in float32) from k = 0 on, whatever the
tile, so a row's bits depend neither on the number of rows nor on its place among them. Few rows use a low
tile, and many a tall one. Another tile size may make the tensor cores use another instruction with another
order of sums. So before tiles are used, their bits are compared in a trial on the device, and a tile that
differs from the tallest one is not used there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.packing import Packing, WeightPacking
from verbatim.kernels.triton.numbers import (
    DTYPES,
    EXACT,
    INTERPRETED,
    helper,
    product,
    rounded,
    widened,
)
from verbatim.kernels.triton.packed import (
    decode_tile,
    format_of,
    group_of,
    stride_of,
    table_of,
    unpack,
)


class Tile(NamedTuple):
    """Sizes of the tile that one program computes at once, number of warps, and of loads in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# By height, ascending.
TILES: tuple[Tile, ...] = (
    Tile(16, 32, 256, 2, 4),
    Tile(64, 32, 128, 4, 4),
    Tile(256, 128, 64, 8, 3),
)
_MAX_ROWS = (32, 384)  # maximum number of rows for each of them; the last tile has no limit
FLOAT32_TILE = Tile(64, 32, 64, 4, 4)  # for float32, which does not use tensor cores
LOW_PACKED_TILE = Tile(16, 32, 256, 4, 3)  # the first of them for a quantized matrix
if INTERPRETED.value:  # the interpreter sums up the depth of a tile before adding it to the total
    TILES = tuple(tile._replace(depth=32) for tile in TILES)  # a product has at most 2**20 elements
    LOW_PACKED_TILE = LOW_PACKED_TILE._replace(depth=32)
# Tiles of rows that run side by side, and share a tile of the matrix in the cache.
_GROUP = tl.constexpr(8)


def supports(x: Tensor, dtype: torch.dtype, bias: Tensor | None) -> bool:
    """Return whether the kernel can multiply these with a matrix of `dtype`: all must have the same dtype,
    float32, bfloat16 or float16.
    """
    return x.dtype in DTYPES and dtype is x.dtype and (bias is None or bias.dtype is x.dtype)


@helper
def _swapped(x, AXIS):
    """Reorder the positions in each 32 along K of a tile: bits 43210 become 32140.

    The compiler gives a thread positions 4i to 4i + 3 and 16 + 4i to 16 + 4i + 3, and multiplies the first
    two of each four in one instruction, and the others in the next. With both factors reordered, an
    instruction sums 16 adjacent products, as in a tile of decoded weights.
    """
    if AXIS == 1:
        parts = tl.reshape(x, (x.shape[0], x.shape[1] // 32, 2, 2, 4, 2))
        parts = tl.permute(parts, (0, 1, 3, 4, 2, 5))
    else:
        parts = tl.reshape(x, (x.shape[0] // 32, 2, 2, 4, 2, x.shape[1]))
        parts = tl.permute(parts, (0, 2, 3, 1, 4, 5))
    return tl.reshape(parts, (x.shape[0], x.shape[1]))


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
    column_stride,
    depth_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Compute one tile of the result.

    `weight` is read as [num_columns, depth] with any strides, or dequantized (`FORMAT`).
    EXPERTS, if not 0, is a power of two and at least `num_experts`: there is one matrix per expert e, for the
    rows `starts[e]` to `starts[e + 1]`.
    """
    program = tl.program_id(0)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    if EXPERTS:  # upper bound
        row_tiles += tl.minimum(num_experts, num_rows)
    column_tiles = (num_columns + COLUMNS - 1) // COLUMNS
    first = program // (_GROUP * column_tiles) * _GROUP
    height = tl.minimum(_GROUP, row_tiles - first)
    row_tile = first + program % (_GROUP * column_tiles) % height
    column_tile = program % (_GROUP * column_tiles) // height
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
        if bias is not None:
            bias += expert.to(tl.int64) * num_columns
    row = first_row + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    row_mask, column_mask = row < last_row, column < num_columns
    x_row = x + row.to(tl.int64)[:, None] * depth
    w_column = weight + column.to(tl.int64)[None, :] * column_stride
    total = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for start in range(0, depth, DEPTH):
        k = start + at
        a = tl.load(x_row + k[None, :], mask=row_mask[:, None] & (k < depth)[None, :], other=0.0)
        if FORMAT is None:
            b = tl.load(
                w_column + k.to(tl.int64)[:, None] * depth_stride,
                mask=column_mask[None, :] & (k < depth)[:, None],
                other=0.0,
            )
        else:
            columns = column, num_columns, column_stride
            b = decode_tile(weight, table, columns, start, depth, x.dtype.element_ty, DEPTH, FORMAT)
        if FORMAT is not None and ROWS == 16 and not INTERPRETED:
            a, b = _swapped(a, 1), _swapped(b, 0)
        total = product(a, b, total)
    if bias is not None:
        total += widened(tl.load(bias + column, mask=column_mask, other=0.0))[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * num_columns + column[None, :],
        rounded(total, out.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    float32: bool = False,
    packing: WeightPacking | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, each row by itself, for tensors on one GPU; `supports` must hold.

    `x` is [..., K]. `weight` is [N, K] with any strides, or the bytes of a quantized matrix (`packing`);
    the bits are those of the dequantized one. `bias` is [N]; the result [..., N], in `x`'s dtype or float32.
    """
    num_columns, depth = weight.shape if packing is None else (packing.width, packing.depth)
    rows = x.reshape(-1, depth).contiguous()
    out = rows.new_empty((len(rows), num_columns), dtype=torch.float32 if float32 else x.dtype)
    if out.numel():
        tile = tile_for(len(rows), x.dtype, x.device, packing, weight.data_ptr())
        multiply(rows, weight, bias, out, tile, packing=packing)
    return out.view(*x.shape[:-1], num_columns)


def tile_for(
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    packing: WeightPacking | None = None,
    address: int = 0,
) -> Tile:
    """Return the lowest tile for a number of rows, among those with the bits of the tallest.

    Args:
        address: of the bytes of a quantized matrix (`packing`).
    """
    if dtype.itemsize > 2:
        return FLOAT32_TILE
    tiles, form = TILES, None
    if packing is not None:
        tiles, group = (LOW_PACKED_TILE, *TILES[1:]), group_of(packing.rows)
        depth = max(1, 512 // group) * group + packing.depth % group
        form = packing.rows, packing.interleaved, depth, address % 4
    equal = _equal_tiles(dtype, device, tiles, form)
    by_rows = (tile for tile, most in zip(tiles, _MAX_ROWS, strict=False) if num_rows <= most)
    return next((tile for tile in by_rows if tile in equal), tiles[-1])


@functools.cache
def _equal_tiles(
    dtype: torch.dtype,
    device: torch.device,
    tiles: tuple[Tile, ...],
    form: tuple[Packing, bool, int, int] | None = None,
) -> frozenset[Tile]:
    """Return the tiles that give the bits of the tallest one on a device, by a trial.

    Args:
        form: of a quantized matrix: its format, whether it is interleaved, its depth, and its address modulo
            4, on which the compiled code depends. It must give the bits of the decoded matrix.
    """
    noise, depth = torch.Generator().manual_seed(0), 512 if form is None else form[2]
    float32: Any = {"generator": noise, "dtype": torch.float32}

    def numbers(count: int) -> Tensor:  # of many magnitudes, so that every rounding shows
        exponents = torch.randint(-6, 7, (count, depth), generator=noise)
        return (torch.randn(count, depth, **float32) * torch.exp2(exponents.float())).to(
            device, dtype
        )

    x, packing = numbers(40), None
    if form is None:
        weight = decoded = numbers(96)
    else:  # these bytes are finite numbers from 2**-20 to 2**10 in every format
        packing = WeightPacking((96, depth), dtype, form[0], interleaved=form[1])
        size = packing.nbytes + form[3]
        weight = torch.randint(0x38, 0x41, (size,), generator=noise, dtype=torch.uint8)
        weight = weight.to(device)[form[3] :]
        decoded = unpack(weight, packing, torch.arange(96, device=device))
    expected, out = torch.empty(2, 40, 96, dtype=torch.float32, device=device)
    multiply(x, decoded, None, expected, TILES[-1])
    equal = set()
    for tile in tiles:
        multiply(x, weight, None, out, tile, packing=packing)
        if out.equal(expected):
            equal.add(tile)
    return frozenset(equal)


def linear_by_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, with their experts' matrices, in one launch.

    Args:
        rows: `[R, K]`.
        weight: `[E, N, K]` with any strides.
        bias: `[E, N]` or None.
        starts: `[E + 1]` int64 on the device: the first row of each expert, and the end of the last one.

    Returns:
        `[R, N]`; rows without an expert are not written.
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
    packing: WeightPacking | None = None,
) -> None:
    """Write the product of `rows` `[R, K]` and `weight` to `out` `[R, N]`, with this tile."""
    shape = weight.shape if packing is None else (packing.width, packing.depth)
    *experts, num_columns, depth = shape
    strides = weight.stride()[-2:] if packing is None else (stride_of(packing), 1)
    table = None if packing is None else table_of(packing.rows.encoding, weight.device)
    row_tiles = triton.cdiv(len(rows), tile.rows) + sum(min(count, len(rows)) for count in experts)
    _linear[(row_tiles * triton.cdiv(num_columns, tile.columns),)](
        out,
        rows,
        weight,
        table,
        None if bias is None else bias.contiguous(),
        starts,
        sum(experts),
        weight.stride(0) if experts else 0,
        len(rows),
        num_columns,
        depth,
        *strides,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EXPERTS=triton.next_power_of_2(sum(experts)) if experts else 0,
        FORMAT=None if packing is None else format_of(packing, weight, tile.depth),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
