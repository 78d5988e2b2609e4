"""Multi-head latent attention (MLA) over a cache of latent vectors.

The keys and values of all heads are products of one latent vector per token and `kv_b_proj`; keys also have
rotated elements, which are the same for all heads (DeepSeek-AI 2024, arXiv:2405.04434). Only the latent
vector and the rotated elements are stored, as the key and the value of a single head. Queries are multiplied
with the part of `kv_b_proj` that makes keys, and attention outputs with the part that makes values:

    q . (W_k c) = (W_k^T q) . c        sum_t w_t (W_v c_t) = W_v (sum_t w_t c_t)
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class AdapterTerm(NamedTuple):
    """The matrix `scaling * B @ A` that an adapter adds to an up-projection, for a range of rows."""

    rows: slice
    a: Tensor  # [rank of the adapter, rank]
    b: Tensor  # [H, Dk + Dv, rank of the adapter]
    scaling: float


def low_rank_terms(module: Any, context: Any) -> list[AdapterTerm]:
    """Return what the adapters of the context's rows add to the up-projection."""
    terms = getattr(module.kv_b_proj.__dict__.get("forward"), "low_rank", None)
    width = module.qk_nope_head_dim + module.v_head_dim
    return [
        AdapterTerm(slice(begin, end), a.float(), b.unflatten(0, (-1, width)), scaling)
        for begin, end, a, b, scaling in (() if terms is None else terms(context))
    ]


def absorb_keys(module: Any, q: Tensor, terms: list[AdapterTerm]) -> Tensor:
    """Return the queries of stored vectors for those of keys: `[T, H, Dk + R]` to `[T, H, rank + R]`."""
    width = module.qk_nope_head_dim
    x = q[..., :width].transpose(0, 1)
    latent = products.matmul(x, up_projection(module)[:, :width])
    for term in terms:
        a = term.a.expand(len(x), -1, -1)
        _add(latent, x, term, (term.b[:, :width], a))
    return torch.cat([latent.transpose(0, 1), q[..., width:]], -1)


def expand_values(module: Any, out: Tensor, terms: list[AdapterTerm]) -> Tensor:
    """Return the attention output for that over stored vectors: `[T, H, rank + R]` to `[T, H, Dv]`."""
    width = module.qk_nope_head_dim
    matrices = up_projection(module)[:, width:].mT
    x = out[..., : matrices.shape[1]].transpose(0, 1)
    values = products.matmul(x, matrices)
    for term in terms:
        a = term.a.t().expand(len(x), -1, -1)
        _add(values, x, term, (a, term.b[:, width:].mT))
    return values.transpose(0, 1)


def _add(out: Tensor, x: Tensor, term: AdapterTerm, factors: tuple[Tensor, Tensor]) -> None:
    """Add the product of `x` `[H, T, K]` and two matrices per head to the rows of `out` `[H, T, N]`."""
    first, second = (factor.contiguous() for factor in factors)
    inner = products.matmul(x[:, term.rows].float(), first)
    delta = products.matmul(inner, second) * term.scaling
    out[:, term.rows] = (out[:, term.rows].float() + delta).to(out.dtype)
