"""Autoregressive drafting with a cheaper forward than the model's, and with the request's own noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from verbatim.batch import ZERO_STATE, Batch, SamplePlan, SampleRow
from verbatim.core import GrammarState, Sequence
from verbatim.placement.offload.cut import cut
from verbatim.sampling.rows import draw_row
from verbatim.sampling.stopping import single_stop_ids


@dataclass(slots=True)
class ActiveDraft:
    """The draft of one sequence under construction."""

    sequence: Sequence
    length: int  # desired number of tokens
    blocks: list[int]  # of the drafter's K and V
    # Of a drafter with recurrent layers: a number of tokens to the slot of the state after them.
    states: dict[int, int] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)  # drafted so far
    grammar: GrammarState | None = None  # state after `ids`
    stop_ids: frozenset[int] = frozenset()  # ids that end the sequence


# The first row's slot in the drafter's blocks, and the ids of the rows; the last one predicts the next token.
Rows = tuple[int, list[int]]


class Chain:
    """Base class of autoregressive proposers: forward and draw once for each token of the longest draft.

    Tokens are drawn as in the engine, with the request's parameters, noise and grammar, but without its
    logits processors. A draft ends early if no token can be drawn.

    Args:
        max_rows: maximum number of rows of one forward; more are split over several.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        drafts = self.begin(sequences, lengths)
        for draft in drafts:
            request = draft.sequence.request
            draft.stop_ids = single_stop_ids(request.params, request.eos_ids)
            if draft.sequence.grammar is not None:
                draft.grammar = draft.sequence.grammar.fork()
        step, live = 0, [draft for draft in drafts if draft.length > 0]
        while live:
            rows = [self.rows(draft, step) for draft in live]
            drawn = self._draw(step, live, rows)
            for draft in live:
                self.computed(draft, step)
            live = [
                draft
                for draft, ids in zip(live, drawn, strict=True)
                if all(_extend(draft, token_id) for token_id in ids)
                and len(draft.ids) < draft.length
            ]
            step += 1
        return [draft.ids for draft in drafts]

    # ---- implemented by subclasses

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        """Start one draft per sequence with its blocks; shorter if there are too few blocks."""
        raise NotImplementedError

    def run(
        self, step: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        """Run the forward that predicts the `step + 1`-th draft tokens, and draw them by `plan`, if given.

        Args and returns: as of `DraftRunner.draft`.
        """
        raise NotImplementedError

    def rows(self, draft: ActiveDraft, step: int) -> Rows:
        """Return the missing rows, through the one that predicts the `step + 1`-th draft token."""
        raise NotImplementedError

    def computed(self, draft: ActiveDraft, step: int) -> None:
        """Mark the rows of a step as computed."""

    # ----

    def _draw(self, step: int, drafts: list[ActiveDraft], rows: list[Rows]) -> list[list[int]]:
        """Return the next token of each draft, or all that are missing; -1 if none can be drawn."""
        lasts = [end - 1 for end in accumulate(len(ids) for _, ids in rows)]
        pairs = list(zip(drafts, rows, strict=True))
        sources = [draft.states.get(start, ZERO_STATE) for draft, (start, _) in pairs]
        targets = [draft.states.get(start + len(ids), ZERO_STATE) for draft, (start, ids) in pairs]
        batch = Batch.of(
            [(ids, start, draft.blocks) for draft, (start, ids) in pairs],
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
            drawn += self.run(step, part, plan, lengths[here])
        return drawn


def _row(draft: ActiveDraft) -> SampleRow:
    mask = None if draft.grammar is None else draft.grammar.mask()
    row = draw_row(draft.sequence, draft.ids, mask)
    row.num_logprobs = 0  # not read
    return row


def _extend(draft: ActiveDraft, token_id: int) -> bool:
    """Append a drawn token to a draft; return whether a token can follow."""
    if token_id < 0:
        return False
    draft.ids.append(token_id)
    if token_id in draft.stop_ids:
        return False
    try:
        return draft.grammar is None or not draft.grammar.push(token_id)
    except Exception:  # the error counts only if the model draws this token
        return False
