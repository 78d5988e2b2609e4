"""Beam search in the engine: the beams of a request are sequences that are forked and removed every step.

A beam's row is not drawn; it yields its likeliest candidates. When all live beams have theirs, the search
selects the next beams. Beams need not run in the same step, nor keep their blocks while they wait.
"""

from __future__ import annotations

from verbatim.batch import Candidate, Candidates
from verbatim.core import Request, Sequence, Token
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import RequestFailed


def add_candidates(
    beam: Sequence, candidates: Candidates | None, token: Token, scheduler: Scheduler
) -> list[Sequence]:
    """Store a beam's candidates, and advance the search if all beams have theirs.

    Args:
        token: the record of the next token, which lacks its log-prob.

    Returns:
        The completions, if the search ended.
    """
    beam.candidates, beam.next_token = candidates, token
    request, search = beam.request, beam.request.search
    assert search is not None
    parents = request.sequences
    rows = [parent.candidates for parent in parents if parent.candidates is not None]
    if len(rows) < len(parents):
        return []
    origins: dict[Sequence, Sequence] = {}

    def grow(parent: Sequence, candidate: Candidate) -> Sequence:
        child = parent.fork(0)
        origins[child] = parent
        child.push(candidate.token_id, parent.next_token._replace(logprob=candidate.logprob))
        if not child.finished and child.grammar is not None and child.grammar.is_complete():
            child.complete()
        return child

    request.sequences = search.advance(rows, grow)
    for child in request.sequences:
        scheduler.fork(origins[child], child)
    for parent in parents:
        scheduler.remove(parent)
    if not search.over:
        return []
    if not search.finished:
        raise RequestFailed(
            f"request {request.request_id}: no beam can continue; the request's bans and its structure "
            "leave no token"
        )
    return finish_search(request)


def finish_search(request: Request) -> list[Sequence]:
    """End the search, make its best hypotheses the request's sequences, and return them."""
    search = request.search
    assert search is not None
    if not search.over:
        search.cut()
    request.sequences = search.finished[: request.params.n]
    for index, sequence in enumerate(request.sequences):
        sequence.index = index
    return request.sequences
