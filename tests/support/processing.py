"""The processing of a row of logits, as the torch sampler does it."""

from __future__ import annotations

from torch import Tensor

from verbatim.batch import SampleRow
from verbatim.sampling.processors import edit, is_greedy, warp


def process(logits: Tensor, row: SampleRow) -> Tensor:
    """Process one row of raw logits `[V]` before the noise is added; filtered ids become -inf.

    If `is_greedy`, the row is edited but not filtered.
    """
    logits = edit(logits.float(), row)
    return logits if is_greedy(logits, row.params.temperature) else warp(logits, row.params)
