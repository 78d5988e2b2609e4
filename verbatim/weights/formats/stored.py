"""Lazy weights of quantized matrices: decoded, or as the packed bytes that a layer holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from verbatim.errors import ModelError, VerbatimError
from verbatim.model.packing import choose_packings, holdable_of
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import unpack
from verbatim.model.weight_packing import WeightPacking
from verbatim.untrusted import reason
from verbatim.weights.lazy import Computed, LazyWeight, Stored

_aten = torch.ops.aten
_ONE_AT_A_TIME = threading.Lock()  # codes take several times the memory while they are laid out


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Computes a matrix from the stored tensors of its format, through the packed layout.

    Attributes:
        name: of the matrix, for errors.
        packing: of the matrix.
        compute: returns the packed bytes of a matrix `[N, K]` or `[K, N]` from its tensors. Those of a stack
            are cut along the first dimension, as unpacked codes take several times the memory.
    """

    name: str
    packing: WeightPacking
    compute: Callable[..., Tensor]

    def pack(self, *parts: Tensor) -> Tensor:
        """Return the packed bytes: `[..., N, vector_bytes]`."""
        shape, packing = self.packing.shape, self.packing
        outer = *shape[:-2], packing.width
        try:
            with _ONE_AT_A_TIME:
                if len(shape) == 2:
                    return self.compute(*parts).view(*outer, -1)
                out = torch.empty(shape[0], packing.nbytes // shape[0], dtype=torch.uint8)
                for row, *own in zip(out, *parts, strict=True):
                    row.copy_(self.compute(*own))
                return out.view(*outer, -1)
        except VerbatimError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"the tensors of {self.name} do not fit its format: {reason(error)}"
            ) from error

    def __call__(self, *parts: Tensor) -> Tensor:
        return unpack(self.pack(*parts).flatten(), self.packing)


def grouped(
    name: str, packing: WeightPacking, compute: Callable[..., Tensor], parts: tuple[Stored, ...]
) -> Computed:
    """Return the lazy weight of a matrix, or a stack of them, that `Grouped` computes from its tensors."""
    func = Grouped(name, packing, compute)
    return Computed(func, parts, shape=packing.shape, dtype=packing.dtype)


def stored_packing(lazy: LazyWeight) -> tuple[WeightPacking, LazyWeight] | None:
    """Return the packing that a lazy weight has in its file, and the lazy weight of its packed bytes.

    A stack or concatenation of packed matrices along any dimension but K is packed as well, and so are the
    rows of one in another order.
    None of any other weight.
    """
    if not isinstance(lazy, Computed):
        return None
    if isinstance(lazy.func, Grouped):
        return lazy.func.packing, replace(lazy, func=lazy.func.pack)
    if lazy.func is _aten.index_select.default:
        source, dim, order = lazy.args
        stored = stored_packing(source)
        if dim or stored is None or stored[0].columns:
            return None
        return stored[0], replace(lazy, args=(stored[1], dim, order))
    if lazy.func not in (_aten.stack.default, _aten.cat.default):
        return None
    pairs = [pair for part in lazy.args[0] if (pair := stored_packing(part)) is not None]
    packings, parts = [packing for packing, _ in pairs], [part for _, part in pairs]
    if len(pairs) < len(lazy.args[0]) or packings[0].columns:
        return None
    dim, first = lazy.args[1] if len(lazy.args) > 1 else 0, packings[0]
    shape = list(first.shape)
    if not 0 <= dim <= len(shape) - 2:
        return None
    if lazy.func is _aten.stack.default:
        shape.insert(dim, len(packings))
    else:
        shape[dim] = sum(packing.shape[dim] for packing in packings)
    if any(replace(packing, shape=first.shape) != first for packing in packings):
        return None
    return replace(first, shape=tuple(shape)), replace(lazy, args=(parts, dim))


def packings_of(
    module: nn.Module,
    lazy_weights: Mapping[nn.Parameter, LazyWeight],
    quantization: Quantization | None,
) -> dict[nn.Parameter, WeightPacking]:
    """Return the layout of every weight that is held packed, without reading data.

    A weight that is stored packed stays as it is stored, if a layer can use it so, unless `quantization`
    takes fewer bits for it, or quantizes activations.

    Raises:
        NotSupported: as of `choose_packings`.
    """
    found = {} if quantization is None else choose_packings(module, quantization)
    holdable = holdable_of(module)
    for parameter, lazy in lazy_weights.items():
        stored, wanted = stored_packing(lazy), found.get(parameter)
        if stored is None or stored[0].columns is not holdable.get(parameter):
            continue
        fewer = wanted and wanted.quantization.bits < stored[0].quantization.bits
        if not fewer and not (wanted and wanted.interleaved):
            found[parameter] = stored[0]
    return found


def stored_as(lazy: LazyWeight, packing: WeightPacking | None) -> LazyWeight | None:
    """Return the lazy weight of a weight's packed bytes, if it is stored in this packing."""
    stored = stored_packing(lazy)
    return stored[1] if stored is not None and stored[0] == packing else None
