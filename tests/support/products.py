"""Random weights, and several matrices in one kernel call, as in fused layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from verbatim.kernels.functions import kernel
from verbatim.model.products import Matrix, pointers_of
from verbatim.quantization.matrix import QuantizedMatrix


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return numbers of widely varying magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape, generator=generator) ** 4
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def multiply_together(
    x: Tensor, weights: Sequence[Tensor | QuantizedMatrix], biases: Sequence[Tensor | None]
) -> Tensor:
    """Return `linear` of the rows `x` `[T, K]` with each weight, concatenated."""
    function = kernel("vb_multiply", x.dtype)
    assert function is not None
    views = [pointers_of(w, b) for w, b in zip(weights, biases, strict=True)]
    matrices = (Matrix * len(views))(*(matrix for matrix, _ in views))
    out = x.new_empty(len(x), sum(w.shape[0] for w in weights))
    rows, at = (x.data_ptr(), len(x), x.stride(0)), ctypes.addressof(matrices)
    function(out.data_ptr(), *rows, at, len(views), out.shape[1], False)
    return out
