"""Prompts that begin alike: what is computed once is found again, and what is being computed awaited."""

from __future__ import annotations

from verbatim.core import Sequence
from verbatim.kv.blocks import BlockPool, chain_key, root_key


class Prefixes:
    """Finds the blocks in which a sequence's first tokens are computed already.

    Only full blocks are shared this way, and at least one row of a sequence is always computed, since
    the next token is drawn from it. Sequences whose routing is forced keep to themselves: their K and V
    are not what their ids alone would give. So do those of a session that goes on from K and V of a time
    of which everything else was forgotten.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_hits = 0  # tokens found since it was opened
        self._promised: dict[bytes, Sequence] = {}  # blocks that somebody's prefill will fill
        self._promises: dict[Sequence, list[bytes]] = {}

    def attach(self, sequence: Sequence) -> None:
        """Hold the longest known prefix of a sequence that holds nothing yet."""
        if not self._takes_part(sequence):
            return
        blocks = self.pool.find(self._wanted(sequence))
        self.pool.share(blocks)
        sequence.blocks = blocks
        sequence.num_computed = len(blocks) * self.block_size
        sequence.num_indexed = len(blocks)

    def in_flight(self, sequence: Sequence) -> bytes | None:
        """The key of the last block of its prefix that somebody else is about to compute."""
        if not self._promised or not self._takes_part(sequence):
            return None
        keys = self._wanted(sequence)
        awaited = None
        for key in keys[len(self.pool.find(keys)) :]:
            if key not in self._promised:
                break
            awaited = key
        return awaited

    def promise(self, sequence: Sequence) -> None:
        """It begins to run: the blocks of its prefill will be there."""
        if self._takes_part(sequence):
            todo = self._keys(sequence)[len(sequence.blocks) :]
            mine = [key for key in todo if key not in self._promised]
            self._promised.update((key, sequence) for key in mine)
            if mine:
                self._promises[sequence] = mine

    def computed(self, sequence: Sequence) -> list[bytes]:
        """Remember the blocks that are full by now; the promised keys that are kept thereby."""
        if not self._takes_part(sequence):
            return []
        full = sequence.num_computed // self.block_size
        first = sequence.num_indexed
        if full == first:
            return []
        keys = self._keys(sequence)
        for i in range(first, full):
            block = self.pool.remember(sequence.blocks[i], keys[i])
            if block != sequence.blocks[i]:  # somebody else's, who perhaps was not drafted for
                sequence.blocks[i] = block
                sequence.truncate_draft_cache(i * self.block_size)
        sequence.num_indexed = full
        return self._drop(sequence, set(keys[first:full]))

    def withdraw(self, sequence: Sequence) -> list[bytes]:
        """It has lost its blocks; the keys that it had promised and not computed."""
        sequence.num_indexed = 0
        return self._drop(sequence, None)

    def _drop(self, sequence: Sequence, kept: set[bytes] | None) -> list[bytes]:
        mine = self._promises.pop(sequence, [])
        dropped = [key for key in mine if kept is None or key in kept]
        left = [] if kept is None else [key for key in mine if key not in kept]
        for key in dropped:
            del self._promised[key]
        if left:
            self._promises[sequence] = left
        return dropped

    def _takes_part(self, sequence: Sequence) -> bool:
        request = sequence.request
        is_private = request.session_cache is not None and request.session_cache.is_private
        return self.enabled and request.params.replay_routing is None and not is_private

    def _wanted(self, sequence: Sequence) -> list[bytes]:
        """The keys of the blocks that may be found instead of computed."""
        limit, unread = sequence.num_tokens - 1, sequence.next_prompt_row
        if unread is not None:
            limit = min(limit, unread)
        return self._keys(sequence)[: limit // self.block_size]

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """The keys of all blocks that the sequence's tokens fill."""
        size, keys = self.block_size, sequence.keys
        for i in range(len(keys), sequence.num_tokens // size):
            parent = keys[-1] if keys else root_key(sequence.request.params.cache_salt)
            keys.append(chain_key(parent, sequence.token_ids(i * size, (i + 1) * size)))
        return keys
