"""A random life of a KV store over tiers beside a plain one: both attend to the same bits."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch, block_tables
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.blocks import BlockPool
from verbatim.kv.store import KVStore, LayerShape
from verbatim.placement.offload.cut import cut
from verbatim.placement.offload.kv import TieredKVStore

HEADS = 4
SHAPES = [LayerShape(2, 8, 8), LayerShape(2, 8, 8), LayerShape(1, 12, 6), LayerShape(4, 8, 8)] * 2
OPTIONS = [
    AttentionOptions(scale=0.3),
    AttentionOptions(scale=0.3, window=5),
    AttentionOptions(scale=0.2, softcap=2.0),
    AttentionOptions(scale=0.2, alibi=torch.tensor([0.1, 0.2, 0.3, 0.4])),
] * 2
GROUPS = [[0], [1, 2], [3], [4], [5], [6, 7]]
_OURS = ("kv", "kv_disk", "prefetch", "scratch", "stream")


class BrokenOff(Exception):
    """Something in the middle of a forward."""


@dataclass(eq=False)
class Row:
    """A sequence."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Life:
    """Sequences that grow, fork and end, over two stores.

    Args:
        tiered, plain: of `SHAPES`, with the same blocks.
    """

    def __init__(self, tiered: TieredKVStore, plain: KVStore, seed: int) -> None:
        self.tiered, self.plain = tiered, plain
        self.random = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.pool = BlockPool(plain.num_blocks)
        self.rows: list[Row] = []
        self.copies: list[tuple[int, int]] = []
        self.stale: set[int] = set()
        self.forwards = self.compared = self.pieces = 0
        for store in (tiered, plain):
            store.poison(list(range(plain.num_blocks)))

    def step(self, *, strange: bool = False, breaks: int | None = None) -> bool:
        """One forward of some sequences; False where it broke off, and what it did is not relied on.

        Args:
            strange: the layers come in another order than the store was told.
            breaks: it is interrupted at so manieth line of the store's code.
        """
        self._come_and_go()
        batch, grown = self._batch()
        parts = cut(batch, self.random.choice([1, 2, 3, 8]), self.random.choice([2, 3, 5, 64]))
        self.pieces += len(parts)
        groups = self.random.sample(GROUPS, len(GROUPS)) if strange else GROUPS
        copies, self.copies = self.copies, []
        self.plain.copy_blocks(copies)
        self.plain.poison(sorted(self.stale - {b for _, b in copies}))
        failed = False
        try:
            with _interrupted_at(breaks):
                self.tiered.copy_blocks(copies)
        except KeyboardInterrupt:  # the copies are made again
            failed = True
            self.tiered.copy_blocks(copies)
        self.tiered.poison(sorted(self.stale - {b for _, b in copies}))
        self.stale.clear()
        try:
            with _interrupted_at(None if failed else breaks):
                self._forward(parts, groups)
        except (KeyboardInterrupt, BrokenOff):
            return False
        self.forwards += 1
        for row, count in grown:
            row.computed += count
        return True

    def _forward(self, parts: list[Batch], groups: list[list[int]]) -> None:
        stop = self.random.randrange(200)  # most are not that long
        with self.tiered.stores_for(parts) as stores, self.plain.stores_for(parts) as plains:
            for group in groups:
                for part, own, plain in zip(parts, stores, plains, strict=True):
                    for layer in group:
                        stop -= 1
                        if stop == 0:
                            raise BrokenOff
                        self._visit(layer, part, own, plain)

    def _visit(self, layer: int, part: Batch, own: KVStore, plain: KVStore) -> None:
        shape, slots = SHAPES[layer], part.slots(own.block_size)
        k, v = (
            self._numbers(len(slots), shape.kv_heads, d) for d in (shape.key_dim, shape.value_dim)
        )
        q = self._numbers(len(slots), HEADS, shape.key_dim)
        found: list[Tensor] = []
        for store in (plain, own):
            store.write(layer, k, v, slots)
            found.append(store.attend(layer, q, part.attention, OPTIONS[layer]))
        assert torch.equal(*found) and found[0].isfinite().all(), (layer, self.forwards)
        self.compared += 1

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers)

    def _come_and_go(self) -> None:
        for row in self.random.sample(self.rows, len(self.rows) // 3):
            self.rows.remove(row)
            self.pool.give_back(row.blocks)
            self.stale.update(b for b in row.blocks if not self.pool._ref_counts[b])
        while len(self.rows) < 4:
            self.rows.append(Row())
        whole = [row for row in self.rows if row.computed]
        if whole and self.pool.num_free > 8 and self.random.random() < 0.5:
            self._fork(self.random.choice(whole))

    def _fork(self, parent: Row) -> None:
        size = self.plain.block_size
        full = parent.computed // size
        child = Row(parent.blocks[:full], parent.computed)
        self.pool.share(child.blocks)
        if parent.computed % size:
            child.blocks += self.pool.take(1)
            self.stale.add(child.blocks[-1])
            self.copies.append((parent.blocks[full], child.blocks[-1]))
        self.rows.append(child)

    def _batch(self) -> tuple[Batch, list[tuple[Row, int]]]:
        size, grown = self.plain.block_size, []
        for row in self.random.sample(self.rows, self.random.randint(1, len(self.rows))):
            count = self.random.choice([1, 1, 2, 7, 17])
            count = min(count, 40 - row.computed)
            missing = -(-(row.computed + count) // size) - len(row.blocks)
            if count < 1 or missing > self.pool.num_free:
                continue
            taken = self.pool.take(max(0, missing))
            row.blocks += taken
            self.stale.update(taken)
            grown.append((row, count))
        if not grown:
            self.rows.clear()
            self.pool = BlockPool(self.plain.num_blocks)
            self.copies.clear()
            self.rows.append(Row(self.pool.take(1)))
            grown = [(self.rows[0], 1)]
        counts = torch.tensor([0] + [count for _, count in grown])
        positions = [torch.arange(r.computed, r.computed + count) for r, count in grown]
        total = int(counts.sum())
        return (
            Batch(
                token_ids=torch.zeros(total, dtype=torch.int64),
                positions=torch.cat(positions),
                query_starts=counts.cumsum(0).int(),
                context_lens=torch.tensor([r.computed + c for r, c in grown], dtype=torch.int32),
                block_tables=block_tables([r.blocks for r, _ in grown]),
                logit_rows=torch.arange(total),
            ),
            grown,
        )


@contextmanager
def _interrupted_at(line: int | None) -> Iterator[None]:
    """Ctrl-C at so manieth line of the store's own code on this thread; None never."""
    if line is None:
        yield
        return
    left, before = line, sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if "offload" not in name or name.rpartition("/")[2].removesuffix(".py") not in _OURS:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(before)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
