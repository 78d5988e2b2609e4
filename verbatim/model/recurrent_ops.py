"""Recurrent operations with the signatures of transformers' functions, over the flat rows of a forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.kernels.options import NormKind
from verbatim.kv.recurrence import causal_conv, linear_recurrence, tree_sum
from verbatim.kv.states import StateShape, Update
from verbatim.model import elementwise
from verbatim.model.context import active_context
from verbatim.model.invariant import exp, forward_for, silu, softplus


@kernels.without_overrides
def update_state(shape: StateShape, update: Update) -> Tensor:
    """Run a recurrent operation in the forward context of this thread."""
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
    """Convolve each channel of `[B, C, T]` with the last rows, by a weight `[C, K]`."""
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
    """Return the row before each row of its sequence, `[B, T, C]`; zeros before the first one."""
    weight = x.new_tensor([1.0, 0.0]).expand(x.shape[-1], 2)
    return causal_conv1d(x.transpose(1, 2), weight).transpose(1, 2)


def _l2norm(x: Tensor, scale: float) -> Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) * scale over the last dimension."""
    width: int = x.shape[-1]
    if elementwise.served(x):  # an RMS norm, but for a factor
        return elementwise.norm(x, None, 1e-6 / width, NormKind.BARE) * (scale / math.sqrt(width))
    return x / torch.sqrt(tree_sum(x * x, -1)[..., None] + 1e-6) * scale


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    rate: Tensor | None = None,
) -> Tensor:
    """Run the next `linear_recurrence` on its state."""
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
    """Gated delta rule, with `g` `[B, T, H]`, or Kimi delta attention, with `g` `[B, T, H, K]`."""
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
    """Mamba (Gu and Dao 2023, arXiv:2312.00752): a head of one value for each channel.

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
    """Let the layer call its operations one by one."""


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
