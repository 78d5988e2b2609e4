"""K and V over three tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch, Batch
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore, LayerShape, bytes_per_token
from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.kv_disk import (
    NUM_STAGED,
    DiskLayer,
    Extent,
    View,
    extents,
    views_of,
)
from verbatim.placement.offload.lane import Lane
from verbatim.placement.offload.scratch import RamScratch, Scratch
from verbatim.placement.offload.sparse import top_k_attention
from verbatim.placement.offload.stream import Ring, Use
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import bytes_of

TIERS = ("gpu", "cpu", "disk")


def assign_tiers(sizes: Sequence[int], percents: Percents) -> list[str]:
    """Return a tier for each of `sizes`, so that any range has about these percents of its bytes."""
    given, total, tiers = [0.0, 0.0, 0.0], 0.0, []
    for size in sizes:
        total += size
        short = [total * share / 100 - had for share, had in zip(percents, given, strict=True)]
        best = max(range(3), key=lambda i: (percents[i] > 0, short[i]))
        given[best] += size
        tiers.append(TIERS[best])
    return tiers


class TieredKVStore(KVStore):
    """A `KVStore` with each layer in one tier: in RAM ("gpu" and "cpu"), or on the disk; "gpu" is a GPU's
    memory where one computes.

    Of a layer on the disk, and of one in RAM beside a GPU, the blocks that a micro-batch uses are read into a
    ring (and copied to the GPU), its rows are written there, and changed blocks are written back. Results do
    not depend on the tier. Such a layer is written and attended in only through what `stores_for` yields:
    copies of this store, one for each micro-batch.

    The ring has room for three times the blocks of the largest micro-batch in one layer (once without
    `overlap`), beside what the tiers hold: `staging_bytes`.

    Args:
        layers, num_blocks, block_size, device: as for `KVStore`.
        dtype: of K and V; a `Packing` quantizes them.
        percents: of the bytes, in (gpu, cpu, disk).
        groups: layers that each micro-batch in turn attends in one after the other, in the order of a
            forward. Layers that come in another order are not read ahead.
        scratch: file on the disk; all of the room is reserved here.
        trace: records reads, writes and waits.
        overlap: read ahead and write back in a thread; False does both where they are waited for.
        top_k: attend to so many keys at most (`sparse.py`); all blocks are read nevertheless.
        is_apart: the device's memory is not RAM.

    Attributes:
        tiers: of each layer.

    Raises:
        TierFailed: the disk has no room.
    """

    # Of a micro-batch: its number, its blocks, and the uses of layers on the disk, by layer and number.
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
        is_apart: bool = False,
    ) -> None:
        in_place = ("gpu",) if is_apart else ("gpu", "cpu")
        self.tiers = assign_tiers([bytes_per_token([shape], dtype) for shape in layers], percents)
        self._near = [i for i, tier in enumerate(self.tiers) if tier in in_place]
        super().__init__(layers, num_blocks, block_size, dtype, device)
        self.top_k, self.trace = top_k, trace
        self.in_place = len(self._near) == len(layers) and top_k is None
        known = {layer for group in groups for layer in group}
        self._groups = [*groups, [layer for layer in range(len(layers)) if layer not in known]]
        self._staged = {
            i: DiskLayer(
                self._blocks(layers[i], 0), scratch if tier == "disk" else RamScratch(), num_blocks
            )
            for i, tier in enumerate(self.tiers)
            if i not in self._near
        }
        self._in_ring: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_staged = NUM_STAGED if overlap else 1
        self._lane = Lane(device) if is_apart else None
        self.ring = Ring("K and V", 1, trace, ahead=overlap, lane=self._lane)

    def _allocated(self) -> list[Tensor]:
        """Return new memory for K and V of the layers that are used in place."""
        return [x for i in self._near for x in self._blocks(self.shapes[i], self.num_blocks)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer; of a staged one, the blocks of the micro-batch that attends in it."""
        if layer in self._staged:
            return self._in_ring[layer]
        return super().layer(self._near.index(layer))

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in all tiers, without the ring."""
        return sum(self.bytes_by_tier().values())

    @property
    def staging_bytes(self) -> int:
        """Bytes of RAM through which blocks are moved."""
        return self.ring.nbytes if self._lane is None else self._lane.buffer.nbytes

    @property
    def device_staging_bytes(self) -> int:
        """Bytes of a device's memory to which they are copied."""
        return 0 if self._lane is None else self.ring.nbytes

    def bytes_by_tier(self) -> dict[str, int]:
        """K and V in each tier. Those on the disk keep their room through `release`."""
        found = dict.fromkeys(TIERS, 0)
        for i, tier in enumerate(self.tiers):
            if i in self._staged:
                found[tier] += self._staged[i].nbytes
            elif self.tensors:
                found[tier] += sum(tensor.nbytes for tensor in self.layer(i))
        return found

    @contextmanager
    def stores_for(self, batches: list[Batch]) -> Iterator[list[KVStore]]:
        """Yield, for each micro-batch of a forward, the store that it writes to and attends in.

        Raises:
            TierFailed: something can't be read or written, at the latest when the block ends.
        """
        if not self._staged:
            yield [self] * len(batches)
            return
        self.ring.drop()
        views = [view.to(self.device) for view in views_of(batches, self.block_size)]
        uses: dict[tuple[int, int], Use] = {}
        for group in self._groups:
            for part, view in enumerate(views):
                for i in group:
                    # A layer that several units share comes once.
                    if i in self._staged and (i, part) not in uses:
                        uses[i, part] = Use(
                            f"K, V {i} #{part}",
                            self._staged[i].staged_bytes(len(view.blocks)),
                            [partial(self._load, self._staged[i], len(view.blocks), view.old)],
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
            blocks, slots = len(self._view.blocks), self._view.slots
            self._in_ring[layer] = self._staged[layer].views(memory, blocks)
        super().write(layer, k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        staged, view = self._staged.get(layer), self._view
        if staged is not None:
            assert view is not None, "a layer that is staged is attended in through stores_for"
            batch = view.batch.attention
        if self.top_k is None or isinstance(options, IndexOptions):
            out = super().attend(layer, q, batch, options)
        else:
            out = top_k_attention(self, layer, q, batch, options, top_k=self.top_k)
        if staged is not None and view is not None:
            del self._in_ring[layer]
            self.ring.give_back(partial(self._save, staged, len(view.blocks), view.new))
        return out

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._cancel()
        super().copy_blocks(copies)
        if copies:
            sources, targets = map(list, zip(*copies, strict=True))
            for layer in self._staged.values():
                # All are read first: what is copied may be overwritten by another copy.
                self._write(layer, targets, self._read(layer, sources))

    def read_blocks(self, blocks: list[int]) -> list[Tensor]:
        self._cancel()
        in_memory, found = iter(super().read_blocks(blocks)), list[Tensor]()
        for i in range(len(self.tiers)):
            if i in self._staged:
                found += [x.clone() for x in self._read(self._staged[i], blocks)]
            else:
                found += [next(in_memory), next(in_memory)]
        return found

    def write_blocks(self, blocks: list[int], contents: list[Tensor]) -> None:
        self._cancel()
        pairs = list(zip(contents[::2], contents[1::2], strict=True))
        in_memory = [pair for i, pair in enumerate(pairs) if i not in self._staged]
        super().write_blocks(blocks, [tensor for pair in in_memory for tensor in pair])
        for i, layer in self._staged.items():
            self._write(layer, blocks, pairs[i])

    def release(self) -> None:
        """Give the memory back and end the threads; the room on the disk stays reserved."""
        self._cancel()
        self.ring.close()
        if self._lane is not None:
            self._lane.release()
        for layer in self._staged.values():
            layer.release()
        super().release()

    def _load(self, layer: DiskLayer, blocks: int, old: list[Extent], memory: Any) -> int:
        """Read blocks of a layer into memory of `blocks`, in the ring's thread; return the bytes read."""
        if self._lane is None:
            return layer.load(blocks, old, memory)
        ram = self._lane.through(memory.nbytes)
        nbytes = layer.load(blocks, old, bytes_of(ram))
        if old:
            memory.copy_(ram, non_blocking=True)
        return nbytes

    def _save(self, layer: DiskLayer, blocks: int, new: list[Extent], memory: Any) -> int:
        """Write blocks of a layer from memory of `blocks`, in the ring's thread; return the bytes written."""
        if self._lane is None:
            return layer.save(blocks, new, memory)
        ram = self._lane.through(memory.nbytes)
        for target, source in zip(
            layer.views(ram, blocks), layer.views(memory, blocks), strict=True
        ):
            for at, _, length in new:
                target[at : at + length] = source[at : at + length]
        return layer.save(blocks, new, bytes_of(ram))

    def _room(self, nbytes: int) -> Tensor:
        """Return RAM to move blocks through, between two forwards."""
        return self.ring.reserve(nbytes) if self._lane is None else self._lane.through(nbytes)

    def _read(self, layer: DiskLayer, blocks: list[int]) -> tuple[Tensor, Tensor]:
        """Read blocks of a layer into RAM, between two forwards."""
        memory = self._room(layer.staged_bytes(len(blocks)))
        layer.load(len(blocks), extents(enumerate(blocks)), bytes_of(memory))
        return layer.views(memory, len(blocks))

    def _write(self, layer: DiskLayer, blocks: list[int], contents: tuple[Tensor, Tensor]) -> None:
        """Write blocks of a layer, between two forwards, through RAM."""
        memory = self._room(layer.staged_bytes(len(blocks)))
        for own, content in zip(layer.views(memory, len(blocks)), contents, strict=True):
            own.copy_(content)
        layer.save(len(blocks), extents(enumerate(blocks)), bytes_of(memory))

    def _cancel(self) -> None:
        """Cancel what is left of an earlier forward, which may have been interrupted."""
        self.ring.drop()
        self._in_ring.clear()
