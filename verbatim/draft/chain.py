"""Drafting by decoding ahead with something smaller than the model, which draws with the model's noise."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verbatim.batch import Batch, SamplePlan, SampleRow, block_tables
from verbatim.core import GrammarState, Sequence
from verbatim.protocols import Forwarder
from verbatim.sampling.rows import draw_row
from verbatim.sampling.stopping import single_stop_ids


@dataclass(slots=True)
class Line:
    """One sequence while it is drafted for."""

    sequence: Sequence
    length: int  # tokens that are wanted
    blocks: list[int]  # where the drafter keeps K and V of it
    ids: list[int] = field(default_factory=list)  # drafted so far
    grammar: GrammarState | None = None  # where its structure stands behind them
    last_ids: frozenset[int] = frozenset()  # behind which nothing comes

    @property
    def wants_more(self) -> bool:
        return len(self.ids) < self.length


@dataclass(slots=True)
class Rows:
    """What one forward of a drafter computes of one line; its last row predicts the next token."""

    start: int  # position of the first, as the drafter's blocks count
    token_ids: list[int]


class Chain:
    """The loop of all proposers that decode ahead: forward, draw, once for each token of the longest draft.

    What is drawn is drawn as the engine would draw it there, with the request's own parameters, noise and
    structure; only its processors in Python are left out. A line ends early where nothing can be drawn.

    Args:
        max_rows: of one forward; longer ones are cut in pieces.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """See `Proposer`."""
        lines = self.begin(sequences, lengths)
        for line in lines:
            request = line.sequence.request
            line.last_ids = single_stop_ids(request.params, request.eos_ids)
            if line.sequence.grammar is not None:
                line.grammar = line.sequence.grammar.fork()
        step, live = 0, [line for line in lines if line.wants_more]
        while live:
            rows = [self.rows(line, step) for line in live]
            drawn = self._draw(self.forwarder(step), live, rows)
            for line, row in zip(live, rows, strict=True):
                self.computed(line, step, row)
            live = [
                line
                for line, token_id in zip(live, drawn, strict=True)
                if _extend(line, token_id) and line.wants_more
            ]
            step += 1
        return [line.ids for line in lines]

    # ---- what each of them says for itself

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[Line]:
        """The lines, with blocks for all that will be computed of them; shorter where there are too few."""
        raise NotImplementedError

    def forwarder(self, step: int) -> Forwarder:
        """What computes the `step + 1`-th tokens."""
        raise NotImplementedError

    def rows(self, line: Line, step: int) -> Rows:
        """What it computes for them: whatever is missing up to the row that predicts the token."""
        raise NotImplementedError

    def computed(self, line: Line, step: int, rows: Rows) -> None:
        """Those rows are computed."""

    # ----

    def _draw(self, forwarder: Forwarder, lines: list[Line], rows: list[Rows]) -> list[int]:
        """The next token of each line; -1 where none can be drawn."""
        pieces: list[tuple[Line, Rows, bool]] = []  # whether it ends in the row that predicts
        drawn: dict[int, int] = {}
        room = self._max_rows

        def run() -> None:
            nonlocal pieces, room
            last = [line for line, _, ends in pieces if ends]
            forward = forwarder.forward(_batch(pieces))
            if last:
                plan = SamplePlan([_row(line) for line in last])
                ids = forwarder.sample(forward, plan).ids
                drawn.update({id(line): token_id for line, token_id in zip(last, ids, strict=True)})
            pieces, room = [], self._max_rows

        for line, row in zip(lines, rows, strict=True):
            start, left = row.start, row.token_ids
            while left:
                piece, left = left[:room], left[room:]
                pieces.append((line, Rows(start, piece), not left))
                start, room = start + len(piece), room - len(piece)
                if not room:
                    run()
        if pieces:
            run()
        return [drawn[id(line)] for line in lines]


def _row(line: Line) -> SampleRow:
    mask = None if line.grammar is None else line.grammar.mask()
    row = draw_row(line.sequence, line.ids, mask)
    row.num_logprobs = 0  # nobody reads them
    return row


def _extend(line: Line, token_id: int) -> bool:
    """Put a drawn token behind a line; False where it ends there."""
    if token_id < 0:
        return False
    line.ids.append(token_id)
    if token_id in line.last_ids:
        return False
    try:
        return line.grammar is None or not line.grammar.push(token_id)
    except Exception:  # the structure gives up behind this token, which may never be drawn
        return False


def _batch(pieces: SequenceOf[tuple[Line, Rows, bool]]) -> Batch:
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts, context_lens, logit_rows = [0], [], []
    for _, rows, ends in pieces:
        token_ids += rows.token_ids
        stop = rows.start + len(rows.token_ids)
        positions += range(rows.start, stop)
        query_starts.append(len(token_ids))
        context_lens.append(stop)
        if ends:
            logit_rows.append(len(token_ids) - 1)
    return Batch(
        token_ids=_long(token_ids),
        positions=_long(positions),
        query_starts=torch.tensor(query_starts, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=block_tables([line.blocks for line, _, _ in pieces]),
        logit_rows=_long(logit_rows),
    )


def _long(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
