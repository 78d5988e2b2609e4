"""Recurrent layers of which the whole forward is replaced, as it calls no function for its recurrence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.kv.recurrence import linear_recurrence
from verbatim.kv.states import StateShape
from verbatim.model.invariant import exp, sigmoid, softplus
from verbatim.model.products import matmul
from verbatim.model.recurrent_ops import causal_conv1d, of_each_row, update_state


def _lightning_attention(
    layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Lightning attention (Qin et al. 2024, arXiv:2401.04658), as MiniMax has it."""
    heads, size = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).flatten(0, 1)
    q, k, v = qkv.view(-1, heads, 3 * size).float().split(size, dim=-1)
    decay = exp(-layer.slope_rate.float().view(1, heads)).expand(len(q), heads)
    update = partial(linear_recurrence, q, k, v, decay, None)
    shape = StateShape((heads, size, size), torch.float32)
    out = update_state(shape, update, lambda: of_each_row(q, k, v))
    out = layer.norm(out.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return layer.out_proj(sigmoid(layer.output_gate(hidden_states)) * out), None


def _griffin(
    layer: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """RecurrentGemma's block of a convolution and a gated recurrence, whose states its modules keep."""
    x, conv = layer.linear_x(input_states).transpose(1, 2), layer.conv_1d
    x = causal_conv1d(x, conv.weight[:, 0], conv.bias).transpose(1, 2)
    x = _rg_lru(layer.rg_lru, x, position_ids) * layer.act_fn(layer.linear_y(input_states))
    return layer.linear_out(x), None


def _rg_lru(layer: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427), a head for each channel."""
    flat = x.flatten(0, 1)
    heads = flat.unflatten(-1, (layer.num_attention_heads, -1)).transpose(0, 1)  # [H, T, C / H]

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return sigmoid((matmul(heads, weight) + bias[:, None]).transpose(0, 1).flatten(1))

    scale = -8.0 * softplus(layer.recurrent_param.float())
    rate = scale * gate(layer.recurrent_gate_weight, layer.recurrent_gate_bias).float()
    value = flat.float() * gate(layer.input_gate_weight, layer.input_gate_bias).float()
    first = position_ids.expand(x.shape[:2]).reshape(-1, 1) == 0
    value = torch.where(first, value, value * torch.sqrt(1.0 - exp(2.0 * rate)))[..., None]
    one = value.new_ones(len(value), 1, 1)
    update = partial(linear_recurrence, one, one, value, exp(rate), None)
    shape = StateShape((flat.shape[1], 1, 1), torch.float32)
    return update_state(shape, update, lambda: value).to(x.dtype).view(x.shape)


FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning_attention,
    "RecurrentGemmaRecurrentBlock": _griffin,
}
