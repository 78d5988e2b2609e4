"""Recurrent operations on flat rows, with the signatures of transformers' functions; and replacements for the
forwards of recurrent layers that call no such function.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.options import NormKind
from verbatim.kv.recurrence import causal_conv, linear_recurrence, scan, tree_sum, weighted_mean
from verbatim.kv.states import StateShape, Update
from verbatim.model import elementwise
from verbatim.model.context import RECURRENT, active_context, replaces
from verbatim.model.invariant import exp, forward_for, logsigmoid, sigmoid, silu, softplus
from verbatim.model.products import matmul


@kernels.without_overrides
def update_state(shape: StateShape, update: Update) -> Tensor:
    """Run a recurrent operation in this thread's forward context."""
    context = active_context()
    assert context is not None
    return context.update_state(shape, update)


def causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve each channel of `[B, C, T]` causally with a weight `[C, K]`."""
    rows = hidden_states.transpose(1, 2)  # [B, T, C]
    flat = rows.flatten(0, 1).contiguous()
    shape = StateShape((weight.shape[1] - 1, weight.shape[0]), flat.dtype, "convolution")
    out = update_state(shape, partial(causal_conv, flat, weight.detach(), bias)).to(weight.dtype)
    if activation in ("silu", "swish"):
        out = silu(out)
    elif activation is not None:
        from transformers.activations import ACT2FN

        function = ACT2FN[activation]
        out = cast(Tensor, (forward_for(function) or function)(out))
    out = out.to(flat.dtype).view(rows.shape)
    return out.transpose(1, 2)


def previous(x: Tensor) -> Tensor:
    """Return each row's preceding row in its sequence, `[B, T, C]`; zeros for the first."""
    weight = x.new_tensor([1.0, 0.0]).expand(x.shape[-1], 2)
    return causal_conv1d(x.transpose(1, 2), weight).transpose(1, 2)


def _l2norm(x: Tensor, scale: float, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum(x^2) + eps) * scale over the last dimension."""
    width: int = x.shape[-1]
    if elementwise.supports(x):  # an RMS norm up to a factor
        return elementwise.norm(x, None, eps / width, NormKind.BARE) * (scale / math.sqrt(width))
    wide = x.float()
    return (wide / torch.sqrt(tree_sum(wide * wide, -1)[..., None] + eps) * scale).to(x.dtype)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    rate: Tensor | None = None,
) -> Tensor:
    """Run `linear_recurrence` on the next recurrent state of the forward context."""
    shape = StateShape((v.shape[1], k.shape[2], v.shape[2]), torch.float32)
    return update_state(shape, partial(linear_recurrence, q, k, v, decay, beta, rate=rate))


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    scale: float | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule (`g` is `[B, T, H]`) or Kimi delta attention (`g` is `[B, T, H, K]`)."""
    q, k, v, decay, rate = (x.flatten(0, 1).float() for x in (query, key, value, g, beta))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q, scale), _l2norm(k, 1.0)
    else:
        q = q * scale
    out = recurrence(q, k, v, exp(decay), rate)
    return out.to(query.dtype).view(value.shape), None


def _step(step: Tensor, bias: Tensor | None, positive: bool) -> Tensor:
    step = step if bias is None else step + bias.float()
    return softplus(step) if positive else step


def _mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): keys are B, queries are C, values are dt * x."""
    x, step, b, c = (t.flatten(0, 1).float() for t in (hidden_states, dt, B, C))
    step = _step(step, dt_bias, dt_softplus).clamp(*dt_limit)
    v = x * step[..., None]
    out = recurrence(c, b, v, exp(step * A.float()))
    if D is not None:
        out = out + x * D.float()[:, None]
    return out.to(hidden_states.dtype).view(hidden_states.shape)


def mamba_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Mamba (Gu and Dao 2023, arXiv:2312.00752): one head of width 1 per channel.

    B and C are `[B, N, T]`, or `[B, G, N, T]` for groups of channels.
    """
    x, step, b, c = (t.movedim(-1, 1).flatten(0, 1).float() for t in (hidden_states, dt, B, C))
    step = _step(step, delta_bias, delta_softplus)
    groups = len(x), -1, A.shape[1]
    v = (x * step)[..., None]
    out = recurrence(c.reshape(groups), b.reshape(groups), v, step, rate=A.float())[..., 0]
    if D is not None:
        out = out + x * D.float()
    if z is not None:
        out = out * silu(z.transpose(1, 2).flatten(0, 1).float())
    batch, channels, length = hidden_states.shape
    return out.view(batch, length, channels).transpose(1, 2).to(hidden_states.dtype)


def _no_fused_mamba(*_: Any, **__: Any) -> None:
    """Return None, so that the layer calls its operations one by one."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: kernels.without_overrides(function)
    for name, function in (
        ("causal_conv1d_fn", causal_conv1d),
        ("torch_chunk_gated_delta_rule", _delta_rule),
        ("chunk_kimi_delta_attention", _delta_rule),
        ("mamba2_chunk_scan", _mamba2_scan),
        ("mamba_selective_scan", mamba_scan),
        ("mamba_inner_fn", _no_fused_mamba),
    )
}


# ---- layers


@replaces("MiniMaxLightningAttention", recurrent=True)
def _lightning_attention(
    layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Lightning attention (Qin et al. 2024, arXiv:2401.04658), as in MiniMax."""
    heads, size = layer.num_attention_heads, layer.head_dim
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).flatten(0, 1)
    q, k, v = qkv.view(-1, heads, 3 * size).float().split(size, dim=-1)
    decay = exp(-layer.slope_rate.float().view(1, heads)).expand(len(q), heads)
    out = recurrence(q, k, v, decay)
    out = layer.norm(out.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return layer.out_proj(sigmoid(layer.output_gate(hidden_states)) * out), None


@replaces("Glm5NextTextForgetGate", "KimiLinearForgetGate", recurrent=True)
def _forget_gate(layer: Any, hidden_states: Tensor) -> Tensor:
    """Return the logarithms of the decays of Kimi delta attention, `[B, T, H, K]` (arXiv:2510.26692)."""
    gates = layer.f_b_proj(layer.f_a_proj(hidden_states)).float() + layer.dt_bias.float()
    gates = gates.unflatten(-1, (layer.num_heads, -1))
    rate: Tensor = exp(layer.A_log.float()).view(-1, 1)
    bound: float | None = getattr(layer, "safe_gate_lower_bound", None)
    return -rate * softplus(gates) if bound is None else bound * sigmoid(rate * gates)


@replaces("RecurrentGemmaRecurrentBlock", recurrent=True)
def _griffin(
    layer: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """RecurrentGemma's block: a convolution and a gated recurrence."""
    x, conv = layer.linear_x(input_states).transpose(1, 2), layer.conv_1d
    x = causal_conv1d(x, conv.weight[:, 0], conv.bias).transpose(1, 2)
    x = _rg_lru(layer.rg_lru, x, position_ids) * layer.act_fn(layer.linear_y(input_states))
    return layer.linear_out(x), None


def _rg_lru(layer: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427), with one head per channel."""
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


@replaces("ZayaCCAProjection", recurrent=True)
def _zaya_projection(
    layer: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476), as in ZAYA."""
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
    """Apply ZAYA's depthwise convolution, then the one by heads, to rows `[B, T, C]`."""
    first, second = layer.conv_qk_depthwise, layer.conv_qk_grouped
    # The bias is added to rows from the states, too: transformers pads with zeros before the first
    # convolution, so the second one sees the bias in the padding.
    taps = [causal_conv1d(rows.transpose(1, 2), first.weight[:, 0]).transpose(1, 2)]
    for _ in range(1, second.kernel_size[0]):
        taps.append(previous(taps[-1]))
    inputs = torch.stack([tap + first.bias for tap in reversed(taps)], dim=-1)
    weight = second.weight.flatten(1).unflatten(0, (second.groups, -1))
    out: Tensor = _by_head(inputs.flatten(2), weight) + second.bias
    return out


def _by_head(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of rows `[..., H * K]` by its matrix in `[H, N, K]`; returns `[..., H * N]`."""
    heads = rows.flatten(0, -2).unflatten(-1, (len(weight), -1)).transpose(0, 1)
    return matmul(heads, weight.mT).transpose(0, 1).reshape(*rows.shape[:-1], -1)


@replaces("ZayaQKNorm", recurrent=True)
def _zaya_norm(layer: Any, *states: Tensor) -> tuple[Tensor, Tensor]:
    """Scale queries and keys `[B, T, H, D]` to length sqrt(D), and keys by an additional factor per head."""
    eps = torch.finfo(states[0].dtype).eps ** 2
    query, key = (_l2norm(x, layer.head_dim_scale, eps) for x in states)
    return query, key * layer.temp[:, None]


@replaces("ZambaMambaMixer", recurrent=True)
def _zamba_mixer(layer: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Zamba's Mamba mixer, in which each head has its own projections to steps, B and C."""
    x, gate = layer.in_proj(hidden_states).unflatten(-1, (-1, 2)).transpose(1, 2).unbind(-1)
    x = causal_conv1d(x, layer.conv1d.weight[:, 0], layer.conv1d.bias, layer.activation)
    projected = _by_head(x.transpose(1, 2), layer.x_proj_weight)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, b, c = projected.unflatten(-1, (layer.n_mamba_heads, -1)).split(sizes, dim=-1)
    step = _by_head(step.flatten(2), layer.dt_proj_weight).transpose(1, 2)
    b, c = (t.movedim(1, -1) for t in (b, c))
    rate, bias = -exp(layer.A_log.float()).flatten(0, 1), layer.dt_proj_bias.flatten()
    out = mamba_scan(x, step, rate, b, c, layer.D.flatten(), gate, bias, True)
    return layer.out_proj(out.transpose(1, 2))  # type: ignore[no-any-return]


@replaces("Qwen4ExpTextNGramEmbedding", recurrent=True)
def _ngram_embedding(layer: Any, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    """Qwen 4's embedding of the hashed n-grams that end at each token, `[B, T, C]`.

    Tokens before an end-of-sequence id or the first token count as end-of-sequence ids.
    """
    end = layer.eos_token_id
    rows = [(input_ids - end)[..., None].float()]  # 0 for `end`, like the initial state
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
    embedded: Tensor = layer.ngram_embedding(torch.cat(hashes, dim=-1)).flatten(-2)
    return embedded


@replaces("Qwen4ExpTextPLELayer", recurrent=True)
def _per_layer_embedding(
    layer: Any, hidden_states: Tensor, input_ids: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Qwen 4's n-gram features for each residual stream, gated and convolved; returns `[B, T, S * H]`."""
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


@replaces("RwkvSelfAttention", recurrent=True)
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


@replaces("RwkvFeedForward", recurrent=True)
def _rwkv_feed_forward(layer: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """RWKV's channel mixing."""
    before = previous(hidden)
    key = torch.relu(layer.key(_mix(hidden, before, layer.time_mix_key))).square()
    receptance = sigmoid(layer.receptance(_mix(hidden, before, layer.time_mix_receptance)))
    return receptance * layer.value(key), None


def _mix(hidden: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    return hidden * weight + before * (1 - weight)


@replaces("xLSTMBackend", recurrent=True)
def _mlstm(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any
) -> Any:
    """Matrix LSTM (Beck et al. 2024, arXiv:2405.04517), `[B, H, T, D]`.

    It is a linear recurrence over the values, with a column of ones for the normalizer. For stability, inputs
    are divided by the exponential of the largest gate exponent so far.
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
    """Return the largest gate exponents up to and before a row."""
    return torch.maximum(state + forget, gate), state


@replaces("xLSTMMultiHeadLayerNorm", recurrent=True)
def _multi_head_norm(layer: Any, x: Tensor) -> Tensor:
    """Normalize each head of xLSTM, `[B, T, H, D]`."""
    wide, size = x.float(), x.shape[-1]
    wide = wide - (tree_sum(wide, -1) / size)[..., None]
    variance = tree_sum(wide.square(), -1) / size
    out = wide / torch.sqrt(variance + layer.eps)[..., None]
    normed: Tensor = layer._apply_weight_bias(out.to(x.dtype).flatten(2))
    return normed


def reads_weight(layer: Any, name: str) -> bool:
    """Return whether a layer reads the weight of its child `name` instead of calling it.

    Mamba and latent attention do so, and BLOOM where a config adds up slices of its products.
    """
    if getattr(layer, "slow_but_exact", False) and layer.pretraining_tp > 1:
        return name in ("dense", "dense_4h_to_h")
    return name == "kv_b_proj" or (name == "dt_proj" and "A_log" in layer._parameters)


def has_supported_states(module: nn.Module) -> bool:
    """Return whether the Python modules of a model have recurrent functions that can be replaced."""
    names = {name for file in files_of(module) for name in vars(file)}
    return not names.isdisjoint(FUNCTIONS.keys() | RECURRENT)


def files_of(module: nn.Module) -> list[ModuleType]:
    """Return the Python modules of transformers that define a model's classes."""
    files = {type(layer).__module__ for layer in module.modules()}
    return [
        sys.modules[name]
        for name in sorted(files)
        if name.startswith("transformers.models.") and name in sys.modules
    ]
