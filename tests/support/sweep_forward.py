"""Forwards of three sequences over a poisoned store, for the toys of the sweep."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from support import toys
from verbatim.batch import Batch
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder

LENGTHS = (23, 5, 31)  # longer than every window, chunk and threshold of the toys
CUT = (3, 2, 17)
BLOCK_SIZE = 8
BLOCKS = 4  # of each sequence


def poisoned_store(decoder: Decoder) -> KVStore:
    """A store in which every value that was never written is NaN."""
    store = KVStore(
        decoder.anatomy.layers, 1 + 3 * BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu")
    )
    for k, v in store.layers:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    return store


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
    ids = [i for s, (a, b) in zip(which, spans, strict=True) for i in sequences()[s][a:b]]
    batch = Batch(
        token_ids=torch.tensor(ids),
        positions=torch.cat([torch.arange(a, b) for a, b in spans]),
        query_starts=torch.cat([torch.zeros(1), ends]).to(torch.int32),
        context_lens=torch.tensor([b for _, b in spans], dtype=torch.int32),
        block_tables=block_tables()[which].contiguous(),
        logit_rows=ends - 1 if last_only else torch.arange(len(ids)),
    )
    return decoder.forward(batch, store).split([1] * len(rows) if last_only else rows)


@functools.cache
def sequences() -> list[list[int]]:
    return [toys.random_ids(n, seed=n) for n in LENGTHS]
