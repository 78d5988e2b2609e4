"""Logits processing before a draw: penalties, biases, bans, temperature, filters.

These are functions of one float32 row `[V]` that return a new row. They are the readable reference for the
kernel, and agree with transformers' warpers on logits without ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from verbatim.batch import SampleRow
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams
from verbatim.sampling.logprobs import lane_sum, masses
from verbatim.sampling.stopping import stop_sequences

_MINUS_INF = int(torch.tensor(-math.inf, device="cpu").view(torch.int32))


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature and the filters, in order."""
    logits = logits / params.temperature
    if params.top_k:  # ties with the k-th are kept
        kth_largest = torch.topk(logits, min(params.top_k, logits.shape[0])).values[-1]
        logits = logits.masked_fill(logits < kth_largest, -math.inf)
    if params.top_p < 1:
        logits = top_p(logits, params.top_p)
    if params.min_p > 0:  # relative to the probability of the likeliest id
        is_unlikely = masses(logits, logits.max().item()) < params.min_p
        logits = logits.masked_fill(is_unlikely, -math.inf)
    if params.typical_p < 1:
        logits = typical(logits, params.typical_p)
    return logits


def edit(logits: Tensor, row: SampleRow) -> Tensor:
    """Apply penalties, biases, bans and the structure, in this order, in float32.

    Without any, return the tensor itself. The output of the request's custom processors replaces the logits.
    """
    params, size = row.params, logits.shape[0]
    if row.processed is not None:
        logits = row.processed
    if not is_edited(row):
        return logits
    logits = logits.float()
    if row.counts is not None:
        ids, counts = row.counts.below(size)
        if params.repetition_penalty != 1:
            logits = repetition_penalty(logits, params.repetition_penalty, ids)
        if params.presence_penalty or params.frequency_penalty:
            presence, frequency = params.presence_penalty, params.frequency_penalty
            logits = count_penalties(logits, presence, frequency, ids, counts)
    if row.bias is not None:
        ids, values = row.bias.below(size)
        logits = logits.index_copy(0, ids, logits[ids] + values)
    if row.banned_ids:
        banned = [i for i in row.banned_ids if 0 <= i < size]
        logits = logits.index_fill(0, torch.tensor(banned, dtype=torch.int64), -math.inf)
    if row.mask is not None:
        logits = apply_mask(logits, row.mask)
    return logits


def apply_mask(logits: Tensor, mask: Tensor) -> Tensor:
    """Set logits `[V]` float32 of ids that are not in `mask`, a `bitmask`, to -inf.

    Works on bit patterns, as `masked_fill` takes ten times as long for a mask without long runs.
    """
    size = logits.shape[0]
    bits = np.unpackbits(mask.numpy().view(np.uint8), count=size, bitorder="little")
    keep = torch.from_numpy(bits).int().neg_()  # all ones, or zero
    kept = logits.view(torch.int32) & keep
    return kept.bitwise_or_(keep.bitwise_not_().bitwise_and_(_MINUS_INF)).view(torch.float32)


def is_edited(row: SampleRow) -> bool:
    """Return whether penalties, biases, bans or a structure change this row's logits."""
    return bool(
        row.counts is not None or row.bias is not None or row.banned_ids or row.mask is not None
    )


def repetition_penalty(logits: Tensor, penalty: float, ids: Tensor) -> Tensor:
    """Divide positive logits of seen ids by the penalty, and multiply negative ones (Keskar et al. 2019)."""
    selected = logits[ids]
    return logits.index_copy(
        0, ids, torch.where(selected < 0, selected * penalty, selected / penalty)
    )


def count_penalties(
    logits: Tensor, presence: float, frequency: float, ids: Tensor, counts: Tensor
) -> Tensor:
    """Subtract `presence` once, and `frequency` once per occurrence, for ids of the completion."""
    penalties = torch.where(counts > 0, presence + frequency * counts, 0.0)
    return logits.index_copy(0, ids, logits[ids] - penalties)


def is_greedy(logits: Tensor, temperature: float) -> bool:
    """Return whether the largest logit is taken: at temperature 0, or if the division overflows."""
    return not torch.isfinite(logits.max() / temperature)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest ids that reach probability `p`, by logit descending and id ascending."""
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    mass = masses(ordered, ordered[0].item())
    before = mass.cumsum(0).roll(1)
    before[0] = 0.0
    return logits.index_fill(0, ids[before >= p * lane_sum(mass)], -math.inf)


def typical(logits: Tensor, p: float) -> Tensor:
    """Keep the ids with surprise nearest to the entropy, up to mass `p` (Meister et al. 2022)."""
    top = logits.max().item()
    mass = masses(logits, top).masked_fill(logits == -math.inf, 0.0)
    total = lane_sum(mass)
    surprise = top - logits.double() + math.log(total)
    entropy = lane_sum(torch.where(mass > 0, mass / total * surprise, 0.0))
    distance, ids = torch.sort((surprise - entropy).abs(), stable=True)
    crossing = int((mass[ids].cumsum(0) < p * total).sum())
    least_typical = distance[min(crossing, len(distance) - 1)]
    return logits.masked_fill((surprise - entropy).abs() > least_typical, -math.inf)


def bitmask(ids: Iterable[int], vocab_size: int) -> Tensor:
    """Return a mask of ids below `vocab_size`: int32 `[ceil(V / 32)]`, bit `i % 32` of word `i // 32`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))


def in_mask(mask: Tensor, token_id: int) -> bool:
    """Return whether a `bitmask` contains an id."""
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest if a parameter has a token id outside of the vocabulary."""
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [i for word in params.bad_words if not isinstance(word, str) for i in word],
        "stop_token_ids": [i for ids in stop_sequences(params) for i in ids],
    }
    for name, ids in named.items():
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})"
                )
