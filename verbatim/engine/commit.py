"""Commits the draws of a step: the only place where a request's output grows.

End of sequence, stop ids, stop strings and length are checked together, token by token, so that ids,
log-probs and top-n lists always have the same length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import DRAW_FAILED, Draws
from verbatim.core import Completion, Delta, FinishReason, Request, Result, Sequence, Token
from verbatim.engine import beams
from verbatim.engine.draw import drawing_sequences
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.work import Chunk


def commit(
    chunk: Chunk, draws: Draws, hidden: Tensor | None, scheduler: Scheduler
) -> list[Sequence]:
    """Append the results of one step to one sequence: one token, or more if draft tokens are accepted.

    Args:
        hidden: `[R, H]` of the step's logits rows, if a request wants them.

    Returns:
        The sequences of its request that have a delta to deliver; none during prefill.
    """
    sequence, request = chunk.sequence, chunk.sequence.request
    scheduler.advance(chunk)
    last = chunk.first_logits_row + chunk.num_prompt_rows  # the first row to draw from, if any
    if request.params.hidden_states and hidden is not None:
        request.prompt_hidden += hidden[chunk.first_logits_row : last].clone()
    prompt_rows = range(chunk.first_draw, chunk.first_draw + chunk.num_prompt_rows)
    for row in prompt_rows if request.params.prompt_logprobs is not None else ():
        request.prompt_logprobs.append(draws[row].logprob)
        request.prompt_top_logprobs.append(draws[row].top)
    if request.is_prefill_only and sequence.num_uncomputed == 0:
        for sibling in request.sequences[1:]:
            scheduler.fork(sequence, sibling)
        return finish(request, FinishReason.LENGTH)
    if not chunk.draws:
        return []
    if chunk.is_complete:
        sequence.complete()
        return [sequence]
    drawn_hidden = hidden[last:] if request.params.hidden_states and hidden is not None else None
    if request.search is not None:
        beam_hidden = None if drawn_hidden is None else drawn_hidden[0].clone()
        return beams.add_candidates(sequence, draws[prompt_rows.stop], beam_hidden, scheduler)
    samples = drawing_sequences(chunk)
    for sibling in samples[1:]:
        scheduler.fork(sequence, sibling)
    rows = valid_rows(chunk, draws)[len(prompt_rows) :]
    if len(samples) > 1:
        for row, sample in zip(rows, samples, strict=True):
            grow(sample, draws, [row], drawn_hidden)
    else:
        chunk.num_accepted = grow(sequence, draws, rows, drawn_hidden) - 1
        if chunk.max_draft:
            scheduler.accept(sequence, chunk.num_accepted)
    return list(samples)


def valid_rows(chunk: Chunk, draws: Draws) -> range:
    """Return the chunk's rows of `draws` through the first rejected draft token.

    A failed draw is valid only in the first row: after a draft, the sequence may end before it, and if
    not, the draw fails again in the next step.
    """
    rows = range(chunk.first_draw, chunk.first_draw + chunk.num_draws)
    if not chunk.draft.ids:
        return rows
    drawn = [draws[row].id for row in rows]  # a chunk with a draft has no prompt rows
    count = 1
    while (
        count < len(drawn)
        and drawn[count - 1] == chunk.draft.ids[count - 1]
        and drawn[count] != DRAW_FAILED
    ):
        count += 1
    return rows[:count]


def grow(sequence: Sequence, draws: Draws, rows: Iterable[int], hidden: Tensor | None) -> int:
    """Append the ids drawn in `rows`, in order, through the first that ends the sequence.

    Args:
        hidden: input of the LM head in those rows; None if not requested.

    Returns:
        The number of tokens appended.
    """
    before, request = len(sequence.output_ids), sequence.request
    for place, row in enumerate(rows):
        request.note_token()
        draw = draws[row]
        token = Token(
            draw.logprob,
            draw.sampled_logprob,
            request.weight_version,
            draw.top,
            draw.support,
            None if hidden is None else hidden[place].clone(),
        )
        sequence.push(draw.id, token)
        if sequence.finished:
            break
    return len(sequence.output_ids) - before


def finish(request: Request, reason: FinishReason) -> list[Sequence]:
    """Finish the unfinished sequences of a request with `reason`, and return those to deliver."""
    if request.search is not None:
        sequences = beams.finish_search(request)
    else:
        sequences = [sequence for sequence in request.sequences if not sequence.finished]
    for sequence in sequences:
        sequence.watch.finish(reason)
    return sequences


def delta(sequence: Sequence, num_accepted: int = 0) -> Delta:
    """Return the output since the last delta; the request's final delta carries its result.

    Args:
        num_accepted: the number of leading new tokens that are accepted draft tokens.
    """
    request = sequence.request
    begin, sequence.num_sent = sequence.num_sent, len(sequence.output_ids)
    request.num_ended += sequence.finished
    if request.num_ended == len(request.sequences):
        request.result = _result(request)
    return Delta(
        request_id=request.request_id,
        text=sequence.watch.take(),
        result=request.result,
        num_accepted=num_accepted,
        **_output(sequence, begin),
    )


def _result(request: Request) -> Result:
    metrics, wanted = request.metrics, request.params.prompt_logprobs
    metrics.total_s = time.monotonic() - request.arrival
    longest = max((len(s.output_ids) for s in request.sequences), default=0)
    longest -= len(request.resumed_ids)
    if longest > 1:
        metrics.per_token_s = (metrics.total_s - metrics.first_token_s) / (longest - 1)
    return Result(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids + request.resumed_ids,
        prompt_logprobs=None if wanted is None else [None, *request.prompt_logprobs],
        prompt_top_logprobs=None if not wanted else [None, *request.prompt_top_logprobs],
        outputs=[_completion(s) for s in sorted(request.sequences, key=lambda s: s.index)],
        num_cached_tokens=metrics.num_cached_tokens,
        metrics=metrics,
        weight_version=request.weight_version,
        prompt_hidden_states=_stack(request, request.prompt_hidden),
    )


def _completion(sequence: Sequence) -> Completion:
    request = sequence.request
    begin = len(request.resumed_ids)
    hidden = [token.hidden for token in sequence.tokens[begin:] if token.hidden is not None]
    return Completion(
        sample_index=sequence.sample_index,
        text=sequence.watch.text,
        seed=request.seed,
        score=None if request.search is None else sequence.score,
        hidden_states=_stack(request, hidden),
        routing=sequence.routing,
        indices=sequence.indices,
        **_output(sequence, begin),
    )


def _output(sequence: Sequence, begin: int) -> dict[str, Any]:
    """Return the fields that completions and deltas share, for the tokens from `begin` on."""
    params, tokens = sequence.request.params, sequence.tokens[begin:]
    is_drawn = sequence.request.search is None
    return {
        "index": sequence.index,
        "token_ids": sequence.output_ids[begin:],
        "logprobs": [token.logprob for token in tokens],
        "sampled_logprobs": [t.sampled_logprob for t in tokens] if is_drawn else None,
        "top_logprobs": None if params.logprobs is None else [t.top_logprobs for t in tokens],
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.watch.stop_reason,
        "weight_versions": [token.weight_version for token in tokens],
        "supports": [token.support.ids for token in tokens] if params.support else None,
        "log_masses": [token.support.log_mass for token in tokens] if params.support else None,
    }


def _stack(request: Request, rows: list[Tensor]) -> Tensor | None:
    if not request.params.hidden_states:
        return None
    return torch.stack(rows) if rows else torch.empty(0, 0)
