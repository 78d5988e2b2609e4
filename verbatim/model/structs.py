"""The kernels' view of a layer and of a model's head: addresses and sizes, as their structs have them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import first_line
from verbatim.kernels.functions import struct_of
from verbatim.kernels.options import NormKind
from verbatim.model.elementwise import NormStruct
from verbatim.model.norms import Norm
from verbatim.model.packed import PackedLinear, is_linear
from verbatim.model.products import Matrix
from verbatim.model.weight_packing import WeightPacking

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # vb::Format of plain ones


class NotFusable(Exception):
    """The kernels can't run a layer or read a weight; the message tells why."""


def why_not(error: Exception) -> str:
    """Return what a NotFusable says, or name another error, which a foreign model may raise."""
    named = "" if isinstance(error, NotFusable) else f"{type(error).__name__}: "
    return named + first_line(error)


class Slice(ctypes.Structure):
    """`Slice` of kernels/layer.cpp."""

    _fields_ = [("at", _LONG), ("stride", _LONG)]


ROLES = "before_attention of_queries of_keys of_values after_attention before_mlp after_mlp".split()


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
        *((name, _FLOAT) for name in ("scale", "softcap")),
        *((name, _LONG) for name in ("window", "chunk")),
        *((name, _POINTER) for name in "sinks mixture delta mamba2 conv alibi".split()),
        ("latent", Matrix * 2),
        *((name, Slice) for name in ("q", "k", "v", "gate")),
        ("chunks", _LONG),
        *((name, _FLOAT) for name in ("clip", "q_scale")),
        ("latent_scale", _FLOAT * 2),
        ("gate_width", _LONG),
        *((name, _INT) for name in ("sinks_f32", "residual", "turned_first", "index", "angles")),
        ("factor", _POINTER),
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


def address_and_f32(tensor: Any, dtype: torch.dtype) -> tuple[int, bool]:
    """Return the address of a contiguous tensor of `dtype` or float32, and whether it is float32."""
    is_f32 = tensor is not None and tensor.dtype is torch.float32
    return address_of(tensor, torch.float32 if is_f32 else dtype), is_f32


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
    by_columns = False
    if type(linear) is PackedLinear:
        packing = linear.packing
        data: Any = linear._buffers["weight_packed"]
        cols, depth = packing.width, packing.depth
    elif is_linear(linear):
        data, by_columns = linear._parameters["weight"], type(linear) is not nn.Linear
        if by_columns and data.mT.is_contiguous():  # held by rows (`load.py`)
            data, by_columns = data.data.mT, False
        cols, depth = reversed(data.shape) if by_columns else data.shape
        if data.stride() != (data.shape[1], 1):
            raise NotFusable("a weight of it is not contiguous in memory")
    else:
        raise NotFusable(f"it has a {type(linear).__name__} in place of a linear layer")
    if bias is not None and bias.shape != (cols,):
        raise NotFusable("a bias of it has another length than its weight")
    matrix = matrix_at(data, bias, dtype, cols, depth, packing)
    if by_columns:
        matrix.transposed, matrix.stride = True, cols
    return matrix


def norm_of(norm: Norm | None, dtype: torch.dtype, width: int, head_dim: int | None) -> NormStruct:
    """Return a norm of `width`, or of `head_dim` for each head."""
    if norm is None:
        return NormStruct(None, width, 0.0, NormKind.NONE)
    weight, bias = norm.weight, norm.bias
    own = (head_dim or width) if weight is None else weight.shape[0]
    if own not in (width, head_dim) or (bias is not None and bias.shape != (own,)):
        raise NotFusable(f"a norm of it is {own} wide")
    at, at_bias = address_of(weight, dtype), address_of(bias, dtype)
    return NormStruct(at, own, norm.eps, norm.kind, at_bias)
