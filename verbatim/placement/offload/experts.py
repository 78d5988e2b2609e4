"""Experts on the disk: chosen experts are read, and those used most stay in memory.

All layers with experts of the same shapes share one cache of slots, each of which holds one expert. The
kernels see the slots as a stack of experts, so outputs are bit-identical to those of the whole stack.

Eviction and prefetch for the next layer use one estimate: the number of layers that run until an expert is
used again. A layer runs once per forward, and an expert is skipped with probability
(1 - share) ** n, where n is the number of choices in the forward.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from verbatim.common.shield import Shield
from verbatim.model.experts import ExpertShare, run_experts
from verbatim.model.quantized import hold_quantized
from verbatim.placement.offload.cost import LIKELY
from verbatim.placement.offload.stream import READERS, Readers
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import ExpertLayer
from verbatim.weights.files import CHUNK, PAGE, OpenFiles, pages, read_into
from verbatim.weights.lazy import Stored, materialize, pieces_of, sources

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FINISHED: Future[None] = Future()  # for slots without a pending read
_FINISHED.set_result(None)
_DECAY_CHOICES = 256.0  # choices of a layer after which earlier ones count 1/e


class ExpertCache:
    """A cache of experts, for all layers with experts that are read one by one.

    Args:
        layers: the layers, in the order of a forward.
        nbytes: memory for experts, in bytes; one expert of each shape is always held.
        ahead: whether experts are read ahead, during computation; False: when they are needed.
        files: the open files of all experts, closed by their owner.

    Attributes:
        shares: `[layers, experts]`, the recent share of a layer's choices that went to an expert.
        layers: the cached layers, in the order of a forward.
        capacity: maximum experts in memory.
        later_parts: number of micro-batches of this forward that still have to run the present layer.
        buffer_bytes: bytes of the buffers through which experts are read.

    Raises:
        TierFailed: a file can't be opened.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        nbytes: int,
        ahead: bool,
        trace: Trace,
        files: OpenFiles,
    ) -> None:
        self.ahead = ahead
        self.later_parts = 0
        self.shield = Shield()  # Ctrl-C could leave a slot with another expert than recorded
        self.shares: Floats = np.zeros((len(layers), max(layer.count for layer in layers)))
        self.trace = trace
        self._files = files
        self._readers = Readers(READERS, "verbatim-experts")
        most = max(layer.buffer_bytes for layer in layers)
        self._buffers = [pages(min(most, CHUNK + PAGE)) for _ in range(READERS)]
        self.buffer_bytes = sum(buffer.nbytes for buffer in self._buffers)
        for stored in {s for layer in layers for t in layer.slots for s in sources(t.lazy)}:
            self._files.of(stored.path, stored.stamp)
        self.layers = self._divide_memory(layers, nbytes)
        self.capacity = sum(pool.count for pool in {layer.pool for layer in self.layers})
        for layer in self.layers:
            layer.location = (
                f"read when chosen, {self.capacity} of {self.num_experts} held in memory"
            )

    def _divide_memory(self, layers: Sequence[ExpertLayer], nbytes: int) -> list[CachedLayer]:
        """Divide the memory among the shapes of experts, in proportion to their total sizes."""
        by_shape: dict[Any, list[ExpertLayer]] = {}
        for layer in layers:
            by_shape.setdefault(_shape_of(layer), []).append(layer)
        total = sum(layer.count * layer.expert_bytes for layer in layers)
        pools: dict[ExpertLayer, _Pool] = {}
        for same_shape in by_shape.values():
            experts = sum(layer.count for layer in same_shape)
            pool = _Pool(same_shape[0], max(1, min(experts, nbytes * experts // total)))
            pools.update(dict.fromkeys(same_shape, pool))
        return [CachedLayer(self, i, layer, pools[layer]) for i, layer in enumerate(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(pool.nbytes for pool in {layer.pool for layer in self.layers})

    @property
    def num_experts(self) -> int:
        """The number of experts of all layers."""
        return sum(layer.layer.count for layer in self.layers)

    def read(self, layer: CachedLayer, expert: int, slot: int) -> Future[None]:
        """Submit the read of an expert into a slot."""
        job = self._readers.submit(self._read, layer, expert, slot)
        if not self.ahead:
            self.wait(layer, job)
        return job

    def _read(self, cached: CachedLayer, expert: int, slot: int) -> None:
        buffer, begin, nbytes = self._buffers.pop(), perf_counter(), 0  # one buffer per thread

        def read(out: npt.NDArray[np.uint8], stored: Stored) -> None:
            nonlocal nbytes
            nbytes += read_into(out, stored, self._files.of(stored.path), buffer)

        def load(stored: Stored) -> Tensor:
            out = torch.empty(stored.nbytes, dtype=torch.uint8)
            read(out.numpy(), stored)
            return out.view(stored.dtype).view(stored.shape)

        try:
            for key, stack in cached.layer.stacks.items():
                target, at = cached.pool.room(key, slot), 0
                for piece in pieces_of(stack.expert(expert)):
                    if isinstance(piece, Stored):
                        end = at + piece.nbytes
                        read(target[at:end], piece)
                    else:
                        data = materialize(piece, load).contiguous().view(torch.uint8).flatten()
                        end = at + len(data)
                        np.copyto(target[at:end], data.numpy())
                    at = end
                assert at == len(target)
        finally:
            self._buffers.append(buffer)
        name = f"{cached.layer.name}, expert {expert}"
        self.trace.add("read", "experts", name, begin, nbytes)

    def wait(self, layer: CachedLayer, job: Future[None]) -> None:
        """Wait until the read of an expert has finished or failed."""
        begin = perf_counter()
        job.exception()
        self.trace.add("wait", "experts", layer.layer.name, begin)

    def forget_failed(self) -> None:
        """Wait for all reads, and remove the experts that could not be read, so that they are read again."""
        for pool in {layer.pool for layer in self.layers}:
            for slot, job in enumerate(pool.jobs):
                if job.exception() is not None:
                    if pool.experts[slot] >= 0:
                        self.layers[pool.layers[slot]].slots[pool.experts[slot]] = -1
                    pool.experts[slot], pool.jobs[slot] = -1, _FINISHED

    def close(self) -> None:
        """End the threads and free everything. May be called again."""
        self._readers.shutdown()
        for layer in self.layers:
            layer.close()
        self.layers, self._buffers = [], []


class CachedLayer(ExpertShare):
    """The experts of one layer, which `flat_experts` finds as its module's `expert_share`.

    Attributes:
        local_experts: a copy of that module with the slots of the cache as its experts; None: closed.
    """

    def __init__(self, cache: ExpertCache, number: int, layer: ExpertLayer, pool: _Pool) -> None:
        self.cache, self.number, self.layer, self.pool = cache, number, layer, pool
        self.slots: Ints = np.full(layer.count, -1)  # of each expert; -1: not in memory
        self._shares = cache.shares[number, : layer.count]
        self._chosen, self._choices = np.zeros(layer.count), 0.0  # decaying sums of choices
        self.local_experts = pool.module_like(layer)
        layer.module.expert_share = self  # type: ignore[assignment]

    def run(self, experts: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
        """Do what `run_experts` does for rows `[n, H]` sorted by expert, `counts[e]` of them for expert e.

        Raises:
            TierFailed: an expert can't be read.
        """
        per_expert, choices = np.asarray(counts), sum(counts)
        out, pending = rows.new_empty(choices, rows.shape[1]), per_expert > 0
        cache, decay = self.cache, math.exp(-choices / _DECAY_CHOICES)
        following = cache.layers[(self.number + 1) % len(cache.layers)]
        with cache.shield.up():
            self._chosen = decay * self._chosen + per_expert
            self._choices = decay * self._choices + choices
            self._shares[:] = self._chosen / max(1, self._choices)
            while len(remaining := np.flatnonzero(pending)):
                self._fetch(remaining, self, remaining, choices)
                ready = self._wait_for_some(remaining)
                self._compute(ready, rows, per_expert, out)
                pending[ready] = False
                if cache.ahead and (self.slots[pending] >= 0).all():  # own reads come first
                    following._fetch(
                        following._likely(choices),
                        self,
                        np.flatnonzero(pending),
                        choices,
                        len(cache.shares),  # not in this forward
                    )
        return out

    def _likely(self, choices: int) -> Ints:
        """Return missing experts that are likely to be chosen in the next forward, likeliest first."""
        likely = 1 - (1 - self._shares) ** choices
        experts = np.flatnonzero((likely >= LIKELY) & (self.slots < 0))
        return experts[np.argsort(-likely[experts], kind="stable")]

    def _fetch(
        self, experts: Ints, now: CachedLayer, wanted: Ints, choices: int, unused_layers: int = 0
    ) -> None:
        """Submit reads of those `experts` that are missing, as far as there are slots.

        Args:
            now: the running layer, which still has to run its experts `wanted`; their slots are kept.
            unused_layers: layers that run, at least, until the expert that is in a slot now is used.
        """
        missing = experts[self.slots[experts] < 0]
        if not len(missing):
            return
        pool = self.pool
        slots = pool.by_next_use(now, wanted, choices, unused_layers)
        for expert, slot in zip(missing.tolist(), slots.tolist(), strict=False):
            if not pool.jobs[slot].done():
                self.cache.wait(self, pool.jobs[slot])
            if pool.experts[slot] >= 0:
                self.cache.layers[pool.layers[slot]].slots[pool.experts[slot]] = -1
                pool.experts[slot] = -1
            pool.jobs[slot] = self.cache.read(self, expert, slot)
            pool.layers[slot], pool.experts[slot] = self.number, expert
            self.slots[expert] = slot  # last, so that every recorded expert has a read

    def _wait_for_some(self, wanted: Ints) -> Ints:
        """Wait for at least one expert; return those in memory, or raise TierFailed if a read failed."""
        held = wanted[self.slots[wanted] >= 0]
        jobs = [self.pool.jobs[slot] for slot in self.slots[held].tolist()]
        if not any(job.done() for job in jobs):
            self.cache.wait(self, jobs[0])
        done = [job.done() for job in jobs]
        try:
            for job in itertools.compress(jobs, done):
                job.result()
        except BaseException:
            self.cache.forget_failed()
            raise
        return held[done]

    def _compute(self, experts: Ints, rows: Tensor, counts: Ints, out: Tensor) -> None:
        experts = experts[np.argsort(self.slots[experts])]
        ends = counts.cumsum()
        places = np.concatenate([np.arange(ends[e] - counts[e], ends[e]) for e in experts])
        index = torch.from_numpy(places)
        per_slot = np.zeros(self.pool.count, dtype=np.int64)
        per_slot[self.slots[experts]] = counts[experts]
        assert self.local_experts is not None
        out[index] = run_experts(self.local_experts, rows[index], torch.from_numpy(per_slot))

    def close(self) -> None:
        """Restore the module, and free the memory."""
        self.local_experts = None
        self.pool.close()
        self.layer.module.__dict__.pop("expert_share", None)


class _Pool:
    """Slots for experts of one shape.

    Attributes:
        layers, experts, jobs: for each slot, the layer and number of its expert (-1: none), and its read.
    """

    def __init__(self, like: ExpertLayer, count: int) -> None:
        self.count = count
        self.layers: Ints = np.zeros(count, dtype=np.int64)
        self.experts: Ints = np.full(count, -1)
        self.jobs = [_FINISHED] * count
        sizes = {key: stack.expert_bytes for key, stack in like.stacks.items()}
        self._memory = {key: pages(count * n).view(count, n) for key, n in sizes.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(memory.nbytes for memory in self._memory.values())

    def room(self, key: str, slot: int) -> npt.NDArray[np.uint8]:
        """Return the memory of one parameter of a slot's expert."""
        room: npt.NDArray[np.uint8] = self._memory[key][slot].numpy()
        return room

    def by_next_use(self, now: CachedLayer, wanted: Ints, choices: int, unused_layers: int) -> Ints:
        """Return slots, latest next use first, by an estimate of how many layers run until that use.

        Args:
            now: the running layer; slots of its experts `wanted` are left out.
            choices: number of choices per layer in a forward.
            unused_layers: slots that are used earlier are left out.
        """
        cache = now.cache
        used = 1 - (1 - cache.shares[self.layers, self.experts]) ** choices
        skipped, count = 1 / np.maximum(used, 1e-9) - 1, len(cache.layers)
        until: Floats = (self.layers - now.number - 1) % count + 1 + count * skipped
        if cache.later_parts:
            until = np.where(self.layers == now.number, skipped, until)
        until[self.experts < 0] = np.inf
        if now.pool is self:
            wanted_slots = now.slots[wanted]
            until[wanted_slots[wanted_slots >= 0]] = -1
        slots = np.argsort(-until, kind="stable")
        return slots[until[slots] >= unused_layers]

    def close(self) -> None:
        """Free the memory."""
        self._memory.clear()

    def module_like(self, layer: ExpertLayer) -> nn.Module:
        """Return a copy of a layer's experts module that has the slots as experts, and shares all else."""
        memo: dict[int, Any] = {id(p): p for p in layer.module.parameters()}
        packed: list[tuple[str, Any]] = []
        for key, stack in layer.stacks.items():
            parameter, packing = stack.parameter, stack.packing
            if packing is None:
                rows = self.count * (parameter.shape[0] // stack.experts)
                held = self._memory[key].view(parameter.dtype).view(rows, *parameter.shape[1:])
                memo[id(parameter)] = nn.Parameter(held, requires_grad=False)
            else:
                packed.append((key, replace(packing, shape=(self.count, *packing.shape[1:]))))
        module = copy.deepcopy(layer.module, memo)
        for key, packing in packed:
            hold_quantized(module, key, self._memory[key].flatten(), packing)
        return module


def _shape_of(layer: ExpertLayer) -> Any:
    """Return the shapes and formats of a layer's experts, by which layers share a pool."""
    kinds = [(s.parameter.dtype, s.packing and s.packing.single) for s in layer.slots]
    shapes = [(key, s.parameter.shape[1:], s.expert_bytes) for key, s in layer.stacks.items()]
    return *kinds, *shapes
