"""What a drafter keeps of sequences, in blocks of its own."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

from verbatim.batch import SCRATCH_BLOCK
from verbatim.core import Sequence


@dataclass(slots=True)
class Held:
    """One sequence's blocks, and how far they hold K and V of it.

    Attributes:
        num_known: leading positions that hold K and V of the sequence's own ids.
        guessed: the ids behind them whose K and V are there as well, whether they came true or not.
    """

    blocks: list[int] = field(default_factory=list)
    num_known: int = 0
    guessed: list[int] = field(default_factory=list)

    def catch_up(self, sequence: Sequence) -> None:
        """What was guessed is known as far as it came true; the rest is forgotten."""
        guessed, self.guessed = self.guessed, []
        # A sequence only ever grows, so what was known is known.
        came = sequence.token_ids(self.num_known, sequence.num_tokens)
        for guess, token_id in zip(guessed, came, strict=False):
            if guess != token_id:
                break
            self.num_known += 1


class Holdings:
    """Blocks 1 to `num_blocks - 1`, each held by the sequences in whose `Held` it stands.

    Nothing is ever given back: a block that no living sequence holds is free. So none is lost where a
    request is dropped, or Ctrl-C breaks in between two lines, and samples share their prompt's blocks
    without counting.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.forget()

    def forget(self) -> None:
        """Let go of everything."""
        self._held: weakref.WeakKeyDictionary[Sequence, Held] = weakref.WeakKeyDictionary()
        self._free: list[int] = []  # of those that are free, as far as they were looked for

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold which have not ended."""
        return len(self._used())

    def of(self, sequence: Sequence) -> Held:
        """What is held of a sequence, which was used last from now on."""
        held = self._held.pop(sequence, None) or Held()
        if not held.blocks:
            self._share_prompt(held, sequence)
        self._held[sequence] = held  # at the end: the order tells who was not used for longest
        return held

    def reserve(self, held: Held, least: int, wanted: int, using: Collection[Sequence] = ()) -> int:
        """Take blocks for the first `wanted` positions or, where there are too few, for fewer.

        Sequences that have ended, and then those not in `using`, lose theirs; the one that was not used for
        longest is first. Where there are too few even for `least` positions, none are taken.

        Returns:
            Positions that there are blocks for.
        """
        size, blocks = self.block_size, held.blocks
        missing = -(-wanted // size) - len(blocks)
        if missing > len(self._free):
            self._find_free(missing, using)
        if (len(blocks) + len(self._free)) * size >= least:
            for _ in range(min(missing, len(self._free))):
                blocks.append(self._free.pop())
        return len(blocks) * size

    def _find_free(self, count: int, using: Collection[Sequence]) -> None:
        """Look for free blocks, and make some where there are fewer than `count`."""
        while True:
            used = self._used()
            self._free = [b for b in range(self.num_blocks - 1, SCRATCH_BLOCK, -1) if b not in used]
            idle = next((s for s in self._held if s not in using), None)
            if len(self._free) >= count or idle is None:
                return
            del self._held[idle]

    def _used(self) -> set[int]:
        used: set[int] = set()
        for sequence, held in list(self._held.items()):
            if not sequence.finished:
                used.update(held.blocks)
            else:
                del self._held[sequence]
        return used

    def _share_prompt(self, held: Held, sequence: Sequence) -> None:
        """Begin with the full blocks of the prompt that another sample of the request has computed.

        Ids of a prompt never change, so nobody will write to them again.
        """
        request = sequence.request
        full = len(request.prompt_ids) // self.block_size
        for sibling in request.sequences if full else ():
            known = self._held.get(sibling)
            if known is not None and known.num_known >= full * self.block_size:
                held.blocks = known.blocks[:full]
                held.num_known = full * self.block_size
                return
