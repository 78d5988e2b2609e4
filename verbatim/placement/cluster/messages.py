"""Batches, sampling plans and draws as plain data, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verbatim.batch import (
    Adapter,
    Batch,
    Candidates,
    Draws,
    LowRank,
    SamplePlan,
    SampleRow,
    Support,
)
from verbatim.params import SamplingParams


class Mark(NamedTuple):
    """The identity of a piece of work; later ones compare larger."""

    epoch: int  # raised whenever the stages are connected anew
    step: int
    part: int  # micro-batch of the step


# What a sampler asks of a request's parameters; the rest decides what the engine does around it.
_DRAWN_WITH = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "support",
)


def pack_batch(batch: Batch) -> dict[str, Any]:
    """Convert a batch to plain data."""
    return {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "block_tables": batch.block_tables,
        "logit_rows": batch.logit_rows,
        "block_copies": batch.block_copies,
        "wants_hidden": batch.wants_hidden,
        "forced_experts": batch.forced_experts,
        "forced_keys": batch.forced_keys,
        "records_keys": batch.records_keys,
        "state_sources": batch.state_sources,
        "state_rows": batch.state_rows,
        "state_targets": batch.state_targets,
        "adapters": batch.adapters,
    }


def unpack_batch(plain: dict[str, Any]) -> Batch:
    """Convert plain data to the batch."""
    copies = [(source, target) for source, target in plain["block_copies"]]
    return Batch(**{**plain, "block_copies": copies})


def pack_adapter(adapter: Adapter) -> dict[str, Any]:
    """Convert an adapter to plain data."""
    layers = {name: [low.a, low.b, low.scaling] for name, low in adapter.layers.items()}
    return {"name": adapter.name, "number": adapter.number, "layers": layers}


def unpack_adapter(plain: dict[str, Any]) -> Adapter:
    """Convert plain data to the adapter."""
    layers = {name: LowRank(*low) for name, low in plain["layers"].items()}
    return Adapter(plain["name"], plain["number"], layers)


def pack_plan(plan: SamplePlan) -> dict[str, Any]:
    """Convert a plan without logits processors; equal parameters are sent once."""
    places: dict[int, int] = {}
    params: list[dict[str, Any]] = []
    rows = []
    for row in plan.rows:
        assert row.processed is None, "rows with processors are drawn by the engine"
        if id(row.params) not in places:
            places[id(row.params)] = len(params)
            params.append(_pack_params(row.params))
        rows.append(
            {
                "params": places[id(row.params)],
                "seed": row.seed,
                "sample_index": row.sample_index,
                "position": row.position,
                "prompt_ids": _ids(row.prompt_ids),
                "output_ids": _ids(row.output_ids),
                "banned_ids": list(row.banned_ids),
                "target": row.target,
                "num_logprobs": row.num_logprobs,
                "mask": row.mask,
                "num_candidates": row.num_candidates,
            }
        )
    return {"params": params, "rows": rows, "logits_rows": plan.logits_rows}


def unpack_plan(plain: dict[str, Any]) -> SamplePlan:
    """Convert plain data to the plan; rows with equal parameters share them."""
    params = [_unpack_params(entry) for entry in plain["params"]]
    rows = []
    for row in plain["rows"]:
        row["params"] = params[row["params"]]
        for name in ("prompt_ids", "output_ids"):
            row[name] = row[name].tolist()
        rows.append(SampleRow(**row))
    return SamplePlan(rows, plain["logits_rows"])


def pack_draws(draws: Draws) -> dict[str, Any]:
    """Convert draws to plain data."""
    return {
        "ids": draws.ids,
        "logprobs": draws.logprobs,
        "sampled_logprobs": draws.sampled_logprobs,
        "top_ids": draws.top_ids,
        "top_logprobs": draws.top_logprobs,
        "candidates": [[row, c.ids, c.logprobs, c.scores] for row, c in draws.candidates.items()],
        "supports": [[row, *support] for row, support in draws.supports.items()],
    }


def unpack_draws(plain: dict[str, Any]) -> Draws:
    """Convert plain data to the draws."""
    candidates = {row: Candidates(*columns) for row, *columns in plain["candidates"]}
    supports = {row: Support(*columns) for row, *columns in plain["supports"]}
    return Draws(**{**plain, "candidates": candidates, "supports": supports})


def _pack_params(params: SamplingParams) -> dict[str, Any]:
    bias = params.logit_bias
    return {
        **{name: getattr(params, name) for name in _DRAWN_WITH},
        "logit_bias": None if bias is None else [[i, value] for i, value in bias.items()],
    }


def _unpack_params(plain: dict[str, Any]) -> SamplingParams:
    bias = plain["logit_bias"]
    return SamplingParams(**{**plain, "logit_bias": None if bias is None else dict(bias)})


def _ids(ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)
