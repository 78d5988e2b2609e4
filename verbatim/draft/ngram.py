"""Prompt lookup: drafts the continuation of an earlier match in the same sequence."""

from __future__ import annotations

import weakref

from verbatim.common.checks import integer
from verbatim.core import Sequence

_MAX_CANDIDATES = 16  # maximum number of earlier matches that are compared
MAX_MATCH = 32  # a match of this many tokens is as good as any longer one


class Ngram:
    """Drafts the tokens after the longest earlier match of a sequence's last tokens.

    It searches prompt and completion, and needs no forward. It pays off if completions repeat their prompt:
    summaries, edits, code, extraction.

    Args:
        min_match: minimum length of a match in tokens, 1 to 32. With 1, nearly every step has a draft, and
            most drafts are wrong.

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
            # Popped during the update: a history that Ctrl-C leaves inconsistent is never used again.
            history = self._histories.pop(sequence, None) or History(self.min_match)
            history.extend(sequence.token_ids(len(history.ids), sequence.num_tokens))
            self._histories[sequence] = history
            drafts.append(history.continuation(length))
        return drafts


class History:
    """The ids of a sequence with hash chains as in LZ77 (Ziv and Lempel 1977; RFC 1951, section 4).

    Stores the last position of every run of `min_match` ids, and for every position the previous one of
    the same run. Appending an id and finding the latest earlier match take constant time.
    """

    def __init__(self, min_match: int) -> None:
        self.ids: list[int] = []
        self._min_match = min_match
        self._last_end: dict[tuple[int, ...], int] = {}  # last end position of a run of ids
        # By end position: the previous end of the same run, or -1.
        self._previous_ends: list[int] = []

    def extend(self, ids: list[int]) -> None:
        """Append ids to the history."""
        size = self._min_match
        for token_id in ids:
            self.ids.append(token_id)
            run = tuple(self.ids[-size:])
            self._previous_ends.append(self._last_end.get(run, -1) if len(run) == size else -1)
            if len(run) == size:
                self._last_end[run] = len(self.ids) - 1

    def continuation(self, length: int) -> list[int]:
        """Return `length` ids after the longest, then latest, earlier match of the last ids; [] if none.

        A continuation that reaches the end of the history repeats from its start.
        """
        ids, best, best_size = self.ids, -1, self._min_match - 1
        position = self._previous_ends[-1] if ids else -1
        for _ in range(_MAX_CANDIDATES):
            if position < 0 or best_size >= MAX_MATCH:
                break
            size = self._match_length(position)
            if size > best_size:
                best, best_size = position, size
            position = self._previous_ends[position]
        if best < 0:
            return []
        period = len(ids) - 1 - best
        return [ids[best + 1 + j % period] for j in range(length)]

    def _match_length(self, place: int) -> int:
        """Return how many ids up to position `place` equal the last ids, at most `MAX_MATCH`."""
        ids, last = self.ids, len(self.ids) - 1
        size = self._min_match
        while size < MAX_MATCH and size <= place and ids[place - size] == ids[last - size]:
            size += 1
        return size
