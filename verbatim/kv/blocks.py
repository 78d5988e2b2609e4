"""Who owns which block."""

from __future__ import annotations

from verbatim.batch import SCRATCH_BLOCK


class BlockPool:
    """Hands out block numbers 1 to `num_blocks - 1`; block 0 is scratch and belongs to nobody."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        # The last block given back is the first one taken: its memory is warm and already mapped.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> list[int]:
        """`count` blocks; the caller has looked at `num_free`."""
        assert count <= len(self._free), (count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self._taken.remove(block)  # a KeyError here is a block returned twice
            self._free.append(block)
