"""Prompt lookup: drafts the continuation of an earlier match in the same sequence."""

from __future__ import annotations

import weakref

from verbatim.checks import integer
from verbatim.core import Sequence

_MAX_CANDIDATES = 16  # maximum number of earlier matches that are compared
MAX_MATCH = 32  # a match of this many tokens is as good as any longer one


class Ngram:
    """Drafts the tokens after the longest earlier match of a sequence's last tokens.

    Matches are looked up in prompt and completion. Costs no forward, and pays where completions repeat
    their prompt: summaries, edits, code, extraction.

    Args:
        min_match: minimum length of a match in tokens, 1 to 32. With 1 nearly every sequence gets drafts,
            and most of them are wrong.

    Raises:
        InvalidRequest: `min_match` is not an integer, or out of range.
    """

    def __init__(self, min_match: int = 2) -> None:
        self.min_match = integer("min_match", min_match, 1, MAX_MATCH)
        self._histories: weakref.WeakKeyDictionary[Sequence, History] = weakref.WeakKeyDictionary()

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        drafts = []
        for sequence, length in zip(sequences, lengths, strict=True):
            # Popped while it changes: a history left inconsistent by Ctrl-C is never used again.
            history = self._histories.pop(sequence, None) or History(self.min_match)
            history.extend(sequence.token_ids(len(history.ids), sequence.num_tokens))
            self._histories[sequence] = history
            drafts.append(history.continuation(length))
        return drafts


class History:
    """The ids of a sequence with hash chains as in LZ77 (Ziv and Lempel 1977; RFC 1951, section 4).

    Stores the last position of every run of `min_match` ids, and for every position the previous one of
    the same run. Appending an id and looking up the end take constant time.
    """

    def __init__(self, min_match: int) -> None:
        self.ids: list[int] = []
        self._min_match = min_match
        self._last: dict[tuple[int, ...], int] = {}  # last end position of a run of ids
        self._before: list[int] = []  # by end position: the previous end of the same run, or -1

    def extend(self, ids: list[int]) -> None:
        """Append ids."""
        size = self._min_match
        for token_id in ids:
            self.ids.append(token_id)
            run = tuple(self.ids[-size:])
            self._before.append(self._last.get(run, -1) if len(run) == size else -1)
            if len(run) == size:
                self._last[run] = len(self.ids) - 1

    def continuation(self, length: int) -> list[int]:
        """Return `length` ids after the longest, then latest, earlier match of the end; [] if none.

        A continuation that reaches the end of the history repeats from its start.
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
        """Return how many ids up to `place` equal those up to the end, at most `MAX_MATCH`."""
        ids, last = self.ids, len(self.ids) - 1
        size = self._min_match
        while size < MAX_MATCH and size <= place and ids[place - size] == ids[last - size]:
            size += 1
        return size
