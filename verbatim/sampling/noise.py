"""Counter-based Gumbel noise: a pure function of seed, sample index, position and token id.

`argmax(logits + noise)` draws from `softmax(logits)` (Gumbel 1954; Yellott 1977). The random words are from
Philox4x32-10 (Salmon et al. 2011), which has no generator state, so scheduling can't change a draw. This is
the readable reference for `verbatim/kernels/philox.h`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.kernels.functions import run

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four random words of Philox4x32-10 for each counter; int64 tensors of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return the high and low word of a 32 x 32 bit product, computed by halves as int64 is signed."""
    high_half, low_half = a * (m >> 16), a * (m & 0xFFFF)  # each below 2**48
    high = (high_half + (low_half >> 16)) >> 16
    low = (((high_half & 0xFFFF) << 16) + low_half) & _WORD
    return high, low


def gumbel_row(seed: int, sample_index: int, position: int, vocab_size: int) -> Tensor:
    """Return the noise of ids 0 to `vocab_size - 1`, `[V]` float32, bit-identically without kernels.

    The noise of an id is `-log(-log1p(-(bits + 1/2) / 2**32))` in float64, rounded once to float32, where
    bits is word `id % 4` of Philox with counter `(id // 4, position, sample_index, 0)` and the seed as key
    (low word first).
    """
    if kernels.library() is not None:
        out = torch.empty(vocab_size, dtype=torch.float32)
        run("vb_gumbel", None, seed, sample_index, position, vocab_size, out.data_ptr())
        return out
    groups = torch.arange((vocab_size + 3) // 4)
    zero = torch.zeros_like(groups)
    counter = groups, zero + position, zero + sample_index, zero
    words = philox(counter, (seed & _WORD, seed >> 32))
    return _transform(torch.stack(words, dim=-1).flatten()[:vocab_size])


def _transform(bits: Tensor) -> Tensor:
    """Convert words to Gumbel variates, bit-identically on every path and machine.

    float64 logarithms may differ in the last place between libraries, and between the vector body and the
    scalar tail of one. That matters only if a value is next to the midpoint of two float32 numbers, about
    once in a million; then the C library's logarithm is used, as in the kernel.
    """
    uniform = (bits.double() + 0.5) * 2.0**-32
    noise = -torch.log(-torch.log1p(-uniform))
    slack = (noise.abs() + 1.0) * 2.0**-50
    result = noise.float()
    doubtful = (noise - slack).float() != (noise + slack).float()
    if doubtful.any():
        exact = [-math.log(-math.log1p(-u)) for u in uniform[doubtful].tolist()]
        result[doubtful] = torch.tensor(exact, dtype=torch.float64, device=bits.device).float()
    return result
