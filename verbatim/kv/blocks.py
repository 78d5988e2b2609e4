"""Allocation of KV blocks, and the prefix cache."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from verbatim.batch import SCRATCH_BLOCK
from verbatim.core import CachedBlocks


def root_key(salt: str | None, adapter: int = 0) -> bytes:
    """Return the parent key of a first block, which separates prefix caches by salt and adapter."""
    root = hashlib.blake2b(b"" if salt is None else b"salt" + salt.encode()).digest()
    return root if not adapter else hashlib.blake2b(root + b"adapter %d" % adapter).digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block, a hash of its token ids and its parent's key."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """Allocates block numbers 1 to `num_blocks - 1`; block 0 is scratch. Also used for slots of states.

    A block is *used* while its reference count is above 0 (samples and equal prefixes share blocks), *cached*
    if its count is 0 but its contents are indexed by key, and *free* otherwise. When no block is free, cached
    ones are evicted, least recently used first. A sequence references all of its blocks and releases the last
    one first, so eviction shortens prefixes from their end.

    Args:
        block_size: positions per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack, as the memory of the last released block is warm and already mapped.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._ref_counts = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, int] = {}  # indexed blocks, used and cached
        self._keys: dict[int, bytes] = {}  # the inverse of `_by_key`

    @property
    def num_free(self) -> int:
        """Number of free and cached blocks, all of which can be taken."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of a sequence with `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def resize(self, cached: CachedBlocks, num_tokens: int) -> None:
        """Take or release blocks, so that a sequence has those of its first `num_tokens` positions."""
        count = self.blocks_for(num_tokens)
        self.release(cached.blocks[count:])
        del cached.blocks[count:]
        cached.blocks += self.take(count - len(cached.blocks))

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks, at most `num_free`, each with a reference count of 1."""
        assert count <= self.num_free, (count, self.num_free)
        while len(self._free) < count:
            self._discard(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Increment the reference counts of used or cached blocks."""
        for block in blocks:
            assert self._ref_counts[block] or block in self._cached, block
            self._ref_counts[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference counts of a sequence's blocks, given in sequence order."""
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} returned twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._discard(block)

    def is_shared(self, block: int) -> bool:
        """Return whether a writer must copy the block first (copy-on-write)."""
        return self._ref_counts[block] > 1

    def remember(self, block: int, key: bytes) -> int:
        """Index a full, used block by its key, and return the block to use from now on.

        If another block has the same contents, that one is shared, and the caller's is released.
        """
        indexed = self._by_key.get(key)
        if indexed is None:
            self._by_key[key], self._keys[block] = block, key
            return block
        if indexed != block:
            self.share([indexed])
            self.release([block])
        return indexed

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, without taking references."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def has(self, key: bytes) -> bool:
        """Return whether a block is indexed by this key."""
        return key in self._by_key

    def drop(self, key: bytes) -> None:
        """Free the block with this key if it is cached and unused."""
        block = self._by_key.get(key)
        if block is not None and block in self._cached:
            self._discard(block)

    def forget_block(self, block: int) -> None:
        """Remove a used block from the index, before its only user writes to it."""
        assert self._ref_counts[block] == 1, block
        self._by_key.pop(self._keys.pop(block, b""), None)

    def forget(self) -> None:
        """Clear the index: cached blocks become free, and used ones can't be found any more."""
        for block in list(self._cached):
            self._discard(block)
        self._by_key.clear()
        self._keys.clear()

    def _discard(self, block: int) -> None:
        """Free an unused block and its index entry."""
        self._cached.pop(block, None)
        self._by_key.pop(self._keys.pop(block, b""), None)
        self._free.append(block)
