"""The queue of waiting sequences, ordered by rank."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from verbatim.core import Sequence


class WaitingQueue:
    """A priority queue with removal of any entry.

    Removal is lazy: stale heap entries are skipped at the top, and the heap is rebuilt when most of its
    entries are stale. The cost of a step depends neither on the length of the queue nor on removals.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[tuple[float, int], int, Sequence]] = []
        self._count = itertools.count()  # tie-breaker between two entries of one sequence
        self._members: dict[Sequence, None] = {}
        self._deferred: dict[bytes, list[Sequence]] = {}  # by the key of the block they wait for
        self._deferred_keys: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, sequence: Sequence) -> None:
        self._members[sequence] = None
        self._push(sequence)
        if len(self._queue) > 64 and len(self._queue) > 2 * len(self._members):
            self._queue = [entry for entry in self._queue if self._is_ready(entry[-1])]
            heapq.heapify(self._queue)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence; return whether it was in the queue."""
        if sequence not in self._members:
            return False
        del self._members[sequence]
        key = self._deferred_keys.pop(sequence, None)
        if key is not None:
            self._deferred[key].remove(sequence)
            if not self._deferred[key]:
                del self._deferred[key]
        return True

    def first(self) -> Sequence | None:
        """Return the sequence with the best rank that is not deferred."""
        while self._queue and not self._is_ready(self._queue[0][-1]):
            heapq.heappop(self._queue)
        return self._queue[0][-1] if self._queue else None

    def defer(self, sequence: Sequence, key: bytes) -> None:
        """Defer the first sequence until the block of `key` is computed or abandoned."""
        _, _, first = heapq.heappop(self._queue)
        assert first is sequence
        self._deferred.setdefault(key, []).append(sequence)
        self._deferred_keys[sequence] = key

    def resume(self, keys: Iterable[bytes]) -> None:
        """End the deferral of the sequences that wait for the blocks of `keys`."""
        for key in keys:
            for sequence in self._deferred.pop(key, ()):
                del self._deferred_keys[sequence]
                self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.rank, next(self._count), sequence))

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence in self._members and sequence not in self._deferred_keys
