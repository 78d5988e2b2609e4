"""K and V of a layer on the disk, and the part of it that a micro-batch sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.kv.store import KVStore
from verbatim.placement.offload.scratch import Scratch
from verbatim.weights.files import PAGE, bytes_of, pages, up


class Stretch(NamedTuple):
    """Neighbouring blocks of the store that are neighbours in a window, too."""

    at: int  # the first of them in the window
    block: int  # the same in the store
    length: int


def stretches(blocks: Iterable[tuple[int, int]]) -> list[Stretch]:
    """Pairs (place in the window, block in the store), joined where both are neighbours."""
    found: list[Stretch] = []
    for at, block in blocks:
        last = found[-1] if found else None
        if last and (at, block) == (last.at + last.length, last.block + last.length):
            found[-1] = last._replace(length=last.length + 1)
        else:
            found.append(Stretch(at, block, 1))
    return found


@dataclass(slots=True)
class View:
    """A micro-batch's view of the store, in a window of its own.

    Attributes:
        blocks: of the store, in the order of the window: `[n]` int64.
        batch: the micro-batch, whose block tables speak of the window.
        slots: where its rows go in the window: `[T]` int64.
        old: blocks with positions that were computed before.
        new: blocks with positions that it computes.
        after: numbers of the micro-batches of the same forward that write what this one needs.
    """

    blocks: Tensor
    batch: Batch
    slots: Tensor
    old: list[Stretch]
    new: list[Stretch]
    after: list[int]


def views_of(batches: list[Batch], block_size: int) -> list[View]:
    """The views of the micro-batches of one forward."""
    views: list[View] = []
    written: list[set[int]] = []
    for batch in batches:
        old: set[int] = set()
        new: set[int] = set()
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        tables = batch.block_tables.tolist()
        for s, table in enumerate(tables):
            begin = lens[s] - (starts[s + 1] - starts[s])
            old.update(table[: -(-begin // block_size)])
            new.update(table[begin // block_size : -(-lens[s] // block_size)])
        blocks = sorted(old | new)
        at = {block: i for i, block in enumerate(blocks)}
        renamed = [[at.get(block, 0) for block in table] for table in tables]
        own = replace(batch, block_tables=torch.tensor(renamed, dtype=torch.int32))
        views.append(
            View(
                blocks=torch.tensor(blocks, dtype=torch.int64),
                batch=own,
                slots=own.slots(block_size),
                old=stretches((at[b], b) for b in sorted(old)),
                new=stretches((at[b], b) for b in sorted(new)),
                after=[i for i, earlier in enumerate(written) if not earlier.isdisjoint(at)],
            )
        )
        written.append(new)
    return views


class Window:
    """Memory for the blocks of one visit; it grows to what the largest one takes."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def room(self, nbytes: int) -> Tensor:
        """At least so many bytes, uint8, from a whole page on."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # before there is more
            self.memory = pages(up(nbytes + nbytes // 8))  # contexts grow
        return self.memory

    def poison(self) -> None:
        """Make everything in it read as NaN."""
        if self.memory is not None:
            self.memory.fill_(0xFF)

    def release(self) -> None:
        """Give the memory back."""
        self.memory = None


class Shape:
    """The layout of a layer's blocks in a window: all of K, and all of V from the next page on.

    Args:
        lens: a store of this layer alone and of no block, through which a window is written and read.
    """

    def __init__(self, lens: KVStore) -> None:
        self.lens = lens
        self._none = lens.layers[0]
        self.key_bytes, self.value_bytes = (
            x.shape[1:].numel() * x.element_size() for x in self._none
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.key_bytes + self.value_bytes

    def window_bytes(self, blocks: int) -> int:
        return up(blocks * self.key_bytes) + up(blocks * self.value_bytes)

    def look(self, window: Window, blocks: int) -> KVStore:
        """A store of the blocks in the window, as its layer 0, until `look_away`."""
        memory = window.room(self.window_bytes(blocks))
        found, at = [], 0
        for none in self._none:
            nbytes = blocks * none.shape[1:].numel() * none.element_size()
            part = memory[at : at + nbytes].view(none.dtype).view(blocks, *none.shape[1:])
            found.append(part)
            at = up(at + nbytes)
        self.lens.layers[0] = found[0], found[1]
        return self.lens

    def look_away(self) -> None:
        """Hold on to no window."""
        self.lens.layers[0] = self._none


class DiskLayer:
    """K and V of one layer in the disk tier: block after block, of each K and then V.

    Raises:
        TierFailed: the disk has no room for them.
    """

    def __init__(self, shape: Shape, num_blocks: int, scratch: Scratch) -> None:
        self.shape = shape
        self.nbytes = num_blocks * shape.nbytes
        self._scratch = scratch
        self._offset = scratch.reserve(self.nbytes)
        # Where a block isn't whole pages, as in toys and some quantized rows, the page cache cuts them.
        self._direct = shape.key_bytes % PAGE == 0 and shape.value_bytes % PAGE == 0

    def load(self, window: Window, blocks: int, wanted: list[Stretch]) -> int:
        """Read blocks into their places in a window of so many: bytes read."""
        memory = bytes_of(window.room(self.shape.window_bytes(blocks)))
        for stretch in wanted:
            views, offset = self._place(memory, blocks, stretch)
            self._scratch.read_into(views, offset, direct=self._direct)
        return self.shape.nbytes * sum(s.length for s in wanted)

    def save(self, window: Window, blocks: int, changed: list[Stretch]) -> int:
        """Write blocks back from a window of so many: bytes written."""
        memory = bytes_of(window.room(self.shape.window_bytes(blocks)))
        for stretch in changed:
            views, offset = self._place(memory, blocks, stretch)
            self._scratch.write_from(views, offset, direct=self._direct)
        return self.shape.nbytes * sum(s.length for s in changed)

    def _place(
        self, memory: memoryview, blocks: int, stretch: Stretch
    ) -> tuple[list[memoryview], int]:
        k_bytes, v_bytes = self.shape.key_bytes, self.shape.value_bytes
        values = up(blocks * k_bytes)
        views = []
        for i in range(stretch.at, stretch.at + stretch.length):
            views.append(memory[i * k_bytes : (i + 1) * k_bytes])
            views.append(memory[values + i * v_bytes : values + (i + 1) * v_bytes])
        return views, self._offset + stretch.block * self.shape.nbytes
