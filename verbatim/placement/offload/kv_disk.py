"""K and V on the disk: layers are read into staging buffers ahead of their use, and written back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.kv.store import KVStore
from verbatim.placement.offload.prefetch import Job, Prefetcher
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import PAGE, bytes_of, pages, up

NUM_BUFFERS = 3  # one is in use, the next is being read, the last is being written


class Extent(NamedTuple):
    """Neighbouring blocks of the store that are neighbours in a staging buffer, too."""

    at: int  # first block in the buffer
    block: int  # first block in the store
    length: int


def extents(blocks: Iterable[tuple[int, int]]) -> list[Extent]:
    """Join pairs (place in the buffer, block of the store) where both are neighbours."""
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
    """The blocks of the store that a micro-batch uses, as they are placed in a staging buffer.

    Attributes:
        blocks: block numbers in the store, in the buffer's order: `[n]` int64.
        batch: the micro-batch, with block tables that refer to the buffer.
        slots: positions of its rows in the buffer: `[T]` int64.
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


class StagingBuffer:
    """Memory for the blocks of one layer and micro-batch; it grows as needed."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def room(self, nbytes: int) -> Tensor:
        """Return at least `nbytes`, uint8, aligned to a page."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # before more is allocated
            self.memory = pages(up(nbytes + nbytes // 8))  # contexts grow
        return self.memory

    def poison(self) -> None:
        """Make all of it read as NaN."""
        if self.memory is not None:
            self.memory.fill_(0xFF)

    def release(self) -> None:
        """Free the memory."""
        self.memory = None


class StagedLayer:
    """A layer whose blocks are copied to a staging buffer: all of K, then all of V from the next page on.

    Args:
        store: a store of this layer alone without blocks, through which a buffer is written and read.
        scratch: has the blocks, each with K before V; None: they are in memory.
        num_blocks: of the layer.

    Raises:
        TierFailed: the disk has no room for them.
    """

    def __init__(self, store: KVStore, scratch: Scratch | None, num_blocks: int) -> None:
        self.store = store
        self._empty = store.layers[0]
        self._sizes = [x.shape[1:].numel() * x.element_size() for x in self._empty]
        self.nbytes = 0 if scratch is None else num_blocks * sum(self._sizes)  # on the disk
        self._scratch = scratch
        self._offset = 0 if scratch is None else scratch.reserve(self.nbytes)
        # Blocks that aren't whole pages, as in toys and some quantized rows, need the page cache.
        self._direct = not any(size % PAGE for size in self._sizes)

    def buffer_bytes(self, blocks: int) -> int:
        """Return the bytes of a buffer for so many blocks."""
        return sum(up(blocks * size) for size in self._sizes)

    def attach(self, buffer: StagingBuffer, blocks: int) -> KVStore:
        """Return a store of the blocks in the buffer, as its layer 0, until `detach`."""
        memory, at, parts = buffer.room(self.buffer_bytes(blocks)), 0, []
        for empty, size in zip(self._empty, self._sizes, strict=True):
            part = memory[at : at + blocks * size].view(empty.dtype)
            parts.append(part.view(blocks, *empty.shape[1:]))
            at += up(blocks * size)
        self.store.layers[0] = parts[0], parts[1]
        return self.store

    def detach(self) -> None:
        """Drop the reference to the buffer."""
        self.store.layers[0] = self._empty

    def load(self, buffer: StagingBuffer, blocks: int, wanted: list[Extent]) -> int:
        """Read blocks from the disk to their places in a buffer of `blocks`; return the bytes read."""
        assert self._scratch is not None
        return self._move(self._scratch.read_into, buffer, blocks, wanted)

    def save(self, buffer: StagingBuffer, blocks: int, changed: list[Extent]) -> int:
        """Write blocks to the disk from a buffer of `blocks`; return the bytes written."""
        assert self._scratch is not None
        return self._move(self._scratch.write_from, buffer, blocks, changed)

    def _move(
        self, move: Callable[..., None], buffer: StagingBuffer, blocks: int, some: list[Extent]
    ) -> int:
        memory, (k_bytes, v_bytes) = bytes_of(buffer.room(self.buffer_bytes(blocks))), self._sizes
        values, block_bytes = up(blocks * k_bytes), k_bytes + v_bytes
        for extent in some:
            views = []
            for i in range(extent.at, extent.at + extent.length):
                views.append(memory[i * k_bytes : (i + 1) * k_bytes])
                views.append(memory[values + i * v_bytes : values + (i + 1) * v_bytes])
            move(views, self._offset + extent.block * block_bytes, direct=self._direct)
        return block_bytes * sum(extent.length for extent in some)


class PrefetchSchedule:
    """The accesses of one forward to layers on the disk, one at a time: `take`, then `finish`.

    The computing thread submits reads and writes to one other thread, in an order in which nothing is read
    before it was written. An access that comes out of order is read and written where it occurs, and so are
    all later ones.

    Args:
        order: (layer, micro-batch) of each expected access, each once.
        views: of the micro-batches.
        layers: on the disk, by number.
        buffers: one without a thread, else `NUM_BUFFERS`.
        worker: reads and writes.
    """

    def __init__(
        self,
        order: Iterable[tuple[int, int]],
        views: list[View],
        layers: Mapping[int, StagedLayer],
        buffers: list[StagingBuffer],
        worker: Prefetcher,
        trace: Trace,
    ) -> None:
        self._order = list(order)
        self._number = {access: number for number, access in enumerate(self._order)}
        self._views, self._layers, self._buffers = views, layers, buffers
        self._worker, self._trace = worker, trace
        self._next = 0  # to be taken; those before it were finished
        self._taken = (0, 0)
        self._reads: list[Job] = []  # of the first accesses
        self._writes: list[Job] = []
        self._in_order = True
        self._dropped = False

    def begin(self) -> None:
        """Begin to read."""
        if self._worker.num_threads:
            self._issue()

    def take(self, layer: int, part: int) -> KVStore:
        """Return a store of the blocks that the micro-batch uses, as its layer 0, until `finish`.

        Raises:
            TierFailed: they can't be read.
        """
        begin, access = perf_counter(), (layer, part)
        if self._in_order and self._order[self._next : self._next + 1] != [access]:
            self._in_order = False  # reads that are still queued do nothing
            self._worker.finish()
            self._check_writes()
        self._taken = access
        if not self._in_order:
            self._load(access, self._buffer)
        else:
            if self._next == len(self._reads):
                self._submit_read()
            read = self._reads[self._next]
            read.wait()
            if read.error is not None:
                raise read.error
        self._trace.add("wait", "K and V", _name(access), begin)
        return self._layers[layer].attach(self._buffer, len(self._views[part].blocks))

    def finish(self) -> None:
        """End the current access, with its new rows written to the buffer.

        Raises:
            TierFailed: they can't be written.
        """
        begin, access = perf_counter(), self._taken
        self._layers[access[0]].detach()
        write = Job(partial(self._save, access, self._buffer))
        if not self._in_order:
            write.run()
        else:
            self._writes.append(write)
            self._worker.submit(write)
            self._next += 1
            self.begin()
        if write.ended and write.error is not None:
            raise write.error
        self._trace.add("store", "K and V", _name(access), begin)

    def end(self) -> None:
        """Wait until everything is written.

        Raises:
            TierFailed: something can't be.
        """
        begin = perf_counter()
        self._worker.finish()
        self._trace.add("flush", "K and V", "K, V", begin)
        self._check_writes()

    def drop(self) -> None:
        """Cancel the remaining accesses, and wait for the thread; a second call is harmless."""
        self._dropped = True
        self._worker.finish()
        for layer in self._layers.values():
            layer.detach()

    @property
    def _buffer(self) -> StagingBuffer:
        """The buffer of the access that is taken next, or is taken."""
        return self._buffers[self._next % len(self._buffers)]

    def _check_writes(self) -> None:
        for write in self._writes:
            if write.error is not None:
                raise write.error

    def _issue(self) -> None:
        """Submit the next reads, as far as buffers are free and what they read was written."""
        while len(self._reads) < min(len(self._order), self._next + len(self._buffers)):
            layer, part = self._order[len(self._reads)]
            if any(self._number[layer, i] >= self._next for i in self._views[part].after):
                return
            self._submit_read()

    def _submit_read(self) -> None:
        number = len(self._reads)
        buffer = self._buffers[number % len(self._buffers)]
        read = Job(partial(self._load, self._order[number], buffer, ahead=True))
        self._reads.append(read)
        self._worker.submit(read)

    def _load(self, access: tuple[int, int], buffer: StagingBuffer, *, ahead: bool = False) -> None:
        if self._dropped or (ahead and not self._in_order):
            return
        begin, (layer, part) = perf_counter(), access
        view = self._views[part]
        nbytes = self._layers[layer].load(buffer, len(view.blocks), view.old)
        self._trace.add("read", "K and V", _name(access), begin, nbytes)

    def _save(self, access: tuple[int, int], buffer: StagingBuffer) -> None:
        if self._dropped:
            return
        begin, (layer, part) = perf_counter(), access
        view = self._views[part]
        nbytes = self._layers[layer].save(buffer, len(view.blocks), view.new)
        self._trace.add("write", "K and V", _name(access), begin, nbytes)


def _name(access: tuple[int, int]) -> str:
    return f"K, V {access[0]} #{access[1]}"
