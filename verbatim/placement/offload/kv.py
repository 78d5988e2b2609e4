"""K and V over three tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from verbatim.batch import AttentionBatch, Batch
from verbatim.kernels.options import AnyOptions, IndexOptions
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore, LayerShape, bytes_per_token
from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.kv_disk import NUM_STAGED, StagedLayer, View, extents, views_of
from verbatim.placement.offload.prefetch import Prefetcher
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.sparse import top_k_attention
from verbatim.placement.offload.stream import Ring, Use
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import bytes_of

_POISONED = 256  # blocks that are written at once
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
    """A `KVStore` with each layer in one tier: in RAM ("gpu" and "cpu"), or on the disk.

    Of a layer on the disk, the blocks that a micro-batch uses are read into a ring, its rows are
    written there, and changed blocks are written back. Results do not depend on the tier. The store is
    written and attended in only through what `stores_for` yields.

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
        cpu_cache_compute: attend to layers in the "cpu" tier where they are; False copies what a
            micro-batch sees to the device first. None is True on a CPU. For the disk it means nothing:
            the ring is the memory that attention reads.
        top_k: attend to so many keys at most (`sparse.py`); all blocks are read nevertheless.

    Attributes:
        tiers: of each layer.

    Raises:
        TierFailed: the disk has no room.
    """

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
        cpu_cache_compute: bool | None = None,
        top_k: int | None = None,
    ) -> None:
        super().__init__([], num_blocks, block_size, dtype, device)
        self.tiers = assign_tiers([bytes_per_token([shape], dtype) for shape in layers], percents)
        in_memory = [i for i, tier in enumerate(self.tiers) if tier != "disk"]
        self.memory = KVStore([layers[i] for i in in_memory], num_blocks, block_size, dtype, device)
        self.place = {layer: i for i, layer in enumerate(in_memory)}  # in `memory`
        self.layers = self.memory.layers
        self.top_k = top_k
        self.value_sizes = [shape.value_dim for shape in layers]
        self.trace = trace
        known = {layer for group in groups for layer in group}
        self._groups = [*groups, [layer for layer in range(len(layers)) if layer not in known]]
        copied = ["cpu"] if cpu_cache_compute is False else []
        self.staged = {
            i: StagedLayer(
                KVStore([layers[i]], 0, block_size, dtype, device),
                scratch if tier == "disk" else None,
                num_blocks,
            )
            for i, tier in enumerate(self.tiers)
            if tier in ("disk", *copied)
        }
        self._on_disk = {i: layer for i, layer in self.staged.items() if self.tiers[i] == "disk"}
        self._num_staged = NUM_STAGED if overlap else 1
        self.ring = Ring("K and V", Prefetcher("verbatim-kv", int(overlap)), trace)
        self.copies = Ring("K and V", Prefetcher("verbatim-kv-copies", 0), trace)  # on the device

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in all tiers, without the ring."""
        return sum(self.bytes_by_tier().values())

    @property
    def staging_bytes(self) -> int:
        """Bytes of the ring, and of copies on the device."""
        return self.ring.nbytes + self.copies.nbytes

    def bytes_by_tier(self) -> dict[str, int]:
        """K and V in each tier. Those on the disk keep their room through `release`."""
        found = dict.fromkeys(TIERS, 0)
        for layer, i in self.place.items():
            if self.memory.layers:
                k, v = self.memory.layers[i]
                found[self.tiers[layer]] += k.nbytes + v.nbytes
        found["disk"] = sum(layer.nbytes for layer in self._on_disk.values())
        return found

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        raise AssertionError("a store over tiers is written through stores_for")

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        raise AssertionError("a store over tiers is attended in through stores_for")

    @contextmanager
    def stores_for(self, batches: list[Batch]) -> Iterator[list[KVStore]]:
        """Yield, for each micro-batch of a forward, the store that it writes to and attends in.

        Raises:
            TierFailed: something can't be read or written, at the latest when the block ends.
        """
        self.ring.drop()
        views = views_of(batches, self.block_size) if self.staged else []
        uses: dict[tuple[int, int], Use] = {}
        for group in self._groups:
            for part, view in enumerate(views):
                for i in group:
                    # A layer that several units share comes once.
                    if i in self._on_disk and (i, part) not in uses:
                        uses[i, part] = Use(
                            f"K, V {i} #{part}",
                            self.staged[i].staged_bytes(len(view.blocks)),
                            [partial(self.staged[i].load, len(view.blocks), view.old)],
                            [uses[i, earlier] for earlier in view.after],
                        )
        largest = self._num_staged * max((use.nbytes for use in uses.values()), default=0)
        self.ring.reserve(largest, spare=largest // 8)  # contexts grow
        try:
            if uses:
                self.ring.follow(uses.values(), repeat=False)
            yield [
                _MicroBatchStore(self, part, views[part] if views else None, uses)
                for part in range(len(batches))
            ]
            if uses:
                self.ring.finish()
        finally:
            self._cancel()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._cancel()
        self.memory.copy_blocks(copies)
        if not copies:
            return
        read = extents((i, a) for i, (a, _) in enumerate(copies))
        write = extents((i, b) for i, (_, b) in enumerate(copies))
        for layer in self._on_disk.values():  # what is copied may be overwritten by another copy
            memory = bytes_of(self._memory(layer, len(copies)))
            layer.load(len(copies), read, memory)
            layer.save(len(copies), write, memory)

    def read_blocks(self, blocks: list[int]) -> list[Tensor]:
        self._cancel()
        in_memory, found = self.memory.read_blocks(blocks), list[Tensor]()
        for i in range(len(self.tiers)):
            if i not in self._on_disk:
                found += in_memory[2 * self.place[i] : 2 * self.place[i] + 2]
                continue
            layer = self._on_disk[i]
            memory = self._memory(layer, len(blocks))
            layer.load(len(blocks), extents(enumerate(blocks)), bytes_of(memory))
            found += [x.clone() for x in layer.attach(memory, len(blocks)).layers[0]]
            layer.detach()
        return found

    def write_blocks(self, blocks: list[int], contents: list[Tensor]) -> None:
        self._cancel()
        places = sorted(self.place, key=self.place.__getitem__)
        self.memory.write_blocks(blocks, [contents[2 * i + j] for i in places for j in (0, 1)])
        for i, layer in self._on_disk.items():
            memory = self._memory(layer, len(blocks))
            staged = layer.attach(memory, len(blocks)).layers[0]
            for own, content in zip(staged, contents[2 * i : 2 * i + 2], strict=True):
                own.copy_(content)
            layer.detach()
            layer.save(len(blocks), extents(enumerate(blocks)), bytes_of(memory))

    def poison(self, blocks: list[int]) -> None:
        self._cancel()
        self.memory.poison(blocks)
        for ring in (self.ring, self.copies):
            ring.reserve(0).fill_(0xFF)
        for layer in self._on_disk.values():
            for first in range(0, len(blocks), _POISONED):
                some = blocks[first : first + _POISONED]
                memory = self._memory(layer, len(some)).fill_(0xFF)
                layer.save(len(some), extents(enumerate(some)), bytes_of(memory))

    def release(self) -> None:
        """Give the memory back and end the threads; the room on the disk stays reserved."""
        self._cancel()
        self.ring.close()
        self.copies.close()
        self.memory.release()
        if self.states is not None:
            self.states.release()

    def allocate(self) -> None:
        self.memory.allocate()
        if self.states is not None:
            self.states.allocate()

    def _memory(self, layer: StagedLayer, blocks: int) -> Tensor:
        """Return memory for blocks of a layer, between two forwards."""
        return self.ring.reserve(layer.staged_bytes(blocks))

    def _cancel(self) -> None:
        """Cancel what is left of an earlier forward, which may have been interrupted."""
        self.ring.drop()
        for layer in self.staged.values():
            layer.detach()


class _MicroBatchStore(KVStore):
    """The store as one micro-batch of one forward uses it.

    Args:
        part: number of the micro-batch.
        view: of it; None where no layer needs one.
        uses: of layers on the disk, by layer and micro-batch.
    """

    def __init__(
        self,
        whole: TieredKVStore,
        part: int,
        view: View | None,
        uses: dict[tuple[int, int], Use],
    ) -> None:
        self.block_size, self.num_blocks = whole.block_size, whole.num_blocks
        self.dtype_name = whole.dtype_name
        self.layers = whole.layers
        self.states = whole.states
        self._whole, self._part, self._view, self._uses = whole, part, view, uses

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        whole = self._whole
        if whole.tiers[layer] != "disk":
            whole.memory.write(whole.place[layer], k, v, slots)
            return
        assert self._view is not None
        memory = whole.ring.take(self._uses[layer, self._part])
        store = whole.staged[layer].attach(memory, len(self._view.blocks))
        store.write(0, k, v, self._view.slots)

    def attend(self, layer: int, q: Tensor, batch: AttentionBatch, options: AnyOptions) -> Tensor:
        whole, view = self._whole, self._view
        if whole.tiers[layer] == "disk":
            assert view is not None
            staged = whole.staged[layer]
            out = self._attend(staged.store, 0, layer, q, view.batch.attention, options)
            staged.detach()
            whole.ring.give_back(partial(staged.save, len(view.blocks), view.new))
            return out
        place = whole.place[layer]
        if layer not in whole.staged:
            return self._attend(whole.memory, place, layer, q, batch, options)
        assert view is not None
        staged, blocks = whole.staged[layer], len(view.blocks)
        nbytes = staged.staged_bytes(blocks)
        memory = whole.copies.reserve(nbytes, spare=nbytes // 8)
        store = staged.attach(memory, blocks)
        for own, held in zip(store.layers[0], whole.memory.layers[place], strict=True):
            torch.index_select(held, 0, view.blocks, out=own)
        out = self._attend(store, 0, layer, q, view.batch.attention, options)
        staged.detach()
        return out

    def _attend(
        self,
        store: KVStore,
        place: int,
        layer: int,
        q: Tensor,
        batch: AttentionBatch,
        options: AnyOptions,
    ) -> Tensor:
        whole = self._whole
        if whole.top_k is None or isinstance(options, IndexOptions):
            return store.attend(place, q, batch, options)
        return top_k_attention(
            store,
            place,
            q,
            batch,
            options,
            top_k=whole.top_k,
            value_size=whole.value_sizes[layer],
            packing=whole.packing,
        )
