"""Splits a batch into micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from verbatim.batch import Batch, state_columns

_ROWS = ("token_ids", "positions", "forced_experts", "forced_keys", "entering")  # fields [T, ...]
_STATES = ("state_sources", "state_rows", "state_targets")


def split_batch(batch: Batch, max_sequences: int, max_rows: int) -> list[Batch]:
    """Split a batch into micro-batches of at most `max_sequences` sequences and `max_rows` rows, in order.

    A sequence with more rows is split into pieces in different micro-batches; later pieces read the K and V
    of earlier ones from the store.
    """
    starts = batch.query_starts.tolist()
    pieces: list[tuple[int, int, int]] = []  # sequence, first row, end
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        pieces += [(s, b, min(b + max_rows, end)) for b in range(begin, end, max_rows)]
    parts: list[list[tuple[int, int, int]]] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        fits = last is not None and (
            len(last) < max_sequences and piece[2] - last[0][1] <= max_rows
        )
        # Two pieces of a sequence in one batch would be two sequences that write to the same blocks.
        if fits and last is not None and last[-1][0] != piece[0]:
            last.append(piece)
        else:
            parts.append([piece])
    if len(parts) == 1:
        return [batch]
    states = None if batch.state_rows is None else _States(batch)
    return [_part(batch, part, states) for part in parts]


class _States:
    """The state slots that the parts of a batch read and write; `of` is called for each part, in order.

    A piece of a sequence passes its state to the next piece in the slot of the sequence's last row.
    """

    def __init__(self, batch: Batch) -> None:
        assert batch.state_sources is not None
        assert batch.state_rows is not None and batch.state_targets is not None
        self._sources: list[int] = batch.state_sources.tolist()
        rows, targets = batch.state_rows.tolist(), batch.state_targets.tolist()
        self._targets: dict[int, int] = dict(zip(rows, targets, strict=True))
        self._ends: list[int] = (batch.query_starts[1:] - 1).tolist()

    def of(self, pieces: list[tuple[int, int, int]]) -> dict[str, Any]:
        """Return the state fields of a part's `Batch`."""
        sources = [self._sources[s] for s, _, _ in pieces]
        writes: dict[int, int] = {}
        for s, begin, end in pieces:
            writes |= {row: self._targets[row] for row in range(begin, end) if row in self._targets}
            if self._ends[s] in self._targets:
                self._sources[s] = writes.setdefault(end - 1, self._targets[self._ends[s]])
        rows = [row - pieces[0][1] for row in writes]
        return dict.fromkeys(_STATES) | state_columns(sources, rows, list(writes.values()))


def _part(batch: Batch, pieces: list[tuple[int, int, int]], states: _States | None) -> Batch:
    first, end = pieces[0][1], pieces[-1][2]
    sequences = torch.tensor([s for s, _, _ in pieces])
    ends = torch.tensor([e for _, _, e in pieces], dtype=torch.int32)
    logit_rows = batch.logit_rows
    fields = {} if states is None else states.of(pieces)
    for name in _ROWS:
        if (rows := getattr(batch, name)) is not None:
            fields[name] = rows[first:end]
    return replace(
        batch,
        query_starts=torch.tensor([b for _, b, _ in pieces] + [end], dtype=torch.int32) - first,
        context_lens=batch.context_lens[sequences] - batch.query_starts[1:][sequences] + ends,
        block_tables=batch.block_tables[sequences],
        logit_rows=logit_rows[(logit_rows >= first) & (logit_rows < end)] - first,
        block_copies=[],
        adapters=None if batch.adapters is None else batch.adapters[sequences],
        **fields,
    )
