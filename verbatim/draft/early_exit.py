"""Drafting with the model's own first layers."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.chain import Chain, Line, Rows
from verbatim.kv.store import KVStore
from verbatim.model.borrow import threads
from verbatim.model.early_exit import EarlyExit
from verbatim.protocols import Forward, Forwarder
from verbatim.sampling.sampler import sample_rows


class EarlyExitProposer(Chain):
    """Decodes ahead with the first layers, on the sequences' own blocks.

    It has nothing to catch up with: what stands there of all layers stands there of the first ones. What
    it writes behind that, the model's own forward writes once more, for the tokens that are looked at; the
    other positions are read by nobody until they are written.

    Args:
        layers: the first layers.
        store: K and V of the whole model.
        max_rows: of one forward.
        num_threads: of torch's pool while they run; None leaves torch's setting.
    """

    def __init__(
        self, layers: EarlyExit, store: KVStore, max_rows: int, num_threads: int | None
    ) -> None:
        super().__init__(max_rows)
        self.layers = layers
        self._store = store
        self._num_threads = num_threads

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[Line]:
        pairs = zip(sequences, lengths, strict=True)
        return [Line(sequence, length, sequence.blocks) for sequence, length in pairs]

    def forwarder(self, step: int) -> Forwarder:
        return self

    def rows(self, line: Line, step: int) -> Rows:
        sequence = line.sequence
        if step:
            return Rows(sequence.num_tokens + step - 1, line.ids[-1:])
        start = sequence.num_computed
        return Rows(start, sequence.token_ids(start, sequence.num_tokens))

    def computed(self, line: Line, step: int, rows: Rows) -> None:
        """Nothing to note: the whole model computes them again."""

    def forward(self, batch: Batch) -> Forward:
        """See `Forwarder`."""
        with threads(self._num_threads):
            return Forward(*self.layers.run(batch, self._store))

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        """See `Forwarder`."""
        with threads(self._num_threads):
            return sample_rows(forward.logits, plan)

    def info(self) -> dict[str, Any]:
        """How much of the model it runs."""
        return {"layers": self.layers.num_layers}

    def close(self) -> None:
        """Let go of the module."""
        self.layers.close()
