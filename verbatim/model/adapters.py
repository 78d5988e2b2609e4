"""Attention for architectures that predate transformers' attention interface.

Each function replaces the forward of one attention class while we run: the module's own projections
around the one attention contract. Their sources differ in how heads are laid out and where ALiBi is
scaled; nothing else of the model is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.attention import AttentionOptions
from verbatim.model.context import attend


def alibi_slopes(num_heads: int) -> Tensor:
    """One slope a head, `[H]` float32 (Press, Smith and Lewis 2022).

    For a power of two the slopes are the powers of 2 ** (-8 / H); otherwise those of the nearest lower
    power of two, followed by every other slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(lower) - 3)))
    slopes = [base**i for i in range(1, lower + 1)]
    if lower < num_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * lower) - 3)))
        slopes += [extra**i for i in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _bloom(module: Any) -> Callable[..., tuple[Tensor, None]]:
    slopes = alibi_slopes(module.num_heads)
    options = AttentionOptions(scale=float(module.inv_norm_factor), alibi=slopes)

    def forward(hidden: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        fused = module.query_key_value(hidden)[0]
        fused = fused.view(fused.shape[0], module.num_heads, 3, module.head_dim)
        out = attend(module, fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], options)
        return residual + module.dense(out.flatten(1)[None]), None

    return forward


def _falcon(module: Any) -> Callable[..., tuple[Tensor, None]]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    # Falcon scales score and bias together, so the slope carries the scale too. Its slopes pass
    # through bfloat16 in the original.
    slopes = alibi_slopes(module.num_heads).bfloat16().float() * module.inv_norm_factor
    rotary = AttentionOptions(scale=module.inv_norm_factor)
    biased = AttentionOptions(scale=module.inv_norm_factor, alibi=slopes)

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        alibi = kwargs.get("alibi", args[0] if args else None)
        q, k, v = _falcon_heads(module, module.query_key_value(hidden))
        if alibi is None:
            cos, sin = kwargs["position_embeddings"]
            q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        out = attend(module, q[0], k[0], v[0], rotary if alibi is None else biased)
        return module.dense(out.flatten(1)[None]), None

    return forward


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q `[1, T, H, D]`, k and v `[1, T, Hkv, D]`, without repeating the shared heads."""
    batch, length, _ = fused.shape
    heads, width = module.num_heads, module.head_dim
    if module.new_decoder_architecture:
        groups = fused.view(batch, length, module.num_kv_heads, -1, width)
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    if module.multi_query:
        rows = fused.view(batch, length, heads + 2, width)
        return rows[..., :-2, :], rows[..., [-2], :], rows[..., [-1], :]
    rows = fused.view(batch, length, heads, 3, width)
    return rows[..., 0, :], rows[..., 1, :], rows[..., 2, :]


_ADAPTERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
}


def adapter_for(module: nn.Module) -> Callable[..., Any] | None:
    """A forward over the attention contract for a class without the interface, else None."""
    maker = _ADAPTERS.get(type(module).__name__)
    if maker is None or not type(module).__module__.startswith("transformers."):
        return None
    return maker(module)
