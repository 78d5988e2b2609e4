"""Who owns which block, and which blocks hold a prefix that somebody may want again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from verbatim.batch import SCRATCH_BLOCK


def root_key(salt: str | None) -> bytes:
    """The key that stands before a prompt's first block; another salt, another tree of prefixes."""
    return hashlib.blake2b(b"" if salt is None else b"salt" + salt.encode()).digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block: it stands for its ids and for every block before it."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """Hands out block numbers 1 to `num_blocks - 1`; block 0 is scratch and belongs to nobody.

    A block is *used* while anybody holds it (samples and equal prefixes hold it together), *cached*
    when nobody does and its contents are still known by their key, and *free* otherwise. Cached blocks
    are taken when no free one is left, the one unused for longest first. Whoever holds a block holds
    all those before it, and blocks are given back last first, so that is always the end of a prefix.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self.num_blocks = num_blocks
        # The last block given back is the first one taken: its memory is warm and already mapped.
        self._free = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._holders = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._by_key: dict[bytes, int] = {}  # used and cached blocks whose contents are known
        self._keys: dict[int, bytes] = {}  # the other way round

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` blocks with one holder each; the caller has looked at `num_free`."""
        assert count <= self.num_free, (count, self.num_free)
        while len(self._free) < count:
            self._discard(next(iter(self._cached)))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of some used or cached blocks."""
        for block in blocks:
            assert self._holders[block] or block in self._cached, block
            self._holders[block] += 1
            self._cached.pop(block, None)

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less for each block of a sequence, in its order."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} returned twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._discard(block)

    def is_shared(self, block: int) -> bool:
        """Does it have several holders, so that a writer needs a copy of its own?"""
        return self._holders[block] > 1

    def remember(self, block: int, key: bytes) -> int:
        """Note that a used block is full, and with what. The block to hold from now on: the one that
        held the same before, if there is one, which the caller then shares in place of its own.
        """
        known = self._by_key.get(key)
        if known is None:
            self._by_key[key], self._keys[block] = block, key
            return block
        if known != block:
            self.share([known])
            self.give_back([block])
        return known

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix; not held yet by the caller."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def forget_block(self, block: int) -> None:
        """Somebody will write to a block that it alone holds: nobody is to find it any more."""
        assert self._holders[block] == 1, block
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]

    def drop_cached(self) -> None:
        """What is cached becomes free; what is used can still be found."""
        for block in list(self._cached):
            self._discard(block)

    def forget(self) -> None:
        """Forget every key: what is cached becomes free, what is used will not be found again."""
        self.drop_cached()
        self._by_key.clear()
        self._keys.clear()

    def _discard(self, block: int) -> None:
        """Free a block that nobody holds: its contents are gone."""
        self._cached.pop(block, None)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]
        self._free.append(block)

    def check(self) -> None:
        """Assert what must always hold; for tests, at a cost that grows with the blocks."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free)
        assert not (free & cached or free & used or cached & used)
        assert free | cached | used == set(range(1, self.num_blocks))
        assert {key: block for block, key in self._keys.items()} == self._by_key
        assert cached <= set(self._keys) and not free & set(self._keys)
