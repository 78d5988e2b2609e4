"""Speculative decoding in the engine: draft lengths, validation of proposals, statistics."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from concurrent.futures import wait
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verbatim.common.checks import as_index
from verbatim.core import DraftStats, Sequence
from verbatim.engine.lengths import DraftLengths
from verbatim.engine.scheduler import MASK_WAIT_S
from verbatim.engine.work import Chunk
from verbatim.protocols import Proposer
from verbatim.sampling.processors import in_mask

if TYPE_CHECKING:
    from verbatim.sampling.grammar import StructureState

_log = logging.getLogger("verbatim")


class Drafting:
    """Gets drafts from a proposer, and validates them.

    Args:
        lengths: chooses the draft lengths.
        vocab_size: upper limit of token ids, exclusive.
        owns: whether the proposer was opened for this engine, and sleeps and closes with it.
    """

    def __init__(
        self, proposer: Any, lengths: DraftLengths, vocab_size: int, *, owns: bool = False
    ) -> None:
        self.proposer: Proposer = proposer
        self._owns = owns
        # Whether proposing runs forwards of a module that belongs to the caller.
        self.runs_live_module: bool = owns and proposer.live
        # Sequences with a postponed draft, which does not count in their acceptance rates.
        self._waiting: Container[Sequence] = getattr(proposer, "waiting", ()) if owns else ()
        self.totals = DraftStats()  # since the engine was opened
        self.last_error: str | None = None
        self._lengths = lengths
        self._proposing_s = 0.0  # time in the proposer, in this step
        self._vocab_size = vocab_size

    def lengths(self, running: Iterable[Sequence]) -> dict[Sequence, int]:
        """Return the draft length to request for each decoding sequence; no entry: no draft."""
        self._proposing_s = 0.0
        if not self._lengths.begin_step():
            return {}
        # The model draws one more token after the last draft token.
        decoding = {
            s: s.request.max_tokens - len(s.output_ids) - 1 for s in running if _is_drafted(s)
        }
        return self._lengths.choose(decoding) if decoding else {}

    def propose(self, chunks: list[Chunk]) -> None:
        """Set the drafts of the chunks with draft rows; none if the proposer fails. Raises only Ctrl-C."""
        chunks = [chunk for chunk in chunks if chunk.max_draft]
        if not chunks:
            return
        sequences, lengths = [c.sequence for c in chunks], [c.max_draft for c in chunks]
        begin = time.perf_counter()
        try:
            proposed = self.proposer.propose(list(sequences), list(lengths))
            drafts = list(islice(proposed, len(chunks) + 1))  # `proposed` may be endless
            if len(drafts) != len(chunks):
                count = len(drafts) if len(drafts) < len(chunks) else f"more than {len(chunks)}"
                raise ValueError(f"{count} drafts for {len(chunks)} sequences")
            for chunk, draft in zip(chunks, drafts, strict=True):
                num_cut = set_draft(chunk, draft, self._vocab_size)
                for stats in (self.totals, chunk.sequence.request.metrics.draft):
                    stats.num_cut += num_cut
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # decoding continues without drafts
            for chunk in chunks:
                chunk.draft_ids, chunk.draft_masks = [], []
            for request in {chunk.sequence.request for chunk in chunks}:
                request.metrics.draft.num_errors += 1
            self.totals.num_errors += 1
            self._report(error)
        spent_s = time.perf_counter() - begin
        self._proposing_s = spent_s
        self._lengths.note_proposal(chunks, spent_s)
        self.totals.time_s += spent_s
        for chunk in chunks:
            chunk.sequence.request.metrics.draft.time_s += spent_s / len(chunks)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """Record the duration of a step, including drafting."""
        self._lengths.note_step(chunks, spent_s - self._proposing_s)

    def note_commit(self, chunk: Chunk) -> None:
        """Record the acceptance of a chunk's draft."""
        request = chunk.sequence.request
        if not chunk.draws or not request.params.draft:
            return
        if chunk.max_draft and chunk.sequence not in self._waiting:
            self._lengths.note_draft(chunk.sequence, chunk.max_draft, chunk.num_accepted)
        # Without a draft, all samples draw from the last row of a prompt; none if the grammar is complete.
        num_drawing = 1 if chunk.draft_ids else len(chunk.results) - chunk.num_prompt_rows
        for stats in (self.totals, request.metrics.draft):
            stats.num_forwards += num_drawing
            stats.num_tokens += num_drawing + chunk.num_accepted
            if chunk.draft_ids:
                stats.note(len(chunk.draft_ids), chunk.num_accepted)

    def call(self, method: str, *args: Any) -> None:
        """Call `method` ("sleep", "wake" or "close") of an owned proposer, if it has one."""
        function = getattr(self.proposer, method, None) if self._owns else None
        if function is not None:
            function(*args)

    def info(self) -> dict[str, Any]:
        """Return the name of the proposer, and what one reports that was opened for this engine."""
        info = getattr(self.proposer, "info", None) if self._owns else None
        return {
            "proposer": type(self.proposer).__name__,
            "num_draft_tokens": self._lengths.fixed,
            **({} if info is None else info()),
        }

    def stats(self) -> dict[str, Any]:
        """Return the statistics since the engine was opened, as plain values."""
        totals = self.totals
        return {
            "acceptance": totals.acceptance,
            "tokens_per_forward": totals.tokens_per_forward,
            "forwards": totals.num_forwards,
            "tokens": totals.num_tokens,
            "drafted": sum(totals.num_drafted),
            "accepted": sum(totals.num_accepted),
            "cut": totals.num_cut,
            "errors": totals.num_errors,
            "last_error": self.last_error,
            "time_s": totals.time_s,
        }

    def _report(self, error: BaseException) -> None:
        text = type(error).__name__
        with suppress(Exception):  # `__str__` is the proposer's code, and may raise
            text = f"{text}: {error}"
        if self.last_error is None:
            name = type(self.proposer).__name__
            _log.warning("the proposer %s failed (%s); decoding goes on without drafts", name, text)
        self.last_error = text


def _is_drafted(sequence: Sequence) -> bool:
    """Return whether the sequence is decoding and drafts are enabled for it."""
    request = sequence.request
    return bool(
        request.params.draft
        and request.search is None
        and sequence.output_ids
        and sequence.num_uncomputed == 1
        and not (sequence.grammar and sequence.grammar.is_slow)
    )


def set_draft(chunk: Chunk, proposed: Iterable[Any], vocab_size: int) -> int:
    """Set a chunk's draft to the valid part of a proposal; return the number of invalid and excess ids.

    An id that ends the sequence, or that the grammar does not allow, ends the draft without being part of
    it, and is not counted.
    """
    length, sequence, request = chunk.max_draft, chunk.sequence, chunk.sequence.request
    values = list(islice(proposed, length + 1))
    grammar = None if sequence.grammar is None else sequence.grammar.fork()
    for j, value in enumerate(values[:length]):
        token_id = as_index(value)
        if token_id is None or not 0 <= token_id < vocab_size:
            return len(values) - j
        if token_id in request.stop_ids:
            break
        mask = None
        if grammar is not None:
            mask = _next_mask(grammar, token_id)
            if mask is None:
                break
        chunk.draft_ids.append(token_id)
        chunk.draft_masks.append(mask)
    return max(0, len(values) - length)


def _next_mask(grammar: StructureState, token_id: int) -> Tensor | None:
    """Return the grammar's mask after a token.

    None if the token is not allowed, no token can follow, or the mask takes longer than `MASK_WAIT_S`.
    """
    try:
        if not in_mask(grammar.mask(), token_id):
            return None
        grammar.push(token_id)
        job = grammar.prepare()
        if job is not None:
            wait([job], timeout=MASK_WAIT_S)
        return grammar.mask() if grammar.ready and not grammar.is_complete() else None
    except Exception:  # matters only if the model draws this token
        return None
