"""What a sequence asks of the sampler for its next token."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from verbatim.batch import SampleRow
from verbatim.core import Sequence
from verbatim.sampling.processors import blocked_by_bad_words
from verbatim.sampling.stopping import banned_until_min_tokens


def draw_row(
    sequence: Sequence, ahead: SequenceOf[int] = (), mask: Tensor | None = None
) -> SampleRow:
    """How the token behind `sequence` and the ids `ahead` of it is drawn.

    The row is the one with which plain decoding would draw that token if those ids were drawn before.

    Args:
        mask: of the ids that the sequence's structure allows there, `SampleRow.mask`; None allows all.
    """
    request, params = sequence.request, sequence.request.params
    output_ids: SequenceOf[int] = sequence.output_ids
    if ahead:
        output_ids = [*output_ids, *ahead]
    banned = banned_until_min_tokens(params, request.eos_ids, len(output_ids))
    if request.bad_word_ids:
        banned += blocked_by_bad_words(request.bad_word_ids, [*request.prompt_ids, *output_ids])
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
