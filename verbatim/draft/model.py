"""Drafts from a separate, smaller model."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verbatim.batch import Batch, SampleRow
from verbatim.common.shield import Shield
from verbatim.core import CachedBlocks, Sequence
from verbatim.draft.layers import ActiveDraft, LayersProposer
from verbatim.kv.blocks import BlockPool
from verbatim.kv.prefixes import block_keys
from verbatim.kv.states import StateSlots
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.protocols import Runner
from verbatim.sampling.stopping import num_in_common


class DraftModelLayers(DraftLayers):
    """All layers of a draft model, for a target model with another vocabulary size.

    Args:
        vocab_size: the target model's vocabulary size. Ids beyond it are never drafted.
        num_embeddings: number of rows of the draft model's embedding; id 0 replaces ids beyond it.
    """

    hooks = True

    def __init__(self, decoder: Decoder, vocab_size: int, num_embeddings: int) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._num_embeddings = num_embeddings

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        if self._num_embeddings < self._vocab_size:
            batch.token_ids = batch.token_ids.where(batch.token_ids < self._num_embeddings, 0)
        return self._decoder, store

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        return super().run(k, batch, store)[:, : self._vocab_size]

    def chain(
        self, k: int, batch: Batch, store: KVStore, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        has_more = self._decoder.spec.vocab_size > self._vocab_size
        return None if has_more else super().chain(k, batch, store, rows, lengths)


@dataclass(slots=True)
class DraftCache(CachedBlocks):
    """The draft model's cache of one sequence.

    Attributes:
        num_tokens: length of the sequence when its last draft was made.
        draft_ids: the last draft. K and V of all its tokens but the last one follow those of the sequence.
    """

    num_tokens: int = 0
    draft_ids: list[int] = field(default_factory=list)


Ref = weakref.ref[Sequence]


class DraftModelProposer(LayersProposer):
    """Drafts with a draft model that has its own blocks and states.

    They are kept until their sequence ends; accepted draft tokens are not recomputed. Samples of a request
    share the blocks of their prompt. With `shares`, all sequences share the blocks of common prefixes,
    including those of ended sequences. When blocks run out, those of the least recently drafted sequences
    are freed, and drafts become shorter or empty.

    Args:
        runner: the draft model with `DraftModelLayers`, used by this proposer only.
        max_length: maximum context of the draft model; None sets no limit.
        shares: whether the engine has a prefix cache.

    Attributes:
        waiting: sequences that got no draft in the last call, because another one computed their first block.
    """

    def __init__(
        self,
        runner: Runner,
        max_rows: int,
        *,
        max_length: int | None,
        live: bool,
        shares: bool = True,
    ) -> None:
        super().__init__(runner, max_rows, live=live)
        self._block_size = runner.block_size
        self._max_length = max_length
        self._shares = shares
        self.waiting = weakref.WeakSet[Sequence]()
        self.clear()

    def clear(self) -> None:
        """Discard all cached blocks and states."""
        self.pool = BlockPool(self.runner.num_blocks, self._block_size)
        self._states = StateSlots(self.runner.num_states)
        self._caches: dict[Ref, DraftCache] = {}  # the least recently used first
        self._stamp = self.runner.stamp() if self.live else None

    def begin(self, sequences: list[Sequence], lengths: list[int]) -> list[ActiveDraft]:
        self.waiting.clear()
        with Shield().up():  # Ctrl-C must not interrupt an allocation
            if self.live and self.runner.stamp() != self._stamp:
                self.clear()  # computed with the old weights
            self.update()
            if self.live and not self._caches:
                self.pool.forget()  # the weights may have changed undetected
            using, in_prefill = set(map(weakref.ref, sequences)), set[bytes]()
            return [
                self._start(sequence, length, using, in_prefill)
                for sequence, length in zip(sequences, lengths, strict=True)
            ]

    def update(self) -> None:
        """Free the blocks of sequences that have ended; index the blocks that are full."""
        for ref, cache in list(self._caches.items()):
            sequence = ref()
            if sequence is None or sequence.finished:
                self._free(ref)
                continue
            if cache.draft_ids:
                ids, begin = cache.draft_ids[:-1], cache.num_tokens
                accepted = num_in_common(ids, sequence.token_ids(begin, begin + len(ids)))
                cache.num_computed, cache.draft_ids = begin + accepted, []
            full = cache.num_computed // self._block_size
            keys = self._keys(sequence, cache.num_indexed, full)
            for i, key in enumerate(keys, cache.num_indexed):
                cache.blocks[i] = self.pool.remember(cache.blocks[i], key)
            cache.num_indexed = full

    def _keys(self, sequence: Sequence, begin: int, end: int) -> list[bytes]:
        """Return the keys of blocks `begin` to `end` of a sequence."""
        salt = b"" if self._shares else sequence.request.request_id.encode()
        return [key + salt for key in block_keys(sequence, self._block_size)[begin:end]]

    def _start(
        self, sequence: Sequence, length: int, using: set[Ref], in_prefill: set[bytes]
    ) -> ActiveDraft:
        """Start a draft of at most `length` tokens, limited by the free blocks and states.

        Args:
            using: sequences that must keep their blocks.
            in_prefill: keys of first blocks that another sequence computes in this call.
        """
        ref, pool, states, size = weakref.ref(sequence), self.pool, self._states, self._block_size
        self._caches[ref] = cache = self._caches.pop(ref, None) or DraftCache()
        num_tokens, first = sequence.num_tokens, set[bytes]()
        if not cache.num_computed and not states.enabled:
            pool.release(cache.blocks)
            keys = self._keys(sequence, 0, (num_tokens - 1) // size)
            cache.blocks = pool.find(keys)
            pool.share(cache.blocks)
            cache.num_indexed = len(cache.blocks)
            cache.num_computed = cache.num_indexed * size
            first = set() if cache.blocks else set(keys[:1])
        # Compute at least the last row, as its logits are needed.
        cache.num_computed = min(cache.num_computed, num_tokens - 1)
        if states.enabled:
            counts = [count for count in cache.states if count <= cache.num_computed]
            cache.num_computed = max(counts, default=0)
            states.keep_only(cache, cache.num_computed)
        end = num_tokens + length - 1  # the last token of a draft is not computed
        if self._max_length is not None:
            end = min(end, self._max_length)
        if first & in_prefill:
            end = 0
            self.waiting.add(sequence)
        end = self._reserve(cache, num_tokens, end, using)
        if end >= num_tokens:
            in_prefill |= first
        length = end - num_tokens + 1
        draft = ActiveDraft(sequence, length, cache)
        cache.num_tokens, cache.draft_ids = num_tokens, draft.ids
        return draft

    def _reserve(self, cache: DraftCache, num_tokens: int, end: int, using: set[Ref]) -> int:
        """Allocate blocks for up to `end` positions, and state slots from position `num_tokens` on.

        Returns the number of positions; if it is less than `num_tokens`, nothing was allocated.
        """
        pool, states = self.pool, self._states
        count = end - num_tokens + 1
        while True:
            room = (len(cache.blocks) + pool.num_free) * self._block_size
            if end <= room and count <= states.num_free(count):
                break
            idle = next((ref for ref in self._caches if ref not in using), None)
            if idle is None:
                break
            self._free(idle)
        end = min(end, room, num_tokens - 1 + states.num_free(count))
        if end >= num_tokens:
            pool.resize(cache, end)
            states.reserve(cache, range(num_tokens, end + 1))
        return end

    def _free(self, ref: Ref) -> None:
        cache = self._caches.pop(ref)
        self.pool.release(cache.blocks)
        self._states.keep_only(cache, 0)

    # ---- called by the engine

    def info(self) -> dict[str, Any]:
        """Return the draft model's size, as plain values."""
        info = self.runner.info()
        names = ("architecture", "parameters", "weight_bytes", "dtype", "kv_bytes", "layers")
        return {name: info[name] for name in names}

    def sleep(self, weights: bool) -> None:
        """Release memory, as `Runner.sleep`."""
        self.runner.sleep(weights)
        self.clear()

    def wake(self) -> None:
        """Allocate the memory again, as `Runner.wake`."""
        self.runner.wake()

    def close(self) -> None:
        """Release the draft model."""
        self._caches.clear()
        self.runner.close()
