"""A DCP checkpoint as lazy weights: how each weight is computed from its files.

torch.save stores the raw numbers of a chunk, so a chunk can be read like a tensor of a safetensors file. A
tensor that was sharded by rows is a concatenation of chunks. Other chunks, and several tensors of one
parameter (experts), are copied to their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import NotSupported
from verbatim.model.dcp.filling import Destination, unequal
from verbatim.model.dcp.folder import DcpCheckpoint, TensorLayout
from verbatim.model.packed import placeholder
from verbatim.weights.lazy import Computed, Held, LazyWeight, Stamp, Stored, materialize, stamp_of
from verbatim.weights.packed_cache import read_stored

_aten = torch.ops.aten


def leave_there(
    checkpoint: DcpCheckpoint, module: nn.Module, pieces: list[tuple[str, Destination]]
) -> Mapping[nn.Parameter, LazyWeight]:
    """Replace the weights of a module by placeholders, and return their lazy weights; read the buffers.

    Raises:
        ModelError: a tensor is damaged, or the copies of a tied tensor differ.
        NotSupported: two parameters share memory without being tied.
    """
    owners: dict[int, nn.Parameter] = {}
    for key, p in module.named_parameters():
        if p.numel() and owners.setdefault(p.untyped_storage().data_ptr(), p) is not p:
            raise NotSupported(
                f"{key} shares its memory with another parameter, and they are not one, so a "
                "torch.distributed.checkpoint can't be read into them; tie them"
            )
    parts: dict[nn.Parameter, list[_Part]] = {p: [] for p in owners.values()}
    stamps: dict[Path, Stamp] = {}
    twice: list[tuple[str, nn.Parameter, LazyWeight]] = []
    for name, piece in pieces:
        owner = owners.get(piece.into.untyped_storage().data_ptr())
        if owner is None:
            stored = checkpoint.read(name).to(piece.into.dtype)
            if piece.spare and not torch.equal(stored, piece.into):
                raise unequal(checkpoint, name)
            piece.into.copy_(stored)
            continue
        found = _parts(checkpoint, name, piece, stamps)
        if piece.spare:
            twice.append((name, owner, _joined(owner, found)))
        else:
            parts[owner] += found
    lazy_weights = {
        # Held: parameters that the checkpoint lacks.
        p: _joined(p, own) if (own := parts.get(p)) else Held(p.data.clone())
        for p in module.parameters()
    }
    for parameter in lazy_weights:
        parameter.requires_grad_(False)
        parameter.data = placeholder(parameter)
    for name, parameter, lazy in twice:
        if not torch.equal(
            materialize(lazy, read_stored), materialize(lazy_weights[parameter], read_stored)
        ):
            raise unequal(checkpoint, name)
    return lazy_weights


class _Part:
    """A box of a tensor, and its location in a parameter."""

    def __init__(self, into: Tensor, lazy: LazyWeight, dtype: torch.dtype) -> None:
        self.size, self.stride = tuple(into.shape), tuple(into.stride())
        self.offset = into.storage_offset()
        self.lazy, self.dtype = lazy, dtype


def _parts(
    checkpoint: DcpCheckpoint, name: str, piece: Destination, stamps: dict[Path, Stamp]
) -> list[_Part]:
    """Return the chunks of a tensor with their locations."""
    dtype, into = checkpoint.dtype(name), piece.into
    if piece.arrange is not None:  # of the whole tensor
        into = torch.empty(into.shape, dtype=dtype, device="meta")
    found = [
        _Part(into[chunk.box], _lazy_weight(name, chunk, dtype, stamps), dtype)
        for chunk in checkpoint.chunks(name)
    ]
    if piece.arrange is None:
        return found
    return [_Part(piece.into, Computed(piece.arrange, (_joined(into, found),), {}, None), dtype)]


def _lazy_weight(
    name: str, chunk: TensorLayout, dtype: torch.dtype, stamps: dict[Path, Stamp]
) -> LazyWeight:
    """Return the lazy weight of a chunk."""
    numbers = chunk.numbers
    if chunk.path not in stamps:
        with chunk.path.open("rb") as file:
            stamps[chunk.path] = stamp_of(file.fileno())
    in_order = numbers.strides == _strides(chunk.sizes)
    stored = Stored(
        f"{name}{list(chunk.offsets)}",
        chunk.path,
        numbers.offset,
        numbers.count * dtype.itemsize,
        dtype,
        chunk.sizes if in_order else (numbers.count,),
        stamps[chunk.path],
    )
    if in_order:
        return stored
    laid = Computed(_aten.as_strided.default, (stored, chunk.sizes, numbers.strides), {}, None)
    # Contiguous, as in memory: other strides would select other matrix products.
    return Computed(_aten.clone.default, (laid,), {"memory_format": torch.contiguous_format}, None)


def _joined(like: Tensor, parts: list[_Part]) -> LazyWeight:
    """Return the lazy weight of a tensor that is covered by parts."""
    shape, base = tuple(like.shape), like.storage_offset()
    parts = sorted(parts, key=lambda part: part.offset)
    first, *others = parts
    rows = [(part.size[0] if part.size else 1) for part in parts]
    row = like[0].numel() if like.ndim else 1
    starts = [base + sum(rows[:i]) * row for i in range(len(rows))]
    in_rows = all(
        part.size[1:] == shape[1:]
        and part.stride == _strides(shape)
        and part.offset == start
        and part.dtype == first.dtype
        for part, start in zip(parts, starts, strict=True)
    )
    if not in_rows:
        places = tuple((part.size, part.stride, part.offset - base) for part in parts)
        made = tuple(part.lazy for part in parts)
        return Computed(_put_together, (shape, like.stride(), like.dtype, places, made), {}, None)
    lazy = first.lazy
    if others:
        lazy = Computed(_aten.cat.default, ([part.lazy for part in parts],), {}, None)
    if first.dtype != like.dtype:
        lazy = Computed(_aten._to_copy.default, (lazy,), {"dtype": like.dtype}, None)
    return lazy


def _put_together(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    places: tuple[Any, ...],
    parts: tuple[Tensor, ...],
) -> Tensor:
    """Return a tensor assembled from parts, each given as (size, strides, first number)."""
    made = torch.empty_strided(shape, strides, dtype=dtype)
    for (size, steps, offset), part in zip(places, parts, strict=True):
        made.as_strided(size, steps, offset).copy_(part)
    return made


def _strides(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for count in reversed(size):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))
