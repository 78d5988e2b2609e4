"""Recurrent states: their tensors, and the allocation of slots to sequences.

A model with recurrent layers (convolutions, linear attention, state spaces) has a state of constant size for
each sequence, instead of or in addition to K and V. A slot holds the state of all layers after some number of
tokens. It is immutable once written: a step reads a sequence's slot and writes others, so a forward can be
repeated, and forks, cached prefixes and sessions can share slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.batch import ZERO_STATE, Batch
from verbatim.core import CachedBlocks
from verbatim.kv.blocks import BlockPool
from verbatim.kv.flat import BlockStore


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one recurrent operation of a model for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "recurrence"  # or "convolution": the last inputs of a layer

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def update_first_rows(self, update: Update, num_rows: int, device: torch.device) -> Tensor:
        """Run an operation on rows that are each the first of a sequence, without storing states."""
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        at = StateRows(starts, torch.zeros_like(starts[1:]), starts[:0], starts[:0])
        return update(torch.zeros(1, *self.shape, dtype=self.dtype, device=device), at)


class StateRows(NamedTuple):
    """The slots that the operations of a forward read and write; for the fields see `Batch`."""

    query_starts: Tensor
    sources: Tensor
    rows: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch: Batch) -> StateRows:
        """Return the slots of a batch; without states, sequences start from zeros and write nothing."""
        sources, rows, targets = batch.state_sources, batch.state_rows, batch.state_targets
        if sources is None or rows is None or targets is None:
            sources = torch.zeros_like(batch.context_lens)
            rows = targets = sources.new_empty(0)
        return cls(batch.query_starts, sources, rows, targets)


# A recurrent operation: reads and writes the slots `[slots, *shape]` of its state, and returns its outputs.
Update = Callable[[Tensor, StateRows], Tensor]


class StateStore(BlockStore):
    """The states in all slots: one tensor `[num_slots, *shape]` for each recurrent operation.

    Slot `ZERO_STATE` is zero, the state before the first token.
    """

    def __init__(self, shapes: list[StateShape], num_slots: int, device: torch.device) -> None:
        self.shapes = shapes
        self.num_slots = num_slots
        self._device = device
        super().__init__()

    def _allocated(self) -> list[Tensor]:
        """Return new tensors, of which only the zero state is initialized."""
        tensors = []
        for s in self.shapes:
            size = (self.num_slots, *s.shape)
            tensors.append(torch.empty(size, dtype=s.dtype, device=self._device))
            tensors[-1][ZERO_STATE] = 0
        return tensors


class StateSlots:
    """Allocates slots to sequences; `CachedBlocks.states` maps numbers of tokens to the slots after them.

    Between two steps, a sequence has one slot, for its computed tokens. A step reserves slots for the states
    that it writes; slots that are not kept after the step are freed.

    Args:
        num_slots: number of slots, including the zero state; 0 for models without recurrent layers.
    """

    def __init__(self, num_slots: int) -> None:
        self.enabled = num_slots > 0
        # Without states, the pool is unused.
        self.pool = BlockPool(num_slots if self.enabled else 2, block_size=1)

    def num_free(self, count: int) -> int:
        """Return how many of `count` slots can be taken: all if the model has no recurrent layers."""
        return min(count, self.pool.num_free) if self.enabled else count

    def reserve(self, cached: CachedBlocks, positions: Iterable[int]) -> None:
        """Take a slot for the state after each of these numbers of tokens; enough slots must be free."""
        if self.enabled:
            new = [p for p in positions if p not in cached.states]
            cached.states.update(zip(new, self.pool.take(len(new)), strict=True))

    def keep_only(self, cached: CachedBlocks, position: int) -> None:
        """Free a sequence's slots, except that of the state after `position` tokens."""
        if len(cached.states) > (position in cached.states):
            self.pool.release([slot for p, slot in cached.states.items() if p != position])
            cached.states = {p: slot for p, slot in cached.states.items() if p == position}

    def fork(self, parent: CachedBlocks, child: CachedBlocks) -> None:
        """Share the state of `parent` with `child`."""
        slot = parent.states.get(parent.num_computed)
        if slot is not None:
            self.pool.share([slot])
            child.states = {parent.num_computed: slot}

    def longest_cached(self, keys: list[bytes]) -> int:
        """Return the largest number of leading keys after which a state is cached; all without states."""
        if not self.enabled:
            return len(keys)
        return next((n for n in range(len(keys), 0, -1) if self.pool.has(keys[n - 1])), 0)
