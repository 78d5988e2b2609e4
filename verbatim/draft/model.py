"""Drafting with another, smaller model."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.core import Request, Sequence
from verbatim.draft.chain import Chain, Line, Rows
from verbatim.draft.holdings import Holdings
from verbatim.protocols import Forward, Forwarder, Runner


class DraftModelProposer(Chain):
    """Decodes ahead with a model of its own, on blocks of its own.

    What it computes of a sequence it keeps as long as that lives, and goes on from there: of a draft that
    came true nothing is computed again. Where its blocks run out, those who were not drafted for lately
    lose theirs, and drafts get shorter or empty.

    Args:
        runner: the draft model, which nobody else uses.
        vocab_size: of the model that is drafted for. Ids that it lacks are not drafted, and ids that the
            draft model lacks are read as id 0.
        num_embeddings: ids that the draft model can read.
        max_length: tokens that the draft model can see; None sets no limit.
        max_rows: of one forward.
        live: somebody else owns the draft model, and may change its weights at any time.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        num_embeddings: int,
        max_length: int | None,
        max_rows: int,
        live: bool,
    ) -> None:
        super().__init__(max_rows)
        self.runner = runner
        self.holdings = Holdings(runner.num_blocks, runner.block_size)
        self._forwarder: Forwarder = runner
        if runner.vocab_size > vocab_size:
            self._forwarder = _Within(vocab_size, runner)
        self._num_embeddings = num_embeddings
        self._max_length = max_length
        self.live = live
        self._stamp = runner.stamp() if live else None

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[Line]:
        if self.live and (stamp := self.runner.stamp()) != self._stamp:
            self.holdings.forget()  # it is of other weights
            self._stamp = stamp
        using, beginning = set(sequences), set[Request]()
        return [
            self._line(sequence, length, using, beginning)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    def _line(
        self, sequence: Sequence, length: int, using: set[Sequence], beginning: set[Request]
    ) -> Line:
        held, num_tokens = self.holdings.of(sequence), sequence.num_tokens
        held.catch_up(sequence)
        if self._max_length is not None:  # the last token of a draft is not computed
            length = min(length, self._max_length - num_tokens + 1)
        if not held.num_known and sequence.request in beginning:
            length = 0  # the next call finds the prompt computed, by another sample
        if length > 0:
            room = self.holdings.reserve(held, num_tokens, num_tokens + length - 1, using)
            length = min(length, room - num_tokens + 1)
        if (
            length > 0
            and not held.num_known
            and len(sequence.request.prompt_ids) >= self.holdings.block_size
        ):
            beginning.add(sequence.request)
        return Line(sequence, max(0, length), held.blocks)

    def forwarder(self, step: int) -> Forwarder:
        return self._forwarder

    def rows(self, line: Line, step: int) -> Rows:
        sequence = line.sequence
        if step:
            start, ids = sequence.num_tokens + step - 1, line.ids[-1:]
        else:
            # At least the last row, which predicts.
            start = min(self.holdings.of(sequence).num_known, sequence.num_tokens - 1)
            ids = sequence.token_ids(start, sequence.num_tokens)
        return Rows(start, [i if i < self._num_embeddings else 0 for i in ids])

    def computed(self, line: Line, step: int, rows: Rows) -> None:
        held = self.holdings.of(line.sequence)
        if step:
            held.guessed.append(line.ids[step - 1])
        else:
            held.num_known = line.sequence.num_tokens

    # ---- with the engine

    def info(self) -> dict[str, Any]:
        """The draft model's sizes."""
        found = self.runner.info()
        return {
            name: found[name]
            for name in (
                "architecture",
                "parameters",
                "weight_bytes",
                "dtype",
                "kv_bytes",
                "layers",
            )
        }

    def sleep(self, weights: bool) -> None:
        """Give memory back, as `Runner.sleep`."""
        self.runner.sleep(weights)
        self.holdings.forget()

    def wake(self) -> None:
        """Take it again, as `Runner.wake`."""
        self.runner.wake()

    def close(self) -> None:
        """Let go of the draft model."""
        self.holdings.forget()
        self.runner.close()


class _Within:
    """Draws ids below `vocab_size`, from a model that has more of them."""

    def __init__(self, vocab_size: int, inner: Forwarder) -> None:
        self._vocab_size = vocab_size
        self._inner = inner

    def forward(self, batch: Batch) -> Forward:
        forward = self._inner.forward(batch)
        return Forward(forward.logits[:, : self._vocab_size])

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        return self._inner.sample(forward, plan)
