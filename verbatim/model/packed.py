"""Layers with quantized weights in memory.

A packed weight is a weight of the model's dtype that happens to be stored in fewer bits (`quantize.py`):
whatever is computed with it has, bit for bit, what the unpacked matrix gives. A linear layer (transformers'
Conv1D, too) becomes a `PackedLinear`, an embedding looks up and unpacks the rows that are asked for, and any
other layer (experts above all) keeps its class and its attributes: reading the parameter unpacks it.

Where the matrix is interleaved (`integers.py`), a linear layer rounds its activations, too; all else reads
the same weights back.

Such a layer has `packings`: the names of its quantized parameters, and the layout of each in the buffer
`<name>_packed`. Of linear layers and embeddings, which have one weight, these are `packing` and `packed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.model import products
from verbatim.model.quantize import unpack, unpack_rows
from verbatim.model.weight_packing import WeightPacking

_POISON = 255  # of bytes: scales that are NaN


class _OneWeight:
    """A layer whose `weight` is quantized."""

    packings: Mapping[str, WeightPacking]
    _buffers: dict[str, Tensor | None]

    @property
    def packing(self) -> WeightPacking:
        """The layout of `packed`."""
        return self.packings["weight"]

    @property
    def packed(self) -> Tensor:
        """The bytes of the matrix."""
        packed = self._buffers["weight_packed"]
        assert packed is not None
        return packed

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix, computed at each access: for callers that ask for its shape or dtype."""
        return unpack(self.packed, self.packing)


class PackedLinear(_OneWeight, nn.Module):
    """A linear layer with its matrix quantized: `[N, K]`, or `[K, N]` of transformers' Conv1D. Where it is
    interleaved, activations become codes.

    None is ever built: `hold_packed` makes one of the layer that is there.
    """

    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        return products.linear(x, products.Packed(self.packed, self.packing), self.bias)

    def extra_repr(self) -> str:
        return f"{self.packing.depth}, {self.packing.width}, {self.packing.name}"


class PackedEmbedding(_OneWeight, nn.Embedding):  # type: ignore[override]
    """An embedding with a quantized table; the forward of its own class goes on top.

    None is ever built: `hold_packed` makes one of the embedding that is there.
    """

    def forward(self, input: Tensor) -> Tensor:
        ids = input.reshape(-1)
        rows = unpack_rows(self.packed, self.packing, ids)
        return rows.view(*input.shape, -1)


def hold_packed(layer: nn.Module, name: str, packed: Tensor, packing: WeightPacking) -> None:
    """Put `packed` in place of the parameter `name` of `layer`, which gets another class."""
    kind: Any = type(layer)
    packed_kind = PackedLinear if is_linear(layer) else _with_unpacked(kind, name)
    del layer._parameters[name]
    layer.register_buffer(f"{name}_packed", packed, persistent=False)
    layer.__dict__["packings"] = {**layer.__dict__.get("packings", {}), name: packing}
    layer.__class__ = packed_kind


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer becomes a `PackedLinear` when its weight is quantized."""
    from transformers.pytorch_utils import Conv1D

    return type(layer) in (nn.Linear, Conv1D)


@functools.cache
def _with_unpacked(kind: type, name: str) -> type:
    """Return a subclass of `kind` whose attribute `name` is dequantized whenever it is read."""
    if issubclass(kind, nn.Embedding) and name == "weight":
        # Its own forward runs first, and what it calls by `super()` is the quantized look-up.
        bases: Any = (kind, PackedEmbedding)
        return PackedEmbedding if kind is nn.Embedding else _named(kind, bases, {})

    def read(self: Any) -> Tensor:
        return unpack(self._buffers[f"{name}_packed"], self.packings[name])

    return _named(kind, (kind,), {name: property(read)})


def _named(kind: type, bases: tuple[type, ...], fields: dict[str, Any]) -> type:
    return type(kind.__name__, bases, {**fields, "__module__": kind.__module__})


def packed_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor, WeightPacking]]:
    """Yield the name, bytes and layout of each quantized weight of `module`, tied ones once."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for name, packing in layer.__dict__.get("packings", {}).items():
            packed = layer._buffers.get(f"{name}_packed")
            if packed is not None and id(packed) not in seen:
                seen.add(id(packed))
                yield f"{path}.{name}" if path else name, packed, packing


def placeholder(like: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype without memory; it reads as NaN, packed or not."""
    value = torch.nan if like.is_floating_point() else _POISON if like.dtype is torch.uint8 else 0
    with torch.inference_mode(False):
        return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; one without memory, such as a `placeholder`, gets none there."""
    moves = any(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if moves or tensor.untyped_storage().nbytes() >= tensor.nbytes:
        return tensor.to(device)
    return tensor.as_strided((), ()).to(device).expand(tensor.shape)


def drop_weights(module: nn.Module) -> None:
    """Free the memory of all weights; a second call does nothing."""
    for tensor in weights_of(module):
        tensor.data = placeholder(tensor)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights that are in memory; what several names share counts once."""
    found: dict[int, tuple[int, int]] = {}
    for tensor in weights_of(module):
        storage = tensor.untyped_storage()
        _, seen = found.get(storage.data_ptr(), (0, 0))
        if tensor.nbytes <= storage.nbytes():  # else a placeholder
            found[storage.data_ptr()] = storage.nbytes(), seen + tensor.nbytes
    return sum(min(pair) for pair in found.values())


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module and the bytes of its quantized weights, tied ones once."""
    return [*module.parameters(), *(packed for _, packed, _ in packed_buffers(module))]


def weight_info(module: nn.Module) -> dict[str, int]:
    """Return the number and bytes of a module's parameters: tied ones once, quantized ones as stored."""
    parameters, packed = list(module.parameters()), list(packed_buffers(module))
    return {
        "parameters": sum(p.numel() for p in parameters)
        + sum(math.prod(packing.shape) for _, _, packing in packed),
        "weight_bytes": sum(p.nbytes for p in parameters) + sum(len(data) for _, data, _ in packed),
    }
