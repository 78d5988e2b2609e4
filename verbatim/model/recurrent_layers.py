"""Recurrent layers of which the whole forward is replaced, as it calls no function for its recurrence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kv.recurrence import scan, tree_sum, weighted_mean
from verbatim.kv.states import StateShape
from verbatim.model import compressed
from verbatim.model.invariant import exp, logsigmoid, sigmoid, softplus
from verbatim.model.products import linear, matmul
from verbatim.model.recurrent_ops import (
    FUNCTIONS,
    causal_conv1d,
    mamba_scan,
    previous,
    recurrence,
    update_state,
)


def _lightning_attention(
    layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Lightning attention (Qin et al. 2024, arXiv:2401.04658), as MiniMax has it."""
    heads, size = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).flatten(0, 1)
    q, k, v = qkv.view(-1, heads, 3 * size).float().split(size, dim=-1)
    decay = exp(-layer.slope_rate.float().view(1, heads)).expand(len(q), heads)
    out = recurrence(q, k, v, decay)
    out = layer.norm(out.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return layer.out_proj(sigmoid(layer.output_gate(hidden_states)) * out), None


def _forget_gate(layer: Any, hidden_states: Tensor) -> Tensor:
    """Return logarithms of the decays of Kimi delta attention `[B, T, H, K]` (arXiv:2510.26692)."""
    made = layer.f_b_proj(layer.f_a_proj(hidden_states)).float() + layer.dt_bias.float()
    steps = softplus(made).unflatten(-1, (layer.num_heads, -1))
    logs: Tensor = -exp(layer.A_log.float()) * steps
    return logs


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

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return sigmoid(_by_head(flat, weight.mT) + bias.flatten())

    scale = -8.0 * softplus(layer.recurrent_param.float())
    rate = scale * gate(layer.recurrent_gate_weight, layer.recurrent_gate_bias).float()
    value = flat.float() * gate(layer.input_gate_weight, layer.input_gate_bias).float()
    first = position_ids.expand(x.shape[:2]).reshape(-1, 1) == 0
    value = torch.where(first, value, value * torch.sqrt(1.0 - exp(2.0 * rate)))[..., None]
    one = value.new_ones(len(value), 1, 1)
    return recurrence(one, one, value, exp(rate)).to(x.dtype).view(x.shape)


def _zaya_projection(
    layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476), as ZAYA has it."""
    width, group = layer.head_dim, layer.num_key_value_groups
    query, key = layer.q_proj(hidden_states), layer.k_proj(hidden_states)
    mixed = _zaya_convolutions(layer, torch.cat([query, key], dim=-1))
    q, k, mixed = (x.unflatten(-1, (-1, width)) for x in (query, key, mixed))
    q = (q + k.repeat_interleave(group, dim=2)) * 0.5
    k = tree_sum(q.unflatten(2, (-1, group)), 3) / group
    values = [layer.v_proj_current(hidden_states), layer.v_proj_delayed(previous(hidden_states))]
    v = torch.cat(values, dim=-1).unflatten(-1, (-1, width))
    return mixed[:, :, : q.shape[2]] + q, mixed[:, :, q.shape[2] :] + k, v


def _zaya_convolutions(layer: Any, rows: Tensor) -> Tensor:
    """Convolve channels, then heads, `[B, T, C]`."""
    first, second = layer.conv_qk_depthwise, layer.conv_qk_grouped
    # The bias is added behind the states: transformers pads with zeros in front of the first convolution,
    # so that the second one finds the bias there.
    taps = [causal_conv1d(rows.transpose(1, 2), first.weight[:, 0]).transpose(1, 2)]
    for _ in range(1, second.kernel_size[0]):
        taps.append(previous(taps[-1]))
    inputs = torch.stack(taps[::-1], dim=-1) + first.bias[:, None]
    weight = second.weight.flatten(1).unflatten(0, (second.groups, -1))
    out: Tensor = _by_head(inputs.flatten(2), weight) + second.bias
    return out


def _by_head(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of rows `[..., H * K]` with its matrix, of `[H, N, K]`: `[..., H * N]`."""
    heads = rows.flatten(0, -2).unflatten(-1, (len(weight), -1)).transpose(0, 1)
    return matmul(heads, weight.mT).transpose(0, 1).reshape(*rows.shape[:-1], -1)


def _zaya_norm(layer: Any, *states: Tensor) -> tuple[Tensor, Tensor]:
    """Scale queries and keys `[B, T, H, D]` to a length of sqrt(D), and keys by a factor of their head."""
    ones = states[0].new_ones(1, states[0].shape[-1], dtype=torch.float32)
    lengths = (torch.sqrt(linear(x.float().square(), ones)).to(x.dtype) for x in states)
    query, key = (
        x * (layer.head_dim_scale / length.clamp_min(torch.finfo(x.dtype).eps))
        for x, length in zip(states, lengths, strict=True)
    )
    return query, key * layer.temp[:, None]


def _zamba_mixer(layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Zamba's Mamba, whose heads have projections of their own to steps, B and C."""
    x, gate = layer.in_proj(hidden_states).unflatten(-1, (-1, 2)).transpose(1, 2).unbind(-1)
    x = causal_conv1d(x, layer.conv1d.weight[:, 0], layer.conv1d.bias, layer.activation)
    made = _by_head(x.transpose(1, 2), layer.x_proj_weight)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = made.unflatten(-1, (layer.n_mamba_heads, -1)).split(sizes, dim=-1)
    step = _by_head(step.flatten(2), layer.dt_proj_weight).transpose(1, 2)
    b, c = (t.movedim(1, -1) for t in (b, c))
    rate, bias = -exp(layer.A_log.float()).flatten(0, 1), layer.dt_proj_bias.flatten()
    out = mamba_scan(x, step, rate, b, c, layer.D.flatten(), gate, bias, True)
    return layer.out_proj(out.transpose(1, 2))  # type: ignore[no-any-return]


def _ngram_embedding(layer: Any, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    """Qwen 4's embedding of each token with the ones before it, by hashes, `[B, T, C]`.

    Tokens before the end of a text, and before the first token, count as ends of a text.
    """
    end = layer.eos_token_id
    rows = [(input_ids - end)[..., None].float()]  # 0 for an end, as in the first state
    for i in range(1, layer.ngram_size):
        before = previous(rows[-1])
        rows.append(before if i == 1 else torch.where(rows[-1] == 0, 0.0, before))
    ids = (row[..., 0].long() + end for row in rows)
    mixed, *others = (x * m for x, m in zip(ids, layer.layer_multipliers, strict=True))
    tables = (layer.ngram_heads_vocab_sizes, layer.ngram_heads_offsets)
    sizes, offsets = (x.split(layer.heads_per_ngram) for x in tables)
    hashes = []
    for other, size, offset in zip(others, sizes, offsets, strict=True):
        mixed = mixed ^ other
        hashes.append(mixed[..., None] % size + offset)
    found: Tensor = layer.ngram_embedding(torch.cat(hashes, dim=-1)).flatten(-2)
    return found


def _per_layer_embedding(
    layer: Any, hidden_states: Tensor, input_ids: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Qwen 4's n-gram features for each residual stream, gated and convolved: `[B, T, S * H]`."""
    embeddings = layer.ple_embedding(input_ids, None)
    streams = (-1, layer.hidden_size)
    keys = layer.norm_key(layer.key_proj(embeddings)).unflatten(-1, streams)
    queries = layer.norm_query(hidden_states).unflatten(-1, streams)
    gate = tree_sum(keys * queries, -1)[..., None] / math.sqrt(layer.hidden_size)
    gate = torch.sqrt(gate.abs().clamp_min(1e-6)) * gate.sign()
    value = (sigmoid(gate) * layer.value_proj(embeddings)[:, :, None]).flatten(-2)
    weight, dilation = layer.conv1d.weight[:, 0], layer.conv1d.dilation[0]
    taps = weight.new_zeros(len(weight), (weight.shape[1] - 1) * dilation + 1)
    taps[:, ::dilation] = weight
    rows = layer.norm_conv(value).transpose(1, 2)
    out: Tensor = value + causal_conv1d(rows, taps, activation="silu").transpose(1, 2)
    return out


def _rwkv_attention(layer: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """RWKV's time mixing (Peng et al. 2023, arXiv:2305.13048)."""
    before = previous(hidden)
    rows = [
        layer.key(_mix(hidden, before, layer.time_mix_key)),
        layer.value(_mix(hidden, before, layer.time_mix_value)),
    ]
    key, value = (x.flatten(0, 1).float() for x in rows)
    receptance = sigmoid(layer.receptance(_mix(hidden, before, layer.time_mix_receptance)))
    first, decay = layer.time_first.float(), exp(layer.time_decay.float())
    shape = StateShape((3, key.shape[1]), torch.float32)
    update = partial(weighted_mean, key, value, first, decay)
    out = update_state(shape, update)
    return layer.output(receptance * out.to(hidden.dtype).view(receptance.shape)), None


def _rwkv_feed_forward(layer: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """RWKV's channel mixing."""
    before = previous(hidden)
    key = torch.relu(layer.key(_mix(hidden, before, layer.time_mix_key))).square()
    receptance = sigmoid(layer.receptance(_mix(hidden, before, layer.time_mix_receptance)))
    return receptance * layer.value(key), None


def _mix(hidden: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    return hidden * weight + before * (1 - weight)


def _mlstm(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any
) -> Any:
    """Matrix LSTM (Beck et al. 2024, arXiv:2405.04517), `[B, H, T, D]`.

    A linear recurrence of the values and of ones, whose inputs are divided by the exponential of the largest
    exponent of a gate so far.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1).float() for x in (query, key, value))
    gate, forget = (x.transpose(1, 2).flatten(0, 1).float() for x in (igate, fgate))
    forget = logsigmoid(forget)
    shape = StateShape((v.shape[1],), torch.float32)
    before = update_state(shape, partial(scan, _largest, (gate, forget)))
    largest = torch.maximum(before + forget, gate)
    decay, k = exp(before + forget - largest), k * exp(gate - largest)[..., None]
    q, v = q * query.shape[-1] ** -0.5, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    out = recurrence(q, k, v, decay)
    divisor = torch.maximum(out[..., -1].abs(), exp(-largest)) + layer.config.eps
    out = (out[..., :-1] / divisor[..., None]).to(query.dtype)
    return out.unflatten(0, (query.shape[0], -1)).transpose(1, 2), None


def _largest(state: Tensor, gate: Tensor, forget: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest exponent of a gate up to a row, and before it."""
    return torch.maximum(state + forget, gate), state


def _multi_head_norm(layer: Any, x: Tensor) -> Tensor:
    """Norm each head of xLSTM, `[B, T, H, D]`."""
    wide, size = x.float(), x.shape[-1]
    wide = wide - (tree_sum(wide, -1) / size)[..., None]
    variance = tree_sum(wide.square(), -1) / size
    out = wide / torch.sqrt(variance + layer.eps)[..., None]
    normed: Tensor = layer._apply_weight_bias(out.to(x.dtype).flatten(2))
    return normed


FORWARDS: dict[str, Callable[..., Any]] = {
    **compressed.COMPRESSORS,
    "KimiLinearForgetGate": _forget_gate,
    "MiniMaxLightningAttention": _lightning_attention,
    "Qwen4ExpTextNGramEmbedding": _ngram_embedding,
    "Qwen4ExpTextPLELayer": _per_layer_embedding,
    "RecurrentGemmaRecurrentBlock": _griffin,
    "RwkvFeedForward": _rwkv_feed_forward,
    "RwkvSelfAttention": _rwkv_attention,
    "ZambaMambaMixer": _zamba_mixer,
    "ZayaCCAProjection": _zaya_projection,
    "ZayaQKNorm": _zaya_norm,
    "xLSTMBackend": _mlstm,
    "xLSTMMultiHeadLayerNorm": _multi_head_norm,
}


def reads_weight(layer: nn.Module, name: str) -> bool:
    """Return whether a layer multiplies with the weight of its child `name` itself, as Mamba's do."""
    return name == "dt_proj" and "A_log" in layer._parameters


def has_supported_states(module: nn.Module) -> bool:
    """Return whether recurrent functions in the files of a model's classes can be replaced."""
    names = {name for file in files_of(module) for name in vars(file)}
    return not names.isdisjoint(FUNCTIONS.keys() | FORWARDS.keys())


def files_of(module: nn.Module) -> list[ModuleType]:
    """Return the files of transformers' models that define a model's classes."""
    files = {type(layer).__module__ for layer in module.modules()}
    return [
        sys.modules[name]
        for name in sorted(files)
        if name.startswith("transformers.models.") and name in sys.modules
    ]
