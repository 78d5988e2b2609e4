"""Units of weights that are streamed in one piece: a decoder layer, the embedding, the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from verbatim.model.experts import ExpertsParts, runs_flat
from verbatim.model.packed import placeholder
from verbatim.model.structs import NotFusable
from verbatim.model.weight_packing import WeightPacking
from verbatim.weights.files import buffer_bytes
from verbatim.weights.lazy import (
    LazyWeight,
    Stored,
    pieces_of,
    rows_can_be_read,
    rows_of,
    sources,
)

_SMALL = 0.002  # of all weights: a list of modules below it, or a parameter outside of the units, stays put


@dataclass(slots=True, eq=False)
class Slot:
    """A parameter and the location of its data.

    Attributes:
        lazy: how it is computed from the data in its tier.
        nbytes: of the parameter.
        tier: "gpu", "cpu" or "disk".
        rows_only: only rows of it are read, from its file; a weight that is used as a whole, too, has two
            slots.
        packing: of the lazy weight's data, if it is quantized.
        holders: modules that use the quantized bytes, which are installed as the buffer of this name; before
            the model is quantized, the modules and the names of the parameter.
        is_unpacked: a holder dequantizes it whole.
        rounding: the packing to whose values the rows are rounded that are read.
        cut: the model's parameter and the range of its rows, if it is not the whole.
        experts: number of experts in it, if they can be read one by one.
        held: its data in the tiers "gpu" and "cpu", while it is in memory.
    """

    name: str
    parameter: nn.Parameter
    lazy: LazyWeight
    tier: str = "disk"
    rows_only: bool = False
    packing: WeightPacking | None = None
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_unpacked: bool = False
    rounding: WeightPacking | None = None
    cut: tuple[nn.Parameter, int, int] | None = None
    experts: int = 0
    held: Tensor | None = None
    _empty: Tensor | None = None  # takes its place where it is not installed

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    def values(self, weight: Tensor) -> Tensor:
        """Return its numbers out of those of the model's parameter, contiguous, in its dtype."""
        if self.cut is not None:
            weight = weight[self.cut[1] : self.cut[2]]
        return weight.detach().to(self.parameter.dtype).contiguous()

    def install(self, data: Tensor | None) -> None:
        """Give the model the parameter, or its holders the quantized bytes; None takes them away."""
        if self.packing is None:
            if data is None:
                if self._empty is None:
                    self._empty = placeholder(self.parameter)
                data = self._empty
            self.parameter.data = data
            return
        for layer, name in self.holders:
            held: Any = layer._buffers[name]
            layer._buffers[name] = placeholder(held) if data is None else data

    @property
    def tier_bytes(self) -> int:
        """Bytes that it takes in its tier, without rounding to pages."""
        return self.nbytes if self.packing is None else self.packing.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, as the kernels read it."""
        return self.tier_bytes // self.experts

    def expert(self, number: int) -> LazyWeight:
        """Return how one expert is made."""
        length = self.parameter.shape[0] if self.packing is None else self.packing.nbytes
        rows = length // self.experts
        lazy = rows_of(self.lazy, number * rows, (number + 1) * rows)
        assert lazy is not None
        return lazy


@dataclass(slots=True, eq=False)
class Unit:
    """A module with all parameters in memory while its forward runs.

    Attributes:
        gathers: it is an embedding: of its weight, only the rows of the batch's tokens are looked up.
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
    """The experts of one layer, each of which can be read by itself.

    Attributes:
        name: of the module.
        count: of its experts.
        stacks: their matrices and biases, by the names of the module's parameters.
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
        """Memory that a thread takes to read an expert: a buffer, and what is converted."""
        # Quantized ones will be in the scratch file as they are held.
        exact = [slot for slot in self.slots if slot.packing is None]
        pieces = [piece for slot in exact for piece in pieces_of(slot.expert(0))]
        made = [
            stored for piece in pieces if not isinstance(piece, Stored) for stored in sources(piece)
        ]
        converted = sum(stored.nbytes for stored in made)
        return buffer_bytes(self.expert_bytes) + (converted + self.expert_bytes if made else 0)


@dataclass(slots=True)
class Units:
    """All parameters of a model.

    Attributes:
        order: of a forward, as far as the module's structure shows it.
        held: small parameters outside of all units, which stay in memory.
        experts: layers of experts that are read one by one, in the order of a forward. Their slots are
            in no unit.
    """

    order: list[Unit]
    held: list[Slot] = field(default_factory=list)
    experts: list[ExpertLayer] = field(default_factory=list)

    @property
    def slots(self) -> list[Slot]:
        """Every slot once, in the order of its first use."""
        units = [slot for unit in self.order for slot in unit.slots]
        experts = [slot for layer in self.experts for slot in layer.slots]
        return list(dict.fromkeys([*units, *experts, *self.held]))

    def split_experts(self) -> None:
        """Take the experts that can be read one by one out of the units of their layers."""
        used = Counter(slot for unit in self.order for slot in unit.slots)
        for unit in self.order:
            for name, module in unit.module.named_modules(prefix=unit.name):
                layer = _expert_layer(name, module, unit)
                if layer is not None and all(used[slot] == 1 for slot in layer.slots):
                    self.experts.append(layer)
                    own = set(layer.slots)
                    unit.slots = [slot for slot in unit.slots if slot not in own]

    def join_experts(self) -> None:
        """Return them to their units, to be read with these or to stay in memory."""
        for layer in self.experts:
            layer.unit.slots += layer.slots
        self.experts = []


def find_units(module: nn.Module, lazy_weights: Mapping[nn.Parameter, LazyWeight]) -> Units:
    """Cut a model into units: each entry of its lists of layers, each embedding and each linear outside.

    Args:
        lazy_weights: of all parameters, or of those that are held here.
    """
    slots: dict[nn.Parameter, Slot] = {}
    for name, parameter in module.named_parameters():  # tied ones come once
        if parameter in lazy_weights:
            slots[parameter] = Slot(name, parameter, lazy_weights[parameter])
    total = sum(slot.nbytes for slot in slots.values())
    order: list[Unit] = []

    def add(name: str, layer: nn.Module) -> None:
        own = list(dict.fromkeys(slots[p] for p in layer.parameters() if p in slots))
        if own:
            gathers = isinstance(layer, nn.Embedding) and rows_can_be_read(own[0].lazy)
            order.append(Unit(name, layer, own, gathers))

    def walk(prefix: str, layer: nn.Module) -> None:
        for name, child in layer.named_children():
            path = f"{prefix}{name}"
            size = sum(slots[p].nbytes for p in set(child.parameters()) & slots.keys())
            if size <= _SMALL * total:
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
    """Return the stacks of an experts module; None of any other module, and where they can't be cut."""
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
            if rows_of(slot.lazy, 0, 1) is None:
                return None
            slot.experts, stacks[key] = slot.parameter.numel() // size, slot
    count = min(slot.experts for slot in stacks.values())
    return ExpertLayer(name, module, unit, count, stacks)
