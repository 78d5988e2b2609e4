"""Residual streams of DeepSeek V4 (manifold-constrained hyper-connections, Xie et al. 2026) and HY V4.

Between layers a token has N residual streams. The input of attention and of the MLP is a weighted sum of
them, and the output is added to all of them. DeepSeek also mixes them by a doubly stochastic matrix. The
factors are computed from the streams. On the CPU, `collapse` and `expand` are one kernel call each,
bit-identical to their torch versions.

Gemma 3n's streams (AltUp, Baykal et al. 2023) are predicted from weighted sums of each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.kernels.functions import addresses, run
from verbatim.kernels.options import NormKind
from verbatim.kv.recurrence import tree_sum
from verbatim.model import elementwise, products
from verbatim.model.context import replaces
from verbatim.model.invariant import exp, sigmoid

_MAX_STREAMS = 8  # maximum number of streams in the kernels


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
    """Return the factors of a layer's output, the matrix that mixes the streams, and the layer's input.

    Args:
        mixes: `[..., (2 + N) * N]` float32, a projection of all streams of a token; `[..., 2 * N]` without
            mixing.
        scale, base: `[3]` and `[(2 + N) * N]`, or `[2]` and `[2 * N]`, float32: factors are functions of
            mixes * scale + base.
        streams: `[..., N, D]`.
        iterations: number of Sinkhorn iterations, each normalizing rows and columns.
        after_scale, after_eps: the factors of a layer's output are sigmoid * after_scale + after_eps.

    Returns:
        `[..., N]` float32; `[..., N, N]` float32, or None without mixing; `[..., D]` in the streams' dtype.
    """
    *rows, count, width = streams.shape
    if elementwise.supports(streams) and count <= _MAX_STREAMS:
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
    before, after_logits, *others = (x * factor + shift for x, factor, shift in parts)
    collapsed = tree_sum((sigmoid(before) + eps)[..., None] * streams, -2).to(streams.dtype)
    after = after_scale * sigmoid(after_logits) + after_eps
    if not others:
        return after, None, collapsed
    mixing = others[0].unflatten(-1, (count, count))
    mixing = exp(mixing - mixing.amax(-1, keepdim=True))
    mixing = mixing / tree_sum(mixing, -1, keepdim=True) + eps
    mixing = mixing / (tree_sum(mixing, -2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixing = mixing / (tree_sum(mixing, -1, keepdim=True) + eps)
        mixing = mixing / (tree_sum(mixing, -2, keepdim=True) + eps)
    return after, mixing, collapsed


@kernels.without_overrides
def expand(streams: Tensor, output: Tensor, after: Tensor, between: Tensor | None = None) -> Tensor:
    """Return streams `[..., N, D]` after a layer returned `output` `[..., D]`, with `collapse`'s factors."""
    count, width = streams.shape[-2:]
    if elementwise.supports(streams) and count <= _MAX_STREAMS and output.shape[-1] == width:
        out = torch.empty_like(streams, memory_format=torch.contiguous_format)
        inputs = [None if x is None else x.contiguous() for x in (streams, output, after, between)]
        shape = output.shape[:-1].numel(), count, width
        run("vb_expand_streams", streams.dtype, *addresses(*inputs, out), *shape)
        return out
    output = output.unsqueeze(-2)
    if between is None:
        return (after[..., None] * output.float() + streams.float()).to(streams.dtype)
    after, between = after.to(streams.dtype), between.to(streams.dtype)
    mixed = between[..., 0, :, None].float() * streams[..., :1, :].float()
    for j in range(1, count):
        mixed = mixed + between[..., j, :, None].float() * streams[..., j : j + 1, :].float()
    return after[..., None] * output + mixed.to(streams.dtype)


@replaces("DeepseekV4UnweightedRMSNorm", "Glm5NextTextUnweightedRMSNorm")
def _unweighted_norm(module: Any, x: Tensor) -> Tensor:
    """Compute an RMS norm that rounds a row's factor before multiplying."""
    if x.dtype is torch.float32 and elementwise.supports(x):
        return elementwise.norm(x, None, module.eps, NormKind.BARE)
    mean = tree_sum(x.float().square(), -1)[..., None] / x.shape[-1]
    return x * torch.sqrt(mean + module.eps).reciprocal().to(x.dtype)


def _normed(module: Any, streams: Tensor) -> Tensor:
    """Return the streams `[B, T, N, D]` of each token as one normed row, `[B, T, N * D]`."""
    rows, norm = streams.flatten(2).float(), module.input_norm
    # HY V4's norm returns only the factors of rows.
    return _unweighted_norm(norm, rows) if type(norm).__name__.startswith("HYV4") else norm(rows)


@replaces(
    "DeepseekV4HyperConnection",
    "Glm5NextTextHyperConnection",
    "HYV4HyperConnection",
    "HYV4VLHyperConnection",
)
def _hyper_connection(module: Any, streams: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `collapse` for streams `[B, T, N, D]`, without None."""
    mixes = products.linear(_normed(module, streams), module.fn.float())
    numbers = {"eps": module.hc_eps, "iterations": getattr(module, "hc_sinkhorn_iters", 0)}
    if hasattr(module, "hc_post_magnitude"):
        numbers |= {"after_scale": module.hc_post_magnitude, "after_eps": module.hc_eps}
    factors = collapse(mixes, module.scale, module.base, streams, **numbers)
    return tuple(x for x in factors if x is not None)


@replaces("DeepseekV4DecoderLayer", "HYV4DecoderLayer", "HYV4VLDecoderLayer")
def run_layer(
    module: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    """Run a layer on residual streams `[B, T, N, D]`; some attention also returns its chosen keys."""
    after, *between, x = module.attn_hc(hidden_states)
    attended = module.self_attn(module.input_layernorm(x), **kwargs)
    # GLM's linear attention returns no keys, but its layer does.
    attended, _, *others = attended if isinstance(attended, tuple) else (attended, None, None)
    streams = expand(hidden_states, attended, after, *between)
    after, *between, x = module.ffn_hc(streams)
    arguments = {} if input_ids is None else {"input_ids": input_ids}
    mlp_out = module.mlp(module.post_attention_layernorm(x), **arguments)
    streams = expand(streams, mlp_out, after, *between)
    return (streams, *others) if others else streams


@replaces("DeepseekV4HyperHead", "HYV4HyperHead", "HYV4VLHyperHead")
def _hyper_head(module: Any, streams: Tensor) -> Tensor:
    """Merge the residual streams `[B, T, N, D]` into one after the last layer."""
    mixes = products.linear(_normed(module, streams), module.hc_fn.float())
    factors = sigmoid(mixes * module.hc_scale.float() + module.hc_base.float()) + module.eps
    return tree_sum(factors[..., None] * streams, 2).to(streams.dtype)


@replaces("Gemma3nTextAltUp.predict")
def _predict(module: Any, streams: Tensor) -> Tensor:
    """Predict Gemma 3n's streams `[N, B, T, D]` as sums of them, with factors from the active one (AltUp)."""
    active, count = module.config.altup_active_idx, module.config.altup_num_inputs
    factors = module.prediction_coefs(module.compute_router_modalities(streams[active]))
    factors = factors.unflatten(-1, (count, count)).movedim(-2, 0)[..., None, :].float()
    wide = streams.float()
    mixed: Tensor = factors[..., 0] * wide[0]
    for j in range(1, count):
        mixed += factors[..., j] * wide[j]
    return mixed.to(streams.dtype) + streams
