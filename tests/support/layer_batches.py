"""Batches of one to 33 rows, and every bit that a decoder makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.stores import poisoned_store
from verbatim.batch import ZERO_STATE, Batch, block_tables
from verbatim.model.decoder import Decoder
from verbatim.model.flat import contents_of
from verbatim.model.patching import threads

BLOCK = 4
STATES = 100  # of three sequences


def make_batch(lengths: list[int], before: list[int]) -> Batch:
    """Sequences of `lengths` more rows, behind `before` earlier ones; each has blocks of its own."""
    total = [a + b for a, b in zip(lengths, before, strict=True)]
    positions = [torch.arange(b, t) for b, t in zip(before, total, strict=True)]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(starts[-1])
    blocks = [list(range(1 + 12 * s, 1 + 12 * s - (-t // BLOCK))) for s, t in enumerate(total)]
    return Batch(
        token_ids=(torch.arange(rows) * 31 + 7) % 120 + 3,
        positions=torch.cat(positions),
        query_starts=starts,
        context_lens=torch.tensor(total, dtype=torch.int32),
        block_tables=block_tables(blocks),
        logit_rows=torch.arange(rows),
        state_sources=_states(before),
        state_rows=starts[1:] - 1,
        state_targets=_states(total),
    )


def _states(lengths: list[int]) -> Tensor:
    """The slots of the states after so many rows of each sequence."""
    slots = [1 + 32 * s + n if n else ZERO_STATE for s, n in enumerate(lengths)]
    return torch.tensor(slots, dtype=torch.int32)


# 1, 2, 7 and 33 rows.
BATCHES = [
    make_batch([1], [0]),
    make_batch([1, 1], [1, 0]),
    make_batch([1, 4, 2], [2, 1, 0]),
    make_batch([2, 20, 11], [3, 5, 2]),
]


def outputs(decoder: Decoder, num_threads: int = 2) -> list[bytes]:
    """Every bit of the logits, and of all K, V and states, after each of `BATCHES`."""
    store = poisoned_store(decoder, 40, BLOCK, STATES)
    with threads(num_threads):
        found = [decoder.forward(batch, store) for batch in BATCHES]
        return [*map(as_bytes, [*found, *contents_of(store)])]


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def wrong(model: Any, place: str, formula: Callable[[Any, Any], Any]) -> Any:
    """`model`, in which one module's class computes `formula(its own forward's result, its input)`."""
    module = model.get_submodule(place)
    base = type(module)

    def forward(self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        x = kwargs.pop("hidden_states", x)
        return formula(base.forward(self, x, *args, **kwargs), x)

    module.__class__ = type(base.__name__, (base,), {"forward": forward})
    return model
