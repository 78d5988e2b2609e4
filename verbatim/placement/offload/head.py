"""The head in pieces: a vocabulary is often larger than any layer, and would determine the ring's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.model.weight_packing import WeightPacking
from verbatim.placement.offload.units import Slot, Unit, Units
from verbatim.weights.lazy import rows_can_be_read, rows_of

_ROWS = 64  # of a piece, a multiple of it: the kernels' tiles of columns
_SMALLEST = 64 << 20  # bytes of a head that is worth it
_LEAST = 16 << 20  # bytes of a piece, but for the last


def split_head(
    units: Units, head: nn.Module | None, packings: dict[nn.Parameter, WeightPacking]
) -> None:
    """Replace the unit of `head` by pieces no larger than the largest layer, where that is possible.

    Each piece computes its columns of the logits bit-identically to the whole matrix, since the kernels'
    products have a fixed order of operations for each element. torch's don't, so without kernels the head
    stays whole. Rows of a tied embedding are then read from its file.

    Args:
        packings: of the weights to quantize; those of the head's pieces are added.
    """
    unit = next((unit for unit in units.order if unit.module is head), None)
    if type(head) is not nn.Linear or head.bias is not None or unit is None:
        return
    (slot,) = unit.slots
    largest = max((u.nbytes for u in units.order if not isinstance(u.module, _WHOLE)), default=0)
    count = -(-slot.nbytes // max(largest, _LEAST))
    if count < 2 or slot.nbytes < _SMALLEST or kernels.library() is None:
        return
    if not rows_can_be_read(slot.lazy):
        return
    num_out, depth = head.weight.shape
    rows = -(-num_out // count // _ROWS) * _ROWS
    pieces = []
    for begin in range(0, num_out, rows):
        end = min(begin + rows, num_out)
        piece = nn.Linear(depth, end - begin, bias=False, device="meta")
        piece.weight = nn.Parameter(head.weight.data[begin:end], requires_grad=False)
        name = f"{unit.name}[{begin}:{end}]"
        if head.weight in packings:
            packings[piece.weight] = replace(packings[head.weight], shape=tuple(piece.weight.shape))
        lazy = rows_of(slot.lazy, begin, end)
        assert lazy is not None
        cut = Slot(f"{name}.weight", piece.weight, lazy, cut=(head.weight, begin, end))
        pieces.append(Unit(name, piece.eval(), [cut]))
    at = units.order.index(unit)
    units.order[at : at + 1] = pieces
    slot.rows_only = any(slot in other.slots for other in units.order)
    head.forward = _in_pieces(pieces)


_WHOLE = (nn.Embedding, nn.Linear)


def _in_pieces(pieces: list[Unit]) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        return torch.cat([piece.module(x) for piece in pieces], dim=-1)

    return forward
