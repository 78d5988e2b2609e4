"""Draws on a GPU: noise and argmax for rows without filters, and the masses of their log-probs.

The numbers are those of `verbatim.sampling` bit for bit, so that it does not show in a result which rows
were drawn where: the noise is the same function of (seed, sample index, position, id), divisions and
double precision sums are IEEE's and in the same order. A logarithm alone may differ from the C library's
in its last place. Where that could turn the rounding of the winner's noise, the row is handed back
undrawn, for the CPU to draw; that happens once in some hundred thousand rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.options import EXP_COEFFICIENTS, NUM_LANES
from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, widened

GROUPS = 256  # of four ids, in one program's tile
BLOCK = 4 * GROUPS
LANES = tl.constexpr(NUM_LANES)
_UNROLLED = tl.constexpr(32)  # additions of lanes between two waits
_KINDS = tl.constexpr(2)  # of masses of a row: at temperature 1, and at its own
_STAGES = 5  # loads of so many are on their way
_WIDTH = tl.constexpr(10)  # numbers found of a row
_SCRATCH = 2**24  # masses of rows that are drawn at once, 128 MB
_NO_ID = tl.constexpr(0x7FFFFFFF)
_C0, _C1, _C2, _C3, _C4, _C5 = map(tl.constexpr, EXP_COEFFICIENTS)
SLACK = 2.0**-50  # of a noise in float64, as `verbatim.sampling.noise` has it
_ROUNDER = tl.constexpr(1.5 * 2**52)  # added and taken away, it leaves the nearest whole number


@helper
def _philox(group, position, sample_index, seed):
    """The four words of each group of ids; all are uint64 that hold 32 bits, but for the seed."""
    c0, c1 = group, tl.full(group.shape, 0, tl.uint64) + position
    c2, c3 = tl.full(group.shape, 0, tl.uint64) + sample_index, tl.full(group.shape, 0, tl.uint64)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in tl.static_range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & 0xFFFFFFFF,
            (left >> 32) ^ c3 ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@helper
def _scores(logits, ids, size, word, temperature, is_greedy, SLACK: tl.constexpr):
    """The lowest and the highest number that the score of each id can be, in float32."""
    held = ids < size
    value = widened(tl.load(logits + ids, mask=held, other=float("-inf")))
    # 1 - u has 33 bits, so this is log1p(-u) of the exact u.
    rest = (4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10
    noise = -tl.log(-tl.log(rest))
    slack = (tl.abs(noise) + 1.0) * SLACK
    warped = tl.div_rn(value, tl.full(value.shape, 0.0, tl.float32) + temperature)
    low = tl.where(is_greedy, value, warped + (noise - slack).to(tl.float32))
    high = tl.where(is_greedy, value, warped + (noise + slack).to(tl.float32))
    return tl.where(held, low, float("-inf")), tl.where(held, high, float("-inf"))


@helper
def _better(best, best_id, score, ids):
    """The best of a tile and of what was found before it; ties to the lowest id."""
    top = tl.max(score, 0)
    found = tl.min(tl.where(score == top, ids, _NO_ID), 0)
    wins = (top > best) | ((top == best) & (found < best_id))
    return tl.where(wins, top, best), tl.where(wins, found, best_id)


@helper
def _row_of(numbers, row, num_rows):
    """A row's place, seed, position, sample index, target and temperature."""
    at = numbers + row
    seed = tl.load(at + num_rows).to(tl.uint64, bitcast=True)
    position = tl.load(at + 2 * num_rows).to(tl.uint64, bitcast=True)
    index = tl.load(at + 3 * num_rows).to(tl.uint64, bitcast=True)
    temperature = tl.load(at + 5 * num_rows).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(at), seed, position, index, tl.load(at + 4 * num_rows), temperature


@helper
def _top_of(tops, place, target, temperature):
    """The largest logit, the same at the temperature, and whether the draw is greedy or warped."""
    top = tl.load(tops + place)  # NaN where there is one
    warped_top = tl.div_rn(top, temperature)
    warmer = tl.abs(warped_top) < float("inf")
    return top, warped_top, warmer == 0, warmer & (target < 0)


@triton.jit(do_not_specialize=["first", "num_rows", "tiles"])
def _pick(
    bests,
    best_ids,
    logits,
    numbers,
    tops,
    first,
    num_rows,
    row_stride,
    size,
    tiles,
    GROUPS: tl.constexpr,
    SLACK: tl.constexpr,
):
    """The best score of a tile of ids and whose it is, by the low and by the high scores."""
    row, tile = tl.program_id(0), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    place, seed, position, index, target, temperature = _row_of(numbers, first + row, num_rows)
    _, _, is_greedy, _ = _top_of(tops, place, target, temperature)
    words = _philox(group.to(tl.uint64), position, index, seed)
    values = logits + place * row_stride
    low, low_id = float("-inf"), _NO_ID
    high, high_id = float("-inf"), _NO_ID
    for word in tl.static_range(4):
        ids = group * 4 + word
        below, above = _scores(values, ids, size, words[word], temperature, is_greedy, SLACK)
        low, low_id = _better(low, low_id, below, ids)
        high, high_id = _better(high, high_id, above, ids)
    at = row * _KINDS * tiles + tile
    tl.store(bests + at, low)
    tl.store(bests + at + tiles, high)
    tl.store(best_ids + at, low_id)
    tl.store(best_ids + at + tiles, high_id)


@helper
def _mass(value, top):
    """Compute `verbatim.sampling.logprobs.exp_falling` of a logit less the largest."""
    t = (value.to(tl.float64) - top.to(tl.float64)) * 1.4426950408889634
    t = tl.where(t < -1000.0, -1000.0, t)
    n = (t + _ROUNDER) - _ROUNDER
    r = t - n
    p = tl.full(t.shape, _C5, tl.float64)
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _C1
    p = p * r + _C0
    p = p * r + 1.0
    bits = p.to(tl.int64, bitcast=True) + (n.to(tl.int64) << 52)
    return bits.to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["first", "num_rows", "tiles"])
def _masses(
    masses,
    logits,
    numbers,
    tops,
    first,
    num_rows,
    row_stride,
    size,
    tiles,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The masses of a tile of ids, at temperature 1 and at the row's: `[R, V / LANES, 2, LANES]`."""
    row, tile = tl.program_id(0), tl.program_id(1)
    place, _, _, _, target, temperature = _row_of(numbers, first + row, num_rows)
    top, warped_top, _, warps = _top_of(tops, place, target, temperature)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    held = ids < size
    value = widened(tl.load(logits + place * row_stride + ids, mask=held, other=float("-inf")))
    step = (row.to(tl.int64) * tiles + tile) * (BLOCK // LANES) + tl.arange(0, BLOCK) // LANES
    at = masses + step * _KINDS * LANES + ids % LANES
    tl.store(at, tl.where(held, _mass(value, top), 0.0))
    if warps:
        divided = tl.div_rn(value, tl.full([BLOCK], 0.0, tl.float32) + temperature)
        tl.store(at + LANES, tl.where(held, _mass(divided, warped_top), 0.0))


@triton.jit(do_not_specialize=["first", "num_rows", "tiles"])
def _draw(
    found,
    bests,
    best_ids,
    masses,
    logits,
    numbers,
    tops,
    first,
    num_rows,
    row_stride,
    size,
    tiles,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLLED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A row of `found`: the sums of its masses in the order of lanes, its id, and what log-probs need."""
    row = tl.program_id(0)
    place, _, _, _, target, temperature = _row_of(numbers, first + row, num_rows)
    top, warped_top, is_greedy, warps = _top_of(tops, place, target, temperature)
    lane = tl.arange(0, _KINDS * LANES)
    at = masses + row.to(tl.int64) * tiles * STEPS * _KINDS * LANES + lane
    sums = tl.full([_KINDS * LANES], 0.0, tl.float64)
    for start in tl.range(0, tiles * STEPS, UNROLLED, num_stages=STAGES):
        for step in tl.static_range(UNROLLED):
            sums += tl.load(at + (start + step) * _KINDS * LANES)
    for level in tl.static_range(1, LEVELS + 1):
        sums = tl.sum(tl.reshape(sums, [_KINDS, 2, LANES >> level]), 1)
    tile = tl.arange(0, TILES)
    scores, ids = bests + row * _KINDS * tiles + tile, best_ids + row * _KINDS * tiles + tile
    held, worst = tile < tiles, float("-inf")
    low, low_id = _better(
        worst,
        _NO_ID,
        tl.load(scores, mask=held, other=worst),
        tl.load(ids, mask=held, other=_NO_ID),
    )
    high, high_id = _better(
        worst,
        _NO_ID,
        tl.load(scores + tiles, mask=held, other=worst),
        tl.load(ids + tiles, mask=held, other=_NO_ID),
    )
    fails = (tl.abs(top) < float("inf")) == 0
    draws = target < 0
    token_id = tl.where(draws, low_id.to(tl.int64), target)
    chosen = widened(tl.load(logits + place * row_stride + tl.minimum(token_id, size - 1)))
    row_found = found + (first + row) * WIDTH
    tl.store(row_found + tl.arange(0, _KINDS), tl.reshape(sums, [_KINDS]))
    tl.store(row_found + 2, tl.where(fails, -1, token_id).to(tl.float64))
    tl.store(row_found + 3, chosen.to(tl.float64))
    tl.store(row_found + 4, top.to(tl.float64))
    tl.store(row_found + 5, warped_top.to(tl.float64))
    exact = ((low_id == high_id) & (low == high)) | (target >= 0) | fails
    tl.store(row_found + 6, exact.to(tl.float64))
    tl.store(row_found + 7, (fails == 0).to(tl.float64))
    tl.store(row_found + 8, (warps & (fails == 0)).to(tl.float64))
    tl.store(row_found + 9, (draws & is_greedy & (fails == 0)).to(tl.float64))


def draw(
    logits: Tensor,
    places: Tensor,
    seeds: Tensor,
    positions: Tensor,
    indices: Tensor,
    temperatures: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw from rows of `logits` `[N, V]`, on their GPU, in the one order of `verbatim.sampling.sampler`.

    Args, one of each a row, on the CPU:
        places: int64, the row of `logits`.
        seeds: int64, the bits of the 64-bit seed.
        positions, indices: int64.
        temperatures: float32, 0 and up.
        targets: int64, an id that is scored and not drawn, or -1.

    Returns, on the CPU:
        `[R]` bool; False where a logarithm of the C library's has to decide.
        `[R]` int64, the ids; the row's target where it has one. -1 where nothing can be drawn.
        `[R]` float32, their log-probs, and those of the distributions that they were drawn from.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    assert logits.dtype in DTYPES
    device, (num_rows, size) = logits.device, (len(places), logits.shape[1])
    # One copy to the GPU, which waits for nothing there, and one back: every number is exact in float64.
    columns = [places, seeds, positions, indices, targets, temperatures.view(torch.int32)]
    numbers = torch.stack([column.long() for column in columns]).to(device, non_blocking=True)
    tops = logits.amax(-1).float()
    tiles = triton.cdiv(size, BLOCK)
    held = max(1, min(num_rows, _SCRATCH // (tiles * BLOCK * _KINDS.value)))
    bests = logits.new_empty(held, _KINDS.value, tiles, dtype=torch.float32)
    best_ids = bests.new_empty(bests.shape, dtype=torch.int32)
    masses = bests.new_empty(held, tiles * BLOCK * _KINDS.value, dtype=torch.float64)
    found = masses.new_empty(num_rows, _WIDTH.value)
    for first in range(0, num_rows, held):
        count = min(held, num_rows - first)
        rows = logits, numbers, tops, first, num_rows, logits.stride(0), size, tiles
        _pick[(count, tiles)](bests, best_ids, *rows, GROUPS=GROUPS, SLACK=SLACK, **EXACT)
        _masses[(count, tiles)](masses, *rows, BLOCK=BLOCK, LANES=LANES, **EXACT)
        _draw[(count,)](
            found,
            bests,
            best_ids,
            masses,
            *rows,
            TILES=triton.next_power_of_2(tiles),
            STEPS=BLOCK // LANES.value,
            LANES=LANES,
            LEVELS=LANES.value.bit_length() - 1,
            STAGES=_STAGES,
            UNROLLED=_UNROLLED,
            WIDTH=_WIDTH,
            num_warps=2,  # one for each kind of mass
            **EXACT,
        )
    total, warped_total, ids, chosen, top, warped_top, *flags = found.cpu().T
    exact, scored, warped, took_largest = (flag != 0 for flag in flags)
    logprobs = _logprobs(chosen, top, total, scored)
    sampled = _logprobs((chosen.float() / temperatures).double(), warped_top, warped_total, warped)
    return exact, ids.long(), logprobs, sampled.masked_fill(took_largest, 0.0)


def _logprobs(logits: Tensor, tops: Tensor, totals: Tensor, which: Tensor) -> Tensor:
    """Return `Mass.row` of one logit per row, NaN where `which` is False: `[R]` float32."""
    logs = [math.log(t) if w else 0.0 for t, w in zip(totals.tolist(), which.tolist(), strict=True)]
    values = (logits - tops - torch.tensor(logs, dtype=torch.float64)).float()
    return torch.where(which, values, torch.nan)
