"""Proposers for tests: correct, correct for some tokens, wrong, or returning garbage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import count, repeat
from typing import Any

import numpy as np
import torch

from support.pools import check_pool
from verbatim import LLM
from verbatim.core import Result, Sequence
from verbatim.draft.model import DraftModelProposer
from verbatim.engine.drafting import Drafting
from verbatim.engine.lengths import DraftLengths
from verbatim.engine.work import Chunk

Answers = dict[tuple[Any, ...], list[int]]


def drafting(proposer: Any, length: int | None, vocab_size: int) -> Drafting:
    """Return an engine's drafting state; a length of None is adaptive."""
    lengths = Clockless() if length is None else DraftLengths(length)
    return Drafting(proposer, lengths, vocab_size)


class Clockless(DraftLengths):
    """Adaptive lengths from computed instead of measured times, so that a test is deterministic."""

    def note_proposal(self, chunks: list[Chunk], spent_s: float) -> None:
        super().note_proposal(chunks, 0.1 * max(chunk.max_draft for chunk in chunks))

    def note_step(self, chunks: list[Chunk], spent_s: float) -> None:
        rows = sum(chunk.num_rows + len(chunk.draft_ids) for chunk in chunks)
        super().note_step(chunks, 1.0 + 0.02 * rows)


def answers_of(results: Iterable[Result]) -> Answers:
    """Return the completions of plain decoding, for `Oracle`."""
    return {
        (tuple(result.prompt_token_ids), c.seed, c.sample_index): c.token_ids
        for result in results
        for c in result.outputs
    }


class Oracle:
    """Drafts the known continuation of a sequence, with wrong ids after a given number of tokens.

    Args:
        answers: completions by prompt, seed and sample index; other sequences get no draft.
        right: returns the number of correct ids in the draft of a sequence; None: all.
        vocab_size: bound of wrong ids, which are never EOS.
    """

    def __init__(
        self,
        answers: Answers,
        right: Callable[[Sequence], int] | None = None,
        vocab_size: int = 128,
    ) -> None:
        self.answers, self.right, self.vocab_size = answers, right, vocab_size
        self.num_calls = 0

    def next_ids(self, sequence: Sequence, length: int) -> list[int]:
        request, known = sequence.request, len(sequence.output_ids)
        key = tuple(request.prompt_ids), request.seed, sequence.sample_index
        return self.answers.get(key, [])[known : known + length]

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        self.num_calls += 1
        return [self.draft(s, n) for s, n in zip(sequences, lengths, strict=True)]

    def draft(self, sequence: Sequence, length: int) -> list[int]:
        ids = self.next_ids(sequence, length)
        if self.right is None or not ids:
            return ids
        right = self.right(sequence)
        wrong = [3 + (token_id - 2) % (self.vocab_size - 3) for token_id in ids[right:]]
        return ids[:right] + wrong


class Moody(Oracle):
    """Drafts some correct ids, then random ones; sometimes none, too many, or it raises."""

    def __init__(self, answers: Answers, seed: int, vocab_size: int = 128) -> None:
        super().__init__(answers, vocab_size=vocab_size)
        self.rng = random.Random(seed)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        if self.rng.random() < 0.05:
            raise LookupError("not today")
        return super().propose(sequences, lengths)

    def draft(self, sequence: Sequence, length: int) -> list[int]:
        rng = self.rng
        ids = self.next_ids(sequence, rng.randint(0, length))
        if rng.random() < 0.5:
            ids += [rng.randrange(-2, self.vocab_size + 2) for _ in range(rng.randint(0, length))]
        return ids


class Random:
    """Drafts random ids."""

    def __init__(self, seed: int = 0, vocab_size: int = 128) -> None:
        self.rng, self.vocab_size = random.Random(seed), vocab_size

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [[self.rng.randrange(self.vocab_size) for _ in range(n)] for n in lengths]


class Liar(int):
    """An integer that compares equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Unspeakable(Exception):
    """An exception that can't be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raise(error: BaseException) -> Any:
    raise error


def _spoil(sequences: list[Any], lengths: list[Any]) -> list[list[int]]:
    sequences.clear()
    lengths[:] = [10**9] * 7
    return [[5, 6, 7]] * 70


_same = [5, 6, 7]
_each = lambda make: lambda sequences, lengths: [make(s, n) for s, n in zip(sequences, lengths)]  # noqa: B905

# Name -> (propose, whether it raises or returns an invalid list of drafts, which counts as an error).
HOSTILE: dict[str, tuple[Callable[[list[Any], list[int]], Any], bool]] = {
    "always the same id": (_each(lambda s, n: [9] * n), False),
    "what was said last": (_each(lambda s, n: s.output_ids[-n:]), False),
    "the sequence's own list": (_each(lambda s, n: s.output_ids), False),
    "end of sequence": (_each(lambda s, n: [2] * n), False),
    "negative": (_each(lambda s, n: [-1] * n), False),
    "outside the vocabulary": (_each(lambda s, n: [3, 128, 4]), False),
    "beyond 64 bits": (_each(lambda s, n: [2**70, -(2**70)]), False),
    "bools": (_each(lambda s, n: [True, False]), False),
    "floats": (_each(lambda s, n: [3.0, float("nan")]), False),
    "a string": (_each(lambda s, n: "345"), False),
    "bytes": (_each(lambda s, n: b"345"), False),
    "nothing in a list": (_each(lambda s, n: [None]), False),
    "lists in a list": (_each(lambda s, n: [[3], [4]]), False),
    "a tensor": (_each(lambda s, n: torch.arange(3, 3 + n)), False),
    "a tensor of floats": (_each(lambda s, n: torch.ones(n)), False),
    "one tensor for all": (lambda sequences, n: torch.full((len(sequences), 4), 7), False),
    "numpy integers": (_each(lambda s, n: np.arange(3, 3 + n)), False),
    "liars": (_each(lambda s, n: [Liar(5)] * n), False),
    "too many": (_each(lambda s, n: list(range(3, 100))), False),
    "an endless draft": (_each(lambda s, n: count(3)), False),
    "empty ones": (_each(lambda s, n: ()), False),
    "the same list for all": (lambda sequences, n: [_same] * len(sequences), False),
    "a generator of generators": (lambda sequences, n: (iter([4, 5]) for _ in sequences), False),
    "endless drafts": (lambda sequences, n: repeat([3]), True),
    "too few drafts": (lambda sequences, n: [[3]] * (len(sequences) - 1), True),
    "too many drafts": (lambda sequences, n: [[3]] * (len(sequences) + 1), True),
    "nothing": (lambda sequences, n: None, True),
    "a number": (lambda sequences, n: 7, True),
    "nothing for each": (lambda sequences, n: [None] * len(sequences), True),
    "what it was given, spoilt": (_spoil, True),
    "an error": (lambda sequences, n: _raise(ValueError("out of ideas")), True),
    "an error that can't be printed": (lambda sequences, n: _raise(Unspeakable()), True),
    "an exit": (lambda sequences, n: _raise(SystemExit(3)), True),
    "out of memory": (lambda sequences, n: _raise(MemoryError()), True),
    "an error half-way": (
        lambda sequences, n: ([3] if i == 0 else _raise(OSError("gone")) for i in range(9)),
        True,
    ),
}


class Hostile:
    """A proposer from `HOSTILE`, by name."""

    def __init__(self, name: str) -> None:
        self._propose, self.fails = HOSTILE[name]
        self.num_calls = 0

    def propose(self, sequences: list[Any], lengths: list[int]) -> Any:
        self.num_calls += 1
        return self._propose(sequences, lengths)


def check_no_drafts_left(llm: LLM) -> None:
    """Check that no block is in use, including a draft model's, and that no proposal failed."""
    stats, proposer = llm.stats(), llm.engine.drafting.proposer  # type: ignore[union-attr]
    assert stats["blocks_used"] == 0
    assert stats["draft"]["errors"] == 0, stats["draft"]["last_error"]
    if isinstance(proposer, DraftModelProposer):
        proposer.update()
        check_pool(proposer.pool)
        assert proposer.pool.num_used == 0
