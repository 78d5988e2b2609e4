"""Layers with quantized weights in memory.

A quantized weight (`quantization/matrix.py`) gives results that are bit-identical to those of the dequantized
one. A linear layer (also transformers' Conv1D) becomes a `QuantizedLinear`; with an interleaved matrix
(`quantization/integers.py`) it also quantizes its activations. An embedding dequantizes the requested rows.
Other layers (mostly experts) become a subclass of their class, in which reading the parameter dequantizes it.

A layer with quantized weights has `packings`, their layouts by parameter name, and a buffer `<name>_packed`
for each. Linear layers and embeddings, which have one weight, also have it as `matrix`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.kernels.packing import WeightPacking
from verbatim.model import products
from verbatim.quantization.matrix import QuantizedMatrix, unpack, unpack_selected

_NAN_BYTE = 255  # fills placeholders of quantized weights, so that their scales are NaN


def _dequantized(name: str) -> Any:
    """Return a property that dequantizes a layer's weight `name` at each access."""

    def dequantize(self: Any) -> Tensor:
        return unpack(self._buffers[f"{name}_packed"], self.packings[name])

    return property(dequantize)


class _OneWeight:
    """A layer with a quantized `weight`, which is dequantized for callers that need its shape or dtype."""

    packings: Mapping[str, WeightPacking]
    _buffers: dict[str, Any]
    weight = _dequantized("weight")

    @property
    def matrix(self) -> QuantizedMatrix:
        """The quantized weight."""
        return QuantizedMatrix(self._buffers["weight_packed"], self.packings["weight"])


class QuantizedLinear(_OneWeight, nn.Module):
    """A linear layer with a quantized matrix: `[N, K]`, or `[K, N]` for transformers' Conv1D.

    `hold_quantized` converts existing layers in place.
    """

    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return products.linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        packing = self.packings["weight"]
        return f"{packing.depth}, {packing.width}, {packing.name}"


class QuantizedEmbedding(_OneWeight, nn.Embedding):
    """An embedding with a quantized table.

    `hold_quantized` converts existing layers in place. Subclasses of `nn.Embedding` keep their own forward.
    """

    def forward(self, input: Tensor) -> Tensor:
        table = self.matrix
        rows = unpack_selected(table.data, table.packing, input.reshape(-1))
        return rows.view(*input.shape, -1)


def hold_quantized(layer: nn.Module, name: str, packed: Tensor, packing: WeightPacking) -> None:
    """Replace the parameter `name` of `layer` by `packed`, and change the layer's class to match."""
    kind: Any = type(layer)
    quantized_kind = QuantizedLinear if is_linear(layer) else _dequantizing(kind, name)
    del layer._parameters[name]
    layer.register_buffer(f"{name}_packed", packed, persistent=False)
    layer.__dict__["packings"] = {**layer.__dict__.get("packings", {}), name: packing}
    layer.__class__ = quantized_kind


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer becomes a `QuantizedLinear` when its weight is quantized."""
    from transformers.pytorch_utils import Conv1D

    return type(layer) in (nn.Linear, Conv1D)


def in_dtype(x: Tensor, layer: nn.Module) -> Tensor:
    """Convert `x` to the dtype of a layer's weight; of its quantized products, if it is quantized."""
    weight: Any = layer._parameters.get("weight")
    if weight is None:  # quantized
        matrix = getattr(layer, "matrix", None)
        return x if matrix is None else x.to(matrix.packing.dtype)
    return x.to(weight.dtype)


@functools.cache
def _dequantizing(kind: type, name: str) -> type:
    """Return a subclass of `kind` that dequantizes its attribute `name` at each access."""
    if kind is nn.Embedding:
        return QuantizedEmbedding
    # A subclass's forward runs first, and calls that of `QuantizedEmbedding` by `super()`.
    is_table = issubclass(kind, nn.Embedding) and name == "weight"
    bases: Any = (kind, QuantizedEmbedding) if is_table else (kind,)
    fields = {name: _dequantized(name), "__module__": kind.__module__}
    return type(kind.__name__, bases, fields)


def quantized_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, WeightPacking]]:
    """Yield the name, bytes and layout of each quantized weight of `module`, tied ones once."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for name, packing in layer.__dict__.get("packings", {}).items():
            packed = layer._buffers.get(f"{name}_packed")
            if packed is not None and id(packed) not in seen:
                seen.add(id(packed))
                yield f"{path}.{name}" if path else name, packed, packing


def placeholder(like: Tensor) -> Tensor:
    """Return a tensor like `like`, but without memory; weights, quantized or not, read as NaN."""
    value = torch.nan if like.is_floating_point() else _NAN_BYTE if like.dtype is torch.uint8 else 0
    with torch.inference_mode(False):
        return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a `placeholder` takes no memory there either."""
    moves = any(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if moves or tensor.untyped_storage().nbytes() >= tensor.nbytes:
        return tensor.to(device)
    return tensor.as_strided((), ()).to(device).expand(tensor.shape)


def drop_weights(module: nn.Module) -> None:
    """Free the memory of all weights; idempotent."""
    for tensor in weights_of(module):
        tensor.data = placeholder(tensor)


def weight_bytes(module: nn.Module) -> int:
    """Return the number of bytes of the weights in memory; shared storage counts once."""
    storages: dict[int, tuple[int, int]] = {}
    for tensor in weights_of(module):
        storage = tensor.untyped_storage()
        _, used = storages.get(storage.data_ptr(), (0, 0))
        if tensor.nbytes <= storage.nbytes():  # else a placeholder
            storages[storage.data_ptr()] = storage.nbytes(), used + tensor.nbytes
    return sum(min(pair) for pair in storages.values())


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module and the buffers of its quantized weights, tied ones once."""
    return [*module.parameters(), *(packed for _, packed, _ in quantized_weights(module))]


def weight_info(module: nn.Module) -> dict[str, int]:
    """Return the number and bytes of a module's parameters: tied ones once, quantized ones as stored."""
    parameters, packed = list(module.parameters()), list(quantized_weights(module))
    return {
        "parameters": sum(p.numel() for p in parameters)
        + sum(math.prod(packing.shape) for _, _, packing in packed),
        "weight_bytes": sum(p.nbytes for p in parameters) + sum(len(data) for _, data, _ in packed),
    }
