"""Autoregressive drafting, with the request's own noise, by layers that are cheaper than the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from verbatim.batch import ZERO_STATE, Batch, SamplePlan, SampleRow
from verbatim.core import CachedBlocks, Sequence
from verbatim.placement.distributed.group import StageGone
from verbatim.placement.offload.cut import cut
from verbatim.protocols import Runner

if TYPE_CHECKING:
    from verbatim.sampling.grammar import StructureState


@dataclass(slots=True)
class ActiveDraft:
    """The draft of one sequence under construction.

    Attributes:
        length: desired number of tokens; below 1: none.
        cached: what the layers have computed of the sequence: the sequence itself, unless they have blocks
            of their own.
        ids: tokens drafted so far.
        grammar: state of the grammar after `ids`.
    """

    sequence: Sequence
    length: int
    cached: CachedBlocks
    ids: list[int] = field(default_factory=list)
    grammar: StructureState | None = None


class LayersProposer:
    """Drafts with layers of the model, wherever its runner has them, in the sequences' own blocks.

    Runs and draws once for each token of the longest draft, or once for all where the runner can. Tokens are
    drawn as in the engine, with the request's parameters, noise and grammar, but without its logits
    processors. A draft ends early if no token can be drawn.

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
        runner: has the layers that draft.
        max_rows: maximum number of rows of one forward; more are split over several.
        live: the layers belong to the caller, whose code may change their weights at any time.
    """

    def __init__(self, runner: Runner, max_rows: int, *, live: bool) -> None:
        self.runner = runner
        self._max_rows = max_rows
        self.live = live
        self._count = runner.draft_info.get("mtp_layers", 0)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`. The step in which a stage of a cluster is lost runs without drafts."""
        drafts = self.begin(sequences, lengths)
        for draft in drafts:
            if draft.sequence.grammar is not None:
                draft.grammar = draft.sequence.grammar.fork()
        step, live = 0, [draft for draft in drafts if draft.length > 0]
        try:
            while live:
                drawn = self._draw(step, live)
                live = [
                    draft
                    for draft, ids in zip(live, drawn, strict=True)
                    if all(_extend(draft, token_id) for token_id in ids)
                    and len(draft.ids) < draft.length
                ]
                step += 1
        except StageGone:  # the next forward replaces the stage
            return [[] for _ in sequences]
        return [draft.ids for draft in drafts]

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        """Start one draft per sequence; shorter if there is too little memory for its K and V."""
        return [ActiveDraft(s, n, s) for s, n in zip(sequences, lengths, strict=True)]

    def info(self) -> dict[str, Any]:
        """Return the number of layers, as plain values."""
        return {"layers": self._count or self.runner.draft_info["early_exit_layers"]}

    def _draw(self, step: int, drafts: list[ActiveDraft]) -> list[list[int]]:
        """Return the next token of each draft, or all that are missing; -1 if none can be drawn."""
        rows = [self._rows(draft, step) for draft in drafts]
        lasts = [end - 1 for end in accumulate(len(ids) for _, ids in rows)]
        spans = [(draft.cached, *row) for draft, row in zip(drafts, rows, strict=True)]
        # MTP layers have no states, so they read none of these.
        sources = [cached.states.get(start, ZERO_STATE) for cached, start, _ in spans]
        targets = [cached.states.get(start + len(ids), ZERO_STATE) for cached, start, ids in spans]
        batch = Batch.of(
            [(ids, start, cached.blocks) for cached, start, ids in spans],
            lasts,
            states=(sources, lasts, targets),
        )
        wanted, drawn = [_row(draft) for draft in drafts], list[list[int]]()
        # Where the bans of a token depend on those before it, or a structure does, one is drawn at a time.
        dependent = any(d.grammar is not None or d.sequence.request.bad_words for d in drafts)
        lengths = [] if dependent else [draft.length - len(draft.ids) for draft in drafts]
        for part in cut(batch, len(drafts), self._max_rows):
            here = slice(len(drawn), len(drawn) + len(part.logit_rows))
            plan = SamplePlan(wanted[here]) if wanted[here] else None
            drawn += self.runner.draft(self._layer(step), part, plan, lengths[here])
        if step < self._count:
            # Slots that depend on draft tokens are computed again from the drawn ones.
            for draft in drafts:
                final = max(0, draft.sequence.num_tokens - 1 - step)
                draft.sequence.num_draft_computed[step] = final
        return drawn

    def _rows(self, draft: ActiveDraft, step: int) -> tuple[int, list[int]]:
        """Return the missing rows, through the one that predicts the `step + 1`-th draft token.

        Returns:
            The slot of the first row, and the id of each.
        """
        sequence, k = draft.sequence, self._layer(step)
        num_tokens = sequence.num_tokens
        if step > max(0, k):  # the slot after the layer's last one, from the last draft token
            return num_tokens - 1 + step - self._count, draft.ids[-1:]
        start = draft.cached.num_computed
        if self._count:
            # At least one slot, also if the last draft was not verified, as when its step was interrupted.
            start = min(sequence.num_draft_computed.get(k, 0), num_tokens - 2)
        first = start + 1 + k  # may exceed `num_tokens` if the sequence is shorter than the layers
        ids = sequence.token_ids(first, num_tokens) + draft.ids[max(0, first - num_tokens) :]
        return start, ids

    def _layer(self, step: int) -> int:
        """Return the layer that drafts the `step + 1`-th token; -1 if all of them run for each."""
        return min(step, self._count - 1)


def _row(draft: ActiveDraft) -> SampleRow:
    mask = None if draft.grammar is None else draft.grammar.mask()
    row = draft.sequence.draw_row(draft.ids, mask)
    row.num_logprobs = 0  # not read
    return row


def _extend(draft: ActiveDraft, token_id: int) -> bool:
    """Append a drawn token to a draft; return whether a token can follow."""
    if token_id < 0:
        return False
    draft.ids.append(token_id)
    if token_id in draft.sequence.request.stop_ids:
        return False
    try:
        return draft.grammar is None or not draft.grammar.push(token_id)
    except Exception:  # the error counts only if the model draws this token
        return False
