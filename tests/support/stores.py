"""Sequences and KV stores for forwards without an engine."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from support.poison import poison
from support.toys import random_ids
from verbatim.batch import ZERO_STATE, Batch
from verbatim.kv.states import StateStore
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder

Span = tuple[int, int]


def poisoned_store(
    decoder: Decoder, num_blocks: int, block_size: int, num_states: int = 1
) -> KVStore:
    """Return a store filled with NaN: K, V and states."""
    spec = decoder.spec
    store = KVStore(spec.layers, num_blocks, block_size, spec.dtype, torch.device("cpu"))
    poison(store, range(num_blocks))
    if spec.states:
        store.states = StateStore(spec.states, num_states, torch.device("cpu"))
        poison(store.states, range(num_states))
    return store


class Sequences:
    """Sequences of random ids, each with its own blocks in random order and a state slot per position.

    Args:
        spare: number of blocks in the store that no sequence uses.
    """

    def __init__(self, *lengths: int, block_size: int, spare: int = 0) -> None:
        self.lengths, self.block_size = lengths, block_size
        self.whole: list[Span] = [(0, length) for length in lengths]
        self.ids = [random_ids(length, seed=length) for length in lengths]
        self._width = -(-max(lengths) // block_size)
        taken = len(lengths) * self._width
        order = torch.randperm(taken, generator=torch.Generator().manual_seed(3)) + 1
        self.tables: list[list[int]] = order.view(len(lengths), -1).tolist()
        self.spare = list(range(taken + 1, taken + 1 + spare))

    def store(self, decoder: Decoder) -> KVStore:
        """Return a poisoned store for all sequences."""
        num_blocks = 1 + len(self.tables) * self._width + len(self.spare)
        return poisoned_store(decoder, num_blocks, self.block_size, self._slot(len(self.ids), 1))

    def _slot(self, which: int, position: int) -> int:
        """Return the slot of a sequence's state after `position` tokens."""
        return which * max(self.lengths) + position if position else ZERO_STATE

    def batch(
        self, which: list[int], spans: list[Span], *, last_only: bool = False, **fields: Any
    ) -> Batch:
        """Return a batch of positions `spans[i]` of sequence `which[i]`; logits of all or of each last."""
        chosen = [(s, *span) for s, span in zip(which, spans, strict=True)]
        ends = list(accumulate(end - begin for _, begin, end in chosen))
        last = [end - 1 for end in ends]
        return Batch.of(
            [(self.ids[s][begin:end], begin, self.tables[s]) for s, begin, end in chosen],
            last if last_only else range(ends[-1]),
            states=(
                [self._slot(s, begin) for s, begin, _ in chosen],
                last,
                [self._slot(s, end) for s, _, end in chosen],
            ),
            **fields,
        )
