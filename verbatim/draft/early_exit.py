"""Drafts from the model's own first layers."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.chain import ActiveDraft, Chain, Rows
from verbatim.kv.store import KVStore
from verbatim.model.borrow import threads
from verbatim.model.early_exit import EarlyExit
from verbatim.protocols import Forward, Forwarder
from verbatim.sampling.sampler import sample_rows


class EarlyExitProposer(Chain):
    """Drafts with the first layers, on the sequences' own blocks.

    It has no cache of its own: positions computed by all layers are computed by the first ones. The K
    and V that it writes for draft tokens are overwritten by the model's verifying forward; positions that
    are not verified are never read before they are written again.

    Args:
        layers: the first layers.
        store: K and V of the whole model.
        max_rows: maximum number of rows of one forward.
        num_threads: torch threads during a forward; None leaves torch's setting.
    """

    def __init__(
        self, layers: EarlyExit, store: KVStore, max_rows: int, num_threads: int | None
    ) -> None:
        super().__init__(max_rows)
        self.layers = layers
        self._store = store
        self._num_threads = num_threads

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        pairs = zip(sequences, lengths, strict=True)
        return [ActiveDraft(sequence, length, sequence.blocks) for sequence, length in pairs]

    def forwarder(self, step: int) -> Forwarder:
        return self

    def rows(self, draft: ActiveDraft, step: int) -> Rows:
        sequence = draft.sequence
        if step:
            return Rows(sequence.num_tokens + step - 1, draft.ids[-1:])
        start = sequence.num_computed
        return Rows(start, sequence.token_ids(start, sequence.num_tokens))

    def computed(self, draft: ActiveDraft, step: int, rows: Rows) -> None:
        """Do nothing: the whole model computes these rows again."""

    def forward(self, batch: Batch) -> Forward:
        """See `Forwarder`."""
        with threads(self._num_threads):
            return Forward(*self.layers.run(batch, self._store))

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """See `Forwarder`."""
        with threads(self._num_threads):
            return sample_rows(forward.logits, plan)

    def info(self) -> dict[str, Any]:
        """Return the number of layers, as plain values."""
        return {"layers": self.layers.num_layers}

    def close(self) -> None:
        """Release the module."""
        self.layers.close()
