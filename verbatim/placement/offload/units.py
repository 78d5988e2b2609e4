"""Units of weights that are streamed as a whole: a decoder layer, the embedding, a piece of the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.kernels.packing import WeightPacking
from verbatim.model.experts import ExpertsParts, runs_flat
from verbatim.model.quantizable import owners
from verbatim.model.quantized import hold_quantized, is_linear, placeholder
from verbatim.model.structs import NotFusable
from verbatim.placement.offload.scratch import Scratch
from verbatim.quantization.formats import Quantization
from verbatim.quantization.matrix import pack_and_measure
from verbatim.quantization.report import PackingReport
from verbatim.weights.files import buffer_bytes, read_whole
from verbatim.weights.lazy import (
    InMemory,
    LazyWeight,
    Stored,
    materialize,
    pieces_of,
    rows_can_be_read,
    rows_of,
    sources,
    stored_as,
)

# Fraction of all weights; smaller submodules have no units, and stay in memory.
_MIN_UNIT_SHARE = 0.002


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter and the location of its data.

    Attributes:
        lazy: lazy weight that computes it from the data in its tier.
        tier: "gpu", "cpu" or "disk".
        rows_only: whether only single rows are read, from the file; a weight that is also used as a whole has
            two slots.
        packing: format of the data of `lazy`, if it is quantized.
        holders: modules that use the quantized bytes, and the names of their parameters.
        buffer: the buffer of all holders for these bytes.
        is_unpacked: whether a holder dequantizes it as a whole.
        rounding: format to which rows are rounded after they are read; None: they are not rounded.
        cut: the model's parameter and the range of its rows in this slot; None: the slot has all rows.
        experts: number of experts in it, if they can be read one by one; else 0.
        data: the data, if its tier is "gpu" or "cpu"; None while dropped.
    """

    name: str
    parameter: nn.Parameter
    lazy: LazyWeight
    tier: str = "disk"
    rows_only: bool = False
    packing: WeightPacking | None = None
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    buffer: Tensor | None = None
    is_unpacked: bool = False
    rounding: WeightPacking | None = None
    cut: tuple[nn.Parameter, int, int] | None = None
    experts: int = 0
    data: Tensor | None = None
    _empty: Tensor | None = None  # placeholder while it is not installed

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    def install(self, data: Tensor | None) -> None:
        """Install the data; None removes it."""
        if data is None:
            if self._empty is None:
                self._empty = placeholder(self.target)
            data = self._empty
        self.target.data = data

    @property
    def target(self) -> Tensor:
        """The tensor that modules read."""
        return self.parameter if self.buffer is None else self.buffer

    @property
    def tier_bytes(self) -> int:
        """Bytes in its tier, without rounding to pages."""
        return self.nbytes if self.packing is None else self.packing.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, in the layout that the kernels read."""
        return self.tier_bytes // self.experts

    def expert(self, number: int) -> LazyWeight:
        """Return the lazy weight of one expert."""
        length = self.parameter.shape[0] if self.packing is None else self.packing.nbytes
        rows = length // self.experts
        lazy = rows_of(self.lazy, number * rows, (number + 1) * rows)
        assert lazy is not None
        return lazy


@dataclass(slots=True, eq=False)
class Unit:
    """A module with all parameters in memory while its forward runs.

    Attributes:
        gathers: whether it is an embedding from which only the rows of the batch's tokens are read.
    """

    name: str
    module: nn.Module
    slots: list[Slot]
    gathers: bool = False

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)


@dataclass(slots=True, eq=False)
class ExpertLayer:
    """The experts of one layer, each of which can be read separately.

    Attributes:
        name: name of the experts module.
        unit: the unit of the layer.
        count: number of experts.
        stacks: stacked matrices and biases, by the name of the module's parameter.
    """

    name: str
    module: nn.Module
    unit: Unit
    count: int
    stacks: dict[str, Slot]

    @property
    def slots(self) -> list[Slot]:
        return list(self.stacks.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return sum(slot.expert_bytes for slot in self.slots)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory that a thread needs to read an expert: a buffer, and tensors to convert."""
        # Quantized experts have the same layout in the scratch file and in memory.
        exact = [slot for slot in self.slots if slot.packing is None]
        pieces = [piece for slot in exact for piece in pieces_of(slot.expert(0))]
        inputs = [
            stored for piece in pieces if not isinstance(piece, Stored) for stored in sources(piece)
        ]
        converted = sum(stored.nbytes for stored in inputs)
        return buffer_bytes(self.expert_bytes) + (converted + self.expert_bytes if inputs else 0)


@dataclass(slots=True)
class Units:
    """All parameters of a model.

    Attributes:
        order: units in the order of a forward, as far as the module's structure shows it.
        resident: slots of small parameters outside of all units, which stay in memory.
        experts: layers with experts that are read one by one, in the order of a forward; no unit contains
            their slots.
    """

    order: list[Unit]
    resident: list[Slot] = field(default_factory=list)
    experts: list[ExpertLayer] = field(default_factory=list)

    @property
    def slots(self) -> list[Slot]:
        """Every slot once, in the order of its first use."""
        units = [slot for unit in self.order for slot in unit.slots]
        experts = [slot for layer in self.experts for slot in layer.slots]
        return list(dict.fromkeys([*units, *experts, *self.resident]))

    @property
    def packing(self) -> WeightPacking | None:
        """A packing of the format with the most bytes; None if nothing is quantized."""
        packings = [slot.packing for slot in self.slots if slot.packing is not None]
        sizes = Counter[str]()
        for packing in packings:
            sizes[packing.name] += packing.nbytes
        return max(packings, key=lambda packing: sizes[packing.name], default=None)

    def split_experts(self) -> None:
        """Move the experts that can be read one by one from their units to `experts`."""
        used = Counter(slot for unit in self.order for slot in unit.slots)
        for unit in self.order:
            for name, module in unit.module.named_modules(prefix=unit.name):
                layer = _expert_layer(name, module, unit)
                if layer is not None and all(used[slot] == 1 for slot in layer.slots):
                    self.experts.append(layer)
                    expert_slots = set(layer.slots)
                    unit.slots = [slot for slot in unit.slots if slot not in expert_slots]

    def join_experts(self) -> None:
        """Move all experts back to their units, to be read or held in memory with these."""
        for layer in self.experts:
            layer.unit.slots += layer.slots
        self.experts = []


def find_units(module: nn.Module, lazy_weights: Mapping[nn.Parameter, LazyWeight]) -> Units:
    """Split a model into units: each layer of its lists of layers, and each embedding and linear outside.

    Args:
        lazy_weights: lazy weights of the parameters to place: all, or those that this process holds.
    """
    slots: dict[nn.Parameter, Slot] = {}
    for name, parameter in module.named_parameters():  # tied parameters come once
        if parameter in lazy_weights:
            slots[parameter] = Slot(name, parameter, lazy_weights[parameter])
    total = sum(slot.nbytes for slot in slots.values())
    order: list[Unit] = []

    def add(name: str, layer: nn.Module) -> None:
        is_embedding = isinstance(layer, nn.Embedding)
        parameters = layer.parameters(recurse=not is_embedding)  # its norm stays in memory
        unit_slots = list(dict.fromkeys(slots[p] for p in parameters if p in slots))
        if unit_slots:
            gathers = is_embedding and rows_can_be_read(unit_slots[0].lazy)
            order.append(Unit(name, layer, unit_slots, gathers))

    def walk(prefix: str, layer: nn.Module) -> None:
        for name, child in layer.named_children():
            path = f"{prefix}{name}"
            size = sum(slots[p].nbytes for p in set(child.parameters()) & slots.keys())
            if size <= _MIN_UNIT_SHARE * total:
                continue
            if isinstance(child, nn.ModuleList):
                for number, entry in enumerate(child):
                    add(f"{path}.{number}", entry)
            elif isinstance(child, nn.Embedding | nn.Linear):
                add(path, child)
            else:
                walk(f"{path}.", child)

    walk("", module)
    in_units = {slot for unit in order for slot in unit.slots}
    return Units(order, [slot for slot in slots.values() if slot not in in_units])


def _expert_layer(name: str, module: nn.Module, unit: Unit) -> ExpertLayer | None:
    """Return the experts of a module; None if it has none, or if they can't be read one by one."""
    if not runs_flat(module):
        return None
    try:
        parts = ExpertsParts(module)
    except NotFusable:
        return None
    slots = {slot.parameter: slot for slot in unit.slots}
    stacks: dict[str, Slot] = {}
    for stack in (*parts.inputs, parts.down):
        for (tensors, key), size in (
            (stack.weight, stack.cols * stack.depth),
            (stack.bias, stack.cols),
        ):
            slot = slots.get(tensors.get(key))  # type: ignore[arg-type]
            if slot is None:
                if tensors.get(key) is not None:
                    return None
                continue
            if key in stacks or rows_of(slot.lazy, 0, 1) is None:
                return None
            slot.experts, stacks[key] = slot.parameter.numel() // size, slot
    count = min(slot.experts for slot in stacks.values())
    return ExpertLayer(name, module, unit, count, stacks)


_ROWS = 64  # pieces have a multiple of this number of rows, the kernels' tile size
_MIN_HEAD_BYTES = 64 << 20  # smaller heads are not split
_MIN_PIECE_BYTES = 16 << 20  # except for the last piece


def split_head(
    units: Units, head: nn.Module | None, packings: dict[nn.Parameter, WeightPacking]
) -> None:
    """Replace the unit of `head` by pieces no larger than the largest layer, if possible.

    Each piece computes its columns of the logits bit-identically to the whole matrix, since the kernels'
    products have a fixed order of operations for each element. torch's don't: without kernels the head stays
    whole. If the head is split, rows of a tied embedding are read from its file.

    Args:
        packings: packings of the weights to quantize; those of the pieces are added.
    """
    unit = next((unit for unit in units.order if unit.module is head), None)
    if type(head) is not nn.Linear or head.bias is not None or unit is None:
        return
    (slot,) = unit.slots
    largest = max(
        (u.nbytes for u in units.order if not isinstance(u.module, _NOT_LAYERS)), default=0
    )
    count = -(-slot.nbytes // max(largest, _MIN_PIECE_BYTES))
    if count < 2 or slot.nbytes < _MIN_HEAD_BYTES or kernels.library() is None:
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
    head.forward = _forward_of(pieces)


_NOT_LAYERS = (nn.Embedding, nn.Linear)


def _forward_of(pieces: list[Unit]) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        return torch.cat([piece.module(x) for piece in pieces], dim=-1)

    return forward


def choose(units: Units, module: nn.Module, packings: Mapping[nn.Parameter, WeightPacking]) -> None:
    """Choose which slots are quantized, and how, without reading data.

    `rows_only` slots stay in their file; their rows are rounded to quantized values when they are read.

    Args:
        packings: result of `packings_of` for the same model.
    """
    packed: dict[nn.Parameter, Slot] = {}
    for slot in units.slots:
        packing = packings.get(slot.parameter)
        if packing is None:
            continue
        if slot.rows_only:
            if stored_as(slot.lazy, packing) is None:  # else the file holds the quantized values
                slot.rounding = packing.plain
            continue
        slot.packing = packing
        packed[slot.parameter] = slot
    with_pieces = nn.ModuleList([module, *(unit.module for unit in units.order)])
    for _, layer, name, parameter in owners(with_pieces):
        if parameter in packed:
            slot = packed[parameter]
            slot.holders.append((layer, name))
            is_embedding = isinstance(layer, nn.Embedding)
            slot.is_unpacked |= not (is_embedding or is_linear(layer) or runs_flat(layer))


def pack(units: Units, quantization: Quantization | None, scratch: Scratch) -> PackingReport:
    """Quantize the chosen weights into their tiers, one parameter at a time; return a report.

    Raises:
        ModelError: a weight holds NaN, an infinity or too large a number; the message names it.
        TierFailed: a weight can't be read, or the disk tier has no room.
    """
    for unit in units.order:
        if unit.gathers:
            unit.slots = [_rows_of(slot) for slot in unit.slots]
    squares: dict[str, tuple[float, float]] = {}
    for slot in units.slots:
        if slot.packing is None:
            continue
        stored = stored_as(slot.lazy, slot.packing)
        if stored is not None:
            packed = materialize(stored, read_whole).flatten()
        else:
            weight = materialize(slot.lazy, read_whole)
            packed, squares[slot.name] = pack_and_measure(weight, slot.packing, slot.name)
        slot.lazy = scratch.store(slot.name, packed) if slot.tier == "disk" else InMemory(packed)
    for layer in units.experts:
        for slot in layer.slots:
            slot.holders = []  # the slots of the cache are held instead
    for slot in units.slots:
        if slot.packing is not None:
            like = torch.empty(1, dtype=torch.uint8).expand(slot.packing.nbytes)
            slot.buffer = placeholder(like)
            for holder, name in slot.holders:
                hold_quantized(holder, name, slot.buffer, slot.packing)
    packings = {slot.name: slot.packing for slot in units.slots if slot.packing is not None}
    unpacked = [slot for slot in units.slots if slot.name not in packings]
    return PackingReport(
        quantization,
        packings,
        [s.name for s in unpacked if s.rounding is None and s.parameter.ndim > 1],
        squares,
        [slot.name for slot in unpacked if slot.rounding is not None],
    )


def _rows_of(slot: Slot) -> Slot:
    """Return the slot from which an embedding reads rows: not quantized if the table is on the disk."""
    if slot.packing is None or slot.tier != "disk":
        return slot
    slot.holders = [use for use in slot.holders if not isinstance(use[0], nn.Embedding)]
    is_elsewhere, rounding = bool(slot.holders), slot.packing.plain
    return replace(slot, packing=None, holders=[], rows_only=is_elsewhere, rounding=rounding)
