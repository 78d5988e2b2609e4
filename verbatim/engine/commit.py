"""The only place where a request grows.

End of sequence, stop ids, stop strings and length are decided together, token by token, so that ids,
log-probs and top-n lists always have the same length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from verbatim.batch import Draws
from verbatim.core import (
    Completion,
    Delta,
    FinishReason,
    Request,
    Result,
    Sequence,
    TopLogprobs,
)
from verbatim.engine.scheduler import Chunk


def commit(chunk: Chunk, draws: Draws, first_row: int) -> Delta | None:
    """Take in what one step computed for one sequence.

    Args:
        first_row: where the chunk's rows begin in `draws`.

    Returns:
        What is new for the caller, or None while the sequence is still in prefill.
    """
    sequence = chunk.sequence
    request = sequence.request
    sequence.num_computed += chunk.num_rows
    row = first_row
    for row in range(first_row, first_row + chunk.num_prompt_targets):
        request.prompt_logprobs.append(draws.logprobs[row])
        request.prompt_top_logprobs.append(_top(draws, row))
    row = first_row + chunk.num_prompt_targets
    if chunk.draws:
        return grow(sequence, draws, [row])
    if request.max_tokens == 0 and sequence.num_uncomputed == 0:
        return finish(sequence, FinishReason.LENGTH)
    return None


def grow(sequence: Sequence, draws: Draws, rows: Iterable[int]) -> Delta:
    """Append the ids drawn in `rows`, in order, through the first that ends the sequence."""
    request = sequence.request
    for row in rows:
        sequence.output_ids.append(draws.ids[row])
        sequence.logprobs.append(draws.logprobs[row])
        sequence.sampled_logprobs.append(draws.sampled_logprobs[row])
        if request.params.logprobs is not None:
            sequence.top_logprobs.append(_top(draws, row))
        if request.metrics.first_token_s == 0.0:
            request.metrics.first_token_s = time.monotonic() - request.arrival
        ended = sequence.watch.push(draws.ids[row])
        if ended is not None:
            sequence.finish_reason, sequence.stop_reason = ended
            break
    return delta(sequence)


def finish(sequence: Sequence, reason: FinishReason) -> Delta:
    """End a sequence for a reason that no token gave: a length of nothing, an abort."""
    sequence.finish_reason = reason
    sequence.watch.finish(reason)
    return delta(sequence)


def delta(sequence: Sequence) -> Delta:
    """Everything that was added since the last one; with the result when the whole request has ended."""
    request = sequence.request
    new = slice(sequence.num_sent, None)
    sequence.num_sent = len(sequence.output_ids)
    if request.result is None and all(s.finished for s in request.sequences):
        request.result = _result(request)
    return Delta(
        request_id=request.request_id,
        index=sequence.index,
        text=sequence.watch.take(),
        token_ids=sequence.output_ids[new],
        logprobs=sequence.logprobs[new],
        sampled_logprobs=sequence.sampled_logprobs[new],
        top_logprobs=sequence.top_logprobs[new] if request.params.logprobs is not None else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        result=request.result,
    )


def _result(request: Request) -> Result:
    request.metrics.total_s = time.monotonic() - request.arrival
    wanted = request.params.prompt_logprobs
    return Result(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids,
        prompt_logprobs=None if wanted is None else [None, *request.prompt_logprobs],
        prompt_top_logprobs=None if not wanted else [None, *request.prompt_top_logprobs],
        outputs=[_completion(s) for s in sorted(request.sequences, key=lambda s: s.index)],
        num_cached_tokens=0,
        metrics=request.metrics,
        weight_version=request.weight_version,
    )


def _completion(sequence: Sequence) -> Completion:
    request = sequence.request
    assert sequence.finish_reason is not None
    return Completion(
        index=sequence.index,
        sample_index=sequence.sample_index,
        text=sequence.watch.text,
        token_ids=sequence.output_ids,
        logprobs=sequence.logprobs,
        sampled_logprobs=sequence.sampled_logprobs,
        top_logprobs=sequence.top_logprobs if request.params.logprobs is not None else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        seed=request.seed,
    )


def _top(draws: Draws, row: int) -> TopLogprobs:
    return list(zip(draws.top_ids[row], draws.top_logprobs[row], strict=True))
