"""Drafting with layers for multi-token prediction that are on the last stage, beside the last layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.mtp import MtpChain
from verbatim.placement.cluster.crew import StageGone
from verbatim.placement.cluster.runner import Clustered
from verbatim.protocols import Forward


@dataclass(slots=True)
class _Asked(Forward):
    """Rows that are computed when somebody draws from them: the stage is asked for both at once."""

    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer as a `Forwarder`."""

    runner: Clustered
    k: int

    def forward(self, batch: Batch) -> Forward:
        if not len(batch.logit_rows):
            self.runner.draft(self.k, batch, None)
        return _Asked(torch.empty(0), batch=batch)

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        assert isinstance(forward, _Asked) and forward.batch is not None
        return self.runner.draft(self.k, forward.batch, plan)


class StagedMtp(MtpChain):
    """Asks the last stage for each token of a draft, which costs a message there and back.

    Who takes a lost stage's place has the hidden states of all that is held, as it computes them again with K
    and V, and its layers catch up. The step in which a stage is lost goes on without drafts.
    """

    def __init__(self, runner: Clustered, max_rows: int) -> None:
        super().__init__([_Layer(runner, k) for k in range(runner.mtp_layers)], max_rows)
        self._runner = runner

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        try:
            if self._runner.supervisor.in_order:
                return super().propose(sequences, lengths)
        except StageGone:  # the forward that comes next finds it a successor
            pass
        return [[] for _ in sequences]
