"""Drafts from a separate, smaller model."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, SamplePlan
from verbatim.core import Request, Sequence
from verbatim.draft.cache import DraftCache
from verbatim.draft.chain import ActiveDraft, Chain, Rows
from verbatim.protocols import Forward, Runner


class DraftModelProposer(Chain):
    """Drafts with a draft model that has its own KV cache.

    The KV of a sequence is kept while the sequence lives; accepted draft tokens are not computed again.
    When blocks run out, the least recently drafted sequences are evicted, and drafts get shorter or empty.

    Args:
        runner: the draft model, used by this proposer only.
        vocab_size: the target model's. Ids that it lacks are never drafted; ids that the draft model
            lacks are replaced by id 0.
        num_embeddings: number of ids in the draft model's embedding.
        max_length: maximum context of the draft model; None sets no limit.
        max_rows: maximum number of rows of one forward.
        live: the draft model belongs to the caller, whose code may change its weights at any time.
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
        self.cache = DraftCache(runner.num_blocks, runner.block_size, runner.num_states)
        self._vocab_size = vocab_size
        self._num_embeddings = num_embeddings
        self._max_length = max_length
        self.live = live
        self._stamp = runner.stamp() if live else None

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        if self.live and (stamp := self.runner.stamp()) != self._stamp:
            self.cache.clear()  # it was computed with the old weights
            self._stamp = stamp
        using, in_prefill = set(sequences), set[Request]()
        return [
            self._start(sequence, length, using, in_prefill)
            for sequence, length in zip(sequences, lengths, strict=True)
        ]

    def _start(
        self, sequence: Sequence, length: int, using: set[Sequence], in_prefill: set[Request]
    ) -> ActiveDraft:
        entry, num_tokens = self.cache.entry(sequence), sequence.num_tokens
        entry.update(sequence)
        if self._max_length is not None:  # the last token of a draft is not computed
            length = min(length, self._max_length - num_tokens + 1)
        if not entry.num_valid and sequence.request in in_prefill:
            length = 0  # wait for the prompt's blocks, which another sample computes in this call
        if length > 0:
            num_slots = self.cache.reserve(entry, num_tokens, num_tokens + length - 1, using)
            length = min(length, num_slots - num_tokens + 1)
        if length > 0:
            length = self.cache.reserve_states(entry, num_tokens, length, using)
        if (
            length > 0
            and not entry.num_valid
            and len(sequence.request.prompt_ids) >= self.cache.block_size
        ):
            in_prefill.add(sequence.request)
        return ActiveDraft(sequence, max(0, length), entry.blocks, entry.states)

    def run(
        self, step: int, batch: Batch, plan: SamplePlan | None, lengths: list[int]
    ) -> list[list[int]]:
        forward = self.runner.forward(batch)
        if plan is None:
            return []
        if self.runner.vocab_size > self._vocab_size:
            forward = Forward(forward.logits[:, : self._vocab_size])
        return [[draw.id] for draw in self.runner.sample(forward, plan)]

    def rows(self, draft: ActiveDraft, step: int) -> Rows:
        sequence = draft.sequence
        if step:
            start, ids = sequence.num_tokens + step - 1, draft.ids[-1:]
        else:
            # At least the last row, whose logits are needed.
            entry = self.cache.entry(sequence)
            start = entry.start(sequence.num_tokens, bool(self.cache.num_states))
            ids = sequence.token_ids(start, sequence.num_tokens)
        return start, [i if i < self._num_embeddings else 0 for i in ids]

    def computed(self, draft: ActiveDraft, step: int) -> None:
        entry = self.cache.entry(draft.sequence)
        if step:
            entry.draft_ids.append(draft.ids[step - 1])
        else:
            entry.num_valid = draft.sequence.num_tokens

    # ---- called by the engine

    def info(self) -> dict[str, Any]:
        """Return the draft model's size, as plain values."""
        info = self.runner.info()
        names = ("architecture", "parameters", "weight_bytes", "dtype", "kv_bytes", "layers")
        return {name: info[name] for name in names}

    def sleep(self, weights: bool) -> None:
        """Release memory, as `Runner.sleep`."""
        self.runner.sleep(weights)
        self.cache.clear()

    def wake(self) -> None:
        """Allocate the memory again, as `Runner.wake`."""
        self.runner.wake()

    def close(self) -> None:
        """Release the draft model."""
        self.cache.clear()
        self.runner.close()
