"""Between the engine and its proposer: how long a draft is, what of it can stand, and what came of it."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from torch import Tensor

from verbatim.core import DraftStats, GrammarState, Sequence
from verbatim.engine.lengths import AdaptiveLengths, FixedLengths
from verbatim.engine.work import Chunk, Draft
from verbatim.protocols import Proposer
from verbatim.sampling.stopping import single_stop_ids

_log = logging.getLogger("verbatim")


class Drafting:
    """Asks a proposer for drafts, and trusts nothing that it answers.

    Args:
        proposer: who guesses.
        lengths: how many tokens are asked for.
        vocab_size: ids are below it.
        owns: the proposer was made for this engine alone, and sleeps and ends with it.
        runs_live_module: proposing makes forwards of a module that somebody else owns.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: AdaptiveLengths | FixedLengths,
        vocab_size: int,
        *,
        owns: bool = False,
        runs_live_module: bool = False,
    ) -> None:
        self.proposer = proposer
        self._owns = owns
        self.runs_live_module = runs_live_module
        self.figures = DraftStats()
        self.last_error: str | None = None
        self._lengths = lengths
        self._proposing_s = 0.0  # of this step
        self._vocab_size = vocab_size

    def lengths(self, running: Iterable[Sequence]) -> dict[Sequence, int]:
        """How long a draft each sequence that decodes should get, where one is worth while."""
        self._proposing_s = 0.0
        if not self._lengths.begin_step():
            return {}
        decoding = {s: _room(s) for s in running if _is_drafted(s)}
        return self._lengths.choose(decoding) if decoding else {}

    def propose(self, chunks: list[Chunk]) -> None:
        """Give drafts to the chunks that have room for one. Raises nothing but Ctrl-C."""
        chunks = [chunk for chunk in chunks if chunk.max_draft]
        if not chunks:
            return
        sequences, lengths = [c.sequence for c in chunks], [c.max_draft for c in chunks]
        begin = time.perf_counter()
        try:
            proposed = self.proposer.propose(list(sequences), list(lengths))
            answers = list(islice(proposed, len(chunks) + 1))  # one that never ends is too long
            if len(answers) != len(chunks):
                given = len(answers) if len(answers) < len(chunks) else f"more than {len(chunks)}"
                raise ValueError(f"{given} drafts for {len(chunks)} sequences")
            for chunk, answer in zip(chunks, answers, strict=True):
                chunk.draft, num_cut = vetted(
                    chunk.sequence, answer, chunk.max_draft, self._vocab_size
                )
                for figures in self._figures_of(chunk):
                    figures.num_cut += num_cut
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it is, no draft is needed to go on
            for chunk in chunks:
                chunk.draft = Draft()
            for request in {chunk.sequence.request for chunk in chunks}:
                request.metrics.draft.num_errors += 1
            self.figures.num_errors += 1
            self._report(error)
        spent = time.perf_counter() - begin
        self._proposing_s = spent
        self._lengths.note_proposal(chunks, spent)
        self.figures.time_s += spent
        for chunk in chunks:
            chunk.sequence.request.metrics.draft.time_s += spent / len(chunks)

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        """A whole step has taken this long."""
        self._lengths.note_step(chunks, spent_s - self._proposing_s)

    def note_commit(self, chunk: Chunk) -> None:
        """What became of a chunk's draft."""
        request = chunk.sequence.request
        if not chunk.draws or not request.params.draft:
            return
        if chunk.max_draft:
            self._lengths.note_draft(chunk.sequence, len(chunk.draft.ids), chunk.num_accepted)
        for figures in self._figures_of(chunk):
            figures.num_forwards += 1
            figures.num_tokens += 1 + chunk.num_accepted
            if chunk.draft.ids:
                figures.note(len(chunk.draft.ids), chunk.num_accepted)

    def call(self, method: str, *args: Any) -> None:
        """Call "sleep", "wake" or "close" of a proposer that was opened for this engine, if it has it."""
        function = getattr(self.proposer, method, None) if self._owns else None
        if function is not None:
            function(*args)

    def info(self) -> dict[str, Any]:
        """Who drafts, and what it holds besides the model, as plain values."""
        own = getattr(self.proposer, "info", None) if self._owns else None
        return {
            "proposer": type(self.proposer).__name__,
            "num_draft_tokens": self._lengths.fixed,
            **({} if own is None else own()),
        }

    def stats(self) -> dict[str, Any]:
        """What drafting came to since the engine was opened, as plain values."""
        figures = self.figures
        return {
            "acceptance": figures.acceptance,
            "tokens_per_forward": figures.tokens_per_forward,
            "forwards": figures.num_forwards,
            "tokens": figures.num_tokens,
            "drafted": sum(figures.num_drafted),
            "accepted": sum(figures.num_accepted),
            "cut": figures.num_cut,
            "errors": figures.num_errors,
            "last_error": self.last_error,
            "time_s": figures.time_s,
        }

    def _figures_of(self, chunk: Chunk) -> tuple[DraftStats, DraftStats]:
        return self.figures, chunk.sequence.request.metrics.draft

    def _report(self, error: BaseException) -> None:
        said = type(error).__name__
        with suppress(Exception):  # its text is made by code of the proposer's
            said = f"{said}: {error}"
        if self.last_error is None:
            name = type(self.proposer).__name__
            _log.warning("the proposer %s failed (%s); decoding goes on without drafts", name, said)
        self.last_error = said


def _is_drafted(sequence: Sequence) -> bool:
    """Does it decode, and may it be drafted for?"""
    request = sequence.request
    return bool(
        request.params.draft
        and request.search is None
        and sequence.output_ids
        and sequence.num_uncomputed == 1
    )


def _room(sequence: Sequence) -> int:
    """Tokens that a draft may have: behind the last of them, the model draws one more."""
    return sequence.request.max_tokens - len(sequence.output_ids) - 1


def vetted(
    sequence: Sequence, proposed: Iterable[Any], length: int, vocab_size: int
) -> tuple[Draft, int]:
    """What of a proposal is worth a row, and how many ids were cut because they can't be there at all.

    What ends the sequence is drawn in the row before, and has none of its own. So it ends the draft, as
    does what the structure does not allow; neither is counted as cut.
    """
    given, draft = list(islice(proposed, length + 1)), Draft()
    request = sequence.request
    last_ids = single_stop_ids(request.params, request.eos_ids)
    grammar = None if sequence.grammar is None else sequence.grammar.fork()
    for j, value in enumerate(given[:length]):
        token_id = _as_id(value)
        if not 0 <= token_id < vocab_size:
            return draft, len(given) - j
        if token_id in last_ids:
            break
        mask = None
        if grammar is not None:
            mask = _mask_behind(grammar, token_id)
            if mask is None:
                break
        draft.ids.append(token_id)
        draft.masks.append(mask)
    return draft, max(0, len(given) - length)


def _mask_behind(grammar: GrammarState, token_id: int) -> Tensor | None:
    """What a structure allows behind a token; None where that can't come, or nothing can follow it."""
    try:
        if not bool(grammar.mask()[token_id // 32] >> (token_id % 32) & 1):
            return None
        return None if grammar.push(token_id) else grammar.mask()
    except Exception:  # it gives up here; whether it comes to that is not said yet
        return None


def _as_id(value: Any) -> int:
    """A plain integer, whatever is given; -1 for what is none."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1
