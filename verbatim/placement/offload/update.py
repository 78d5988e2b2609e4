"""New weights for an offloaded model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from verbatim.model.quantize import pack_and_measure
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.units import Slot
from verbatim.placement.offload.weights import Weights
from verbatim.shield import Shield
from verbatim.weights.lazy import Held, LazyWeight
from verbatim.weights.update import WeightWriter


class TierWriter(WeightWriter):
    """Writes new weights in place in memory, and to a new file in the disk tier.

    Args:
        weights: those of a model or of a part of one.
        targets: the state dict of its module before it was quantized.

    Attributes:
        packed: names of the weights that are held quantized or on the disk.
    """

    def __init__(self, weights: Weights, targets: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._shield = Shield()  # Ctrl-C waits until all weights are written
        self._overlay: Scratch | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._lazies: dict[Slot, LazyWeight] = {}
        self.squares = {}
        owned: dict[Tensor, list[Slot]] = {}
        for slot in weights.units.slots:
            owned.setdefault(slot.cut[0] if slot.cut else slot.parameter, []).append(slot)
        # Tied weights come once, and a parameter without slots is of another part.
        self._slots = {n: owned.pop(target) for n, target in targets.items() if target in owned}
        self._targets = {n: t for n, t in targets.items() if not isinstance(t, nn.Parameter)}
        self.packed = [
            name
            for name, slots in self._slots.items()
            if any(slot.tier == "disk" or slot.packing is not None for slot in slots)
        ]
        self.exact = [n for n in (*self._slots, *self._targets) if n not in set(self.packed)]

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Quantize new weights, and write those of the disk tier to a file, until `write`.

        Raises:
            TierFailed: the disk tier has no room.
            ModelError: one can't be quantized.
        """
        slots = [
            (slot, tensors[name])
            for name in self.packed
            if name in tensors
            for slot in self._slots[name]
        ]
        if any(slot in self._lazies for slot, _ in slots):  # of an update that was broken off
            self.drop()
        if self._overlay is None:
            self._overlay = self._weights.scratch.another()
        try:
            for slot, tensor in slots:
                self._prepare(slot, tensor)
        except BaseException:
            self.drop()
            raise

    def _prepare(self, slot: Slot, tensor: Tensor) -> None:
        held = slot.values(tensor)
        if slot.packing is not None:
            held, self.squares[slot.name] = pack_and_measure(held, slot.packing, slot.name)
        if slot.tier == "disk":
            assert self._overlay is not None
            self._lazies[slot] = self._overlay.keep(slot.name, held)
            return
        target = slot.held
        assert target is not None
        self._copies.append((target, held))
        self._lazies[slot] = Held(target)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write all that stays in memory unquantized, and put all that was prepared in its place."""
        for name in self.exact:
            if name in tensors and name in self._targets:
                self._copies.append((self._targets[name], tensors[name]))
            elif name in tensors:
                for slot in self._slots[name]:
                    self._prepare(slot, tensors[name])
        with self._shield.up():
            self._weights.replace(self._copies, self._lazies, self._overlay)
            self._overlay, self._copies, self._lazies = None, [], {}

    def drop(self) -> None:
        """Forget what was prepared."""
        if self._overlay is not None:
            self._overlay.close()
        self._overlay, self._copies, self._lazies = None, [], {}
