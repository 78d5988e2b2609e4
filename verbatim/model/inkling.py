"""Inkling's attention, in which a row's hidden state decides the bias of each distance to an earlier key.

Scores need no rotary embedding: a bank of profiles by distance, `[d_rel, E]`, is mixed by states of the row
and the head. Keys E or more positions back have no bias. In Inkling 2, layers also attend to the sums of
earlier blocks of layers, and the taps of some short convolutions depend on the row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verbatim.kernels.options import AttentionOptions
from verbatim.kv.recurrence import tree_sum
from verbatim.model import products
from verbatim.model.context import DistanceBias, active_context, attend, replaces
from verbatim.model.experts import stack_of
from verbatim.model.invariant import exp, logsigmoid, sigmoid
from verbatim.model.masks import attends
from verbatim.model.recurrent_ops import FUNCTIONS, previous
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
    correction = module.e_score_correction_bias.float()
    _, experts = choose(routed, form, correction, forced_experts())
    scores = logsigmoid(torch.cat([routed.gather(1, experts.long()), shared], dim=1))
    weights = exp(scores - scores.amax(1, keepdim=True))
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


# ---- Inkling 2, also with a loop over some of its layers


def _named(*names: str) -> list[str]:
    return [f"{model}{name}" for model in ("Inkling2", "Inkling2Loop") for name in names]


def _no_distances(*_: Any, **__: Any) -> None:
    """Return None in place of the distances of all pairs of rows, which only the replaced bias would read."""


FUNCTIONS["get_relative_distance"] = _no_distances


@replaces(*_named("RelativePositionBias"))
def _position_bias(
    module: Any, hidden_states: Tensor, relative_distance: Any, position_ids: Tensor
) -> DistanceBias:
    states = module.linear(hidden_states).unflatten(-1, (module.num_heads, -1))
    return DistanceBias(_relative_bias(module, module.norm(states, position_ids)))


@replaces(*_named("L2Clip"))
def _clip(module: Any, x: Tensor) -> Tensor:
    """Scale heads whose L2 norm is above the threshold down to it."""
    wide = x.float()
    norm = torch.sqrt(tree_sum(wide * wide, -1, keepdim=True))
    clipped: Tensor = wide * (module.threshold / (norm + 1e-6)).clamp(max=1.0)
    return clipped.to(x.dtype)


@replaces(*_named("ScaledL2Clip"))
def _scaled_clip(module: Any, x: Tensor, position_ids: Any = None) -> Tensor:
    return _clip(module, x.float() * module.scale.float()).to(x.dtype)


@replaces(*_named("GatedOutputProjection"))
def _gated_output(module: Any, attn_output: Tensor, hidden_states: Tensor) -> Tensor:
    gate = sigmoid(module.gate_proj(hidden_states).float())
    out: Tensor = module.linear((attn_output.float() * gate).to(attn_output.dtype))
    return out


@replaces(*_named("DynamicShortConvolution"), recurrent=True)
def _dynamic_convolution(
    module: Any, hidden_states: Tensor, dynamic_input: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Convolve with taps that are sums of weights by channel and of weights by row and head."""
    heads = *hidden_states.shape[:-1], module.num_heads, -1
    by_row = module.weight_proj(dynamic_input).float().view(heads)
    lagged = residual = hidden_states.float()
    total = torch.zeros_like(residual).view(heads)
    for lag, by_channel in enumerate(module.static_weight.float()):
        lagged = previous(lagged) if lag else lagged
        taps = by_channel.view(module.num_heads, -1) + by_row[..., lag, None]
        total = total + lagged.view(heads) * taps
    total = total.view(residual.shape) + residual
    return (total / math.sqrt(2 * module.conv_kernel_size + 1)).to(hidden_states.dtype)


@replaces(*_named("BlockAttentionResidual"))
def _block_residual(module: Any, blocks: Tensor, partial_block: Tensor) -> tuple[Tensor, ...]:
    queries = module.query.view(-1, module.query.shape[-1])
    return _attend_to_blocks(module.norm, queries, blocks, partial_block).unbind(-2)


@replaces("Inkling2LoopMessageAttentionResidual")
def _messages(module: Any, blocks: Tensor, partial_block: Tensor, loop_layer_idx: int) -> Tensor:
    return _attend_to_blocks(module.norm, module.query[loop_layer_idx], blocks, partial_block)


def _attend_to_blocks(norm: Any, queries: Tensor, blocks: Tensor, partial_block: Tensor) -> Tensor:
    """Return means of a row's n `blocks` `[B, T, n, H]` and its partial one, `[B, T, Q, H]` float32.

    They are weighted by the softmax of their products with the Q `queries` `[Q, H]`.
    """
    states = norm(torch.cat([blocks, partial_block.unsqueeze(-2)], dim=-2).float())
    scores = products.linear(states.flatten(0, -2), queries.float()) * states.shape[-1] ** -0.5
    scores = scores.view(*states.shape[:-1], -1).transpose(-1, -2)  # [B, T, Q, n + 1]
    weights = exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / tree_sum(weights, -1, keepdim=True)
    return tree_sum(weights[..., None] * states.unsqueeze(-3), -2)
