"""NaN in blocks of KV that nobody has written since they changed hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
