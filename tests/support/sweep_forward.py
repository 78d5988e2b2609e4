"""Forwards of three sequences over a poisoned KV store, for the toys of the sweep."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from support.stores import Sequences, Span
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder

CUT = (3, 2, 17)


@functools.cache
def sequences() -> Sequences:
    return Sequences(23, 5, 31, block_size=8)  # longer than every window and chunk of the toys


def logits_of(
    decoder: Decoder,
    which: list[int],
    spans: list[Span],
    store: KVStore | None = None,
    *,
    last_only: bool = False,
) -> tuple[Tensor, ...]:
    """Return the logits of positions `spans[i]` of sequence `which[i]`, or only of the last of them."""
    store = store or sequences().store(decoder)
    logits = decoder.run(sequences().batch(which, spans, last_only=last_only), store).logits
    return logits.split([1 if last_only else end - begin for begin, end in spans])


def plain(model: Any) -> list[Tensor]:
    """Return transformers' logits, one sequence at a time, without a cache."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            for ids in sequences().ids
        ]


def assert_equal_in_every_schedule(model: Any, decoder: Decoder) -> None:
    """Check that the decoder matches transformers' `model`, and itself in chunks, alone and batched."""
    every, whole = [0, 1, 2], sequences().whole
    packed = logits_of(decoder, every, whole)
    expected = plain(model)
    scale = max(1.0, *(float(logits.abs().max()) for logits in expected))
    for ours, theirs in zip(packed, expected, strict=True):
        # transformers' own chunked and cached forwards of recurrent layers differ by as much.
        limit = 1e-4 if decoder.spec.states else 1e-5
        assert float((ours - theirs).abs().max()) / scale < limit

    store = sequences().store(decoder)
    head = logits_of(decoder, every, [(0, c) for c in CUT], store)
    tail = logits_of(decoder, every, [(c, n) for c, (_, n) in zip(CUT, whole, strict=True)], store)
    for logits, first, rest in zip(packed, head, tail, strict=True):
        assert torch.equal(logits, torch.cat([first, rest]))
    for s, logits in enumerate(packed):
        (alone,) = logits_of(decoder, [s], [whole[s]], last_only=True)
        assert torch.equal(alone[0], logits[-1])
