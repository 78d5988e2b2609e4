"""NaN in KV blocks that were not written since they were taken or freed, also in those of draft models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from verbatim import LLM
from verbatim.batch import ZERO_STATE
from verbatim.draft.model import DraftModelProposer
from verbatim.kv.flat import BlockStore
from verbatim.kv.states import StateStore
from verbatim.placement.offload.kv import TieredKVStore

FIRST_BLOCKS = 64
_AT_ONCE = 256  # blocks


def poison(store: BlockStore, blocks: Iterable[int]) -> None:
    """Fill blocks with NaN, so that reads of unwritten positions show."""
    numbers = [b for b in blocks if b != ZERO_STATE or not isinstance(store, StateStore)]
    if isinstance(store, TieredKVStore):
        store.ring.reserve(0).fill_(0xFF)
    likes = store.read_blocks([])
    for first in range(0, len(numbers), _AT_ONCE):
        some = numbers[first : first + _AT_ONCE]
        # In byte tensors, 0xFF makes every bf16 scale a NaN.
        fills = [torch.nan if like.is_floating_point() else 0xFF for like in likes]
        shapes = [(len(some), *like.shape[1:]) for like in likes]
        pairs = zip(likes, shapes, fills, strict=True)
        store.write_blocks(some, [like.new_full(shape, fill) for like, shape, fill in pairs])


def poison_blocks(
    pool: Any, copier: Any, spoil: Callable[[list[int]], Any], count: int, writer: Any = None
) -> None:
    """Poison the first of `count` blocks now, and from now on those that are freed or newly taken.

    Blocks are poisoned when they are taken. For reads of blocks that were never taken, scratch included, the
    first `FIRST_BLOCKS` are enough: poisoning a whole store would take most of the time of an opening.

    Args:
        pool: the engine's block pool.
        copier: the object with the `copy_blocks` that each forward begins with.
        spoil: a function that fills blocks with NaN.
        writer: the object with the `write_blocks` that fills blocks from elsewhere; None: `copier`.
    """
    writer = copier if writer is None else writer
    write = writer.write_blocks
    take, discard, copy = pool.take, pool._discard, copier.copy_blocks
    stale: set[int] = set()  # blocks taken or freed since the last forward

    def noted_take(count: int) -> list[int]:
        blocks: list[int] = take(count)
        stale.update(blocks)
        return blocks

    def noted_discard(block: int) -> None:
        stale.add(block)
        discard(block)

    def copy_then_poison(copies: list[tuple[int, int]]) -> None:
        # A forward begins with copies, which may still read blocks that were freed since.
        copy(copies)
        spoil(sorted(stale - {target for _, target in copies}))
        stale.clear()

    def noted_write(blocks: list[int], contents: list[Any]) -> None:
        stale.difference_update(blocks)
        write(blocks, contents)

    spoil(list(range(min(count, FIRST_BLOCKS))))
    pool.take, pool._discard, copier.copy_blocks = noted_take, noted_discard, copy_then_poison
    writer.write_blocks = noted_write


def poison_draft_model(llm: LLM) -> None:
    """In each call, fill with NaN everything that a draft model must not read."""
    proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
    if not isinstance(proposer, DraftModelProposer):
        return
    plain, store = proposer.begin, proposer.runner.store  # type: ignore[attr-defined]
    poison(store, range(store.num_blocks))

    def begin(sequences: Any, lengths: Any) -> Any:
        drafts = plain(sequences, lengths)
        size = store.block_size
        for draft in drafts:
            start = draft.cached.num_computed
            for i, block in enumerate(draft.cached.blocks[start // size :]):
                rows = slice(start % size if i == 0 else 0, size)
                for tensor in store.tensors:
                    tensor[block, :, rows] = math.nan if tensor.is_floating_point() else 255
        return drafts

    proposer.begin = begin  # type: ignore[method-assign]
