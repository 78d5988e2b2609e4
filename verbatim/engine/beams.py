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
    return _advance(beam.request, scheduler)


def _advance(request: Request, scheduler: Scheduler) -> list[Sequence]:
    search = request.search
    assert search is not None
    parents = request.sequences
    rows = [parent.candidates for parent in parents if parent.candidates is not None]
    if len(rows) < len(parents):
        return []
    live = search.advance(rows, _child)
    for child in live:
        scheduler.fork(parents[child.parent], child.state)
    for parent in parents:
        scheduler.remove(parent)
    request.sequences = [child.state for child in live]
    if not search.over:
        return []
    if not search.finished:
        raise RequestFailed(
            f"request {request.request_id}: no beam can continue; the request's bans and its structure "
            "leave no token"
        )
    return finish_search(request)


def _child(parent: Sequence, candidate: Candidate) -> Sequence:
    """Return a fork of `parent` with one more token, which may finish it."""
    child = parent.fork(0)
    child.push(candidate.token_id, parent.next_token._replace(logprob=candidate.logprob))
    if not child.finished and child.grammar is not None and child.grammar.is_complete():
        child.complete()
    return child


def finish_search(request: Request) -> list[Sequence]:
    """End the search, make its best hypotheses the request's sequences, and return them."""
    search = request.search
    assert search is not None
    if not search.over:
        search.cut()
    request.sequences = []
    for index, beam in enumerate(search.best(request.params.n)):
        sequence = beam.state
        sequence.index, sequence.score = index, beam.score
        request.sequences.append(sequence)
    return request.sequences
