"""Beam search with the semantics of transformers.

Each step ranks all continuations of all live beams by running score, the sum of their log-probs. In that
order, continuations that end become hypotheses if they are among the first `num_beams`, and are dropped
otherwise; the first `num_beams` of the others are the next live beams. A hypothesis of `l` tokens (including
the one that ended it) with running score `s` has the score

    s / l ** length_penalty

after Wu et al. 2016 (arXiv:1609.08144, section 7, without the coverage penalty and the constants). The
`num_beams` best hypotheses are kept.

The reference is `GenerationMixin._beam_search` of transformers 5.17 to 5.23, for a batch of one prompt
without sampling. One difference is intended: in transformers, a search that runs out of beams continues with
copies of the first one, or past the end of a hypothesis, with a score near -1e9. Here fewer beams stay live,
and the search may end with fewer than `num_beams` hypotheses.

The beams of a request are sequences that are forked and removed every step. No token is drawn from a beam's
row: it yields the likeliest candidates. Once all live beams have theirs, the search selects the next beams.
Beams need not run in the same step, nor keep their blocks while they wait.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Iterator
from itertools import islice

from verbatim.batch import Candidate, Candidates
from verbatim.core import Request, Sequence, Token
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import RequestFailed
from verbatim.params import SamplingParams

_MAX_EXPONENT = 250.0  # limits `l ** length_penalty` to 10 ** 250, so that scores stay finite


class BeamSearch:
    """The beams of one prompt.

    Attributes:
        live: the live beams, best first; initially only the root.
        finished: the best hypotheses so far, best first, at most `num_beams`. Of equal scores, the earlier
            hypothesis comes first.
        over: whether the search has ended and the hypotheses are final.
        num_candidates: number of candidates needed for each live beam (or all if there are fewer). There are
            enough continuations even if each beam's candidates include every end-of-sequence id.

    Args:
        root: the sequence of the prompt, before any token.
        params: a search ends when no beam is live, or by `early_stopping`. True: with `num_beams` hypotheses.
            False: when, in addition, the best live beam, ended now, would be no better than the worst
            hypothesis. "never": as False, but with `length_penalty` above 0 (which favours long hypotheses,
            since scores are negative) the beam is assumed to keep its running score up to `max_tokens`, its
            best possible outcome.
        num_eos: number of single ids that end a completion.
        max_tokens: maximum length of a completion; `grow` must end beams there.
    """

    def __init__(
        self, root: Sequence, params: SamplingParams, num_eos: int, max_tokens: int
    ) -> None:
        self.live: list[Sequence] = [root]
        self.finished: list[Sequence] = []
        self.over = False
        self.num_candidates = max(2, 1 + num_eos) * params.num_beams
        self._num_beams, self._early_stopping = params.num_beams, params.early_stopping
        self._num_tokens = 0  # length of every live beam
        self._max_tokens = max_tokens
        limit = _MAX_EXPONENT / math.log10(max(2, max_tokens))
        self._length_penalty = max(-limit, min(limit, params.length_penalty))

    def advance(
        self, rows: list[Candidates], grow: Callable[[Sequence, Candidate], Sequence]
    ) -> list[Sequence]:
        """Advance the search by one token.

        Args:
            rows: for each beam of `live`, its candidates with the highest `score`, best first, ties by the
                lowest id; a score of -inf marks an impossible candidate.
            grow: returns the state of a beam extended by a candidate, without changing the given state.
                Called in order of rank, only for continuations that are selected or that end.

        Returns:
            `live` after the step; empty when the search is over. Equal running scores are in the order of
            their parents, and for one parent in the order of its row.
        """
        assert not self.over and len(rows) == len(self.live)
        self._num_tokens += 1
        live: list[Sequence] = []
        ended: list[Sequence] = []
        for rank, (score, parent, candidate) in enumerate(self._ranked(rows)):
            state = grow(self.live[parent], candidate)
            state.score = score
            if not state.finished:
                live.append(state)
                if len(live) == self._num_beams:
                    break
            elif rank < self._num_beams:
                ended.append(state)
        self.live = live
        self._keep(ended, self._num_tokens)
        self.over = not (live and self._may_improve())
        if self.over:
            self.live = []
        return self.live

    def cut(self) -> None:
        """End the search now; the live beams become hypotheses."""
        live, self.live, self.over = self.live, [], True
        self._keep(live, max(1, self._num_tokens))

    def _ranked(self, rows: list[Candidates]) -> Iterator[tuple[float, int, Candidate]]:
        """Yield the best continuations, best first: running score, parent, candidate.

        The sum is rounded to float32 at each step, as in transformers. Rounding keeps each row sorted, so
        rows can be merged without a sort.
        """

        def continuations(parent: int) -> Iterator[tuple[float, int, Candidate]]:
            parent_score = self.live[parent].score
            for candidate in rows[parent]:
                score = _float32(parent_score + _float32(candidate.score))
                if score == -math.inf:
                    return
                yield score, parent, candidate

        merged = heapq.merge(
            *map(continuations, range(len(rows))), key=lambda entry: entry[0], reverse=True
        )
        return islice(merged, self.num_candidates)

    def _keep(self, ended: list[Sequence], length: int) -> None:
        for beam in ended:
            beam.score = self._final_score(beam.score, length)
        merged = sorted(self.finished + ended, key=lambda beam: -beam.score)  # a stable sort
        self.finished = merged[: self._num_beams]

    def _may_improve(self) -> bool:
        """Return whether the best live beam can still become one of the best hypotheses."""
        if len(self.finished) < self._num_beams:
            return True
        if self._early_stopping is True:
            return False
        assumes_max_length = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if assumes_max_length else self._num_tokens
        return self._final_score(self.live[0].score, length) > self.finished[-1].score

    def _final_score(self, score: float, length: int) -> float:
        return score / float(length**self._length_penalty)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def add_candidates(
    beam: Sequence, candidates: Candidates | None, token: Token, scheduler: Scheduler
) -> list[Sequence]:
    """Store a beam's candidates, and advance the search once all beams have theirs.

    Args:
        token: the values recorded for the next token, without its log-prob.

    Returns:
        The completions if the search has ended, else an empty list.
    """
    beam.candidates, beam.next_token = candidates, token
    request, search = beam.request, beam.request.search
    assert search is not None
    parents = request.sequences
    candidate_lists = [parent.candidates for parent in parents if parent.candidates is not None]
    if len(candidate_lists) < len(parents):
        return []
    origins: dict[Sequence, Sequence] = {}

    def extended(parent: Sequence, candidate: Candidate) -> Sequence:
        child = parent.fork(0)
        origins[child] = parent
        child.push(candidate.token_id, parent.next_token._replace(logprob=candidate.logprob))
        if not child.finished and child.grammar is not None and child.grammar.is_complete():
            child.complete()
        return child

    request.sequences = search.advance(candidate_lists, extended)
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
