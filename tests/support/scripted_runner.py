"""A runner without a model: blocks hold ids, and logits are a hash of all ids that a row attends to.

Any mistake with blocks (a read before the write, two sequences that write one block, a late copy)
changes the hash, and with it the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from support.pools import check_pool
from verbatim.batch import Batch, Choices, Draws, SamplePlan
from verbatim.core import Request, Result
from verbatim.engine.admission import Admission
from verbatim.engine.engine import Engine
from verbatim.engine.scheduler import Scheduler
from verbatim.errors import NotSupported
from verbatim.params import SamplingParams
from verbatim.protocols import CacheLost, Forward
from verbatim.sampling.sampler import sample_rows

VOCAB = 24
EOS = 2
FREE = -7  # content of positions that were never written


class ScriptedRunner:
    """A `Runner` over a table of ids."""

    vocab_size = VOCAB
    hidden_reason = None
    choices = MappingProxyType(
        {"routing": Choices(2, 1, 5), "indices": Choices(reason="a scripted runner has no indexer")}
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_states = 0
        self.num_forwards = 0
        self.held = torch.full((num_blocks, block_size), FREE)
        self.experts = torch.full((num_blocks, block_size, 2, 1), -1, dtype=torch.int16)
        self.num_rows = 0
        self.raises: BaseException | None = None  # raised by the next forward
        # As in a cluster: the method that loses all K and V, and whether they are lost.
        self.loses, self.lost = "", False
        self.limit = 100  # the limit in `CacheLost`
        self.evict: Callable[[], object] = lambda: None

    def forward(self, batch: Batch) -> Forward:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        if self.lost or self.loses == "forward":
            self._recover(self.limit if self.lost else None)
        self.num_forwards += 1
        self.num_rows += batch.num_tokens
        if batch.block_copies:
            source, target = (list(side) for side in zip(*batch.block_copies, strict=True))
            self.held[target] = self.held[source]
            self.experts[target] = self.experts[source]
        slots = batch.slots(self.block_size)
        self.held.view(-1)[slots] = batch.token_ids
        chosen = (batch.token_ids[:, None, None] + torch.arange(2)[:, None]) % 5
        if batch.forced_experts is not None:
            chosen = torch.where(batch.forced_experts >= 0, batch.forced_experts.long(), chosen)
        self.experts.view(-1, 2, 1)[slots] = chosen.short()
        starts, lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        rows: list[Tensor] = []
        wanted = set(batch.logit_rows.tolist())
        for s, length in enumerate(lens):
            context = self.held[batch.block_tables[s].long()].reshape(-1)[:length]
            went = self.experts[batch.block_tables[s].long()].reshape(-1, 2)[:length]
            for row in range(starts[s], starts[s + 1]):
                if row in wanted:
                    end = length - starts[s + 1] + row + 1
                    rows.append(logits_after(context[:end].tolist(), went[:end].tolist()))
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        return Forward(logits, logits[:, :3].clone() if batch.wants_hidden else None)

    def _recover(self, limit: int | None) -> None:
        self.lost, self.loses = False, ""
        self.held.fill_(FREE)
        self.evict()
        raise CacheLost("all is lost", limit)

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        if self.loses == "sample":
            self._recover(self.limit)
        if self.loses == "record":
            self.lost, self.loses = True, ""
        return sample_rows(forward.logits, plan)

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        return forward.logits[rows].clone()

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        num_rows = 0 if self.lost else num_tokens
        return self.experts[block_table].reshape(-1, 2, 1)[:num_rows].clone()

    def info(self) -> dict[str, Any]:
        return {}

    def stats(self) -> dict[str, Any]:
        return {}

    def sleep(self, weights: bool = False) -> None:
        raise NotSupported("a scripted runner does not sleep")

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def logits_after(ids: list[int], experts: list[list[int]]) -> Tensor:
    """Return `[VOCAB]` logits for the token after `ids`, which were routed to these experts."""
    assert FREE not in ids, "a row attends to a position that was never written"
    seed = hashlib.blake2b(repr((ids, experts)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") % 2**62)
    return torch.randn(VOCAB, generator=generator) * 2


def scripted_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_batch_tokens: int = 64,
    max_sequences: int = 8,
    max_prompt_rows: int = 16,
    prefix_cache: bool = True,
    max_waiting: int | None = None,
) -> tuple[Engine, Admission]:
    """Return an engine over a `ScriptedRunner`, and its admission."""
    runner = ScriptedRunner(num_blocks, block_size)
    scheduler = Scheduler(
        runner, max_batch_tokens, max_sequences, max_prompt_rows, prefix_cache=prefix_cache
    )
    limit = (num_blocks - 1) * block_size
    runner.evict = scheduler.evict_all
    engine = Engine(runner, scheduler, max_waiting=max_waiting)
    eos_ids = frozenset({EOS})
    return engine, Admission(None, runner, limit, "the pool", eos_ids, adapters=engine.adapters)


def solo(prompt: list[int], params: SamplingParams) -> Result:
    """Return the result of a request that runs alone, with more than enough memory."""
    engine, admission = scripted_engine(
        512, 4, max_batch_tokens=4096, max_sequences=64, prefix_cache=False
    )
    request = admission.admit(prompt, params)
    engine.add(request)
    while engine.step():
        pass
    return result_of(request)


def result_of(request: Request) -> Result:
    if request.error is not None:
        raise request.error
    assert request.result is not None
    return request.result


def check(engine: Engine) -> None:
    """Check the accounting: a block's reference count is the number of block tables that contain it."""
    scheduler = engine.scheduler
    pool, waiting = scheduler.pool, list(scheduler.waiting)
    check_pool(pool)
    assert not set(waiting) & set(scheduler.running)
    assert len(scheduler.running) <= scheduler.max_sequences
    held = [0] * pool.num_blocks
    for sequence in [*scheduler.running, *waiting]:
        assert not sequence.finished or sequence.num_recorded is not None
        assert len(set(sequence.blocks)) == len(sequence.blocks)
        assert len(sequence.blocks) * scheduler.block_size >= sequence.num_computed
        assert sequence.num_uncomputed > 0 or sequence.candidates is not None
        for block in sequence.blocks:
            held[block] += 1
    assert held == pool._ref_counts
    assert pool.num_used == sum(count > 0 for count in held)
    active = {request.request_id for request in engine.active}
    assert {s.request.request_id for s in [*scheduler.running, *waiting]} <= active
