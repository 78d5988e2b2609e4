"""Commits the draws of a step. Output is added to requests only here.

End of sequence, stop ids, stop strings and length are checked together, token by token, so that ids,
log-probs and top-n lists always have the same length.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import DRAW_FAILED, Draw, Draws
from verbatim.core import Completion, Delta, FinishReason, Request, Result, Sequence, Token
from verbatim.engine.beams import add_candidates, finish_search
from verbatim.engine.scheduler import Scheduler
from verbatim.engine.work import Chunk, drawing_sequences
from verbatim.errors import RequestFailed


def commit(chunk: Chunk, hidden: Tensor | None, scheduler: Scheduler) -> list[Sequence]:
    """Append the results of one step to one sequence: one token, or more if draft tokens are accepted.

    Args:
        hidden: `[R, H]`, hidden states of the step's logits rows, if a request needs them.

    Returns:
        The sequences of the request that have a delta to deliver; none during prefill.

    Raises:
        RequestFailed: no token can be drawn.
    """
    sequence, request = chunk.sequence, chunk.sequence.request
    results = _valid_draws(chunk)
    if any(draw.id == DRAW_FAILED for draw in results):
        raise RequestFailed(
            f"request {request.request_id}: no token can be drawn; the model's logits are NaN or "
            "infinite, or the request's bans, structure and filters leave no token"
        )
    scheduler.advance(chunk)
    first_row = chunk.first_logits_row
    for row, draw in enumerate(results[: chunk.num_prompt_rows], first_row):
        request.prompt_tokens.append(_token(request, draw, hidden, row))
    if sequence.finished:  # recomputed for its recorded choices
        return [] if sequence.num_uncomputed else [sequence]
    if request.is_prefill_only and sequence.num_uncomputed == 0:
        for sibling in request.sequences[1:]:
            scheduler.fork(sequence, sibling)
        return finish(request, FinishReason.LENGTH)
    if not chunk.draws:
        return []
    if chunk.is_complete:
        sequence.complete()
        return [sequence]
    drawn, first_row = results[chunk.num_prompt_rows :], first_row + chunk.num_prompt_rows
    if request.metrics.first_token_s == 0.0:
        request.metrics.first_token_s = time.monotonic() - request.arrival
    if request.search is not None:
        token = _token(request, drawn[0], hidden, first_row)
        return add_candidates(sequence, drawn[0].candidates, token, scheduler)
    samples = drawing_sequences(chunk)
    for sibling in samples[1:]:
        scheduler.fork(sequence, sibling)
    if len(samples) > 1:
        for draw, sample in zip(drawn, samples, strict=True):
            sample.push(draw.id, _token(request, draw, hidden, first_row))
    else:
        for row, draw in enumerate(drawn):
            sequence.push(draw.id, _token(request, draw, hidden, first_row + row))
            if sequence.finished:
                break
        chunk.num_accepted = row  # the last row that was pushed follows only accepted drafts
        if chunk.max_draft:
            scheduler.accept(sequence, chunk.num_accepted)
    return list(samples)


def _valid_draws(chunk: Chunk) -> Draws:
    """Return the chunk's results through the first rejected draft token.

    A failed draw counts only in the first row: before a later one the sequence may end, and otherwise the
    draw fails again in the next step.
    """
    drawn, draft = chunk.results, chunk.draft_ids  # a chunk with a draft has no prompt rows
    if not draft:
        return drawn
    count = 1
    while (
        count < len(drawn)
        and drawn[count - 1].id == draft[count - 1]
        and drawn[count].id != DRAW_FAILED
    ):
        count += 1
    return drawn[:count]


def _token(request: Request, draw: Draw, hidden: Tensor | None, row: int) -> Token:
    """Return the values to record for a draw from logits row `row`."""
    if not request.params.hidden_states:
        hidden = None
    return Token(
        draw.logprob,
        draw.sampled_logprob,
        request.weight_version,
        draw.top,
        draw.support,
        None if hidden is None else hidden[row].clone(),
    )


def finish(request: Request, reason: FinishReason) -> list[Sequence]:
    """Finish the unfinished sequences of a request with `reason`; return those to deliver.

    A finished sequence that is being recomputed for its record is delivered without it, with `reason`.
    """
    if request.search is not None:
        sequences = finish_search(request)
    else:
        sequences = [s for s in request.sequences if not s.finished or s.num_recorded is not None]
    for sequence in sequences:
        if sequence.num_recorded is not None:
            sequence.watch.finish_reason = reason
        sequence.watch.finish(reason)
    return sequences


def delta(sequence: Sequence, num_accepted: int = 0) -> Delta:
    """Return the output since the last delta; the request's final delta has its result.

    The first `num_accepted` of the new tokens are accepted draft tokens.
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
    metrics, num_top = request.metrics, request.params.prompt_logprobs
    prompt = request.prompt_tokens
    metrics.total_s = time.monotonic() - request.arrival
    longest = max((len(s.output_ids) for s in request.sequences), default=0)
    longest -= len(request.resumed_ids)
    if longest > 1:
        metrics.per_token_s = (metrics.total_s - metrics.first_token_s) / (longest - 1)
    return Result(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_ids + request.resumed_ids,
        prompt_logprobs=None if num_top is None else [None, *(t.logprob for t in prompt)],
        prompt_top_logprobs=None if not num_top else [None, *(t.top_logprobs for t in prompt)],
        outputs=[_completion(s) for s in sorted(request.sequences, key=lambda s: s.index)],
        num_cached_tokens=metrics.num_cached_tokens,
        metrics=metrics,
        weight_version=request.weight_version,
        prompt_hidden_states=_stack(request, prompt),
    )


def _completion(sequence: Sequence) -> Completion:
    request = sequence.request
    begin = len(request.resumed_ids)
    return Completion(
        sample_index=sequence.sample_index,
        text=sequence.watch.text,
        seed=request.seed,
        score=None if request.search is None else sequence.score,
        hidden_states=_stack(request, sequence.tokens[begin:]),
        routing=sequence.routing,
        indices=sequence.indices,
        **_output(sequence, begin),
    )


def _output(sequence: Sequence, begin: int) -> dict[str, Any]:
    """Return the fields common to completions and deltas, for the tokens from `begin` on."""
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


def _stack(request: Request, tokens: list[Token]) -> Tensor | None:
    if not request.params.hidden_states:
        return None
    rows = [token.hidden for token in tokens if token.hidden is not None]
    return torch.stack(rows) if rows else torch.empty(0, 0)
