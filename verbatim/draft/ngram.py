"""Prompt lookup: a sequence goes on as it did the last time it said the same."""

from __future__ import annotations

import weakref

from verbatim.core import Sequence
from verbatim.errors import InvalidRequest

_MAX_CANDIDATES = 16  # earlier places that are compared at most
MAX_MATCH = 32  # a match of this many tokens is as good as any longer one


class Ngram:
    """Drafts what followed the longest earlier match of a sequence's last tokens, in prompt or completion.

    Costs no forward, and pays where completions repeat their prompt: summaries, edits, code, extraction.

    Args:
        min_match: tokens that must agree, 1 to 32. With 1 nearly every sequence is drafted for, and
            most drafts are wrong.

    Raises:
        InvalidRequest: `min_match` is not an integer, or out of range.
    """

    def __init__(self, min_match: int = 2) -> None:
        is_integer = isinstance(min_match, int) and not isinstance(min_match, bool)
        if not is_integer or not 1 <= min_match <= MAX_MATCH:
            raise InvalidRequest(f"min_match={min_match!r}: must be an integer, 1 to {MAX_MATCH}")
        self.min_match = min_match
        self._histories: weakref.WeakKeyDictionary[Sequence, History] = weakref.WeakKeyDictionary()

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            # Out of its place while it grows: one that Ctrl-C left half-way is never met again.
            history = self._histories.pop(sequence, None) or History(self.min_match)
            history.extend(sequence.token_ids(len(history.ids), sequence.num_tokens))
            self._histories[sequence] = history
            drafts.append(history.continuation(length))
        return drafts


class History:
    """Ids in the order they came, with hash chains as in LZ77 (Ziv and Lempel 1977; RFC 1951, section 4).

    For every run of `min_match` ids its last place is kept, and for every place the one before that held
    the same run. So taking in an id and looking up the end cost the same however long the history is.
    """

    def __init__(self, min_match: int) -> None:
        self.ids: list[int] = []
        self._min_match = min_match
        self._last: dict[tuple[int, ...], int] = {}  # where a run of ids ended last
        self._before: list[int] = []  # by end: where the same run ended before, -1 for nowhere

    def extend(self, ids: list[int]) -> None:
        """Take in more ids."""
        size, known = self._min_match, self.ids
        for token_id in ids:
            known.append(token_id)
            run = tuple(known[-size:])
            self._before.append(self._last.get(run, -1) if len(run) == size else -1)
            if len(run) == size:
                self._last[run] = len(known) - 1

    def continuation(self, length: int) -> list[int]:
        """What followed the longest earlier match of the end, the latest of several as long; [] for none.

        A match that reaches to the end itself goes on with its own continuation, as a repetition does.
        """
        ids, best, best_size = self.ids, -1, self._min_match - 1
        place = self._before[-1] if ids else -1
        for _ in range(_MAX_CANDIDATES):
            if place < 0 or best_size >= MAX_MATCH:
                break
            size = self._match(place)
            if size > best_size:
                best, best_size = place, size
            place = self._before[place]
        if best < 0:
            return []
        period = len(ids) - 1 - best
        return [ids[best + 1 + j % period] for j in range(length)]

    def _match(self, place: int) -> int:
        """How many ids up to `place` equal those up to the end."""
        ids, last = self.ids, len(self.ids) - 1
        size = self._min_match
        while size < MAX_MATCH and size <= place and ids[place - size] == ids[last - size]:
            size += 1
        return size
