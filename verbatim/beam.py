"""Beam search with the semantics of transformers.

Each step ranks every continuation of every live beam by its running score, the sum of its log-probs.
In that order, continuations that end become hypotheses if they are among the first `num_beams`, and are
dropped otherwise; of the others the first `num_beams` are the next live beams. A hypothesis of `l` tokens
(including the one that ended it) with running score `s` has the score

    s / l ** length_penalty

after Wu et al. 2016 (arXiv:1609.08144, section 7, without the coverage and the constants). The
`num_beams` best hypotheses are kept.

The oracle is `GenerationMixin._beam_search` of transformers 5.17 to 5.23, for a batch of one prompt
without sampling. One difference is intended: there, a search that runs out of beams continues with copies
of the first one, or past the end of a hypothesis, marked by a score near -1e9. Here fewer beams stay live,
and fewer than `num_beams` hypotheses may be found.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from verbatim.batch import Candidate

_MAX_EXPONENT = 250.0  # limits `l ** length_penalty` to 10 ** 250, so that scores stay finite


class BeamState(Protocol):
    """The caller's state of a beam: its ids, its text, its KV blocks.

    Attributes:
        score: the sum of its candidates' scores for a live beam; for a hypothesis, that sum divided by
            length ** length_penalty.
    """

    score: float

    @property
    def finished(self) -> bool:
        """True if its last token met a stopping criterion: end of sequence, a stop or the length."""
        ...


State = TypeVar("State", bound=BeamState)


class BeamSearch(Generic[State]):
    """The beams of one prompt.

    Attributes:
        live: the live beams, best first; at first only the root.
        finished: the best hypotheses so far, best first, at most `num_beams`. Of equal ones the earlier
            comes first.
        over: the search has ended; the hypotheses are final.
        num_candidates: number of candidates needed for each live beam (or all there are). It leaves
            enough continuations even if every end-of-sequence id is among each beam's candidates.

    Args:
        root: the state of the prompt, before any token.
        num_beams: 1 or more.
        length_penalty: above 0 favours long hypotheses, since scores are negative.
        early_stopping: when to end, besides when no beam is live. True: with `num_beams` hypotheses. False:
            when in addition the best live beam, ended now, would be no better than the worst of them.
            "never": the same, but with `length_penalty` above 0 the beam is assumed to keep its running
            score up to `max_tokens`, its best possible outcome.
        num_eos: number of single ids that end a completion.
        max_tokens: maximum length of a completion; `grow` must end beams there.
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
        self.live: list[State] = [root]
        self.finished: list[State] = []
        self.over = False
        self.num_candidates = max(2, 1 + num_eos) * num_beams
        self._num_beams = num_beams
        self._num_tokens = 0  # of every live beam
        self._max_tokens = max_tokens
        self._early_stopping = early_stopping
        limit = _MAX_EXPONENT / math.log10(max(2, max_tokens))
        self._length_penalty = max(-limit, min(limit, length_penalty))

    def advance(
        self, rows: Sequence[Iterable[Candidate]], grow: Callable[[State, Candidate], State]
    ) -> list[State]:
        """Advance the search by one token.

        Args:
            rows: for each of `live` its likeliest candidates by `score`, likeliest first, ties by the
                lowest id; a score of -inf marks an impossible candidate.
            grow: returns the state of a beam extended by a candidate, without changing the given state.
                Called in order of rank, only for continuations that are selected or end.

        Returns:
            `live` after the step; empty when the search is over. Equal running scores keep the
            order of their parents, and within one parent that of its row.
        """
        assert not self.over and len(rows) == len(self.live)
        self._num_tokens += 1
        live: list[State] = []
        ended: list[State] = []
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

    def _ranked(
        self, rows: Sequence[Iterable[Candidate]]
    ) -> Iterator[tuple[float, int, Candidate]]:
        """Yield the best continuations, best first: running score, parent, candidate.

        The sum is rounded to float32 at each step, as in transformers. Rounding keeps each row sorted, so
        rows can be merged without a sort.
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

    def _keep(self, ended: list[State], length: int) -> None:
        for beam in ended:
            beam.score = self._final(beam.score, length)
        merged = sorted(self.finished + ended, key=lambda beam: -beam.score)  # a stable sort
        self.finished = merged[: self._num_beams]

    def _may_improve(self) -> bool:
        """Return whether the best live beam could still become one of the best hypotheses."""
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
