"""Drafting with the layers for multi-token prediction that came with a model."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.chain import Chain, Line, Rows
from verbatim.model.borrow import threads
from verbatim.model.mtp import MtpLayers
from verbatim.protocols import Forward, Forwarder
from verbatim.sampling.sampler import sample_rows


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer as a `Forwarder`."""

    layers: MtpLayers
    k: int

    def forward(self, batch: Batch) -> Forward:
        return Forward(self.layers.run(self.k, batch))

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        return sample_rows(forward.logits, plan)


class MtpChain(Chain):
    """The j-th token of a draft comes from layer j, and those behind the layers from the last one, chained.

    Layers catch up when they are asked: they compute all slots that they have not, from what the model and
    the layers before have left in the sequence's blocks, up to the one that predicts. So an evicted
    sequence, or one that begins with a cached prefix, is drafted for as if nothing had happened.

    Sequences that share a block both write its slots: the same values, but for the last few, which hold
    either's next tokens. That costs a little acceptance, and copying blocks for it would cost more.

    Args:
        layers: each runs one.
        max_rows: of one forward.
    """

    def __init__(self, layers: SequenceOf[Forwarder], max_rows: int) -> None:
        super().__init__(max_rows)
        self._forwarders = layers
        self._count = len(layers)

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[Line]:
        return [Line(s, n, s.blocks) for s, n in zip(sequences, lengths, strict=True)]

    def forwarder(self, step: int) -> Forwarder:
        return self._forwarders[self._layer(step)]

    def rows(self, line: Line, step: int) -> Rows:
        sequence, k = line.sequence, self._layer(step)
        known = sequence.num_tokens
        if step > k:  # behind its own last slot, on the token that was drafted last
            return Rows(known - 1 + step - self._count, line.ids[-1:])
        start = sequence.num_draft_computed.get(k, 0)
        first = start + 1 + k  # behind all known tokens where those are fewer than the layers
        ids = sequence.token_ids(first, known) + line.ids[max(0, first - known) :]
        return Rows(start, ids)

    def computed(self, line: Line, step: int, rows: Rows) -> None:
        # Those on tokens that are only drafted are computed again on what was drawn there.
        if step < self._count:
            final = max(0, line.sequence.num_tokens - 1 - step)
            line.sequence.num_draft_computed[step] = final

    def _layer(self, step: int) -> int:
        return min(step, self._count - 1)


class MtpProposer(MtpChain):
    """Drafts with the layers of a model in this process.

    Args:
        layers: of the model.
        max_rows: of one forward.
        num_threads: of torch's pool while it runs; None leaves torch's setting.
    """

    def __init__(self, layers: MtpLayers, max_rows: int, num_threads: int | None) -> None:
        super().__init__([_Layer(layers, k) for k in range(layers.count)], max_rows)
        self._layers = layers
        self._num_threads = num_threads

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        with threads(self._num_threads), self._layers.borrowed():
            return super().propose(sequences, lengths)
