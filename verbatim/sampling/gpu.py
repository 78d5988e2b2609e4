"""The sampler for logits on a GPU (`verbatim/kernels/triton/sampling.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verbatim.batch import DRAW_FAILED, Draws, SampleRow
from verbatim.sampling.processors import is_edited


def supports(row: SampleRow) -> bool:
    """Return whether the row needs at most a temperature.

    Top log-probs, filters, penalties, structures and beams are computed on the CPU.
    """
    if row.num_candidates or row.num_logprobs:
        return False
    if row.target is not None:
        return True
    params = row.params
    plain = not params.top_k and params.top_p >= 1 and params.min_p <= 0 and params.typical_p >= 1
    return plain and row.processed is None and not is_edited(row)


def sample_rows(
    logits: Tensor, rows: list[SampleRow], logits_rows: list[int]
) -> tuple[Draws, list[int]]:
    """Draw supported rows; return the draws, and the indices of rows that the CPU must draw."""
    from verbatim.kernels.triton.sampling import draw

    seeds = [row.seed - (row.seed >> 63 << 64) for row in rows]  # as a signed number
    drawn = draw(
        logits,
        torch.tensor(logits_rows),
        torch.tensor(seeds),
        torch.tensor([row.position for row in rows]),
        torch.tensor([row.sample_index for row in rows]),
        torch.tensor([row.params.temperature for row in rows], dtype=torch.float32),
        torch.tensor([-1 if row.target is None else row.target for row in rows]),
    )
    failed = drawn.ids == DRAW_FAILED
    logprobs = _logprobs(drawn.logits, drawn.tops, drawn.totals, ~failed)
    warped = drawn.logits / torch.tensor([row.params.temperature for row in rows])
    targets = torch.tensor([row.target is not None for row in rows])
    sampled_rows = ~(failed | targets | drawn.greedy)
    sampled = _logprobs(warped, drawn.warped_tops, drawn.warped_totals, sampled_rows)
    sampled[drawn.greedy & ~failed & ~targets] = 0.0
    nothing: list[list[int]] = [[] for _ in rows]
    draws = Draws(
        ids=drawn.ids.tolist(),
        logprobs=logprobs.tolist(),
        sampled_logprobs=sampled.tolist(),
        top_ids=nothing,
        top_logprobs=[[] for _ in rows],
    )
    return draws, (~drawn.exact).nonzero().flatten().tolist()


def _logprobs(logits: Tensor, tops: Tensor, totals: Tensor, which: Tensor) -> Tensor:
    """Return `Mass.row` of one logit per row, NaN where `which` is False: `[R]` float32."""
    logs = [math.log(t) if w else 0.0 for t, w in zip(totals.tolist(), which.tolist(), strict=True)]
    values = (logits.double() - tops.double() - torch.tensor(logs, dtype=torch.float64)).float()
    return torch.where(which, values, torch.nan)
