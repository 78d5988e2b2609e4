"""Sampling of logit rows with Megatron's parameters, by Verbatim's sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verbatim.batch import Draws, SamplePlan, SampleRow
from verbatim.compat.megatron.params import SamplingParams
from verbatim.core import TopLogprobs
from verbatim.errors import InvalidRequest
from verbatim.params import SamplingParams as EngineParams
from verbatim.sampling.sampler import sample_rows


def draw_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    seed: int,
    position: int = 0,
    vocab_size: int | None = None,
    top_n: int = 0,
) -> Draws:
    """Draw from each row of `[B, V]`, row b with sample index b.

    Args:
        params: of each row.
        vocab_size: larger ids can't be drawn.
        top_n: number of likeliest ids to report, of the raw distribution.

    Raises:
        InvalidRequest: not logits `[B, V]`, or a row without a token that can be drawn.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidRequest(f"logits must be a floating point [B, V], not {list(logits.shape)}")
    if vocab_size is not None and vocab_size < 1:
        raise InvalidRequest(f"vocab_size={vocab_size}: must be 1 or more")
    beyond = range(logits.shape[1] if vocab_size is None else vocab_size, logits.shape[1])
    rows = [
        SampleRow(
            EngineParams(**each.sampling()),
            seed,
            index,
            position,
            banned_ids=list(beyond),
            num_logprobs=top_n,
        )
        for index, each in enumerate(params)
    ]
    draws = sample_rows(logits, SamplePlan(rows))
    if -1 in draws.ids:
        raise InvalidRequest(f"row {draws.ids.index(-1)} of logits holds NaN or +inf, or only -inf")
    return draws


def top_of_rows(logits: Tensor, top_n: int) -> list[TopLogprobs]:
    """Return the `top_n` likeliest ids of each row of `[R, V]`, without drawing."""
    row = SampleRow(EngineParams(), 0, 0, 0, target=0, num_logprobs=top_n)
    return tops_of(sample_rows(logits, SamplePlan([row] * logits.shape[0])))


def tops_of(draws: Draws) -> list[TopLogprobs]:
    """Return the likeliest ids of each row with their log-probs."""
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(draws.top_ids, draws.top_logprobs, strict=True)
    ]


def draw_seed() -> int:
    """Draw a seed from torch's default generator, so that `torch.manual_seed` repeats a run."""
    return int(torch.randint(2**53, ()))
