"""`Prefixes`: sharing of cached blocks between sequences, including blocks still being computed."""

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

    Only full blocks are shared, and at least one row of a sequence is always computed, for its next token.
    Sequences with replayed choices are excluded, as their K and V depend on more than the token ids; so are
    private sessions, as their K and V may date from before the cache was cleared.

    Attributes:
        folder: prefixes in files, from earlier runs or evicted; None: memory only. Prefixes of adapters are
            not written, as the adapters' numbers may change between runs.
    """

    folder: PrefixFolder | None = None

    def __init__(self, pool: BlockPool, states: StateSlots, *, enabled: bool) -> None:
        self.pool = pool
        self.states = states
        self.block_size = pool.block_size
        self.enabled = enabled
        self.num_hits = 0  # cached tokens found since the engine was opened
        self._in_flight: dict[bytes, Sequence] = {}  # by key of a block that a prefill will fill

    def attach(self, sequence: Sequence, *, load: bool = False) -> None:
        """Attach the longest cached prefix to a sequence without blocks.

        With `load`, also read blocks from files, if there is room for the whole sequence.
        """
        if not self._is_shareable(sequence):
            return
        keys = self._reusable_keys(sequence)
        cached = self.pool.find(keys)
        if load and self.folder is not None and not sequence.request.adapter:
            self._load(self.folder, sequence, keys, cached)
            cached = self.pool.find(keys)
        blocks = cached[: self.states.longest_cached(keys[: len(cached)])]
        self._queue(sequence, "blocks", keys[: len(blocks)], 0)
        self.pool.share(blocks)
        sequence.blocks = blocks
        sequence.num_computed = len(blocks) * self.block_size
        sequence.num_indexed = len(blocks)
        if blocks and self.states.enabled:
            key = keys[len(blocks) - 1]
            self._queue(sequence, "states", [key], len(blocks))
            slots = self.states.pool.find([key])
            self.states.pool.share(slots)
            sequence.states = {sequence.num_computed: slots[0]}

    def _load(
        self, folder: PrefixFolder, sequence: Sequence, keys: list[bytes], in_memory: list[int]
    ) -> None:
        """Load the blocks of a prefix that are in files and follow the blocks `in_memory`."""
        self.pool.share(in_memory)  # protects them from eviction
        try:
            needed = self.pool.blocks_for(sequence.num_tokens) - len(in_memory)
            if self.pool.num_free >= needed and self.states.num_free(3) == 3:
                usable = len(in_memory) + folder.count_leading(keys[len(in_memory) :])
                cached = self.states.pool.has
                while self.states.enabled and usable and not cached(keys[usable - 1]):
                    if folder.has("states", keys[usable - 1]):
                        break
                    usable -= 1
                count = len(in_memory) + folder.load("blocks", keys[len(in_memory) : usable])
                if self.states.enabled and count >= usable > 0 and not cached(keys[usable - 1]):
                    folder.load("states", keys[usable - 1 : usable])
        finally:
            self.pool.release(in_memory)

    def _queue(self, sequence: Sequence, kind: str, keys: list[bytes], first: int) -> None:
        """Queue cache entries for writing, if there is a folder."""
        if self.folder is not None and keys and not sequence.request.adapter:
            self.folder.queue(kind, keys, first)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether another sequence will compute the next block, or a state, of its prefix."""
        if not self._in_flight or not self._is_shareable(sequence):
            return False
        keys = self._reusable_keys(sequence)
        missing = keys[len(self.pool.find(keys)) :]
        return any(key in self._in_flight for key in missing[: None if self.states.enabled else 1])

    def register(self, sequence: Sequence) -> None:
        """Register the blocks of a starting prefill as in flight."""
        if self._is_shareable(sequence):
            uncomputed = block_keys(sequence, self.block_size)[len(sequence.blocks) :]
            if self.states.enabled:  # other sequences can only continue from a cached state
                uncomputed = self._reusable_keys(sequence)[len(sequence.blocks) :][-1:]
            for key in uncomputed:
                self._in_flight.setdefault(key, sequence)

    def index_blocks(self, sequence: Sequence) -> None:
        """Index newly full blocks."""
        full = sequence.num_computed // self.block_size
        first = sequence.num_indexed
        if full == first or not self._is_shareable(sequence):
            return
        keys = block_keys(sequence, self.block_size)
        for i in range(first, full):
            block = self.pool.remember(sequence.blocks[i], keys[i])
            if block != sequence.blocks[i]:  # another sequence's block, which may lack draft cache
                sequence.blocks[i] = block
                sequence.truncate_draft_cache(i * self.block_size)
        sequence.num_indexed = full
        self._queue(sequence, "blocks", keys[first:full], first)
        self._snapshot(sequence, first, full)
        self._drop(sequence, keys[first:full])

    def unregister(self, sequence: Sequence) -> None:
        """Unregister a sequence that lost its blocks."""
        sequence.num_indexed = 0
        if sequence.snapshot is not None and self.states.pool.has(sequence.snapshot):
            self._queue(sequence, "states", [sequence.snapshot], len(sequence.keys))
        self._drop(sequence, sequence.keys)

    def snapshots(self, sequence: Sequence, end: int) -> list[int]:
        """Return the numbers of tokens after which the state is cached, in a prefill up to `end`.

        They are the ends of the prompt's last full block and of its longest cached prefix.
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

        Only the last state within the completion is kept, for the next turn of a conversation.
        """
        for position in sorted(sequence.states):
            blocks, offset = divmod(position, self.block_size)
            if offset or not first < blocks <= full:
                continue
            key, slots = sequence.keys[blocks - 1], sequence.states
            slots[position] = self.states.pool.remember(slots[position], key)
            if position >= sequence.request.num_input_tokens:
                if sequence.snapshot is not None:
                    self.states.pool.drop(sequence.snapshot)
                sequence.snapshot = key  # the last snapshot is written to a file
            else:
                self._queue(sequence, "states", [key], blocks)

    def forget(self) -> None:
        """Clear the cache; running sequences keep what they use."""
        self.pool.forget()
        self.states.pool.forget()

    def _drop(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Unregister the keys that the sequence has in flight."""
        for key in keys if self._in_flight else ():
            if self._in_flight.get(key) is sequence:
                del self._in_flight[key]

    def _is_shareable(self, sequence: Sequence) -> bool:
        request = sequence.request
        is_private = request.session_cache is not None and request.session_cache.is_private
        params = request.params
        # Cached blocks don't record the keys chosen for their rows.
        is_private |= params.forces_choices or params.record_indices
        return self.enabled and not is_private

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the blocks that can be reused instead of computed."""
        limit, unread = sequence.num_needed - 1, sequence.next_prompt_row
        if unread is not None:
            limit = min(limit, unread)
        return block_keys(sequence, self.block_size)[: limit // self.block_size]
