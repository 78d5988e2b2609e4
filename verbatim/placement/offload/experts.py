"""Experts on the disk: the chosen ones are read, and those used most stay in memory.

All layers whose experts have the same shapes share one cache of slots, each of which holds one expert. The
kernels see the slots as a stack of experts, so an expert's rows get the bits that they get anywhere.

What leaves the cache, and what is read ahead for the next layer, follows from one estimate: how many
layers pass until an expert is used again. A layer comes once in a forward; an expert that `n` choices
miss with probability (1 - share) ** n is skipped that often.
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

from verbatim.model.experts import ExpertShare, run_experts
from verbatim.model.packed import hold_packed
from verbatim.placement.offload.cost import LIKELY
from verbatim.placement.offload.stream import READERS, Readers
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import ExpertLayer
from verbatim.shield import Shield
from verbatim.weights.files import CHUNK, PAGE, OpenFiles, pages, read_into
from verbatim.weights.lazy import Stored, materialize, pieces_of, sources

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_READ: Future[None] = Future()  # of a slot that nothing reads
_READ.set_result(None)
_REMEMBERED = 256.0  # choices of a layer after which what was seen before counts 1/e


class ExpertCache:
    """Experts in memory, of all layers whose experts are read one by one.

    Args:
        layers: in the order of a forward.
        nbytes: of memory for experts. One of each shape is held in any case.
        ahead: read ahead, and while experts compute; False: when they are needed.
        trace: records reads and waits.
        files: of all experts, closed by their owner.

    Attributes:
        shares: `[layers, experts]`, the share of a layer's choices that fell on an expert of late.
        layers: as they run.
        capacity: experts that are held at most.
        later_parts: micro-batches of this forward that run the same layer after the present one.
        buffer_bytes: memory through which experts are read.

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
        self.shield = Shield()  # Ctrl-C could leave a slot with another expert than is noted
        self.shares: Floats = np.zeros((len(layers), max(layer.count for layer in layers)))
        self.trace = trace
        self._files = files
        self._readers = Readers(READERS, "verbatim-experts")
        most = max(layer.buffer_bytes for layer in layers)
        self._buffers = [pages(min(most, CHUNK + PAGE)) for _ in range(READERS)]
        self.buffer_bytes = sum(buffer.nbytes for buffer in self._buffers)
        for stored in {s for layer in layers for t in layer.slots for s in sources(t.lazy)}:
            self._files.of(stored.path, stored.stamp)
        self.layers = self._share_out(layers, nbytes)
        self.capacity = sum(pool.count for pool in {layer.pool for layer in self.layers})
        for layer in self.layers:
            layer.where = f"read when chosen, {self.capacity} of {self.num_experts} held in memory"

    def _share_out(self, layers: Sequence[ExpertLayer], nbytes: int) -> list[CachedLayer]:
        """Divide the memory among the shapes of experts, by their total sizes."""
        alike: dict[Any, list[ExpertLayer]] = {}
        for layer in layers:
            alike.setdefault(_shape_of(layer), []).append(layer)
        total = sum(layer.count * layer.expert_bytes for layer in layers)
        pools: dict[ExpertLayer, _Pool] = {}
        for some in alike.values():
            experts = sum(layer.count for layer in some)
            pool = _Pool(some[0], max(1, min(experts, nbytes * experts // total)))
            pools.update(dict.fromkeys(some, pool))
        return [CachedLayer(self, i, layer, pools[layer]) for i, layer in enumerate(layers)]

    @property
    def nbytes(self) -> int:
        """Memory that holds experts."""
        return sum(pool.nbytes for pool in {layer.pool for layer in self.layers})

    @property
    def num_experts(self) -> int:
        """The number of experts of all layers."""
        return sum(layer.layer.count for layer in self.layers)

    def until_used(self, now: int, choices: int, layers: Ints, experts: Ints) -> Floats:
        """Estimate how many layers pass until experts are used, seen from layer `now`.

        Args:
            choices: of a layer, in a forward.
            layers, experts: `[n]`.
        """
        used = 1 - (1 - self.shares[layers, experts]) ** choices
        skipped, count = 1 / np.maximum(used, 1e-9) - 1, len(self.layers)
        until: Floats = (layers - now - 1) % count + 1 + count * skipped
        return np.where(layers == now, skipped, until) if self.later_parts else until

    def read(self, layer: CachedLayer, expert: int, slot: int) -> Future[None]:
        """Submit the read of an expert into a slot."""
        job = self._readers.submit(self._read, layer, expert, slot)
        if not self.ahead:
            self.wait(layer, job)
        return job

    def _read(self, cached: CachedLayer, expert: int, slot: int) -> None:
        buffer, begin, nbytes = self._buffers.pop(), perf_counter(), 0  # one for each thread

        def read(out: npt.NDArray[np.uint8], stored: Stored) -> None:
            nonlocal nbytes
            nbytes += read_into(out, stored, self._files.of(stored.path), buffer)

        def apart(stored: Stored) -> Tensor:
            out = torch.empty(stored.nbytes, dtype=torch.uint8)
            read(out.numpy(), stored)
            return out.view(stored.dtype).view(stored.shape)

        try:
            for key, stack in cached.layer.stacks.items():
                room, at = cached.pool.room(key, slot), 0
                for piece in pieces_of(stack.expert(expert)):
                    if isinstance(piece, Stored):
                        end = at + piece.nbytes
                        read(room[at:end], piece)
                    else:
                        made = materialize(piece, apart).contiguous().view(torch.uint8).flatten()
                        end = at + len(made)
                        np.copyto(room[at:end], made.numpy())
                    at = end
                assert at == len(room)
        finally:
            self._buffers.append(buffer)
        name = f"{cached.layer.name}, expert {expert}"
        self.trace.add("read", "experts", name, begin, nbytes)

    def wait(self, layer: CachedLayer, job: Future[None]) -> None:
        """Wait until an expert was read, or could not be."""
        begin = perf_counter()
        job.exception()
        self.trace.add("wait", "experts", layer.layer.name, begin)

    def close(self) -> None:
        """End the threads and free everything; a second call does nothing."""
        self._readers.shutdown()
        for layer in self.layers:
            layer.close()
        self.layers, self._buffers = [], []


class CachedLayer(ExpertShare):
    """The experts of one layer, as `flat_experts` finds them at the module of a model.

    Attributes:
        held: a copy of that module whose experts are those in memory.
    """

    def __init__(self, cache: ExpertCache, number: int, layer: ExpertLayer, pool: _Pool) -> None:
        self.cache, self.number, self.layer, self.pool = cache, number, layer, pool
        self.slots: Ints = np.full(layer.count, -1)  # of each expert; -1: it is not in memory
        self._shares = cache.shares[number, : layer.count]
        self._chosen, self._choices = np.zeros(layer.count), 0.0  # those further back count less
        self.held = pool.module_like(layer)
        layer.module.expert_share = self  # type: ignore[assignment]

    def run(self, experts: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
        """Run `run_experts` on rows `[n, H]` sorted by expert, `counts[e]` of each expert e.

        Raises:
            TierFailed: an expert can't be read.
        """
        per_expert, choices = np.asarray(counts), sum(counts)
        out, wanted = rows.new_empty(choices, rows.shape[1]), per_expert > 0
        cache, kept = self.cache, math.exp(-choices / _REMEMBERED)
        following = cache.layers[(self.number + 1) % len(cache.layers)]
        with cache.shield.up():
            self._chosen = kept * self._chosen + per_expert
            self._choices = kept * self._choices + choices
            self._shares[:] = self._chosen / max(1, self._choices)
            while len(left := np.flatnonzero(wanted)):
                self._fetch(left, choices)
                done = self._wait_for_some(left)
                self._compute(done, rows, per_expert, out)
                wanted[done] = False
                if cache.ahead and (self.slots[wanted] >= 0).all():  # else these come first
                    following.fetch_likely(self, np.flatnonzero(wanted), choices)
        return out

    def _fetch(self, wanted: Ints, choices: int) -> None:
        """Submit the reads of missing experts, as far as slots hold experts that are not wanted."""
        missing = wanted[self.slots[wanted] < 0]
        if len(missing):
            slots, _ = self.pool.used_last(self, wanted, choices)
            for expert, slot in zip(missing.tolist(), slots.tolist(), strict=False):
                self._read(expert, slot)

    def fetch_likely(self, now: CachedLayer, wanted: Ints, choices: int) -> None:
        """Submit the reads of likely experts, into slots that are not used for a whole forward.

        Args:
            now: the previous layer, with its experts `wanted` still to run.
        """
        likely = 1 - (1 - self._shares) ** choices
        missing = np.flatnonzero((likely >= LIKELY) & (self.slots < 0))
        if not len(missing):
            return
        missing = missing[np.argsort(-likely[missing], kind="stable")]
        slots, until = self.pool.used_last(now, wanted, choices)
        slots = slots[until >= len(self.cache.shares)]
        for expert, slot in zip(missing.tolist(), slots.tolist(), strict=False):
            self._read(expert, slot)

    def _read(self, expert: int, slot: int) -> None:
        pool = self.pool
        if not pool.jobs[slot].done():
            self.cache.wait(self, pool.jobs[slot])
        if pool.experts[slot] >= 0:
            self.cache.layers[pool.layers[slot]].slots[pool.experts[slot]] = -1
            pool.experts[slot] = -1
        pool.jobs[slot] = self.cache.read(self, expert, slot)
        pool.layers[slot], pool.experts[slot] = self.number, expert
        self.slots[expert] = slot  # last: what is noted here was read, or is being read

    def _wait_for_some(self, wanted: Ints) -> Ints:
        """Return those that are in memory, once there is one.

        Raises:
            TierFailed: one can't be read.
        """
        held = wanted[self.slots[wanted] >= 0]
        jobs = [self.pool.jobs[slot] for slot in self.slots[held].tolist()]
        if not any(job.done() for job in jobs):
            self.cache.wait(self, jobs[0])
        done = [job.done() for job in jobs]
        for job in itertools.compress(jobs, done):
            job.result()
        return held[done]

    def _compute(self, experts: Ints, rows: Tensor, counts: Ints, out: Tensor) -> None:
        experts = experts[np.argsort(self.slots[experts])]
        ends = counts.cumsum()
        places = np.concatenate([np.arange(ends[e] - counts[e], ends[e]) for e in experts])
        index = torch.from_numpy(places)
        per_slot = np.zeros(self.pool.count, dtype=np.int64)
        per_slot[self.slots[experts]] = counts[experts]
        assert self.held is not None
        out[index] = run_experts(self.held, rows[index], torch.from_numpy(per_slot))

    def close(self) -> None:
        """Restore the module, and free the memory."""
        self.held = None
        self.pool.close()
        self.layer.module.__dict__.pop("expert_share", None)


class _Pool:
    """Memory for experts of one shape.

    Args:
        like: a layer with such experts.
        count: experts that it holds.

    Attributes:
        layers, experts, jobs: of each slot, the expert in it (-1: none), and its read.
    """

    def __init__(self, like: ExpertLayer, count: int) -> None:
        self.count = count
        self.layers: Ints = np.zeros(count, dtype=np.int64)
        self.experts: Ints = np.full(count, -1)
        self.jobs = [_READ] * count
        self._bytes = {key: stack.expert_bytes for key, stack in like.stacks.items()}
        self._memory = {key: pages(count * nbytes) for key, nbytes in self._bytes.items()}

    @property
    def nbytes(self) -> int:
        """Memory of the slots."""
        return self.count * sum(self._bytes.values())

    def room(self, key: str, slot: int) -> npt.NDArray[np.uint8]:
        """Return the memory of one parameter's expert."""
        nbytes = self._bytes[key]
        room: npt.NDArray[np.uint8] = self._memory[key][slot * nbytes : (slot + 1) * nbytes].numpy()
        return room

    def used_last(self, now: CachedLayer, wanted: Ints, choices: int) -> tuple[Ints, Floats]:
        """Return slots, those used last first, and how many layers pass until then.

        Args:
            now: the layer that runs; slots of its experts `wanted` are left out.
        """
        until = now.cache.until_used(now.number, choices, self.layers, self.experts)
        until[self.experts < 0] = np.inf
        if now.pool is self:
            own = now.slots[wanted]
            until[own[own >= 0]] = -1
        slots = np.argsort(-until, kind="stable")
        slots = slots[until[slots] >= 0]
        return slots, until[slots]

    def close(self) -> None:
        """Free the memory."""
        self._memory.clear()

    def module_like(self, layer: ExpertLayer) -> nn.Module:
        """Return a copy of a layer's experts module whose experts are the slots.

        All else is the module's own, and is there while the layer's unit is installed.
        """
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
            hold_packed(module, key, self._memory[key], packing)
        return module


def _shape_of(layer: ExpertLayer) -> Any:
    """Return the shape that experts of one pool have in common."""
    found: list[Any] = []
    for key, stack in layer.stacks.items():
        parameter, packing = stack.parameter, stack.packing
        kind = None if packing is None else (packing.format, packing.quantization)
        found.append((key, parameter.shape[1:], parameter.dtype, stack.expert_bytes, kind))
    return tuple(found)
