"""Recurrent layers of transformers models: their functions, replaced by those over flat batches.

transformers calls a function of the model's own file for each recurrent operation. `patch` puts another in
its place that passes the rows to the forward context of this thread; outside of the engine's forwards it
calls the original.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from verbatim.kernels.options import NormKind
from verbatim.kv.recurrence import causal_conv, linear_recurrence, tree_sum
from verbatim.kv.states import StateShape
from verbatim.model import elementwise
from verbatim.model.context import RecurrentPass, Update, active_pass
from verbatim.model.invariant import exp, sigmoid, silu, softplus


def _update(shape: StateShape, update: Update, rowwise: Callable[[], Tensor]) -> Tensor:
    return cast(RecurrentPass, active_pass()).update_state(shape, update, rowwise)


def _causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    rows = hidden_states.transpose(1, 2)  # [B, T, C]
    flat = rows.flatten(0, 1).contiguous()
    shape = StateShape((weight.shape[1] - 1, weight.shape[0]), flat.dtype)
    update = partial(causal_conv, flat, weight.detach(), bias)
    out = _update(shape, update, lambda: flat.float() * weight[:, -1].float()).to(weight.dtype)
    if activation in ("silu", "swish"):
        out = silu(out)
    elif activation is not None:
        from transformers.activations import ACT2FN

        out = cast(Tensor, ACT2FN[activation](out))
    out = out.to(flat.dtype).view(rows.shape)
    return out.transpose(1, 2)


def _l2norm(x: Tensor, scale: float) -> Tensor:
    """Return x / sqrt(sum(x^2) + 1e-6) * scale over the last dimension."""
    width: int = x.shape[-1]
    if elementwise.served(x):  # an RMS norm, but for a factor
        return elementwise.rms_norm(x, None, 1e-6 / width, NormKind.BARE) * (
            scale / math.sqrt(width)
        )
    return x / torch.sqrt(tree_sum(x * x, -1)[..., None] + 1e-6) * scale


def _of_each_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return something in place of a recurrence that depends on all of a row's operands, for inspection."""
    seen = torch.cos(tree_sum(q, -1) + tree_sum(k, -1))
    return v * seen.repeat_interleave(v.shape[1] // k.shape[1], dim=1)[..., None]


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
    shape = StateShape((v.shape[1], k.shape[2], v.shape[2]), torch.float32)
    update = partial(linear_recurrence, q, k, v, exp(decay), rate)
    out = _update(shape, update, lambda: _of_each_row(q, k, v) * rate[..., None])
    return out.to(query.dtype).view(value.shape), None


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
    if dt_bias is not None:
        step = step + dt_bias.float()
    if dt_softplus:
        step = softplus(step)
    step = step.clamp(*dt_limit)
    v = x * step[..., None]
    shape = StateShape((x.shape[1], b.shape[2], x.shape[2]), torch.float32)
    update = partial(linear_recurrence, c, b, v, exp(step * A.float()), None)
    out = _update(shape, update, lambda: _of_each_row(c, b, v))
    if D is not None:
        out = out + x * D.float()[:, None]
    return out.to(hidden_states.dtype).view(hidden_states.shape)


def _mamba_scan(
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
    """Mamba (Gu and Dao 2023, arXiv:2312.00752): a head of one value for each channel."""
    x, step, b, c = (t.transpose(1, 2).flatten(0, 1).float() for t in (hidden_states, dt, B, C))
    if delta_bias is not None:
        step = step + delta_bias.float()
    if delta_softplus:
        step = softplus(step)
    v = (x * step)[..., None]
    decay = exp(step[..., None] * A.float())  # [T, C, N]
    shape = StateShape((x.shape[1], b.shape[1], 1), torch.float32)
    update = partial(linear_recurrence, c[:, None], b[:, None], v, decay, None)
    out = _update(shape, update, lambda: _of_each_row(c[:, None], b[:, None], v))[..., 0]
    if D is not None:
        out = out + x * D.float()
    if z is not None:
        out = out * silu(z.transpose(1, 2).flatten(0, 1).float())
    batch, channels, length = hidden_states.shape
    return out.view(batch, length, channels).transpose(1, 2).to(hidden_states.dtype)


def _no_fused_mamba(*_: Any, **__: Any) -> None:
    """Let the layer call its operations one by one."""


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
    out = _update(shape, update, lambda: _of_each_row(q, k, v))
    out = layer.norm(out.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return layer.out_proj(sigmoid(layer.output_gate(hidden_states)) * out), None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
    "mamba_inner_fn": _no_fused_mamba,
}
_FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}


def patch(module: nn.Module) -> None:
    """Replace the recurrent functions of the files of a model's classes; does nothing the second time."""
    for file in _files_of(module):
        names = vars(file)
        for name, ours in _FUNCTIONS.items():
            if name in names:
                _replace(file, name, ours)
        for name, ours in _FORWARDS.items():
            if name in names:
                _replace(names[name], "forward", ours)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "verbatim_original"):
        setattr(owner, name, _dispatch(ours, original))


def _dispatch(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if active_pass() is None:
            return original(*args, **kwargs)
        return ours(*args, **kwargs)

    call.verbatim_original = original  # type: ignore[attr-defined]
    return call


def reads_weight(layer: nn.Module, name: str) -> bool:
    """Return whether a layer multiplies with the weight of its child `name` itself, as Mamba's do."""
    return name == "dt_proj" and "A_log" in layer._parameters


def has_supported_states(module: nn.Module) -> bool:
    """Return whether recurrent functions in the files of a model's classes can be replaced."""
    names = {name for file in _files_of(module) for name in vars(file)}
    return not names.isdisjoint(_FUNCTIONS.keys() | _FORWARDS.keys())


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of a sequence's states by the widths of a model's layers, before a forward.

    In these layers, states have as many numbers as a convolution's past rows, and as the products of keys
    and values; recurrences keep float32.
    """
    total = 0
    for layer in module.modules():
        convs = [child for child in layer.children() if isinstance(child, nn.Conv1d)]
        if convs or type(layer).__name__ in _FORWARDS:
            for conv in convs:
                rows = conv.kernel_size[0] - 1
                total += rows * conv.out_channels * conv.weight.dtype.itemsize
            total += _recurrence_width(vars(layer)) * torch.float32.itemsize
    return total


def _recurrence_width(sizes: dict[str, Any]) -> int:
    if "num_v_heads" in sizes:  # gated delta rule
        width: int = sizes["num_v_heads"] * sizes["head_k_dim"] * sizes["head_v_dim"]
    elif "ssm_state_size" in sizes:
        width = sizes["intermediate_size"] * sizes["ssm_state_size"]
    else:  # keys as wide as values, or a convolution alone
        heads = sizes.get("num_heads", sizes.get("num_attention_heads", 0))
        width = heads * sizes.get("head_dim", 0) ** 2
    return width


def _files_of(module: nn.Module) -> list[ModuleType]:
    files = {type(layer).__module__ for layer in module.modules()}
    return [
        sys.modules[name]
        for name in sorted(files)
        if name.startswith("transformers.models.") and name in sys.modules
    ]
