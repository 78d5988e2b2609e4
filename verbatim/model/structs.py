"""The kernels' view of a layer and of a model's head: addresses and sizes, as their structs have them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.functions import struct_of
from verbatim.kernels.options import NormKind
from verbatim.model.norms import Norm
from verbatim.model.packed import PackedLinear
from verbatim.model.products import Matrix
from verbatim.model.weight_packing import WeightPacking

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # vb::Format of plain ones


class NotFusable(Exception):
    """The kernels can't run a layer or read a weight; the message tells why."""


class NormStruct(ctypes.Structure):
    """`vb::Norm` of kernels/elementwise.h."""

    _fields_ = [("weight", _POINTER), ("width", _LONG), ("eps", _FLOAT), ("kind", _INT)]


ROLES = (
    "before_attention",
    "of_queries",
    "of_keys",
    "after_attention",
    "before_mlp",
    "after_mlp",
)


@struct_of("layer")
class LayerStruct(ctypes.Structure):
    """`Layer` of kernels/layer.cpp."""

    _fields_ = [
        ("inputs", Matrix * 6),
        ("output", Matrix),
        ("gates", Matrix * 2),
        ("down", Matrix),
        *((role, NormStruct) for role in ROLES),
        *((name, _LONG) for name in ("hidden", "heads", "kv_heads", "head_dim", "value_dim")),
        *((name, _INT) for name in ("num_inputs", "num_gates", "activation", "rotation")),
        ("residual_scale", _FLOAT),
        ("is_bf16", _INT),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("window", _LONG),
        ("chunk", _LONG),
        ("sinks", _POINTER),
        ("mixture", _POINTER),
        ("delta", _POINTER),
        ("mamba2", _POINTER),
        ("conv", _POINTER),
        ("gated", _INT),
        ("index", _INT),
    ]


def address_of(tensor: Any, dtype: torch.dtype) -> int:
    """Return the address of a contiguous tensor of `dtype`; 0 for None."""
    if tensor is None:
        return 0
    if type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype is not dtype:
        raise NotFusable(f"a weight of it is a {type(tensor).__name__} of {tensor.dtype}")
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise NotFusable("a weight of it is not contiguous in memory")
    address: int = tensor.data_ptr()
    return address


def matrix_at(
    data: Any,
    bias: Tensor | None,
    dtype: torch.dtype,
    cols: int,
    depth: int,
    packing: WeightPacking | None,
) -> Matrix:
    """Return a matrix `[cols, depth]`, the first one at `data`; raise NotFusable if the kernels can't read
    it.

    Args:
        dtype: of the activations.
        packing: how it is quantized; None: it is plain.
    """
    if dtype not in _FORMATS:
        raise NotFusable(f"its weights are {dtype}")
    at_bias = address_of(bias, dtype)
    if packing is None:
        return Matrix(address_of(data, dtype), at_bias, cols, depth, depth, _FORMATS[dtype])
    if packing.dtype is not dtype:
        raise NotFusable(f"a packed weight of it stands for {packing.dtype}")
    at = address_of(data, torch.uint8)
    group = packing.quantization.group_size
    return Matrix(at, at_bias, cols, depth, depth, packing.format, group)


def matrix_of(linear: Any, dtype: torch.dtype) -> Matrix:
    """Return a linear layer's weight and bias for the kernels; raise NotFusable if they can't read it."""
    bias = linear._parameters.get("bias")
    packing: WeightPacking | None = None
    if type(linear) is PackedLinear:
        packing = linear.packing
        data: Any = linear._buffers["weight_packed"]
        cols, depth = packing.width, packing.depth
    elif type(linear) is nn.Linear:
        data = linear._parameters["weight"]
        cols, depth = data.shape
        if data.stride() != (depth, 1):
            raise NotFusable("a weight of it is not contiguous in memory")
    else:
        raise NotFusable(f"it has a {type(linear).__name__} in place of a linear layer")
    if bias is not None and bias.shape != (cols,):
        raise NotFusable("a bias of it has another length than its weight")
    return matrix_at(data, bias, dtype, cols, depth, packing)


def norm_of(norm: Norm | None, dtype: torch.dtype, width: int, head_dim: int | None) -> NormStruct:
    """Return a norm of `width`, or of `head_dim` for each head."""
    if norm is None:
        return NormStruct(None, width, 0.0, NormKind.NONE)
    weight = norm.weight
    own = (head_dim or width) if weight is None else weight.shape[0]
    if own not in (width, head_dim):
        raise NotFusable(f"a norm of it is {own} wide")
    return NormStruct(address_of(weight, dtype), own, norm.eps, norm.kind)
