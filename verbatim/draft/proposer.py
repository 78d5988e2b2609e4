"""The one method that all proposers have."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol, runtime_checkable

from verbatim.core import Sequence


@runtime_checkable
class Proposer(Protocol):
    """Guesses how sequences go on.

    Whatever it answers, the words stay the same: the model draws every token itself, with its own logits
    and noise, and a guess only tells for which tokens that can be done at once. A guess that is drawn as
    the engine draws it (`verbatim.sampling.rows.draw_row`: same seed, same position, same noise) is right
    far more often than any other.
    """

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> SequenceOf[SequenceOf[int]]:
        """Ids that may follow each sequence.

        Called before a forward in which each of `sequences` computes its last token, with blocks in place for
        that and for the draft. Nothing of a sequence may be changed. State of one's own that belongs to a
        sequence is best kept in a `weakref.WeakKeyDictionary`, so that it goes when the sequence does.

        Args:
            sequences: those that want a draft in this step; `token_ids(0, num_tokens)` are its ids.
            lengths: how many ids each wants at most, 1 or more.

        Returns:
            One list for each sequence, in their order; shorter ones and empty ones are welcome.
        """
        ...
