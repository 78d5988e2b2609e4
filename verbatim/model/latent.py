"""Multi-head latent attention (MLA) over a cache of latent vectors.

The keys and values of all heads are products of one latent vector per token and `kv_b_proj`; keys also have
rotated elements, which are the same for all heads (DeepSeek-AI 2024, arXiv:2405.04434). Only the latent
vector and the rotated elements are stored, as the key and the value of a single head. Queries are multiplied
with the part of `kv_b_proj` that makes keys, and attention outputs with the part that makes values:

    q . (W_k c) = (W_k^T q) . c        sum_t w_t (W_v c_t) = W_v (sum_t w_t c_t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verbatim.errors import ModelChanged
from verbatim.model import products
from verbatim.model.fingerprint import has_hooks

METHOD = "expand_kv"  # the method of attention modules that makes keys and values of latent vectors


def method_of(cls: type) -> Any:
    """Return the method of a class if it is transformers' own, else None."""
    method = vars(cls).get(METHOD)
    method = getattr(method, "verbatim_original", method)
    is_own = getattr(method, "__module__", "").startswith("transformers.")
    return method if is_own and not hasattr(method, "__wrapped__") else None


def is_absorbable(module: nn.Module) -> bool:
    """Return whether keys and values are known to be products of latent vectors and matrices.

    They may not be if the up-projection has a bias or hooks, or the class of either module is unknown.
    """
    linear = module._modules.get("kv_b_proj")
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and not has_hooks([linear.__dict__])
        and METHOD not in module.__dict__
        and method_of(type(module)) is not None
    )


class AdapterTerm(NamedTuple):
    """The matrix `scaling * B @ A` that an adapter adds to an up-projection, for a range of rows."""

    rows: slice
    a: Tensor  # [rank of the adapter, rank]
    b: Tensor  # [H, Dk + Dv, rank of the adapter]
    scaling: float


@dataclass(frozen=True, slots=True)
class UpProjection:
    """The matrices that make keys and values of latent vectors.

    Attributes:
        matrices: `[H, Dk + Dv, rank]`.
        key_width: Dk, without rotated elements.
        terms: what adapters add.
    """

    matrices: Tensor
    key_width: int
    terms: list[AdapterTerm]

    @staticmethod
    def of(module: Any, context: Any) -> UpProjection:
        """Return the up-projection of an attention module, with the adapters of the context's rows.

        Raises:
            ModelChanged: the module is no longer `is_absorbable`.
        """
        if not is_absorbable(module):
            raise ModelChanged(
                f"a bias, hooks or code were added to {type(module).__name__} or its kv_b_proj since the "
                "model was opened; open it again"
            )
        linear, widths = module.kv_b_proj, (-1, module.qk_nope_head_dim + module.v_head_dim)
        low_rank = getattr(linear.__dict__.get("forward"), "low_rank", None)
        terms = [
            AdapterTerm(slice(begin, end), a.float(), b.unflatten(0, widths), scaling)
            for begin, end, a, b, scaling in (() if low_rank is None else low_rank(context))
        ]
        return UpProjection(linear.weight.unflatten(0, widths), module.qk_nope_head_dim, terms)

    def absorb_keys(self, q: Tensor) -> Tensor:
        """Turn queries for keys into queries for latent vectors: `[T, H, Dk + R]` to `[T, H, rank + R]`."""
        x, rotated = q[..., : self.key_width].transpose(0, 1), q[..., self.key_width :]
        latent = products.matmul(x, self.matrices[:, : self.key_width])
        for term in self.terms:
            a = term.a.expand(len(x), -1, -1)
            _add(latent, x, term, term.b[:, : self.key_width], a)
        return torch.cat([latent.transpose(0, 1), rotated], -1)

    def expand_values(self, out: Tensor) -> Tensor:
        """Turn attention outputs over latent vectors into those over values.

        `[T, H, rank + R]` becomes `[T, H, Dv]`.
        """
        x = out[..., : self.matrices.shape[2]].transpose(0, 1)
        values = products.matmul(x, self.matrices[:, self.key_width :].mT)
        for term in self.terms:
            a = term.a.t().expand(len(x), -1, -1)
            _add(values, x, term, a, term.b[:, self.key_width :].mT)
        return values.transpose(0, 1)


def _add(out: Tensor, x: Tensor, term: AdapterTerm, first: Tensor, second: Tensor) -> None:
    """Add the product of `x` `[H, T, K]` and two matrices per head to the rows of `out` `[H, T, N]`."""
    inner = products.matmul(x[:, term.rows].float(), first.contiguous())
    delta = products.matmul(inner, second.contiguous()) * term.scaling
    out[:, term.rows] = (out[:, term.rows].float() + delta).to(out.dtype)
