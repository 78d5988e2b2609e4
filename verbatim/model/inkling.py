"""Inkling's attention, in which a row's hidden state decides the bias of each distance to an earlier key.

Scores need no rotary embedding: a bank of profiles by distance, `[d_rel, E]`, is mixed by states of the row
and the head. Keys E or more positions back have no bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.kernels.options import AttentionOptions
from verbatim.kv.recurrence import tree_sum
from verbatim.model import products
from verbatim.model.context import active_context, attend, replaces
from verbatim.model.experts import stack_of
from verbatim.model.invariant import sigmoid
from verbatim.model.masks import attends
from verbatim.model.router import SIGMOID, RouterForm, choose, forced_experts


def _log_scale(floor: float, alpha: float, positions: Tensor) -> Tensor:
    """Return the factor of queries and biases at `positions`, which grows from `floor` positions on."""
    return 1.0 + alpha * torch.log(((positions + 1).float() / floor).clamp(min=1.0))


@attends("InklingAttention")
def _attention(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    shape = *hidden_states.shape[:-1], -1
    heads = *shape, module.head_dim
    q = module.q_norm(module.q_proj(hidden_states).view(heads))
    k = module.k_norm(module.k_sconv(module.k_proj(hidden_states)).view(heads))
    v = module.v_sconv(module.v_proj(hidden_states)).view(heads)
    states = module.r_proj(hidden_states).view(*q.shape[:-1], -1)
    bias = module.rel_logits_proj(states)
    context = active_context()
    assert context is not None
    floor, alpha = module.config.log_scaling_n_floor, module.config.log_scaling_alpha
    if not module.is_sliding and floor is not None:
        scale = _log_scale(floor, alpha, context.positions.to(q.device))[..., None, None]
        q, bias = ((x.float() * scale).to(x.dtype) for x in (q, bias))
    options = AttentionOptions(
        module.scaling, window=module.sliding_window or 0, bias=bias.flatten(0, 1)
    )
    out = attend(module, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), options)
    return module.o_proj(out.reshape(shape)), None


@replaces("InklingRelativeLogits")
def _relative_bias(module: Any, relative_states: Tensor) -> Tensor:
    """Return the bias of each distance: `[..., d_rel]` to `[..., E]`."""
    bias = products.matmul(relative_states.flatten(0, -2), module.proj)
    return bias.view(*relative_states.shape[:-1], -1)


@replaces("InklingTopkRouter")
def _router(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inkling's router, in which the weights of the chosen and of the shared experts have a fixed sum.

    Returns:
        The logits, weights and experts of the routed experts, and the weights of the shared ones.
    """
    rows = hidden_states.reshape(-1, module.hidden_dim)
    logits = products.linear(rows.float(), module.weight.float())
    routed, shared = logits.split([module.num_experts, module.n_shared_experts], dim=1)
    routed, form = routed.contiguous(), RouterForm(module.top_k, SIGMOID)
    chosen, experts = choose(
        routed, form, module.e_score_correction_bias.float(), forced_experts(), rows.dtype
    )
    weights = torch.cat([chosen, sigmoid(shared)], dim=1)
    weights = weights / tree_sum(weights, 1, keepdim=True)
    weights = (weights * module.route_scale * module.global_scale.float()).to(rows.dtype)
    return routed, weights[:, : module.top_k], experts, weights[:, module.top_k :]


@replaces("InklingSharedExperts")
def _shared_experts(module: Any, hidden_states: Tensor, gammas: Tensor) -> Tensor:
    """Return the sum of the shared experts' outputs, weighted by `gammas` `[T, n]`, in float32."""
    names = "gate_proj", "up_proj", "down_proj"
    gates, ups, downs = (stack_of(module, name) for name in names)
    rows = hidden_states.flatten(0, -2)
    total = rows.new_zeros((), dtype=torch.float32)
    for expert, gamma in enumerate(gammas.unbind(1)):
        inner = module.act_fn(gates.project(expert, rows)) * ups.project(expert, rows)
        total = total + downs.project(expert, inner * gamma[:, None]).float()
    return total.to(rows.dtype).view(hidden_states.shape)
