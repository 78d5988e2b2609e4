"""Drafts from layers of the model itself: its first ones, or those for multi-token prediction (MTP)."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, SamplePlan
from verbatim.core import Sequence
from verbatim.draft.chain import ActiveDraft, Chain, Rows
from verbatim.placement.distributed.group import StageGone
from verbatim.protocols import DraftRunner


class LayersProposer(Chain):
    """Drafts with layers of the model, wherever its runner has them, in the sequences' own blocks.

    The first layers have no cache of their own: positions computed by all layers are computed by the
    first ones. The K and V that they write for draft tokens are overwritten by the model's verifying forward;
    positions that are not verified are never read before they are written again. The same is true of states:
    there is a slot for each draft token that will be verified.

    MTP layer j drafts the j-th token, and the last layer, chained, the tokens beyond. A layer first computes
    all its missing slots, from the hidden states that the model and the layers before left in the sequence's
    blocks. So evicted sequences, those with a cached prefix, and those that moved to another stage need no
    special case. Sequences that share a block both write its slots. The values are equal but for the last
    few, which depend on each sequence's next tokens. That costs a little acceptance; copying blocks would
    cost more.

    Args:
        runner: the model's runner.
        max_rows: maximum number of rows of one forward.
    """

    def __init__(self, runner: DraftRunner, max_rows: int) -> None:
        super().__init__(max_rows)
        self._runner = runner
        self._count = runner.draft_info.get("mtp_layers", 0)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`. The step in which a stage of a cluster is lost runs without drafts."""
        try:
            return super().propose(sequences, lengths)
        except StageGone:  # the next forward replaces the stage
            return [[] for _ in sequences]

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        return [
            ActiveDraft(s, n, s.blocks, {} if self._count else s.states)
            for s, n in zip(sequences, lengths, strict=True)
        ]

    def run(
        self, step: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        return self._runner.draft(self._layer(step), batch, plan, lengths)

    def rows(self, draft: ActiveDraft, step: int) -> Rows:
        sequence, k = draft.sequence, self._layer(step)
        num_tokens = sequence.num_tokens
        if step > max(0, k):  # the slot after the layer's last one, from the last draft token
            return num_tokens - 1 + step - self._count, draft.ids[-1:]
        start = sequence.num_computed
        if self._count:
            # At least one slot, also if the last draft was not verified, as when its step was interrupted.
            start = min(sequence.num_draft_computed.get(k, 0), num_tokens - 2)
        first = start + 1 + k  # may exceed `num_tokens` if the sequence is shorter than the layers
        ids = sequence.token_ids(first, num_tokens) + draft.ids[max(0, first - num_tokens) :]
        return start, ids

    def computed(self, draft: ActiveDraft, step: int) -> None:
        # Slots that depend on draft tokens are computed again from the drawn ones.
        if step < self._count:
            final = max(0, draft.sequence.num_tokens - 1 - step)
            draft.sequence.num_draft_computed[step] = final

    def info(self) -> dict[str, Any]:
        """Return the number of layers, as plain values."""
        return {"layers": self._count or self._runner.draft_info["early_exit_layers"]}

    def _layer(self, step: int) -> int:
        """Return the layer that drafts the `step + 1`-th token; -1 for the model's first ones."""
        return min(step, self._count - 1)
