"""The queue of waiting sequences, ordered by rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter

from verbatim.core import Sequence

_rank = attrgetter("rank")  # constant while a sequence waits, and no other sequence has the same


class WaitingQueue:
    """A sorted list, and the deferred sequences with the key of the block they wait for."""

    def __init__(self) -> None:
        self._ready: list[Sequence] = []
        self._deferred: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._ready) + len(self._deferred)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._ready, self._deferred)

    def add(self, sequence: Sequence) -> None:
        insort(self._ready, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; return whether it was in the queue."""
        if self._deferred.pop(sequence, None) is not None:
            return True
        place = bisect_left(self._ready, sequence.rank, key=_rank)
        found = self._ready[place : place + 1] == [sequence]
        del self._ready[place : place + found]
        return found

    def first(self) -> Sequence | None:
        """Return the sequence with the best rank that is not deferred."""
        return self._ready[0] if self._ready else None

    def defer(self, sequence: Sequence, key: bytes) -> None:
        """Defer the first sequence until the block of `key` is computed or abandoned."""
        assert self._ready.pop(0) is sequence
        self._deferred[sequence] = key

    def resume(self, keys: Collection[bytes]) -> None:
        """End the deferral of the sequences that wait for the blocks of `keys`."""
        if keys and self._deferred:
            awaited = set(keys)
            for sequence in [s for s, key in self._deferred.items() if key in awaited]:
                del self._deferred[sequence]
                self.add(sequence)
