"""DeepSeek V4's residual streams (manifold-constrained hyper-connections, Xie et al. 2026), and HY V4's.

Between layers a token has N rows instead of one. Attention and the MLP each get a sum of them; what they
make is added to all, and a doubly stochastic matrix mixes DeepSeek's. The factors are computed from the rows.
On the CPU `collapse` and `expand` are one kernel call each, with the bits of their torch versions.

Gemma 3n's streams (AltUp, Baykal et al. 2023) are sums of one another, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.kernels.functions import addresses, run
from verbatim.kernels.options import NormKind
from verbatim.kv.recurrence import tree_sum
from verbatim.model import elementwise, products
from verbatim.model.invariant import exp, sigmoid

_MOST = 8  # streams in the kernels


@kernels.without_overrides
def collapse(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    streams: Tensor,
    *,
    iterations: int,
    eps: float,
    after_scale: float = 2.0,
    after_eps: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the factors of a layer's output, those that mix the streams, and the layer's input.

    Args:
        mixes: `[..., (2 + N) * N]` float32, the products of all streams of a row; `[..., 2 * N]` if streams
            are not mixed.
        scale, base: `[3]` and `[(2 + N) * N]`, or `[2]` and `[2 * N]`, float32: factors are functions of
            mixes * scale + base.
        streams: `[..., N, D]`.
        iterations: of Sinkhorn's normalization of rows and columns.
        after_scale, after_eps: the factors of a layer's output are sigmoids, times one and plus the other.

    Returns:
        `[..., N]` and `[..., N, N]` float32, or None if streams are not mixed, and `[..., D]` in their dtype.
    """
    *rows, count, width = streams.shape
    if elementwise.served(streams) and count <= _MOST:
        after = mixes.new_empty(*rows, count)
        between = mixes.new_empty(*rows, count, count) if len(scale) > 2 else None
        out, streams = streams.new_empty(*rows, width), streams.contiguous()
        inputs = [x.detach().float().contiguous() for x in (mixes, scale, base)]
        outputs = streams, after, between, out
        shape = out.shape[:-1].numel(), count, width, iterations
        numbers = (eps, after_scale, after_eps)
        run("vb_collapse_streams", streams.dtype, *addresses(*inputs, *outputs), *shape, *numbers)
        return after, between, out
    sizes = [count, count, count * count][: len(scale)]
    parts = zip(mixes.split(sizes, -1), scale.unbind(), base.split(sizes), strict=True)
    before, behind, *others = (x * factor + shift for x, factor, shift in parts)
    collapsed = tree_sum((sigmoid(before) + eps)[..., None] * streams, -2).to(streams.dtype)
    after = after_scale * sigmoid(behind) + after_eps
    if not others:
        return after, None, collapsed
    comb = others[0].unflatten(-1, (count, count))
    comb = exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / tree_sum(comb, -1, keepdim=True) + eps
    comb = comb / (tree_sum(comb, -2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (tree_sum(comb, -1, keepdim=True) + eps)
        comb = comb / (tree_sum(comb, -2, keepdim=True) + eps)
    return after, comb, collapsed


@kernels.without_overrides
def expand(streams: Tensor, made: Tensor, after: Tensor, between: Tensor | None = None) -> Tensor:
    """Return the streams `[..., N, D]` behind a layer that has made `made` `[..., D]`.

    Args:
        after, between: the factors from `collapse`.
    """
    count, width = streams.shape[-2:]
    if elementwise.served(streams) and count <= _MOST and made.shape[-1] == width:
        out = torch.empty_like(streams, memory_format=torch.contiguous_format)
        inputs = [None if x is None else x.contiguous() for x in (streams, made, after, between)]
        shape = made.shape[:-1].numel(), count, width
        run("vb_expand_streams", streams.dtype, *addresses(*inputs, out), *shape)
        return out
    made = made.unsqueeze(-2)
    if between is None:
        return (after[..., None] * made.float() + streams.float()).to(streams.dtype)
    after, between = after.to(streams.dtype), between.to(streams.dtype)
    mixed = between[..., 0, :, None].float() * streams[..., :1, :].float()
    for j in range(1, count):
        mixed = mixed + between[..., j, :, None].float() * streams[..., j : j + 1, :].float()
    return after[..., None] * made + mixed.to(streams.dtype)


def _unweighted_norm(module: Any, x: Tensor) -> Tensor:
    """An RMS norm that rounds the factor of a row, and then the row."""
    if x.dtype is torch.float32 and elementwise.served(x):
        return elementwise.norm(x, None, module.eps, NormKind.BARE)
    mean = tree_sum(x.float().square(), -1)[..., None] / x.shape[-1]
    return x * torch.sqrt(mean + module.eps).reciprocal().to(x.dtype)


def _normed(module: Any, streams: Tensor) -> Tensor:
    """Return the streams `[B, T, N, D]` of each token as one row, by the norm of `module`."""
    rows, norm = streams.flatten(2).float(), module.input_norm
    # HY V4's returns no more than the factors of rows.
    return _unweighted_norm(norm, rows) if type(norm).__name__.startswith("HYV4") else norm(rows)


def _hyper_connection(module: Any, streams: Tensor) -> tuple[Tensor, ...]:
    """Return of streams `[B, T, N, D]` what `collapse` returns, without None."""
    mixes = products.linear(_normed(module, streams), module.fn.float())
    numbers = {"eps": module.hc_eps, "iterations": getattr(module, "hc_sinkhorn_iters", 0)}
    if hasattr(module, "hc_post_magnitude"):
        numbers |= {"after_scale": module.hc_post_magnitude, "after_eps": module.hc_eps}
    made = collapse(mixes, module.scale, module.base, streams, **numbers)
    return tuple(x for x in made if x is not None)


def _layer(
    module: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    """A layer with residual streams `[B, T, N, D]`; HY V4's attention returns keys that it chose, too."""
    after, *between, x = module.attn_hc(hidden_states)
    attended, _, *others = module.self_attn(module.input_layernorm(x), **kwargs)
    streams = expand(hidden_states, attended, after, *between)
    after, *between, x = module.ffn_hc(streams)
    given = {} if input_ids is None else {"input_ids": input_ids}
    made = module.mlp(module.post_attention_layernorm(x), **given)
    streams = expand(streams, made, after, *between)
    return (streams, *others) if others else streams


def _hyper_head(module: Any, streams: Tensor) -> Tensor:
    """Make one row of the residual streams `[B, T, N, D]` behind the last layer."""
    mixes = products.linear(_normed(module, streams), module.hc_fn.float())
    factors = sigmoid(mixes * module.hc_scale.float() + module.hc_base.float()) + module.eps
    return tree_sum(factors[..., None] * streams, 2).to(streams.dtype)


def _predict(module: Any, streams: Tensor) -> Tensor:
    """Predict Gemma 3n's streams `[N, B, T, D]` by sums of them, with factors from the active one (AltUp)."""
    active, count = module.config.altup_active_idx, module.config.altup_num_inputs
    factors = module.prediction_coefs(module.compute_router_modalities(streams[active]))
    factors = factors.unflatten(-1, (count, count)).movedim(-2, 0)[..., None, :].float()
    wide = streams.float()
    mixed: Tensor = factors[..., 0] * wide[0]
    for j in range(1, count):
        mixed += factors[..., j] * wide[j]
    return mixed.to(streams.dtype) + streams


METHODS: dict[str, dict[str, Callable[..., Any]]] = {"Gemma3nTextAltUp": {"predict": _predict}}
FORWARDS: dict[str, Callable[..., Any]] = {
    "DeepseekV4UnweightedRMSNorm": _unweighted_norm,
    **{
        family + name: forward
        for family in ("DeepseekV4", "HYV4")
        for name, forward in (
            ("DecoderLayer", _layer),
            ("HyperConnection", _hyper_connection),
            ("HyperHead", _hyper_head),
        )
    },
}
