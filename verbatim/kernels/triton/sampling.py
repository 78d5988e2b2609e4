"""Draws on a GPU: noise and argmax for rows without filters, and the masses of their log-probs.

The results are bit-identical to those of `verbatim.sampling`, wherever a row was drawn: the noise is the same
function of (seed, sample index, position, id), and divisions and double precision sums follow IEEE, in the
same order. Only a logarithm may differ from the C library's, in its last place. If that could affect the
rounding of the winner's noise, the row is returned undrawn, for the CPU to draw; that happens once in some
hundred thousand rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from verbatim.kernels.options import EXP_COEFFICIENTS, NUM_LANES
from verbatim.kernels.triton.numbers import DTYPES, EXACT, helper, widened

GROUPS = tl.constexpr(256)  # of four ids, per tile
BLOCK = tl.constexpr(4 * 256)
LANES = tl.constexpr(NUM_LANES)
_UNROLLED = tl.constexpr(32)  # additions of lanes between two waits for loads
_KINDS = tl.constexpr(2)  # masses per row: at temperature 1, and at its own temperature
_LEVELS = tl.constexpr(NUM_LANES.bit_length() - 1)  # of a tree of sums over the lanes
_STAGES = tl.constexpr(5)  # loads in flight
_WIDTH = tl.constexpr(10)  # numbers returned per row
_SCRATCH = 2**24  # masses of the rows that are drawn at once, 128 MB
_NO_ID = tl.constexpr(0x7FFFFFFF)
_C0, _C1, _C2, _C3, _C4, _C5 = map(tl.constexpr, EXP_COEFFICIENTS)
SLACK = 2.0**-50  # error bound of a noise in float64, as in `verbatim.sampling.noise`
_ROUNDER = tl.constexpr(1.5 * 2**52)  # adding and subtracting it rounds to the nearest integer


@helper
def _philox(group, position, sample_index, seed):
    """Return the four words of each group of ids; all are uint64 with 32 bits, except for the seed."""
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
def _scores(logits, ids, size, word, temperature, is_greedy, SLACK):
    """Return the lowest and highest possible score of each id, in float32."""
    mask = ids < size
    value = widened(tl.load(logits + ids, mask=mask, other=float("-inf")))
    # 1 - u has 33 bits, so this is log1p(-u) of the exact u.
    rest = (4294967295.5 - word.to(tl.float64)) * 2.3283064365386963e-10
    noise = -tl.log(-tl.log(rest))
    slack = (tl.abs(noise) + 1.0) * SLACK
    warped = tl.div_rn(value, tl.full(value.shape, 0.0, tl.float32) + temperature)
    low = tl.where(is_greedy, value, warped + (noise - slack).to(tl.float32))
    high = tl.where(is_greedy, value, warped + (noise + slack).to(tl.float32))
    return tl.where(mask, low, float("-inf")), tl.where(mask, high, float("-inf"))


@helper
def _better(best, best_id, score, ids):
    """Return the best of a tile and of the tiles before it; ties to the lowest id."""
    top = tl.max(score, 0)
    found = tl.min(tl.where(score == top, ids, _NO_ID), 0)
    wins = (top > best) | ((top == best) & (found < best_id))
    return tl.where(wins, top, best), tl.where(wins, found, best_id)


@helper
def _best_of(scores, ids, mask):
    """Return the best of the tiles at these places."""
    found = tl.load(scores, mask=mask, other=float("-inf"))
    return _better(float("-inf"), _NO_ID, found, tl.load(ids, mask=mask, other=_NO_ID))


@helper
def _row_of(numbers, row):
    """Return a row's place, seed, position, sample index, target and temperature."""
    at = numbers + row * 6
    seed = tl.load(at + 1).to(tl.uint64, bitcast=True)
    position = tl.load(at + 2).to(tl.uint64, bitcast=True)
    index = tl.load(at + 3).to(tl.uint64, bitcast=True)
    temperature = tl.load(at + 5).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(at), seed, position, index, tl.load(at + 4), temperature


@helper
def _top_of(tops, place, target, temperature):
    """Return the largest logit, the same at the temperature, and whether the draw is greedy or warped."""
    top = tl.load(tops + place)  # NaN if any is NaN
    warped_top = tl.div_rn(top, temperature)
    warmer = tl.abs(warped_top) < float("inf")
    return top, warped_top, warmer == 0, warmer & (target < 0)


@triton.jit(do_not_specialize=["tiles"])
def _pick(bests, best_ids, logits, numbers, tops, row_stride, size, tiles, SLACK: tl.constexpr):
    """Find the best score of a tile of ids and its id, for the low and for the high scores."""
    row, tile = tl.program_id(0), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    place, seed, position, index, target, temperature = _row_of(numbers, row)
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


@triton.jit(do_not_specialize=["tiles"])
def _masses(masses, logits, numbers, tops, row_stride, size, tiles):
    """Compute the masses of a tile of ids, at temperature 1 and the row's: `[R, V / LANES, 2, LANES]`."""
    row, tile = tl.program_id(0), tl.program_id(1)
    place, _, _, _, target, temperature = _row_of(numbers, row)
    top, warped_top, _, warps = _top_of(tops, place, target, temperature)
    ids = tile * BLOCK + tl.arange(0, BLOCK)
    mask = ids < size
    value = widened(tl.load(logits + place * row_stride + ids, mask=mask, other=float("-inf")))
    step = (row.to(tl.int64) * tiles + tile) * (BLOCK // LANES) + tl.arange(0, BLOCK) // LANES
    at = masses + step * _KINDS * LANES + ids % LANES
    tl.store(at, tl.where(mask, _mass(value, top), 0.0))
    if warps:
        divided = tl.div_rn(value, tl.full([BLOCK], 0.0, tl.float32) + temperature)
        tl.store(at + LANES, tl.where(mask, _mass(divided, warped_top), 0.0))


@triton.jit(do_not_specialize=["tiles"])
def _draw(
    results,
    bests,
    best_ids,
    masses,
    logits,
    numbers,
    tops,
    row_stride,
    size,
    tiles,
    TILES: tl.constexpr,
):
    """Write a row of `results`: the sums of its masses in lane order, its id, and inputs of its log-probs."""
    row = tl.program_id(0)
    place, _, _, _, target, temperature = _row_of(numbers, row)
    top, warped_top, is_greedy, warps = _top_of(tops, place, target, temperature)
    steps: tl.constexpr = BLOCK // LANES
    lane = tl.arange(0, _KINDS * LANES)
    at = masses + row.to(tl.int64) * tiles * steps * _KINDS * LANES + lane
    sums = tl.full([_KINDS * LANES], 0.0, tl.float64)
    for start in tl.range(0, tiles * steps, _UNROLLED, num_stages=_STAGES):
        for step in tl.static_range(_UNROLLED):
            sums += tl.load(at + (start + step) * _KINDS * LANES)
    for level in tl.static_range(1, _LEVELS + 1):
        sums = tl.sum(tl.reshape(sums, [_KINDS, 2, LANES >> level]), 1)
    tile = tl.arange(0, TILES)
    at, mask = row * _KINDS * tiles + tile, tile < tiles
    low, low_id = _best_of(bests + at, best_ids + at, mask)
    high, high_id = _best_of(bests + at + tiles, best_ids + at + tiles, mask)
    fails = (tl.abs(top) < float("inf")) == 0
    draws = target < 0
    token_id = tl.where(draws, low_id.to(tl.int64), target)
    chosen = widened(tl.load(logits + place * row_stride + tl.minimum(token_id, size - 1)))
    row_results = results + row * _WIDTH
    tl.store(row_results + tl.arange(0, _KINDS), tl.reshape(sums, [_KINDS]))
    tl.store(row_results + 2, tl.where(fails, -1, token_id).to(tl.float64))
    tl.store(row_results + 3, chosen.to(tl.float64))
    tl.store(row_results + 4, top.to(tl.float64))
    tl.store(row_results + 5, warped_top.to(tl.float64))
    exact = ((low_id == high_id) & (low == high)) | (target >= 0) | fails
    tl.store(row_results + 6, exact.to(tl.float64))
    tl.store(row_results + 7, (fails == 0).to(tl.float64))
    tl.store(row_results + 8, (warps & (fails == 0)).to(tl.float64))
    tl.store(row_results + 9, (draws & is_greedy & (fails == 0)).to(tl.float64))


def draw(
    logits: Tensor,
    places: Tensor,
    seeds: Tensor,
    positions: Tensor,
    indices: Tensor,
    temperatures: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw from rows of `logits` `[N, V]`, on their GPU, as `verbatim.sampling.sampler` does.

    Args, one element per row, on the CPU:
        places: int64, the row of `logits`.
        seeds: int64, the bits of the 64-bit seed.
        positions, indices: int64, position and sample index.
        temperatures: float32, 0 or above.
        targets: int64, an id to score without drawing, or -1.

    Returns, on the CPU:
        `[R]` bool; False if the C library's logarithm has to decide.
        `[R]` int64, the ids: the target if there is one, -1 if none can be drawn.
        `[R]` float32, their log-probs, and those in the distributions that they were drawn from.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    assert logits.dtype in DTYPES
    device, (num_rows, size) = logits.device, (len(places), logits.shape[1])
    # One copy to the GPU, without waiting for it, and one copy back: every number is exact in float64.
    columns = [places, seeds, positions, indices, targets, temperatures.view(torch.int32)]
    numbers = torch.stack([column.long() for column in columns], 1).to(device, non_blocking=True)
    tops = logits.amax(-1).float()
    tiles = triton.cdiv(size, BLOCK.value)
    masses_each = tiles * BLOCK.value * _KINDS.value
    mask = max(1, min(num_rows, _SCRATCH // masses_each))
    bests = logits.new_empty(mask, _KINDS.value, tiles, dtype=torch.float32)
    best_ids = bests.new_empty(bests.shape, dtype=torch.int32)
    masses = bests.new_empty(mask, masses_each, dtype=torch.float64)
    results = masses.new_empty(num_rows, _WIDTH.value)
    for first in range(0, num_rows, mask):
        count = min(mask, num_rows - first)
        rows = logits, numbers[first:], tops, logits.stride(0), size, tiles
        _pick[(count, tiles)](bests, best_ids, *rows, SLACK=SLACK, **EXACT)
        _masses[(count, tiles)](masses, *rows, **EXACT)
        _draw[(count,)](
            results[first:],
            bests,
            best_ids,
            masses,
            *rows,
            TILES=triton.next_power_of_2(tiles),
            num_warps=2,  # one for each kind of mass
            **EXACT,
        )
    total, warped_total, ids, chosen, top, warped_top, *flags = results.cpu().T
    exact, scored, warped, took_largest = (flag != 0 for flag in flags)
    logprobs = _logprobs(chosen, top, total, scored)
    sampled = _logprobs((chosen.float() / temperatures).double(), warped_top, warped_total, warped)
    return exact, ids.long(), logprobs, sampled.masked_fill(took_largest, 0.0)


def _logprobs(logits: Tensor, tops: Tensor, totals: Tensor, which: Tensor) -> Tensor:
    """Return `Mass.row` of one logit per row, NaN where `which` is False: `[R]` float32."""
    logs = [math.log(t) if w else 0.0 for t, w in zip(totals.tolist(), which.tolist(), strict=True)]
    values = (logits - tops - torch.tensor(logs, dtype=torch.float64)).float()
    return torch.where(which, values, torch.nan)
