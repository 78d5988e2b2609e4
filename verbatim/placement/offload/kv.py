"""A KV cache in three tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch, Batch
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kv.store import KVStore, LayerShape, bytes_per_token
from verbatim.placement.offload.choice import TIERS, Percents, assign_tiers
from verbatim.placement.offload.scratch import RamScratch, Scratch
from verbatim.placement.offload.sparse import top_k_attention
from verbatim.placement.offload.stream import Lane, Ring, Use
from verbatim.placement.offload.trace import Trace
from verbatim.quantization.formats import KVDtype
from verbatim.weights.files import PAGE, bytes_of, round_to_pages

NUM_STAGED = 3  # staged layers: one in use, the next being read, the last being written


class Extent(NamedTuple):
    """A run of blocks that is contiguous both in the store and in memory."""

    at: int  # first block in memory
    block: int  # first block in the store
    length: int


def extents(blocks: Iterable[tuple[int, int]]) -> list[Extent]:
    """Join pairs (block in memory, block in the store) into extents."""
    joined: list[Extent] = []
    for at, block in blocks:
        last = joined[-1] if joined else None
        if last and (at, block) == (last.at + last.length, last.block + last.length):
            joined[-1] = last._replace(length=last.length + 1)
        else:
            joined.append(Extent(at, block, 1))
    return joined


@dataclass(slots=True)
class View:
    """The blocks of the store that a micro-batch uses, and their order in staging memory.

    Attributes:
        num_blocks: number of blocks in staging memory.
        batch: fields for attention, with block tables that refer to staging memory.
        slots: positions of its rows in staging memory: `[T]` int64.
        old: extents of blocks with positions that were computed before.
        new: extents of blocks with positions that this micro-batch computes.
        after: numbers of earlier micro-batches of this forward that write some of these blocks.
    """

    num_blocks: int
    batch: AttentionBatch
    slots: Tensor
    old: list[Extent]
    new: list[Extent]
    after: list[int]


def views_of(batches: list[Batch], block_size: int, device: torch.device) -> list[View]:
    """Return the views of the micro-batches of one forward, which compute on `device`."""
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
        staged = replace(batch, block_tables=torch.tensor(renamed, dtype=torch.int32))
        views.append(
            View(
                num_blocks=len(blocks),
                batch=(staged if device.type == "cpu" else staged.to(device)).attention,
                slots=staged.slots(block_size).to(device),
                old=extents((at[b], b) for b in sorted(old)),
                new=extents((at[b], b) for b in sorted(new)),
                after=[i for i, earlier in enumerate(written) if not earlier.isdisjoint(at)],
            )
        )
        written.append(new)
    return views


class DiskLayer:
    """K and V of a layer on the disk, or in RAM with a GPU.

    In staging memory, K of all staged blocks comes first, then V from the next page on.

    Args:
        empty: K and V tensors of the layer, with zero blocks.
        scratch: storage of the blocks, each with K before V.
        num_blocks: number of blocks of the layer.

    Raises:
        TierFailed: the disk has no room for the blocks.
    """

    def __init__(
        self, empty: tuple[Tensor, Tensor], scratch: Scratch | RamScratch, num_blocks: int
    ) -> None:
        self._empty = empty
        self._sizes = [x.shape[1:].numel() * x.element_size() for x in empty]
        self.nbytes = num_blocks * sum(self._sizes)
        self._scratch, self._offset = scratch, scratch.reserve(self.nbytes)
        # Blocks that aren't whole pages (tiny models, some quantized formats) need the page cache.
        self._direct = not any(size % PAGE for size in self._sizes)

    def staged_bytes(self, blocks: int) -> int:
        """Return the bytes of staging memory for `blocks` blocks."""
        return sum(round_to_pages(blocks * size) for size in self._sizes)

    def views(self, memory: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of K and V of the blocks in staging memory."""
        at = 0, round_to_pages(blocks * self._sizes[0])
        k, v = (
            memory[begin : begin + blocks * size].view(empty.dtype).view(blocks, *empty.shape[1:])
            for begin, empty, size in zip(at, self._empty, self._sizes, strict=True)
        )
        return k, v

    def load(
        self, blocks: int, wanted: list[Extent], memory: Tensor, lane: Lane | None = None
    ) -> int:
        """Read the blocks `wanted` into staging memory for `blocks` blocks; return the bytes read.

        Args:
            lane: copies from RAM, if the staging memory is on a device; None: it is in RAM.
        """
        ram = memory if lane is None else lane.staging_buffer(memory.nbytes)
        nbytes = self._move(self._scratch.read, blocks, wanted, ram)
        if lane is not None and wanted:
            memory.copy_(ram, non_blocking=True)
        return nbytes

    def save(
        self, blocks: int, changed: list[Extent], memory: Tensor, lane: Lane | None = None
    ) -> int:
        """Write the blocks `changed` from staging memory; return the bytes written. Reverses `load`."""
        ram = memory
        if lane is not None:
            ram = lane.staging_buffer(memory.nbytes)
            pairs = zip(self.views(ram, blocks), self.views(memory, blocks), strict=True)
            for target, source in pairs:
                for at, _, length in changed:
                    target[at : at + length] = source[at : at + length]
        return self._move(self._scratch.write_from, blocks, changed, ram)

    def release(self) -> None:
        """Free the memory of a layer in RAM."""
        if isinstance(self._scratch, RamScratch):
            self._scratch.release()

    def _move(
        self, move: Callable[..., object], blocks: int, some: list[Extent], memory: Tensor
    ) -> int:
        (k_bytes, v_bytes), view = self._sizes, bytes_of(memory)
        v_begin, block_bytes = round_to_pages(blocks * k_bytes), k_bytes + v_bytes
        for extent in some:
            views = []
            for i in range(extent.at, extent.at + extent.length):
                views.append(view[i * k_bytes : (i + 1) * k_bytes])
                views.append(view[v_begin + i * v_bytes : v_begin + (i + 1) * v_bytes])
            move(views, self._offset + extent.block * block_bytes, direct=self._direct)
        return block_bytes * sum(extent.length for extent in some)


class TieredKVStore(KVStore):
    """A `KVStore` with each layer in one tier: "gpu" (RAM, if there is no GPU), "cpu" (RAM) or "disk".

    A layer on the disk, or in RAM with a GPU, is staged: the blocks that a micro-batch uses are read into a
    ring (and copied to the GPU), its rows are written there, and changed blocks are written back. Results do
    not depend on the tier. A staged layer is written and attended to only through the stores that
    `stores_for` yields: copies of this store, one per micro-batch.

    The ring takes memory in addition to the tiers (`staging_bytes`): for the largest micro-batch's blocks in
    three layers, or in one without `overlap`.

    Args:
        layers, num_blocks, block_size, device: as for `KVStore`.
        dtype: dtype of K and V; a `Packing` quantizes them.
        percents: shares of the bytes in (gpu, cpu, disk).
        groups: groups of layers in the order of a forward; each runs for all micro-batches, one after the
            other, before the next group. Layers used in another order are not read ahead.
        scratch: file of the disk tier, in which all space is reserved here.
        overlap: whether to read ahead and write back in a thread; False: wait for every read and write.
        top_k: maximum keys to attend to (`sparse.py`); all blocks are still read.
        is_separate: whether the device's memory is separate from RAM.

    Attributes:
        tiers: the tier of each layer.

    Raises:
        TierFailed: the disk has no room.
    """

    # In the copy for a micro-batch: its number, its blocks, and the ring's uses by (layer, number).
    _part = 0
    _view: View | None = None
    _uses: dict[tuple[int, int], Use]

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: KVDtype,
        device: torch.device,
        *,
        percents: Percents,
        groups: list[list[int]],
        scratch: Scratch,
        trace: Trace,
        overlap: bool = True,
        top_k: int | None = None,
        is_separate: bool = False,
    ) -> None:
        in_place = ("gpu",) if is_separate else ("gpu", "cpu")
        self.tiers = assign_tiers([bytes_per_token([shape], dtype) for shape in layers], percents)
        self._unstaged = [i for i, tier in enumerate(self.tiers) if tier in in_place]
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.top_k, self.trace = top_k, trace
        self.in_place = len(self._unstaged) == len(layers) and top_k is None
        known = {layer for group in groups for layer in group}
        self._groups = [*groups, [layer for layer in range(len(layers)) if layer not in known]]
        self._staged = {
            i: DiskLayer(
                self._blocks(layers[i], 0), scratch if tier == "disk" else RamScratch(), num_blocks
            )
            for i, tier in enumerate(self.tiers)
            if i not in self._unstaged
        }
        self._in_ring: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_staged = NUM_STAGED if overlap else 1
        self._lane = Lane(device) if is_separate else None
        self.ring = Ring("K and V", 1, trace, ahead=overlap, lane=self._lane)

    def _allocated(self) -> list[Tensor]:
        """Return new memory for K and V of the layers that are used in place."""
        return [x for i in self._unstaged for x in self._blocks(self.shapes[i], self.num_blocks)]

    def _pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the stored tensors of a layer; if it is staged, the blocks of the present micro-batch."""
        if layer in self._staged:
            return self._in_ring[layer]
        return super()._pair(self._unstaged.index(layer))

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in all tiers, without the ring."""
        return sum(self.bytes_by_tier().values())

    @property
    def staging_bytes(self) -> tuple[int, int]:
        """Bytes of RAM, and of a device's own memory, through which blocks are moved."""
        ring = self.ring.nbytes
        return (ring, 0) if self._lane is None else (self._lane.buffer.nbytes, ring)

    def bytes_by_tier(self) -> dict[str, int]:
        """Return the bytes of K and V in each tier. Layers on the disk keep their space after `release`."""
        totals = dict.fromkeys(TIERS, 0)
        for i, tier in enumerate(self.tiers):
            if i in self._staged:
                totals[tier] += self._staged[i].nbytes
            elif self.tensors:
                totals[tier] += sum(tensor.nbytes for tensor in self._pair(i))
        return totals

    @contextmanager
    def stores_for(self, batches: list[Batch]) -> Iterator[list[KVStore]]:
        """Yield one store per micro-batch of a forward, for its writes and its attention.

        Raises:
            TierFailed: a read or write failed; raised at the end of the block at the latest.
        """
        if not self._staged:
            yield [self] * len(batches)
            return
        self.ring.drop()
        views = views_of(batches, self.block_size, self.device)
        uses: dict[tuple[int, int], Use] = {}
        for group in self._groups:
            for part, view in enumerate(views):
                for i in group:
                    # A layer shared by several units is read once.
                    if i in self._staged and (i, part) not in uses:
                        layer, count = self._staged[i], view.num_blocks
                        uses[i, part] = Use(
                            f"K, V {i} #{part}",
                            layer.staged_bytes(count),
                            [partial(layer.load, count, view.old, lane=self._lane)],
                            [uses[i, earlier] for earlier in view.after],
                        )
        largest = self._num_staged * max((use.nbytes for use in uses.values()), default=0)
        self.ring.reserve(largest, spare=largest // 8)  # contexts grow
        stores: list[KVStore] = []
        for part, view in enumerate(views):
            store = copy(self)
            store._part, store._view, store._uses = part, view, uses
            stores.append(store)
        try:
            self.ring.follow(uses.values(), repeat=False)
            yield stores
            self.ring.finish()
        finally:
            self._cancel()

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if layer in self._staged:
            assert self._view is not None, "a layer that is staged is written through stores_for"
            memory = self.ring.take(self._uses[layer, self._part])
            slots = self._view.slots
            self._in_ring[layer] = self._staged[layer].views(memory, self._view.num_blocks)
        super().write(layer, k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        staged, view = self._staged.get(layer), self._view
        if staged is not None:
            assert view is not None, "a layer that is staged is attended in through stores_for"
            batch = view.batch
        if self.top_k is None or isinstance(options, IndexOptions):
            out = super().attend(layer, q, batch, options)
        else:
            out = top_k_attention(self, layer, q, batch, options, top_k=self.top_k)
        if staged is not None and view is not None:
            del self._in_ring[layer]
            self.ring.release(partial(staged.save, view.num_blocks, view.new, lane=self._lane))
        return out

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._cancel()
        super().copy_blocks(copies)
        if copies:
            sources, targets = map(list, zip(*copies, strict=True))
            for layer in self._staged.values():
                # All sources are read first, since another copy may overwrite them.
                self._write(layer, targets, self._read(layer, sources))

    def read_blocks(self, blocks: list[int]) -> list[Tensor]:
        self._cancel()
        in_memory, contents = iter(super().read_blocks(blocks)), list[Tensor]()
        for i in range(len(self.tiers)):
            if i in self._staged:
                contents += [x.clone() for x in self._read(self._staged[i], blocks)]
            else:
                contents += [next(in_memory), next(in_memory)]
        return contents

    def write_blocks(self, blocks: list[int], contents: list[Tensor]) -> None:
        self._cancel()
        pairs = list(zip(contents[::2], contents[1::2], strict=True))
        in_memory = [pair for i, pair in enumerate(pairs) if i not in self._staged]
        super().write_blocks(blocks, [tensor for pair in in_memory for tensor in pair])
        for i, layer in self._staged.items():
            self._write(layer, blocks, pairs[i])

    def release(self) -> None:
        """Free the memory and end the threads; disk space stays reserved."""
        self._cancel()
        self.ring.close()
        if self._lane is not None:
            self._lane.release()
        for layer in self._staged.values():
            layer.release()
        super().release()

    def _room(self, nbytes: int) -> Tensor:
        """Return RAM through which blocks are moved between two forwards."""
        return (
            self.ring.reserve(nbytes) if self._lane is None else self._lane.staging_buffer(nbytes)
        )

    def _read(self, layer: DiskLayer, blocks: list[int]) -> tuple[Tensor, Tensor]:
        """Read blocks of a layer into RAM, between two forwards."""
        memory = self._room(layer.staged_bytes(len(blocks)))
        layer.load(len(blocks), extents(enumerate(blocks)), memory)
        return layer.views(memory, len(blocks))

    def _write(self, layer: DiskLayer, blocks: list[int], contents: tuple[Tensor, Tensor]) -> None:
        """Write blocks of a layer, between two forwards, through RAM."""
        memory = self._room(layer.staged_bytes(len(blocks)))
        for target, content in zip(layer.views(memory, len(blocks)), contents, strict=True):
            target.copy_(content)
        layer.save(len(blocks), extents(enumerate(blocks)), memory)

    def _cancel(self) -> None:
        """Cancel reads of an earlier forward, which may have been interrupted."""
        self.ring.drop()
        self._in_ring.clear()
