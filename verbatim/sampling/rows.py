"""`draw_row`: the row of a sample plan that draws a sequence's next token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from verbatim.batch import SampleRow
from verbatim.core import Sequence
from verbatim.sampling.stopping import banned_until_min_tokens


def draw_row(
    sequence: Sequence, ahead: SequenceOf[int] = (), mask: Tensor | None = None
) -> SampleRow:
    """Return the row that draws the next token of `sequence` followed by the ids `ahead`.

    It equals the row of plain decoding after those ids.

    Args:
        mask: the ids that the sequence's grammar allows there, as `SampleRow.mask`; None allows all.
    """
    request, params = sequence.request, sequence.request.params
    output_ids: SequenceOf[int] = sequence.output_ids
    if ahead:
        output_ids = [*output_ids, *ahead]
    banned = banned_until_min_tokens(params, request.eos_ids, len(output_ids))
    if request.bad_words:
        tail = [
            *sequence.token_ids(
                max(0, sequence.num_tokens - request.bad_words.num_history), sequence.num_tokens
            ),
            *ahead,
        ]
        banned += request.bad_words.blocked(tail)
    if request.allowed_mask is not None:
        mask = request.allowed_mask if mask is None else mask & request.allowed_mask
    penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    needs_history = penalized != (1.0, 0.0, 0.0)
    return SampleRow(
        params,
        request.seed,
        sequence.sample_index,
        sequence.num_tokens + len(ahead),
        prompt_ids=request.prompt_ids if needs_history else (),
        output_ids=output_ids if needs_history else (),
        banned_ids=banned,
        num_logprobs=params.logprobs or 0,
        mask=mask,
        num_candidates=0 if request.search is None else request.search.num_candidates,
    )
