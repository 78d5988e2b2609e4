"""Prefix sharing: reuse of cached blocks, and waiting for prefixes in flight."""

from __future__ import annotations

from verbatim.core import Sequence
from verbatim.kv.blocks import BlockPool, chain_key, root_key
from verbatim.kv.prefix_folder import PrefixFolder
from verbatim.kv.states import StateSlots


def block_keys(sequence: Sequence, size: int) -> list[bytes]:
    """Return the keys of all full blocks of a sequence, of `size` tokens each."""
    request, keys = sequence.request, sequence.keys
    for i in range(len(keys), sequence.num_tokens // size):
        parent = keys[-1] if keys else root_key(request.params.cache_salt, request.adapter)
        keys.append(chain_key(parent, sequence.token_ids(i * size, (i + 1) * size)))
    return keys


class Prefixes:
    """Shares the blocks of common prefixes between sequences.

    Only full blocks are shared, and at least one row of a sequence is always computed, for its next
    token. Excluded are sequences with replayed choices, as their K and V depend on more than the ids, and
    those of private sessions, with K and V from before the cache was cleared.

    Attributes:
        folder: prefixes in files, from earlier runs or evicted; None: memory only. Prefixes of adapters are
            in memory only, as their numbers differ in another run.
    """

    folder: PrefixFolder | None = None

    def __init__(
        self, pool: BlockPool, states: StateSlots, block_size: int, *, enabled: bool
    ) -> None:
        self.pool = pool
        self.states = states
        self.block_size = block_size
        self.enabled = enabled
        self.num_hits = 0  # cached tokens found since it was opened
        self._in_flight: dict[bytes, Sequence] = {}  # by key of a block that a prefill will fill

    def attach(self, sequence: Sequence, *, load: bool = False) -> None:
        """Attach the longest cached prefix to a sequence without blocks.

        Args:
            load: also read blocks from files, if there is room for the whole sequence.
        """
        if not self._is_shareable(sequence):
            return
        keys = self._reusable_keys(sequence)
        found = self.pool.find(keys)
        if load and self.folder is not None and not sequence.request.adapter:
            self._load(self.folder, sequence, keys, found)
            found = self.pool.find(keys)
        blocks = found[: self.states.longest(keys[: len(found)])]
        self._note(sequence, "blocks", keys[: len(blocks)], 0)
        if blocks and self.states.enabled:
            self._note(sequence, "states", keys[len(blocks) - 1 : len(blocks)], len(blocks))
        self.pool.share(blocks)
        self.states.attach(sequence, len(blocks) * self.block_size, keys[: len(blocks)])
        sequence.blocks = blocks
        sequence.num_computed = len(blocks) * self.block_size
        sequence.num_indexed = len(blocks)

    def _load(
        self, folder: PrefixFolder, sequence: Sequence, keys: list[bytes], found: list[int]
    ) -> None:
        """Cache the blocks of a prefix that are in files, after the blocks `found` in memory."""
        self.pool.share(found)  # so that they are not evicted
        needed = -(-sequence.num_tokens // self.block_size) - len(found)
        if self.pool.num_free >= needed and self.states.num_free(3) == 3:
            usable = len(found) + folder.leading(keys[len(found) :])
            cached = self.states.pool.has
            while self.states.enabled and usable and not cached(keys[usable - 1]):
                if folder.has("states", keys[usable - 1]):
                    break
                usable -= 1
            count = len(found) + folder.load("blocks", keys[len(found) : usable])
            if self.states.enabled and count >= usable > 0 and not cached(keys[usable - 1]):
                folder.load("states", keys[usable - 1 : usable])
        self.pool.give_back(found)

    def _note(self, sequence: Sequence, kind: str, keys: list[bytes], first: int) -> None:
        """Queue cache entries to be written to files, if there is a folder."""
        if self.folder is not None and keys and not sequence.request.adapter:
            self.folder.note(kind, keys, first)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether another sequence will compute the next block of its prefix, or a state in it."""
        if not self._in_flight or not self._is_shareable(sequence):
            return False
        keys = self._reusable_keys(sequence)
        missing = keys[len(self.pool.find(keys)) :]
        return any(key in self._in_flight for key in missing[: None if self.states.enabled else 1])

    def promise(self, sequence: Sequence) -> None:
        """Register the blocks of a starting prefill as in flight."""
        if self._is_shareable(sequence):
            uncomputed = block_keys(sequence, self.block_size)[len(sequence.blocks) :]
            if self.states.enabled:  # other sequences can continue only where a state is cached
                uncomputed = self._reusable_keys(sequence)[len(sequence.blocks) :][-1:]
            for key in uncomputed:
                self._in_flight.setdefault(key, sequence)

    def computed(self, sequence: Sequence) -> None:
        """Index newly full blocks."""
        full = sequence.num_computed // self.block_size
        first = sequence.num_indexed
        if full == first or not self._is_shareable(sequence):
            return
        keys = block_keys(sequence, self.block_size)
        for i in range(first, full):
            block = self.pool.remember(sequence.blocks[i], keys[i])
            if block != sequence.blocks[i]:  # another sequence's, which may lack draft cache
                sequence.blocks[i] = block
                sequence.truncate_draft_cache(i * self.block_size)
        sequence.num_indexed = full
        self._note(sequence, "blocks", keys[first:full], first)
        self._snapshot(sequence, first, full)
        self._drop(sequence, keys[first:full])

    def withdraw(self, sequence: Sequence) -> None:
        """Unregister a sequence that lost its blocks."""
        sequence.num_indexed = 0
        if sequence.snapshot is not None and self.states.pool.has(sequence.snapshot):
            self._note(sequence, "states", [sequence.snapshot], len(sequence.keys))
        self._drop(sequence, sequence.keys)

    def snapshots(self, sequence: Sequence, end: int) -> list[int]:
        """Return the numbers of tokens after which to cache the state, in a prefill up to `end`.

        They are the last full block of the prompt, and the block where it departs from a cached prompt.
        """
        if not self.states.enabled or not self._is_shareable(sequence):
            return []
        size, start = self.block_size, sequence.num_computed
        keys = self._reusable_keys(sequence)[: end // size]
        known = start // size + len(self.pool.find(keys[start // size :]))
        ends = {known, (sequence.num_tokens - 1) // size}
        return sorted(n * size for n in ends if start < n * size <= end)

    def _snapshot(self, sequence: Sequence, first: int, full: int) -> None:
        """Cache the states that were written at the ends of blocks `first` to `full`.

        Of the states in the completion only the latest is kept, for the next turn of a conversation.
        """
        for position in sorted(sequence.states):
            blocks, offset = divmod(position, self.block_size)
            if offset or not first < blocks <= full:
                continue
            key = sequence.keys[blocks - 1]
            self.states.remember(sequence, position, key)
            if position >= sequence.request.num_input_tokens:
                if sequence.snapshot is not None:
                    self.states.pool.drop(sequence.snapshot)
                sequence.snapshot = key  # the last snapshot is written to a file
            else:
                self._note(sequence, "states", [key], blocks)

    def forget(self) -> None:
        """Clear the cache; running sequences keep what they use."""
        self.pool.forget()
        self.states.pool.forget()

    def _drop(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Unregister those of the keys that the sequence was to compute."""
        for key in keys if self._in_flight else ():
            if self._in_flight.get(key) is sequence:
                del self._in_flight[key]

    def _is_shareable(self, sequence: Sequence) -> bool:
        request = sequence.request
        is_private = request.session_cache is not None and request.session_cache.is_private
        params = request.params
        # Blocks of other requests have no record of keys.
        is_private |= params.forces_choices or params.record_indices
        return self.enabled and not is_private

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the blocks that may be reused instead of computed."""
        limit, unread = sequence.num_needed - 1, sequence.next_prompt_row
        if unread is not None:
            limit = min(limit, unread)
        return block_keys(sequence, self.block_size)[: limit // self.block_size]
