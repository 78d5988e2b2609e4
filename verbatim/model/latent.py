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

from verbatim.errors import ModelChanged
from verbatim.model import products
from verbatim.model.fingerprint import has_global_hooks
from verbatim.model.quantized import QuantizedLinear

METHOD = "expand_kv"  # the method of attention modules that makes keys and values of latent vectors


def method_of(cls: type) -> Any:
    """Return the method of a class if it is transformers' own, else None."""
    method = vars(cls).get(METHOD)
    return method if getattr(method, "__module__", "").startswith("transformers.") else None


def is_absorbable(module: nn.Module) -> bool:
    """Return whether keys and values are known to be products of latent vectors and matrices.

    They may not be if the up-projection has a bias or hooks, or the class of either module is unknown.
    """
    linear = module._modules.get("kv_b_proj")
    if linear is None or method_of(type(module)) is None or METHOD in module.__dict__:
        return False
    layers = [*linear.modules()]  # several if it has a LoRA of PEFT
    is_known = _is_plain(linear) or type(linear).__module__.startswith("peft.tuners.lora.")
    has_bias = any(layer._parameters.get("bias") is not None for layer in layers)
    has_own_hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    return is_known and not (has_bias or has_own_hooks)


def _is_plain(linear: nn.Module) -> bool:
    return type(linear) in (nn.Linear, QuantizedLinear)


def up_projection(module: Any) -> Tensor:
    """Return the matrices that make the key and the value of each head, `[H, Dk + Dv, rank]`."""
    linear = module.kv_b_proj
    if not is_absorbable(module):
        raise ModelChanged(
            f"a bias, hooks or code were added to {type(module).__name__} or its kv_b_proj since the "
            "model was opened; open it again"
        )
    if _is_plain(linear) and not has_global_hooks():
        weight = linear.weight
    else:  # products with ones and zeros are exact
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
