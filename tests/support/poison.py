"""NaN in blocks of KV that nobody has written since they changed hands, and in a draft model's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verbatim import LLM
from verbatim.draft.model import DraftModelProposer

FIRST_BLOCKS = 64


def poison_blocks(
    pool: Any, copier: Any, poison: Callable[[list[int]], Any], count: int, writer: Any = None
) -> None:
    """Poison the first of `count` blocks now, and from now on those that are freed or newly taken.

    A block is poisoned when it is taken, so the first `FIRST_BLOCKS` are enough for reads of blocks that
    nobody took, scratch included: all of a store would take most of the time of an opening.

    Args:
        pool: the engine's block pool.
        copier: whose `copy_blocks` each forward begins with.
        poison: fills blocks with NaN.
        writer: whose `write_blocks` fills blocks from elsewhere; None: `copier`.
    """
    writer = copier if writer is None else writer
    write = writer.write_blocks
    take, discard, copy = pool.take, pool._discard, copier.copy_blocks
    stale: set[int] = set()  # blocks that changed hands since the last forward

    def noted_take(count: int) -> list[int]:
        blocks: list[int] = take(count)
        stale.update(blocks)
        return blocks

    def noted_discard(block: int) -> None:
        stale.add(block)
        discard(block)

    def copy_then_poison(copies: list[tuple[int, int]]) -> None:
        # A forward begins with the copies, which may still read a block that was given back since.
        copy(copies)
        poison(sorted(stale - {target for _, target in copies}))
        stale.clear()

    def noted_write(blocks: list[int], contents: list[Any]) -> None:
        stale.difference_update(blocks)
        write(blocks, contents)

    poison(list(range(min(count, FIRST_BLOCKS))))
    pool.take, pool._discard, copier.copy_blocks = noted_take, noted_discard, copy_then_poison
    writer.write_blocks = noted_write


def poison_draft_model(llm: LLM) -> None:
    """Before each call, make everything read as NaN that a draft model must not read."""
    proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
    if not isinstance(proposer, DraftModelProposer):
        return
    plain, store = proposer.begin, proposer.runner.store  # type: ignore[attr-defined]
    store.poison(list(range(store.num_blocks)))

    def begin(sequences: Any, lengths: Any) -> Any:
        drafts = plain(sequences, lengths)
        size = store.block_size
        for draft in drafts:
            entry = proposer.cache.entry(draft.sequence)
            for i, block in enumerate(entry.blocks[entry.num_valid // size :]):
                rows = slice(entry.num_valid % size if i == 0 else 0, size)
                for tensor in (tensor for layer in store.layers for tensor in layer):
                    tensor[block, :, rows] = math.nan if tensor.is_floating_point() else 255
        return drafts

    proposer.begin = begin  # type: ignore[method-assign]
