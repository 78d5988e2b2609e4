"""Autoregressive drafting by layers that are cheaper than the model, with the request's own noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from verbatim.batch import ZERO_STATE, Batch, SamplePlan, SampleRow
from verbatim.core import CachedBlocks, Sequence
from verbatim.placement.distributed.group import StageGone
from verbatim.placement.micro_batches import split_batch
from verbatim.protocols import Runner

if TYPE_CHECKING:
    from verbatim.sampling.grammar import StructureState


@dataclass(slots=True)
class ActiveDraft:
    """The draft of one sequence under construction.

    Attributes:
        length: desired number of draft tokens; below 1: none.
        cached: the KV cache of the draft layers for this sequence: the sequence itself, unless they have
            separate blocks.
        ids: tokens drafted so far.
        grammar: state of the grammar after `ids`.
    """

    sequence: Sequence
    length: int
    cached: CachedBlocks
    ids: list[int] = field(default_factory=list)
    grammar: StructureState | None = None


class LayersProposer:
    """Drafts with layers of the model, in any placement, in the sequences' own blocks.

    There is one forward and draw for each token of the longest draft, or a single call for all tokens if the
    runner can do that. Tokens are drawn as in the engine, with the request's parameters, noise and grammar,
    but without its logits processors. A draft ends early if no token can be drawn.

    With early exit, the draft layers are the model's first layers and share its KV cache. The K and V that
    they write for draft tokens are overwritten by the model's verifying forward; positions that are not
    verified are never read before they are written again. The same holds for recurrent states: there is a
    slot for each draft token that will be verified.

    MTP layer j drafts the j-th token, and the last layer, chained, all later ones. A layer first computes
    all its missing slots, from the hidden states that the model and the previous layers left in the
    sequence's blocks. So evicted sequences, cached prefixes and moved stages need no special case. Sequences
    that share a block both write its slots. The values are equal except the last few, which depend on each
    sequence's next tokens. That lowers acceptance a little; copying blocks would cost more.

    Args:
        runner: runs the draft layers.
        max_rows: maximum number of rows of one forward; larger batches are split.
        live: whether the layers belong to the caller, who may change their weights at any time.
    """

    def __init__(self, runner: Runner, max_rows: int, *, live: bool) -> None:
        self.runner = runner
        self._max_rows = max_rows
        self.live = live
        self._num_mtp_layers = runner.draft_info.get("mtp_layers", 0)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`. If a stage of a cluster is lost meanwhile, the step runs without drafts."""
        drafts = self.begin(sequences, lengths)
        for draft in drafts:
            if draft.sequence.grammar is not None:
                draft.grammar = draft.sequence.grammar.fork()
        step, unfinished = 0, [draft for draft in drafts if draft.length > 0]
        try:
            while unfinished:
                drawn = self._draw(step, unfinished)
                unfinished = [
                    draft
                    for draft, ids in zip(unfinished, drawn, strict=True)
                    if all(_extend(draft, token_id) for token_id in ids)
                ]
                step += 1
        except StageGone:  # the next forward will replace the stage
            return [[] for _ in sequences]
        return [draft.ids for draft in drafts]

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        """Start one draft per sequence, shortened if there is too little memory for its K and V."""
        return [ActiveDraft(s, n, s) for s, n in zip(sequences, lengths, strict=True)]

    def info(self) -> dict[str, Any]:
        """Return the number of draft layers."""
        return {"layers": self._num_mtp_layers or self.runner.draft_info["early_exit_layers"]}

    def _draw(self, step: int, drafts: list[ActiveDraft]) -> list[list[int]]:
        """Return the next token of each draft, or all its missing tokens; -1 if none can be drawn."""
        rows = [self._rows(draft, step) for draft in drafts]
        last_rows = [end - 1 for end in accumulate(len(ids) for _, ids in rows)]
        spans = [(draft.cached, *row) for draft, row in zip(drafts, rows, strict=True)]
        # Not used by MTP layers, which have no recurrent states.
        sources = [cached.states.get(start, ZERO_STATE) for cached, start, _ in spans]
        targets = [cached.states.get(start + len(ids), ZERO_STATE) for cached, start, ids in spans]
        batch = Batch.of(
            [(ids, start, cached.blocks) for cached, start, ids in spans],
            last_rows,
            states=(sources, last_rows, targets),
        )
        sample_rows, drawn = [_row(draft) for draft in drafts], list[list[int]]()
        # If bans or a grammar depend on the preceding tokens, one token is drawn at a time.
        dependent = any(d.grammar is not None or d.sequence.request.bad_words for d in drafts)
        lengths = [] if dependent else [draft.length - len(draft.ids) for draft in drafts]
        for part in split_batch(batch, len(drafts), self._max_rows):
            part_rows = slice(len(drawn), len(drawn) + len(part.logit_rows))
            plan = SamplePlan(sample_rows[part_rows]) if sample_rows[part_rows] else None
            drawn += self.runner.draft(self._layer(step), part, plan, lengths[part_rows])
        if step < self._num_mtp_layers:
            # Slots that depend on draft tokens are recomputed later, from the tokens that the model draws.
            for draft in drafts:
                final = max(0, draft.sequence.num_tokens - 1 - step)
                draft.sequence.num_draft_computed[step] = final
        return drawn

    def _rows(self, draft: ActiveDraft, step: int) -> tuple[int, list[int]]:
        """Return first slot and ids of the rows to compute; the last row predicts draft token `step + 1`."""
        sequence, k = draft.sequence, self._layer(step)
        num_tokens = sequence.num_tokens
        if step > max(0, k):  # the slot after the layer's last one, from the last draft token
            return num_tokens - 1 + step - self._num_mtp_layers, draft.ids[-1:]
        start = draft.cached.num_computed
        if self._num_mtp_layers:
            # At least one slot, even if the last draft was not verified because its step was interrupted.
            start = min(sequence.num_draft_computed.get(k, 0), num_tokens - 2)
        first = start + 1 + k  # may exceed `num_tokens` if the sequence is shorter than the layers
        ids = sequence.token_ids(first, num_tokens) + draft.ids[max(0, first - num_tokens) :]
        return start, ids

    def _layer(self, step: int) -> int:
        """Return the layer that drafts the `step + 1`-th token; -1: all draft layers run for each token."""
        return min(step, self._num_mtp_layers - 1)


def _row(draft: ActiveDraft) -> SampleRow:
    mask = None if draft.grammar is None else draft.grammar.mask()
    row = draft.sequence.draw_row(draft.ids, mask)
    row.num_logprobs = 0  # not read
    return row


def _extend(draft: ActiveDraft, token_id: int) -> bool:
    """Append a drawn token to a draft; return whether another token can follow."""
    if token_id < 0:
        return False
    draft.ids.append(token_id)
    if len(draft.ids) >= draft.length or token_id in draft.sequence.request.stop_ids:
        return False
    try:
        if draft.grammar is not None:
            draft.grammar.push(token_id)
            draft.grammar.mask()  # kept for the next token
        return True
    except Exception:  # matters only if the model draws this token
        return False
