"""Rows of logits that lie on a GPU and are drawn there (`verbatim/kernels/triton/sampling.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verbatim.batch import DRAW_FAILED, Draws, SampleRow
from verbatim.sampling.processors import is_edited


def serves(row: SampleRow) -> bool:
    """Does nothing stand between this row's logits and its draw but the temperature? Lists of likely
    ids, filters, penalties, structures and beams are for the CPU.
    """
    if row.num_candidates or row.num_logprobs:
        return False
    if row.target is not None:
        return True
    params = row.params
    plain = not params.top_k and params.top_p >= 1 and params.min_p <= 0 and params.typical_p >= 1
    return plain and row.processed is None and not is_edited(row)


def sample_rows(
    logits: Tensor, rows: list[SampleRow], places: list[int]
) -> tuple[Draws, list[int]]:
    """The draws of rows that the kernel `serves`, and which of them the CPU has to draw after all."""
    from verbatim.kernels.triton.sampling import draw

    seeds = [row.seed - (row.seed >> 63 << 64) for row in rows]  # as a signed number
    drawn = draw(
        logits,
        torch.tensor(places),
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
    drawn_so = ~(failed | targets | drawn.greedy)
    sampled = _logprobs(warped, drawn.warped_tops, drawn.warped_totals, drawn_so)
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
    """`Mass.row` of one logit of each row, NaN where not asked for: `[R]` float32."""
    logs = [math.log(t) if w else 0.0 for t, w in zip(totals.tolist(), which.tolist(), strict=True)]
    found = (logits.double() - tops.double() - torch.tensor(logs, dtype=torch.float64)).float()
    return torch.where(which, found, torch.nan)
