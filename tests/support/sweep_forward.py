"""Forwards of three sequences over a poisoned store, for the toys of the sweep."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from support import toys
from support.stores import poisoned_store
from verbatim.batch import ZERO_STATE, Batch
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder

LENGTHS = (23, 5, 31)  # longer than every window, chunk and threshold of the toys
CUT = (3, 2, 17)
BLOCK_SIZE = 8
BLOCKS = 4  # of each sequence


def empty_store(decoder: Decoder) -> KVStore:
    """A store of all that the three sequences write."""
    return poisoned_store(decoder, 1 + 3 * BLOCKS, BLOCK_SIZE, 3 * (max(LENGTHS) + 1))


def _slot(which: int, position: int) -> int:
    """The slot of a sequence's state after so many tokens."""
    return which * (max(LENGTHS) + 1) + position if position else ZERO_STATE


@functools.cache
def block_tables() -> Tensor:
    order = torch.randperm(3 * BLOCKS, generator=torch.Generator().manual_seed(3)) + 1
    return order.view(3, BLOCKS).to(torch.int32)


def forward(
    decoder: Decoder,
    store: KVStore,
    which: list[int],
    spans: list[tuple[int, int]],
    *,
    last_only: bool = False,
) -> tuple[Tensor, ...]:
    """Logits of positions `spans[i]` of sequence `which[i]`, or of their last positions."""
    rows = [stop - start for start, stop in spans]
    ends = torch.tensor(rows).cumsum(0)

    def slots(positions: list[int]) -> Tensor:
        return torch.tensor([_slot(s, p) for s, p in zip(which, positions, strict=True)]).int()

    ids = [i for s, (a, b) in zip(which, spans, strict=True) for i in sequences()[s][a:b]]
    batch = Batch(
        token_ids=torch.tensor(ids),
        positions=torch.cat([torch.arange(a, b) for a, b in spans]),
        query_starts=torch.cat([torch.zeros(1), ends]).to(torch.int32),
        context_lens=torch.tensor([b for _, b in spans], dtype=torch.int32),
        block_tables=block_tables()[which].contiguous(),
        logit_rows=ends - 1 if last_only else torch.arange(len(ids)),
        state_sources=slots([a for a, _ in spans]),
        state_rows=(ends - 1).int(),
        state_targets=slots([b for _, b in spans]),
    )
    return decoder.forward(batch, store).split([1] * len(rows) if last_only else rows)


@functools.cache
def sequences() -> list[list[int]]:
    return [toys.random_ids(n, seed=n) for n in LENGTHS]


def plain(model: Any) -> list[Tensor]:
    """transformers' own logits, one sequence at a time, without a cache."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences()
        ]


def assert_equal_in_every_schedule(model: Any, decoder: Decoder) -> None:
    """Compare the decoder with transformers' `model`, and with itself in chunks, alone and batched."""
    whole = [(0, n) for n in LENGTHS]
    packed = forward(decoder, empty_store(decoder), [0, 1, 2], whole)
    expected = plain(model)
    scale = max(1.0, *(float(logits.abs().max()) for logits in expected))
    for ours, theirs in zip(packed, expected, strict=True):
        # transformers' two forwards of recurrent layers, chunked and cached, differ by as much.
        limit = 1e-4 if decoder.spec.states else 1e-5
        assert float((ours - theirs).abs().max()) / scale < limit

    store = empty_store(decoder)
    head = forward(decoder, store, [0, 1, 2], [(0, c) for c in CUT])
    tail = forward(decoder, store, [0, 1, 2], list(zip(CUT, LENGTHS, strict=True)))
    for logits, first, rest in zip(packed, head, tail, strict=True):
        assert torch.equal(logits, torch.cat([first, rest]))
    for s, logits in enumerate(packed):
        (alone,) = forward(decoder, empty_store(decoder), [s], [whole[s]], last_only=True)
        assert torch.equal(alone[0], logits[-1])
