"""The support of a draw: the ids that the filters left to draw from, and their share of the mass."""

from __future__ import annotations

import math

from torch import Tensor

from verbatim.batch import SampleRow, Support
from verbatim.sampling import fast
from verbatim.sampling.logprobs import Mass
from verbatim.sampling.processors import edit, is_greedy, temperature, warp


def support_of(raw: Tensor, row: SampleRow, token_id: int, *, use_kernel: bool) -> Support:
    """Return the support of a row that drew `token_id` from its raw logits `[V]`."""
    params = row.params
    logits = edit(raw.float(), row)
    if is_greedy(logits, params.temperature):
        return Support([token_id], 0.0)
    logits = temperature(logits, params.temperature)
    if use_kernel and params.typical_p == 1:
        return fast.support(logits, params)
    has_top_k = 0 < params.top_k < len(logits)
    if not (has_top_k or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1):
        return Support(None, 0.0)
    filtered = warp(logits, params.replace(temperature=1.0))
    kept, total = Mass.of(filtered), Mass.of(logits)
    assert kept is not None and total is not None  # a token was drawn from them
    ids = (filtered > -math.inf).nonzero()[:, 0].tolist()
    # The typical filter may drop the largest logit, which the masses are relative to.
    shift = kept.top - total.top
    return Support(ids, shift + (math.log(kept.total) - math.log(total.total)))
