"""The experts contract: how a mixture-of-experts layer runs on a flat batch.

Registered in transformers' `ExpertsInterface`. A token's output may not depend on which other tokens
chose the same experts, so each expert's rows go through row-invariant products, and the top-k outputs
of a token are added in the order of its own slots, in float32. The pass that is active is told where the
tokens go (`routing.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.context import route
from verbatim.model.packed import one_matrix
from verbatim.model.products import linear, matmul, packed_linear
from verbatim.model.quantize import unpack


def flat_experts(
    experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the chosen experts.

    Args:
        experts: a transformers experts module, whose weights are stacked along a first dimension.
        hidden: `[T, H]`.
        top_k_index: `[T, k]` int64, the experts of each token.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, H]` in `hidden`'s dtype.
    """
    route(experts, top_k_index, top_k_weights)
    num_tokens, top_k = top_k_index.shape
    # Slots sorted by expert: each expert then owns one run of rows. The sort is stable, though no
    # row's result depends on where in the run it stands.
    by_expert = torch.argsort(top_k_index.reshape(-1), stable=True)
    rows = hidden[by_expert // top_k]
    counts = torch.bincount(top_k_index.reshape(-1), minlength=experts.num_experts).tolist()
    counts = counts[: experts.num_experts]
    # Experts that live on several ranks come with something that knows where (`shard.py`).
    share = getattr(experts, "expert_share", None)
    out = run_experts(experts, rows, counts) if share is None else share.run(experts, rows, counts)
    slots = torch.empty_like(rows)
    slots[by_expert[: len(out)]] = out
    weighted = slots.view(num_tokens, top_k, -1).float() * top_k_weights[..., None].float()
    total = weighted[:, 0]
    for k in range(1, top_k):
        total = total + weighted[:, k]
    return total.to(hidden.dtype)


def run_experts(experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """What the experts that lie here make of rows `[n, H]`, sorted by expert, `counts[e]` of each."""
    out = rows.new_empty(sum(counts), rows.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            stop = start + count
            out[start:stop] = _one_expert(experts, expert, rows[start:stop])
            start = stop
    return out


def _one_expert(experts: Any, expert: int, rows: Tensor) -> Tensor:
    """Gate-up (or up), activation, down, for the rows `[n, H]` of one expert."""
    if experts.has_gate:
        mixed = experts._apply_gate(_project(experts, "gate_up_proj", expert, rows))
    else:
        mixed = experts.act_fn(_project(experts, "up_proj", expert, rows))
    out = _project(experts, "down_proj", expert, mixed)
    if getattr(experts, "has_post_expert_norm", False):
        norm: nn.Module = experts.post_expert_norm
        out = norm(out)
    return out


def _project(experts: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    packed = one_matrix(experts, name, expert)
    if packed is not None and not packed[1].columns:
        return packed_linear(rows, *packed, bias)
    weight = getattr(experts, name)[expert] if packed is None else unpack(*packed)
    if experts.is_transposed:  # stored [in, out]
        return matmul(rows, weight) if bias is None else matmul(rows, weight) + bias
    return linear(rows, weight, bias)
