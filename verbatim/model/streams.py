"""DeepSeek V4's residual streams (manifold-constrained hyper-connections, Xie et al. 2026).

Between layers a token has N rows instead of one. Attention and the MLP each get a sum of them; what they
make is added to all, which are mixed by a doubly stochastic matrix. The factors are computed from the rows.
On the CPU `collapse` and `expand` are one kernel call each, with the bits of their torch versions.
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
from verbatim.model.invariant import GateTensor, exp, sigmoid

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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of a layer's output, those that mix the streams, and the layer's input.

    Args:
        mixes: `[T, (2 + N) * N]` float32, the products of all streams of a row.
        scale, base: `[3]` and `[(2 + N) * N]` float32: factors are functions of mixes * scale + base.
        streams: `[T, N, D]`.
        iterations: of Sinkhorn's normalization of rows and columns.
        backend: "auto", or "torch" for the slow reference.

    Returns:
        `[T, N]` and `[T, N, N]` float32, and `[T, D]` in the streams' dtype.
    """
    rows, count, width = streams.shape
    if backend == "auto" and elementwise.served(streams) and count <= _MOST:
        after, between = mixes.new_empty(rows, count), mixes.new_empty(rows, count, count)
        out, streams = streams.new_empty(rows, width), streams.contiguous()
        inputs = [x.detach().float().contiguous() for x in (mixes, scale, base)]
        outputs, shape = (streams, after, between, out), (rows, count, width, iterations)
        run("vb_collapse_streams", streams.dtype, *addresses(*inputs, *outputs), *shape, eps)
        return after, between, out
    sizes = [count, count, count * count]
    parts = zip(mixes.split(sizes, -1), scale.unbind(), base.split(sizes), strict=True)
    before, behind, comb = (x * factor + shift for x, factor, shift in parts)
    comb = comb.unflatten(-1, (count, count))
    comb = exp(comb - comb.amax(-1, keepdim=True))
    comb = comb / _total(comb, -1) + eps
    comb = comb / (_total(comb, -2) + eps)
    for _ in range(iterations - 1):
        comb = comb / (_total(comb, -1) + eps)
        comb = comb / (_total(comb, -2) + eps)
    collapsed = tree_sum((sigmoid(before) + eps)[..., None] * streams, 1).to(streams.dtype)
    return 2 * sigmoid(behind), comb, collapsed


@kernels.without_overrides
def expand(
    streams: Tensor, made: Tensor, after: Tensor, between: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Return the streams `[T, N, D]` behind a layer that has made `made` `[T, D]`.

    Args:
        after, between: the factors from `collapse`.
        backend: "auto", or "torch" for the slow reference.
    """
    rows, count, width = streams.shape
    if backend == "auto" and elementwise.served(streams) and count <= _MOST:
        out = streams.new_empty(rows, count, width)
        inputs = [x.contiguous() for x in (streams, made, after, between)]
        run("vb_expand_streams", streams.dtype, *addresses(*inputs, out), rows, count, width)
        return out
    after, between = after.to(streams.dtype), between.to(streams.dtype)
    mixed = between[:, 0, :, None].float() * streams[:, 0, None].float()
    for j in range(1, count):
        mixed = mixed + between[:, j, :, None].float() * streams[:, j, None].float()
    return after[..., None] * made[:, None] + mixed.to(streams.dtype)


def _total(x: Tensor, dim: int) -> Tensor:
    return tree_sum(x, dim).unsqueeze(dim)


def _unweighted_norm(module: Any, x: Tensor) -> Tensor:
    """An RMS norm that rounds the factor of a row, and then the row."""
    if x.dtype is torch.float32 and elementwise.served(x):
        return elementwise.rms_norm(x, None, module.eps, NormKind.BARE)
    mean = tree_sum(x.float().square(), -1)[..., None] / x.shape[-1]
    return x * torch.sqrt(mean + module.eps).reciprocal().to(x.dtype)


def _hyper_connection(module: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of streams `[B, T, N, D]` what `collapse` returns."""
    batch = streams.shape[:2]
    rows = streams.flatten(0, 1)
    mixes = products.linear(module.input_norm(rows.flatten(1).float()), module.fn.float())
    numbers = {"iterations": module.hc_sinkhorn_iters, "eps": module.hc_eps}
    made = collapse(mixes, module.scale, module.base, rows, **numbers)
    after, between, out = (x.unflatten(0, batch) for x in made)
    return after, between.as_subclass(GateTensor), out


def _layer(
    module: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """A layer with residual streams `[B, T, N, D]`."""

    def add(streams: Tensor, made: Tensor, after: Tensor, between: Tensor) -> Tensor:
        flat = (x.as_subclass(Tensor).flatten(0, 1) for x in (streams, made, after, between))
        return expand(*flat).view(streams.shape)

    after, between, x = module.attn_hc(hidden_states)
    attended, _ = module.self_attn(module.input_layernorm(x), **kwargs)
    streams = add(hidden_states, attended, after, between)
    after, between, x = module.ffn_hc(streams)
    made = module.mlp(module.post_attention_layernorm(x), input_ids=input_ids)
    return add(streams, made, after, between)


def _hyper_head(module: Any, streams: Tensor) -> Tensor:
    """Make one row of the residual streams `[B, T, N, D]` behind the last layer."""
    flat = module.input_norm(streams.flatten(2).float())
    mixes = products.linear(flat, module.hc_fn.float())
    factors = sigmoid(mixes * module.hc_scale.float() + module.hc_base.float()) + module.eps
    return tree_sum(factors[..., None] * streams, 2).to(streams.dtype)


FORWARDS: dict[str, Callable[..., Any]] = {
    "DeepseekV4DecoderLayer": _layer,
    "DeepseekV4HyperConnection": _hyper_connection,
    "DeepseekV4HyperHead": _hyper_head,
    "DeepseekV4UnweightedRMSNorm": _unweighted_norm,
}
