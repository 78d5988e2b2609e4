"""What the kernels know of a layer and of a model's head: addresses and sizes, as their structs have them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model.elementwise import NormKind
from verbatim.model.layer_parts import Norm, NotFusable
from verbatim.model.packed import PackedLinear
from verbatim.model.products import packing_format

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # vb::Format of plain ones


class Matrix(ctypes.Structure):
    """`vb::Matrix` of kernels/matrix.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("data", "bias")),
        *((name, _LONG) for name in ("cols", "depth", "stride")),
        *((name, _INT) for name in ("format", "group")),
    ]


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


class LayerStruct(ctypes.Structure):
    """`Layer` of kernels/layer.cpp."""

    _fields_ = [
        ("inputs", Matrix * 3),
        ("output", Matrix),
        ("gates", Matrix * 2),
        ("down", Matrix),
        *((role, NormStruct) for role in ROLES),
        *(
            (name, _LONG)
            for name in ("hidden", "heads", "kv_heads", "head_dim", "value_dim", "inner")
        ),
        *((name, _INT) for name in ("num_inputs", "num_gates", "activation", "rotation")),
        ("residual_scale", _FLOAT),
        ("is_bf16", _INT),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
        ("window", _LONG),
    ]


def _checked(tensor: Any, dtype: torch.dtype) -> int:
    """The address of a tensor that lies as it should; None has none."""
    if tensor is None:
        return 0
    if type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype is not dtype:
        raise NotFusable(f"a weight of it is a {type(tensor).__name__} of {tensor.dtype}")
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise NotFusable("a weight of it is not contiguous in memory")
    address: int = tensor.data_ptr()
    return address


def matrix_of(linear: Any, dtype: torch.dtype) -> Matrix:
    """A linear layer's weight and bias as the kernels read them; NotFusable where they can't."""
    if dtype not in _FORMATS:
        raise NotFusable(f"its weights are {dtype}")
    own_bias = linear._parameters.get("bias")
    bias = _checked(own_bias, dtype)
    if type(linear) is PackedLinear:
        packing = linear.packing
        if packing.dtype is not dtype:
            raise NotFusable(f"a packed weight of it stands for {packing.dtype}")
        data = _checked(linear._buffers["packed"], torch.uint8)
        (cols, depth), kind = packing.shape, packing.quantization
        _check_bias(own_bias, cols)
        return Matrix(data, bias, cols, depth, depth, packing_format(packing), kind.group_size)
    if type(linear) is not nn.Linear:
        raise NotFusable(f"it has a {type(linear).__name__} in place of a linear layer")
    weight: Any = linear._parameters["weight"]
    data = _checked(weight, dtype)
    cols, depth = weight.shape
    _check_bias(own_bias, cols)
    if weight.stride() != (depth, 1):
        raise NotFusable("a weight of it is not contiguous in memory")
    return Matrix(data, bias, cols, depth, depth, _FORMATS[dtype], 0)


def _check_bias(bias: Tensor | None, cols: int) -> None:
    if bias is not None and bias.shape != (cols,):
        raise NotFusable("a bias of it has another length than its weight")


def norm_of(norm: Norm | None, dtype: torch.dtype, width: int, head_dim: int | None) -> NormStruct:
    """A norm of `width`, or of `head_dim` for each head."""
    if norm is None:
        return NormStruct(None, width, 0.0, NormKind.NONE)
    kind, name, eps = norm.parts
    weight = None if name is None else norm.module._parameters[name]
    own = (head_dim or width) if weight is None else weight.shape[0]
    if own not in (width, head_dim):
        raise NotFusable(f"a norm of it is {own} wide")
    return NormStruct(_checked(weight, dtype), own, norm.module.__dict__[eps], kind)
