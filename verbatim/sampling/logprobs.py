"""Masses and log-probs of one row of logits, batch-invariant.

A mass is a sum of `exp(logit - max)` in float64. The exponential consists of explicit additions and products,
and id `i` is always added to lane `i % 32`. Unlike with `torch.logsumexp`, a row alone or in a batch, any
number of threads and the kernel (`verbatim/kernels/logits.h`) are bit-identical.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verbatim.kernels.options import EXP_COEFFICIENTS, NUM_LANES


def exp_falling(x: Tensor) -> Tensor:
    """Return `exp(x)` for float64 `x <= 0`: exactly 1 at 0, never below `2**-1000`."""
    t = (x * 1.4426950408889634).clamp(min=-1000.0)
    n = torch.round(t)
    r = t - n
    p = torch.full_like(r, EXP_COEFFICIENTS[-1])
    for c in (*EXP_COEFFICIENTS[-2::-1], 1.0):
        p = p * r + c
    return (p.view(torch.int64) + (n.long() << 52)).view(torch.float64)


def masses(logits: Tensor, top: float) -> Tensor:
    """Return `exp(logit - top)` of float32 logits, as float64."""
    return exp_falling(logits.double() - top)


def lane_sum(values: Tensor) -> float:
    """Sum float64 values `[V]`, in the fixed order of this module."""
    padding = -values.shape[0] % NUM_LANES
    lanes = torch.nn.functional.pad(values, (0, padding)).view(-1, NUM_LANES)
    # cumsum adds row by row; the order of `sum` is undefined.
    lanes = lanes.cumsum(0)[-1]
    while lanes.shape[0] > 1:
        half = lanes.shape[0] // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes.item()


@dataclass(frozen=True, slots=True)
class Mass:
    """The largest logit and the mass of one row, which turn logits into log-probs."""

    top: float
    total: float

    @classmethod
    def of(cls, logits: Tensor) -> Mass | None:
        """Return the mass of float32 logits `[V]`; None if they have NaN or +inf, or nothing above -inf."""
        top = logits.max().item()  # NaN if any is NaN
        if not math.isfinite(top):
            return None
        return cls(top, lane_sum(masses(logits, top)))

    def row(self, logits: Tensor) -> Tensor:
        """Return the log-probs of some of the row's logits, rounded to float32."""
        return (logits.double() - self.top - math.log(self.total)).float()


def likeliest(logits: Tensor, n: int) -> Tensor:
    """Return the ids of the `n` largest logits `[V]` above -inf, largest first, ties by id."""
    n = min(n, int((logits > -math.inf).sum()))
    if n == 0:
        return torch.empty(0, dtype=torch.int64)
    nth_largest = torch.topk(logits, n).values[-1]
    ids = (logits >= nth_largest).nonzero().squeeze(1)
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices[:n]]
