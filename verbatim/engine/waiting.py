"""Those who wait, first in rank first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from verbatim.core import Sequence


class WaitingRoom:
    """A queue by rank, from which anybody can leave at any time.

    Leaving costs nothing: an entry whose sequence is elsewhere by now is passed over when it comes up,
    and the queue is swept when most of its entries are such. So a step's cost does not depend on how
    many wait, nor on how many have left.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[tuple[float, int], int, Sequence]] = []
        self._count = itertools.count()  # so that two entries of one sequence can be compared
        self._members: dict[Sequence, None] = {}
        self._held: dict[bytes, list[Sequence]] = {}  # by the key of the block they wait for
        self._holding: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, sequence: Sequence) -> None:
        self._members[sequence] = None
        self._push(sequence)
        if len(self._queue) > 64 and len(self._queue) > 2 * len(self._members):
            self._queue = [entry for entry in self._queue if self._stands(entry[-1])]
            heapq.heapify(self._queue)

    def remove(self, sequence: Sequence) -> bool:
        """Let one go; False when it is not here, which is harmless."""
        if sequence not in self._members:
            return False
        del self._members[sequence]
        key = self._holding.pop(sequence, None)
        if key is not None:
            self._held[key].remove(sequence)
            if not self._held[key]:
                del self._held[key]
        return True

    def first(self) -> Sequence | None:
        """The next in line."""
        while self._queue and not self._stands(self._queue[0][-1]):
            heapq.heappop(self._queue)
        return self._queue[0][-1] if self._queue else None

    def hold(self, sequence: Sequence, key: bytes) -> None:
        """Take the next in line out of it until the block of this key is there, or will not be."""
        _, _, first = heapq.heappop(self._queue)
        assert first is sequence
        self._held.setdefault(key, []).append(sequence)
        self._holding[sequence] = key

    def readmit(self, keys: Iterable[bytes]) -> None:
        """Back into the line with those who waited for these."""
        for key in keys:
            for sequence in self._held.pop(key, ()):
                del self._holding[sequence]
                self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.rank, next(self._count), sequence))

    def _stands(self, sequence: Sequence) -> bool:
        return sequence in self._members and sequence not in self._holding
