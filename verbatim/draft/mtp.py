"""Drafts from a model's multi-token prediction (MTP) layers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.chain import ActiveDraft, Chain, Rows
from verbatim.model.borrow import threads
from verbatim.model.mtp import MtpLayers
from verbatim.protocols import Forward, Forwarder
from verbatim.sampling.sampler import sample_rows


@dataclass(frozen=True, slots=True)
class _Layer:
    """One MTP layer as a `Forwarder`."""

    layers: MtpLayers
    k: int

    def forward(self, batch: Batch) -> Forward:
        return Forward(self.layers.run(self.k, batch))

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        return sample_rows(forward.logits, plan)


class MtpChain(Chain):
    """Drafts the j-th token with layer j, and tokens beyond the layers with the last layer, chained.

    A layer first computes all its missing slots, from the hidden states that the model and the layers
    before left in the sequence's blocks. So evicted sequences, and those with a cached prefix, need no
    special case.

    Sequences that share a block both write its slots. The values are equal but for the last few, which
    depend on each sequence's next tokens. That costs a little acceptance; copying blocks would cost more.

    Args:
        layers: a forwarder for each layer.
        max_rows: maximum number of rows of one forward.
    """

    def __init__(self, layers: SequenceOf[Forwarder], max_rows: int) -> None:
        super().__init__(max_rows)
        self._forwarders = layers
        self._count = len(layers)

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        return [ActiveDraft(s, n, s.blocks) for s, n in zip(sequences, lengths, strict=True)]

    def forwarder(self, step: int) -> Forwarder:
        return self._forwarders[self._layer(step)]

    def rows(self, draft: ActiveDraft, step: int) -> Rows:
        sequence, k = draft.sequence, self._layer(step)
        num_tokens = sequence.num_tokens
        if step > k:  # the slot after the layer's last one, from the last draft token
            return Rows(num_tokens - 1 + step - self._count, draft.ids[-1:])
        start = sequence.num_draft_computed.get(k, 0)
        first = start + 1 + k  # may exceed `num_tokens` if the sequence is shorter than the layers
        ids = sequence.token_ids(first, num_tokens) + draft.ids[max(0, first - num_tokens) :]
        return Rows(start, ids)

    def computed(self, draft: ActiveDraft, step: int, rows: Rows) -> None:
        # Slots that depend on draft tokens are computed again from the drawn ones.
        if step < self._count:
            final = max(0, draft.sequence.num_tokens - 1 - step)
            draft.sequence.num_draft_computed[step] = final

    def _layer(self, step: int) -> int:
        return min(step, self._count - 1)


class MtpProposer(MtpChain):
    """Drafts with the MTP layers of a model in this process.

    Args:
        max_rows: maximum number of rows of one forward.
        num_threads: torch threads during a proposal; None leaves torch's setting.
    """

    def __init__(self, layers: MtpLayers, max_rows: int, num_threads: int | None) -> None:
        super().__init__([_Layer(layers, k) for k in range(layers.count)], max_rows)
        self._layers = layers
        self._num_threads = num_threads

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        with threads(self._num_threads), self._layers.borrowed():
            return super().propose(sequences, lengths)
