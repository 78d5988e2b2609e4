"""The sampler for logits on a GPU (`verbatim/kernels/triton/sampling.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.batch import Draw, SampleRow
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


def sample_rows(logits: Tensor, rows: list[SampleRow], logits_rows: list[int]) -> list[Draw | None]:
    """Draw supported rows; None for a row that the CPU must draw, once in some hundred thousand."""
    from verbatim.kernels.triton.sampling import draw

    seeds = [row.seed - (row.seed >> 63 << 64) for row in rows]  # as a signed number
    columns = draw(
        logits,
        torch.tensor(logits_rows),
        torch.tensor(seeds),
        torch.tensor([row.position for row in rows]),
        torch.tensor([row.sample_index for row in rows]),
        torch.tensor([row.params.temperature for row in rows], dtype=torch.float32),
        torch.tensor([-1 if row.target is None else row.target for row in rows]),
    )
    return [
        Draw(token_id, logprob, sampled_logprob, [], []) if exact else None
        for exact, token_id, logprob, sampled_logprob in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]
