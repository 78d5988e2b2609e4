"""ctypes structs that describe a layer and its weights to the kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import first_line
from verbatim.kernels.functions import struct_layout
from verbatim.kernels.options import NormKind
from verbatim.kernels.packing import WeightPacking
from verbatim.model.elementwise import NormStruct
from verbatim.model.norms import Norm
from verbatim.model.products import Matrix
from verbatim.model.quantized import QuantizedLinear, is_linear

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # vb::Format of unquantized matrices


class NotFusable(Exception):
    """The kernels can't run a layer or read a weight; the message says why."""


def why_not(error: Exception) -> str:
    """Return the first line of an error's message, with its class unless it is NotFusable."""
    named = "" if isinstance(error, NotFusable) else f"{type(error).__name__}: "
    return named + first_line(error)


@struct_layout("L at stride")
class Slice(ctypes.Structure):
    """`Slice` of kernels/layer.cpp."""


ROLES = "before_attention of_queries of_keys of_values after_attention before_mlp after_mlp".split()


_LAYER = f"""
    Matrix inputs[6] output gates[2] down
    NormStruct {" ".join(ROLES)}
    L hidden heads kv_heads head_dim value_dim
    I num_inputs num_gates activation rotation
    F residual_scale
    I is_bf16
    F scale softcap
    L window chunk
    P sinks mixture delta mamba2 conv alibi
    Matrix latent[2]
    Slice q k v gate
    L chunks
    F clip q_scale latent_scale[2]
    L gate_width
    I sinks_f32 residual turned_first index angles
    P factor
    L absorbed
"""


@struct_layout(_LAYER, size="layer")
class LayerStruct(ctypes.Structure):
    """`Layer` of kernels/layer.cpp."""


def address_of(tensor: Any, dtype: torch.dtype) -> int:
    """Return the address of a contiguous tensor of `dtype`; 0 for None."""
    if tensor is None:
        return 0
    if type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype is not dtype:
        raise NotFusable(f"one of its weights is a {type(tensor).__name__} of {tensor.dtype}")
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise NotFusable("one of its weights is not contiguous in memory")
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
    """Return the struct of a matrix `[cols, depth]` at the start of `data`.

    Args:
        dtype: dtype of the activations.
        packing: layout of a quantized matrix, or None.

    Raises:
        NotFusable: the kernels can't read the matrix.
    """
    if dtype not in _FORMATS:
        raise NotFusable(f"its weights are {dtype}")
    at_bias = address_of(bias, dtype)
    if packing is None:
        return Matrix(address_of(data, dtype), at_bias, cols, depth, depth, _FORMATS[dtype])
    if packing.dtype is not dtype:
        raise NotFusable(f"a quantized weight has dtype {packing.dtype}")
    at = address_of(data, torch.uint8)
    return Matrix(at, at_bias, cols, depth, depth, packing.format, packing.rows.group)


def matrix_of(linear: Any, dtype: torch.dtype) -> Matrix:
    """Return the struct of a linear layer; raise NotFusable if the kernels can't read it."""
    bias = linear._parameters.get("bias")
    packing: WeightPacking | None = None
    by_columns = False
    if type(linear) is QuantizedLinear:
        quantized = linear.matrix
        data: Any = quantized.data
        packing, (cols, depth) = quantized.packing, quantized.shape
    elif is_linear(linear):
        data, by_columns = linear._parameters.get("weight"), type(linear) is not nn.Linear
        if data is None:
            raise NotFusable("the weight of one of its linear layers is not a parameter")
        if by_columns and data.mT.is_contiguous():  # stored by rows (`weights/load.py`)
            data, by_columns = data.data.mT, False
        cols, depth = reversed(data.shape) if by_columns else data.shape
        if data.stride() != (data.shape[1], 1):
            raise NotFusable("one of its weights is not contiguous in memory")
    else:
        raise NotFusable(f"it has a {type(linear).__name__} in place of a linear layer")
    if bias is not None and bias.shape != (cols,):
        raise NotFusable("one of its biases differs in length from its weight")
    matrix = matrix_at(data, bias, dtype, cols, depth, packing)
    if by_columns:
        matrix.transposed, matrix.stride = True, cols
    return matrix


def norm_of(norm: Norm | None, dtype: torch.dtype, width: int, head_dim: int | None) -> NormStruct:
    """Return the struct of a norm over `width` elements, or over the `head_dim` elements of each head."""
    if norm is None:
        return NormStruct(None, width, 0.0, NormKind.NONE)
    if not norm.is_complete:
        raise NotFusable("the weight of one of its norms is not a parameter")
    weight, bias = norm.weight, norm.bias
    norm_width = (head_dim or width) if weight is None else weight.shape[0]
    if norm_width not in (width, head_dim) or (bias is not None and bias.shape != (norm_width,)):
        raise NotFusable(f"one of its norms has width {norm_width}")
    weight_at, bias_at = address_of(weight, dtype), address_of(bias, dtype)
    return NormStruct(weight_at, norm_width, norm.eps, norm.kind, bias_at)
