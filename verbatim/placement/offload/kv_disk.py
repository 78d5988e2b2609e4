"""K and V on the disk: which blocks of a layer a micro-batch uses, and how they are read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.placement.offload.scratch import RamScratch, Scratch
from verbatim.weights.files import PAGE, up

NUM_STAGED = 3  # in memory at once: one is used, the next is read, the last is written


class Extent(NamedTuple):
    """Neighbouring blocks of the store that are neighbours in memory, too."""

    at: int  # first block in memory
    block: int  # first block in the store
    length: int


def extents(blocks: Iterable[tuple[int, int]]) -> list[Extent]:
    """Join pairs (place in memory, block of the store) where both are neighbours."""
    found: list[Extent] = []
    for at, block in blocks:
        last = found[-1] if found else None
        if last and (at, block) == (last.at + last.length, last.block + last.length):
            found[-1] = last._replace(length=last.length + 1)
        else:
            found.append(Extent(at, block, 1))
    return found


@dataclass(slots=True)
class View:
    """The blocks of the store that a micro-batch uses, as they are placed in other memory.

    Attributes:
        blocks: block numbers in the store, in the order of that memory: `[n]` int64.
        batch: the micro-batch, with block tables that refer to that memory.
        slots: positions of its rows there: `[T]` int64.
        old: blocks with positions that were computed before.
        new: blocks with positions that it computes.
        after: numbers of the micro-batches of the same forward that write what this one reads.
    """

    blocks: Tensor
    batch: Batch
    slots: Tensor
    old: list[Extent]
    new: list[Extent]
    after: list[int]

    def to(self, device: torch.device) -> View:
        """Return it with the batch and the slots on `device`, where the micro-batch computes."""
        if device.type == "cpu":
            return self
        return replace(self, batch=self.batch.to(device), slots=self.slots.to(device))


def views_of(batches: list[Batch], block_size: int) -> list[View]:
    """Return the views of the micro-batches of one forward."""
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
                old=extents((at[b], b) for b in sorted(old)),
                new=extents((at[b], b) for b in sorted(new)),
                after=[i for i, earlier in enumerate(written) if not earlier.isdisjoint(at)],
            )
        )
        written.append(new)
    return views


class DiskLayer:
    """A layer on the disk, or in RAM beside a GPU. Some of its blocks are copied to memory: all of K,
    then all of V from the next page on.

    Args:
        empty: K and V of the layer with no blocks.
        scratch: has the blocks, each with K before V.
        num_blocks: of the layer.

    Raises:
        TierFailed: the disk has no room for them.
    """

    def __init__(
        self, empty: tuple[Tensor, Tensor], scratch: Scratch | RamScratch, num_blocks: int
    ) -> None:
        self._empty = empty
        self._sizes = [x.shape[1:].numel() * x.element_size() for x in empty]
        self.nbytes = num_blocks * sum(self._sizes)
        self._scratch, self._offset = scratch, scratch.reserve(self.nbytes)
        # Blocks that aren't whole pages, as in toys and some quantized rows, need the page cache.
        self._direct = not any(size % PAGE for size in self._sizes)

    def staged_bytes(self, blocks: int) -> int:
        """Return the bytes of memory for so many blocks."""
        return sum(up(blocks * size) for size in self._sizes)

    def views(self, memory: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return K and V of the blocks in `memory`."""
        at = 0, up(blocks * self._sizes[0])
        k, v = (
            memory[begin : begin + blocks * size].view(empty.dtype).view(blocks, *empty.shape[1:])
            for begin, empty, size in zip(at, self._empty, self._sizes, strict=True)
        )
        return k, v

    def load(self, blocks: int, wanted: list[Extent], memory: memoryview) -> int:
        """Read blocks from the disk to their places in memory of `blocks`; return the bytes read."""
        return self._move(self._scratch.read, blocks, wanted, memory)

    def save(self, blocks: int, changed: list[Extent], memory: memoryview) -> int:
        """Write blocks to the disk from memory of `blocks`; return the bytes written."""
        return self._move(self._scratch.write_from, blocks, changed, memory)

    def release(self) -> None:
        """Free the memory of a layer in RAM."""
        if isinstance(self._scratch, RamScratch):
            self._scratch.release()

    def _move(
        self, move: Callable[..., object], blocks: int, some: list[Extent], memory: memoryview
    ) -> int:
        k_bytes, v_bytes = self._sizes
        values, block_bytes = up(blocks * k_bytes), k_bytes + v_bytes
        for extent in some:
            views = []
            for i in range(extent.at, extent.at + extent.length):
                views.append(memory[i * k_bytes : (i + 1) * k_bytes])
                views.append(memory[values + i * v_bytes : values + (i + 1) * v_bytes])
            move(views, self._offset + extent.block * block_bytes, direct=self._direct)
        return block_bytes * sum(extent.length for extent in some)
