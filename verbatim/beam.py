"""Beam search as transformers does it: which beams go on, which end, and when the search is over.

Each step ranks every continuation of every live beam by its running score, the sum of its log-probs.
Going down that ranking, those that end are hypotheses if they are among the first `num_beams`, and
lost otherwise; of the others the first `num_beams` are the next live beams. A hypothesis of `l` tokens
(the one that ended it included) with running score `s` has the score

    s / l ** length_penalty

after Wu et al. 2016 (arXiv:1609.08144, section 7, without the coverage and the constants). The
`num_beams` best hypotheses are kept.

The oracle is `GenerationMixin._beam_search` of transformers 5.17 to 5.23, for a batch of one prompt
without sampling. One difference is meant: there, a search that runs out of beams goes on with copies
of the first one, or past the end of a hypothesis, marked by a score near -1e9. Here nothing fills the
gap: fewer beams are live, and fewer than `num_beams` hypotheses may be found, but each is real.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from verbatim.batch import Candidate

_MAX_EXPONENT = 250.0  # of ten: how far `l ** length_penalty` may go, so that scores stay finite


class BeamState(Protocol):
    """What the caller keeps of a beam: its ids, its text, its place in the KV store."""

    @property
    def finished(self) -> bool:
        """Whether its last token met a stopping criterion: end of sequence, a stop or the length."""
        ...


State = TypeVar("State", bound=BeamState)


@dataclass(frozen=True, slots=True)
class Beam(Generic[State]):
    """A live beam, or a hypothesis.

    Attributes:
        state: the caller's.
        score: of a live beam the sum of its candidates' scores, of a hypothesis that over its length
            to the penalty.
        parent: its place among the live beams of the step before.
    """

    state: State
    score: float
    parent: int


class BeamSearch(Generic[State]):
    """The beams of one prompt.

    Attributes:
        live: the beams to go on with, best first; at first the root alone.
        finished: the best hypotheses so far, best first, at most `num_beams`. Of equal ones the earlier
            stands first.
        over: nothing more is to be done; the hypotheses are final.
        num_candidates: how many candidates the row of each live beam must report (or all there are). With
            as many, enough are left to go on with where every beam meets every end of sequence.

    Args:
        root: the state of the prompt, before any token.
        num_beams: 1 or more.
        length_penalty: above 0 favours long hypotheses, since scores are negative.
        early_stopping: when to end, besides when no beam is live. True: with `num_beams` hypotheses. False:
            when moreover the best live beam, ended as it stands, would be no better than the worst of
            them. "never": the same, but where `length_penalty` is above 0 the beam is taken to keep its
            running score up to `max_tokens`, the best that could become of it.
        num_eos: how many single ids end a completion.
        max_tokens: the longest completion. That `grow` ends a beam there is up to the caller.
    """

    def __init__(
        self,
        root: State,
        *,
        num_beams: int,
        length_penalty: float,
        early_stopping: bool | str,
        num_eos: int,
        max_tokens: int,
    ) -> None:
        assert num_beams >= 1 and max_tokens >= 1 and num_eos >= 0
        assert early_stopping in (True, False, "never")
        self.live: list[Beam[State]] = [Beam(root, 0.0, 0)]
        self.finished: list[Beam[State]] = []
        self.over = False
        self.num_candidates = max(2, 1 + num_eos) * num_beams
        self._num_beams = num_beams
        self._num_tokens = 0  # of every live beam
        self._max_tokens = max_tokens
        self._early_stopping = early_stopping
        limit = _MAX_EXPONENT / math.log10(max(2, max_tokens))
        self._length_penalty = max(-limit, min(limit, length_penalty))

    def advance(
        self, rows: Sequence[Sequence[Candidate]], grow: Callable[[State, Candidate], State]
    ) -> list[Beam[State]]:
        """Take one step.

        Args:
            rows: for each of `live` its likeliest candidates by `score`, likeliest first, ties by the
                lowest id; what has a score of -inf can't be.
            grow: makes the state of a beam that takes a candidate on; must leave the state it is given
                as it is. Called in order of rank, for those alone that go on or end.

        Returns:
            `live` after the step; empty when the search is over. Equal running scores keep the
            order of their parents, and within one parent that of its row.
        """
        assert not self.over and len(rows) == len(self.live)
        self._num_tokens += 1
        live: list[Beam[State]] = []
        ended: list[Beam[State]] = []
        for rank, (score, parent, candidate) in enumerate(self._ranked(rows)):
            state = grow(self.live[parent].state, candidate)
            if not state.finished:
                live.append(Beam(state, score, parent))
                if len(live) == self._num_beams:
                    break
            elif rank < self._num_beams:
                ended.append(Beam(state, self._final(score, self._num_tokens), parent))
        self.live = live
        self._keep(ended)
        self.over = not (live and self._may_improve())
        if self.over:
            self.live = []
        return self.live

    def cut(self) -> None:
        """End the search from outside: the live beams become hypotheses as they stand."""
        length = max(1, self._num_tokens)
        live, self.live, self.over = self.live, [], True
        self._keep([Beam(b.state, self._final(b.score, length), b.parent) for b in live])

    def best(self, n: int) -> list[Beam[State]]:
        """The `n` best hypotheses, best first; fewer where fewer were found."""
        return self.finished[:n]

    def _ranked(
        self, rows: Sequence[Sequence[Candidate]]
    ) -> Iterator[tuple[float, int, Candidate]]:
        """The continuations that are looked at, best first: running score, parent, candidate.

        The sum is float32 at each step, as transformers has it; rounding keeps a row in its order, so
        that rows can be merged without a sort.
        """

        def continuations(parent: int) -> Iterator[tuple[float, int, Candidate]]:
            before = self.live[parent].score
            for candidate in rows[parent]:
                score = _float32(before + _float32(candidate.score))
                if score == -math.inf:
                    return
                yield score, parent, candidate

        merged = heapq.merge(
            *map(continuations, range(len(rows))), key=lambda entry: entry[0], reverse=True
        )
        return islice(merged, self.num_candidates)

    def _keep(self, ended: list[Beam[State]]) -> None:
        merged = sorted(self.finished + ended, key=lambda beam: -beam.score)  # equal ones stay put
        self.finished = merged[: self._num_beams]

    def _may_improve(self) -> bool:
        """Whether the best live beam could still become one of the hypotheses that are kept."""
        if len(self.finished) < self._num_beams:
            return True
        if self._early_stopping is True:
            return False
        to_the_end = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if to_the_end else self._num_tokens
        return self._final(self.live[0].score, length) > self.finished[-1].score

    def _final(self, score: float, length: int) -> float:
        return score / float(length**self._length_penalty)


def _float32(value: float) -> float:
    return ctypes.c_float(value).value
