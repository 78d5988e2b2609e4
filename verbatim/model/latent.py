"""Multi-head latent attention (MLA) over a cache of latent vectors.

The keys and values of all heads are products of one latent vector per token and `kv_b_proj`; keys also have
rotated elements, which are the same for all heads (DeepSeek-AI 2024, arXiv:2405.04434). Only the latent
vector and the rotated elements are stored, as the key and the value of a single head. Queries are multiplied
with the part of `kv_b_proj` that makes keys, and attention outputs with the part that makes values:

    q . (W_k c) = (W_k^T q) . c        sum_t w_t (W_v c_t) = W_v (sum_t w_t c_t)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model import products
from verbatim.model.fingerprint import has_hooks
from verbatim.model.quantized import QuantizedLinear

METHOD = "expand_kv"  # the method of attention modules that makes keys and values of latent vectors


def up_projection(module: Any) -> Tensor:
    """Return the matrices that make the key and the value of each head, `[H, Dk + Dv, rank]`."""
    linear = module.kv_b_proj
    if type(linear) in (nn.Linear, QuantizedLinear) and not has_hooks([linear.__dict__]):
        weight = linear.weight
    else:  # such as one with a LoRA of PEFT; products with ones and zeros are exact
        rank, like = module.kv_lora_rank, next(linear.parameters())
        weight = linear(torch.eye(rank, dtype=like.dtype, device=like.device)).t()
    matrices: Tensor = weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    return matrices


def absorb_keys(module: Any, q: Tensor) -> Tensor:
    """Return the queries of stored vectors for those of keys: `[T, H, Dk + R]` to `[T, H, rank + R]`."""
    width = module.qk_nope_head_dim
    matrices = up_projection(module)[:, :width]
    latent = products.matmul(q[..., :width].transpose(0, 1), matrices)
    return torch.cat([latent.transpose(0, 1), q[..., width:]], -1)


def expand_values(module: Any, out: Tensor) -> Tensor:
    """Return the attention output for that over stored vectors: `[T, H, rank + R]` to `[T, H, Dv]`."""
    matrices = up_projection(module)[:, module.qk_nope_head_dim :]
    latent = out[..., : matrices.shape[2]].transpose(0, 1)
    return products.matmul(latent, matrices.mT).transpose(0, 1)
