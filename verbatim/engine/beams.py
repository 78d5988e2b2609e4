"""Beams: sequences of one request that wait for each other, and are born and dropped at every step.

A beam's row is not drawn. It reports its likeliest candidates, and when all live beams have, the search
decides which go on. Beams need not run in the same step, nor keep their blocks while they wait.
"""

from __future__ import annotations

from torch import Tensor

from verbatim.batch import Candidate, Draws
from verbatim.core import Request, Sequence
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import RequestFailed


def note(
    beam: Sequence, draws: Draws, row: int, hidden: Tensor | None, scheduler: Scheduler
) -> list[Sequence]:
    """Take in how one beam may go on; the completions if that ends the search."""
    beam.candidates = draws.candidates[row]
    beam.request.note_token()
    # What belongs to the next token is kept with the beam, which hands it down to each of its heirs.
    if hidden is not None:
        beam.hidden.append(hidden)
    if beam.request.params.logprobs is not None:
        beam.top_logprobs.append(draws.top(row))
    return _advance(beam.request, scheduler)


def _advance(request: Request, scheduler: Scheduler) -> list[Sequence]:
    search = request.search
    assert search is not None
    parents = request.sequences
    rows = [parent.candidates for parent in parents if parent.candidates is not None]
    if len(rows) < len(parents):
        return []
    live = search.advance(rows, _heir)
    for heir in live:
        scheduler.fork(parents[heir.parent], heir.state)
    for parent in parents:
        scheduler.remove(parent)
    request.sequences = [heir.state for heir in live]
    if not search.over:
        return []
    if not search.finished:
        raise RequestFailed(
            f"request {request.request_id}: no beam can go on; the request's bans and its structure "
            "leave nothing"
        )
    return cut(request)


def _heir(parent: Sequence, candidate: Candidate) -> Sequence:
    """The beam that goes on from `parent` with one more token; it may end with it."""
    heir = parent.fork(0)
    heir.logprobs.append(candidate.logprob)
    heir.push(candidate.token_id)
    return heir


def cut(request: Request) -> list[Sequence]:
    """End the search where it stands; the request's sequences are then its best completions."""
    search = request.search
    assert search is not None
    if not search.over:
        search.cut()
    request.sequences = []
    for index, beam in enumerate(search.best(request.params.n)):
        sequence = beam.state
        sequence.index, sequence.score = index, beam.score
        for entries in (sequence.top_logprobs, sequence.hidden):  # an heir's, if it had none yet
            del entries[len(sequence.output_ids) :]
        request.sequences.append(sequence)
    return request.sequences
