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
LANES = tl.constexpr(NUM_LANES)
_UNROLLED = tl.constexpr(16)  # loads on their way at once
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


@triton.jit(do_not_specialize=["tiles"])
def _pick(
    bests,
    best_ids,
    logits,
    places,
    seeds,
    positions,
    indices,
    temperatures,
    greedy,
    row_stride,
    size,
    tiles,
    GROUPS: tl.constexpr,
    SLACK: tl.constexpr,
):
    """The best score of a tile of ids and whose it is, by the low and by the high scores."""
    row, tile = tl.program_id(0), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    index = tl.load(indices + row).to(tl.uint64, bitcast=True)
    temperature, is_greedy = tl.load(temperatures + row), tl.load(greedy + row) != 0
    words = _philox(group.to(tl.uint64), position, index, seed)
    values = logits + tl.load(places + row) * row_stride
    low, low_id = float("-inf"), _NO_ID
    high, high_id = float("-inf"), _NO_ID
    for word in tl.static_range(4):
        ids = group * 4 + word
        below, above = _scores(values, ids, size, words[word], temperature, is_greedy, SLACK)
        low, low_id = _better(low, low_id, below, ids)
        high, high_id = _better(high, high_id, above, ids)
    place = (row * tiles + tile) * 2
    tl.store(bests + place, low)
    tl.store(bests + place + 1, high)
    tl.store(best_ids + place, low_id)
    tl.store(best_ids + place + 1, high_id)


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


@triton.jit
def _masses(
    sums,
    logits,
    places,
    tops,
    temperatures,
    wants_warped,
    row_stride,
    size,
    LANES: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """The lanes of a row's mass, at temperature 1 and at its own: `[R, 2, LANES]`."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    values = logits + tl.load(places + row) * row_stride
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    warped_top = tl.div_rn(top, temperature)
    warps = tl.load(wants_warped + row) != 0
    raw = tl.full([LANES], 0.0, tl.float64)
    warped = tl.full([LANES], 0.0, tl.float64)
    for start in range(0, size, LANES * UNROLLED):
        for step in tl.static_range(UNROLLED):
            ids = start + step * LANES + lane
            held = ids < size
            value = widened(tl.load(values + ids, mask=held, other=float("-inf")))
            raw += tl.where(held, _mass(value, top), 0.0)
            if warps:
                divided = tl.div_rn(value, tl.full([LANES], 0.0, tl.float32) + temperature)
                warped += tl.where(held, _mass(divided, warped_top), 0.0)
    tl.store(sums + row * 2 * LANES + lane, raw)
    tl.store(sums + (row * 2 + 1) * LANES + lane, warped)


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
    numbers = torch.stack([places, seeds, positions, indices, targets]).to(device)
    places, seeds, positions, indices, targets = numbers
    given, temperatures = temperatures, temperatures.to(device)
    tops = logits.amax(-1).float()[places]  # NaN where there is one
    greedy = ~torch.isfinite(tops / temperatures)
    draws = targets < 0
    tiles = triton.cdiv(size, 4 * GROUPS)
    bests = torch.empty(num_rows, tiles, 2, dtype=torch.float32, device=device)
    best_ids = torch.empty(num_rows, tiles, 2, dtype=torch.int32, device=device)
    _pick[(num_rows, tiles)](
        bests,
        best_ids,
        logits,
        places,
        seeds,
        positions,
        indices,
        temperatures,
        greedy.int(),
        logits.stride(0),
        size,
        tiles,
        GROUPS=GROUPS,
        SLACK=SLACK,
        num_warps=4,
        **EXACT,
    )
    sums = torch.empty(num_rows, 2, LANES.value, dtype=torch.float64, device=device)
    warps = draws & ~greedy
    _masses[(num_rows,)](
        sums,
        logits,
        places,
        tops,
        temperatures,
        warps.int(),
        logits.stride(0),
        size,
        LANES=LANES,
        UNROLLED=_UNROLLED,
        num_warps=1,
        **EXACT,
    )
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    best = bests.amax(1, keepdim=True)
    low, high = torch.where(bests == best, best_ids, _NO_ID.value).amin(1).long().unbind(1)
    exact = (low == high) & (best[:, 0, 0] == best[:, 0, 1])
    fails = ~torch.isfinite(tops)
    ids = torch.where(fails, -1, torch.where(draws, low, targets))
    chosen = logits[places, ids.clamp(min=0, max=size - 1)].float()
    # One copy to the CPU for all of it: every number is exact in float64.
    values = [ids, chosen, tops, sums[:, 0, 0], tops / temperatures, sums[:, 1, 0]]
    flags = [exact | ~draws | fails, ~fails, warps & ~fails, draws & greedy & ~fails]
    found = torch.stack([column.double() for column in (*values, *flags)]).cpu()
    ids, chosen, top, total, warped_top, warped_total = found[: len(values)]
    exact, scored, warped, took_largest = found[len(values) :] != 0
    logprobs = _logprobs(chosen, top, total, scored)
    sampled = _logprobs((chosen.float() / given).double(), warped_top, warped_total, warped)
    return exact, ids.long(), logprobs, sampled.masked_fill(took_largest, 0.0)


def _logprobs(logits: Tensor, tops: Tensor, totals: Tensor, which: Tensor) -> Tensor:
    """Return `Mass.row` of one logit per row, NaN where `which` is False: `[R]` float32."""
    logs = [math.log(t) if w else 0.0 for t, w in zip(totals.tolist(), which.tolist(), strict=True)]
    values = (logits - tops - torch.tensor(logs, dtype=torch.float64)).float()
    return torch.where(which, values, torch.nan)
