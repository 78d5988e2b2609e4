"""The draft model's KV cache: its blocks and the sequences that use them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from verbatim.core import Sequence


@dataclass(slots=True)
class CacheEntry:
    """The blocks of one sequence, and the ids that they hold K and V of.

    Attributes:
        num_valid: leading positions that hold K and V of the sequence's own ids.
        draft_ids: ids of the positions behind them, of the last draft.
        states: for recurrent layers: number of tokens to the slot of the state after them.
    """

    blocks: list[int] = field(default_factory=list)
    num_valid: int = 0
    draft_ids: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)

    def update(self, sequence: Sequence) -> None:
        """Make the accepted prefix of `draft_ids` valid, and drop the rest."""
        draft_ids, self.draft_ids = self.draft_ids, []
        # Sequences only grow, so valid positions stay valid.
        new_ids = sequence.token_ids(self.num_valid, sequence.num_tokens)
        for draft_id, token_id in zip(draft_ids, new_ids, strict=False):
            if draft_id != token_id:
                break
            self.num_valid += 1

    def start(self, num_tokens: int, has_states: bool) -> int:
        """Return the first position to compute so that all of `num_tokens` are, the last one in any case."""
        last = min(self.num_valid, num_tokens - 1)
        if not has_states:
            return last
        return max((count for count in self.states if count <= last), default=0)


Held = Callable[[CacheEntry], Iterable[int]]  # numbers of blocks, or of slots


class DraftCache:
    """Allocates blocks 1 to `num_blocks - 1`, and slots of states, to the entries of sequences.

    Blocks are never freed explicitly: a block is free if no entry of a living sequence has it. So none
    leaks when a request is dropped or Ctrl-C interrupts an allocation, and the samples of a request share
    their prompt's blocks without reference counts.
    """

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_states = num_states
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Drop all entries."""
        # In order of use: the least recently used first.
        self._entries: weakref.WeakKeyDictionary[Sequence, CacheEntry] = weakref.WeakKeyDictionary()
        self._free_blocks: list[int] = []  # of the last scan

    @property
    def num_used(self) -> int:
        """Number of blocks of unfinished sequences."""
        return len(self._used(lambda entry: entry.blocks))

    def entry(self, sequence: Sequence) -> CacheEntry:
        """Return the entry of a sequence, and mark it as the most recently used."""
        entry = self._entries.pop(sequence, None) or CacheEntry()
        if not entry.blocks and not self.num_states:
            self._share_prompt(entry, sequence)
        self._entries[sequence] = entry
        return entry

    def reserve(
        self, entry: CacheEntry, least: int, wanted: int, using: Collection[Sequence] = ()
    ) -> int:
        """Allocate blocks for the first `wanted` positions, or for fewer if there are too few.

        Blocks of finished sequences are reused first, then those of sequences not in `using`, the least
        recently used first. If there are too few even for `least` positions, none are allocated.

        Returns:
            The number of positions in the blocks of the entry.
        """
        size, blocks = self.block_size, entry.blocks
        missing = -(-wanted // size) - len(blocks)
        if missing > len(self._free_blocks):
            self._free_blocks = self._free(lambda e: e.blocks, self.num_blocks, missing, using)
        if (len(blocks) + len(self._free_blocks)) * size >= least:
            for _ in range(min(missing, len(self._free_blocks))):
                blocks.append(self._free_blocks.pop())
        return len(blocks) * size

    def reserve_states(
        self, entry: CacheEntry, num_tokens: int, length: int, using: Collection[Sequence]
    ) -> int:
        """Allocate slots for the states after the first `num_tokens` tokens and after drafted ones.

        Of those of an earlier draft, the one that computation starts from is kept.

        Returns:
            The number of tokens that can be drafted, at most `length`.
        """
        if not self.num_states:
            return length
        kept = entry.start(num_tokens, True)
        entry.states = {count: slot for count, slot in entry.states.items() if count == kept}
        free = self._free(lambda e: e.states.values(), self.num_states, length, using)
        entry.states.update(zip(range(num_tokens, num_tokens + length), free, strict=False))
        return min(length, len(free))

    def _free(self, held: Held, end: int, count: int, using: Collection[Sequence]) -> list[int]:
        """Return the numbers from 1 to `end`, exclusive, that no entry holds; evict entries while there are
        fewer than `count`.
        """
        while True:
            used = self._used(held)
            free = [number for number in range(end - 1, 0, -1) if number not in used]
            idle = next((s for s in self._entries if s not in using), None)
            if len(free) >= count or idle is None:
                return free
            del self._entries[idle]

    def _used(self, held: Held) -> set[int]:
        """Return what entries of unfinished sequences hold, and drop those of finished ones."""
        for sequence in [s for s in self._entries if s.finished]:
            del self._entries[sequence]
        return {number for entry in self._entries.values() for number in held(entry)}

    def _share_prompt(self, entry: CacheEntry, sequence: Sequence) -> None:
        """Start a new entry with the full prompt blocks of another sample of the request.

        Prompt ids never change, so these blocks are not written again.
        """
        request = sequence.request
        full = len(request.prompt_ids) // self.block_size
        for sibling in request.sequences if full else ():
            other = self._entries.get(sibling)
            if other is not None and other.num_valid >= full * self.block_size:
                entry.blocks = other.blocks[:full]
                entry.num_valid = full * self.block_size
                return
