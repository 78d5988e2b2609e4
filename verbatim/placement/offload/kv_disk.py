"""K and V on the disk: layers are read into staging buffers ahead of their use, and written back after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    """The layout of a layer's blocks in a staging buffer: all of K, then all of V from the next page on.

    Args:
        store: a store of this layer alone without blocks, through which a buffer is written and read.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._empty = store.layers[0]
        self.key_bytes, self.value_bytes = (
            x.shape[1:].numel() * x.element_size() for x in self._empty
        )

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.key_bytes + self.value_bytes

    def buffer_bytes(self, blocks: int) -> int:
        """Return the bytes of a buffer for so many blocks."""
        return up(blocks * self.key_bytes) + up(blocks * self.value_bytes)

    def attach(self, buffer: StagingBuffer, blocks: int) -> KVStore:
        """Return a store of the blocks in the buffer, as its layer 0, until `detach`."""
        memory = buffer.room(self.buffer_bytes(blocks))
        parts, at = [], 0
        for empty in self._empty:
            nbytes = blocks * empty.shape[1:].numel() * empty.element_size()
            part = memory[at : at + nbytes].view(empty.dtype).view(blocks, *empty.shape[1:])
            parts.append(part)
            at = up(at + nbytes)
        self.store.layers[0] = parts[0], parts[1]
        return self.store

    def detach(self) -> None:
        """Drop the reference to the buffer."""
        self.store.layers[0] = self._empty


class DiskLayer:
    """K and V of one layer in the disk tier, block by block, K before V.

    Raises:
        TierFailed: the disk has no room for them.
    """

    def __init__(self, staged: StagedLayer, num_blocks: int, scratch: Scratch) -> None:
        self.staged = staged
        self.nbytes = num_blocks * staged.nbytes
        self._scratch = scratch
        self._offset = scratch.reserve(self.nbytes)
        # Blocks that aren't whole pages, as in toys and some quantized rows, need the page cache.
        self._direct = staged.key_bytes % PAGE == 0 and staged.value_bytes % PAGE == 0

    def load(self, buffer: StagingBuffer, blocks: int, wanted: list[Extent]) -> int:
        """Read blocks to their places in a buffer of `blocks`; return the bytes read."""
        for views, offset in self._places(buffer, blocks, wanted):
            self._scratch.read_into(views, offset, direct=self._direct)
        return self.staged.nbytes * sum(extent.length for extent in wanted)

    def save(self, buffer: StagingBuffer, blocks: int, changed: list[Extent]) -> int:
        """Write blocks back from a buffer of `blocks`; return the bytes written."""
        for views, offset in self._places(buffer, blocks, changed):
            self._scratch.write_from(views, offset, direct=self._direct)
        return self.staged.nbytes * sum(extent.length for extent in changed)

    def _places(
        self, buffer: StagingBuffer, blocks: int, some: list[Extent]
    ) -> Iterable[tuple[list[memoryview], int]]:
        memory = bytes_of(buffer.room(self.staged.buffer_bytes(blocks)))
        k_bytes, v_bytes = self.staged.key_bytes, self.staged.value_bytes
        values = up(blocks * k_bytes)
        for extent in some:
            views = []
            for i in range(extent.at, extent.at + extent.length):
                views.append(memory[i * k_bytes : (i + 1) * k_bytes])
                views.append(memory[values + i * v_bytes : values + (i + 1) * v_bytes])
            yield views, self._offset + extent.block * self.staged.nbytes


@dataclass(slots=True)
class Traffic:
    """Bytes moved, and seconds that the computing thread waited.

    Attributes:
        load_s: seconds waiting for reads.
        store_s: seconds waiting for writes.
        between_s: those of them in which no layer was about to compute.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    between_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Access:
    """The use of a layer by a micro-batch."""

    layer: int
    part: int
    buffer: StagingBuffer
    after: list[_Access] = field(default_factory=list)  # those that must have been written back
    read: Job | None = None
    write: Job | None = None


class PrefetchSchedule:
    """The accesses of one forward to layers on the disk, one at a time: `take`, then `finish`.

    The computing thread submits reads and writes, in an order in which nothing is read before it was
    written. An access that comes out of order is read and written where it occurs, and so are all later ones.

    Args:
        order: (layer, micro-batch) of each expected access.
        views: of the micro-batches.
        layers: on the disk, by number.
        buffers: one without threads, else `NUM_BUFFERS`.
        reader, writer: both with a thread, or both without.
    """

    def __init__(
        self,
        order: Iterable[tuple[int, int]],
        views: list[View],
        layers: Mapping[int, DiskLayer],
        buffers: list[StagingBuffer],
        reader: Prefetcher,
        writer: Prefetcher,
        traffic: Traffic,
        trace: Trace,
    ) -> None:
        self._views, self._layers, self._buffers = views, layers, buffers
        self._reader, self._writer = reader, writer
        self._traffic, self._trace = traffic, trace
        self._next = 0  # to be taken
        self._issued = 0  # accesses with submitted reads
        self._in_order = True
        self._dropped = False
        self._accesses: list[_Access] = []
        found: dict[tuple[int, int], _Access] = {}
        for layer, part in order:
            number = len(self._accesses)
            access = _Access(layer, part, buffers[number % len(buffers)])
            if number >= len(buffers):
                access.after.append(self._accesses[number - len(buffers)])
            access.after += [found[layer, i] for i in views[part].after]
            self._accesses.append(access)
            found[layer, part] = access

    def begin(self) -> None:
        """Begin to read."""
        if self._reader.num_threads:
            self._issue()

    def take(self, layer: int, part: int) -> KVStore:
        """Return a store of the blocks that the micro-batch uses, as its layer 0, until `finish`.

        Raises:
            TierFailed: they can't be read, or an earlier one could not be written.
        """
        begin = perf_counter()
        access = self._accesses[self._next] if self._next < len(self._accesses) else None
        if self._in_order and (access is None or (access.layer, access.part) != (layer, part)):
            self._in_order = False  # reads that are still queued do nothing
            self._wait()
            self._check_writes()
        if not self._in_order or access is None:
            access = _Access(layer, part, self._buffers[0])
            self._load(access)
        else:
            if access.read is None:
                self._submit_read(access)
            assert access.read is not None
            access.read.wait()
            if access.read.error is not None:  # or that of a write before it
                raise access.read.error
        waited = perf_counter() - begin
        self._traffic.load_s += waited
        if self._reader.num_threads and waited > 1e-4:
            self._trace.add("wait", self._name(access), begin, begin + waited)
        self._taken = access
        return self._layers[layer].staged.attach(access.buffer, len(self._views[part].blocks))

    def finish(self) -> None:
        """End the current access, with its new rows written to the buffer.

        Raises:
            TierFailed: they can't be written.
        """
        begin, access = perf_counter(), self._taken
        self._layers[access.layer].staged.detach()
        if not self._in_order:
            self._save(access)
        else:
            job = Job(partial(self._save, access))
            self._writer.submit(job)
            access.write = job
            self._next += 1
            if self._reader.num_threads:
                self._issue()
            elif job.error is not None:
                raise job.error
        self._traffic.store_s += perf_counter() - begin

    def end(self) -> None:
        """Wait until everything is written.

        Raises:
            TierFailed: something can't be.
        """
        begin = perf_counter()
        self._writer.finish()
        waited = perf_counter() - begin
        self._traffic.store_s += waited
        self._traffic.between_s += waited
        if self._writer.num_threads and waited > 1e-4:
            self._trace.add("wait", "K, V written", begin, begin + waited)
        self._check_writes()

    def drop(self) -> None:
        """Cancel the remaining accesses, and wait for the threads; a second call is harmless."""
        self._dropped = True
        self._wait()
        for layer in self._layers.values():
            layer.staged.detach()

    def _wait(self) -> None:
        self._reader.finish()
        self._writer.finish()

    def _check_writes(self) -> None:
        for access in self._accesses:
            if access.write is not None and access.write.error is not None:
                raise access.write.error

    def _issue(self) -> None:
        """Submit the reads of all accesses that wait for no write yet to be submitted."""
        while self._issued < len(self._accesses):
            access = self._accesses[self._issued]
            if any(earlier.write is None for earlier in access.after):
                return
            self._submit_read(access)

    def _submit_read(self, access: _Access) -> None:
        writes = [earlier.write for earlier in access.after if earlier.write is not None]
        access.read = Job(partial(self._load, access, ahead=True), writes)
        self._reader.submit(access.read)
        self._issued += 1
        access.after = []

    def _load(self, access: _Access, *, ahead: bool = False) -> None:
        if self._dropped or (ahead and not self._in_order):
            return
        begin, view = perf_counter(), self._views[access.part]
        layer = self._layers[access.layer]
        self._traffic.bytes_read += layer.load(access.buffer, len(view.blocks), view.old)
        self._trace.add("read", self._name(access), begin, perf_counter())

    def _save(self, access: _Access) -> None:
        if self._dropped:
            return
        begin, view = perf_counter(), self._views[access.part]
        layer = self._layers[access.layer]
        self._traffic.bytes_written += layer.save(access.buffer, len(view.blocks), view.new)
        self._trace.add("write", self._name(access), begin, perf_counter())

    @staticmethod
    def _name(access: _Access) -> str:
        return f"K, V {access.layer} #{access.part}"
