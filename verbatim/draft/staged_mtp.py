"""Drafts from multi-token prediction (MTP) layers on the last stage of a cluster."""

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
class _DeferredForward(Forward):
    """A forward that runs with the draw, in one message to the stage."""

    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One MTP layer as a `Forwarder`."""

    runner: Clustered
    k: int

    def forward(self, batch: Batch) -> Forward:
        if not len(batch.logit_rows):
            self.runner.draft(self.k, batch, None)
        return _DeferredForward(torch.empty(0), batch=batch)

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        assert isinstance(forward, _DeferredForward) and forward.batch is not None
        return self.runner.draft(self.k, forward.batch, plan)


class StagedMtp(MtpChain):
    """Drafts with the last stage; each token costs one round trip.

    The replacement of a lost stage recomputes the hidden states with K and V, and its MTP layers compute
    their missing slots from them. The step in which a stage is lost runs without drafts.
    """

    def __init__(self, runner: Clustered, max_rows: int) -> None:
        super().__init__([_Layer(runner, k) for k in range(runner.mtp_layers)], max_rows)
        self._runner = runner

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        try:
            if self._runner.supervisor.in_order:
                return super().propose(sequences, lengths)
        except StageGone:  # the next forward replaces the stage
            pass
        return [[] for _ in sequences]
