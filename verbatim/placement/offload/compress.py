"""Weights in few bits: which parameters, packed once when a model is opened, unpacked when they are lent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from verbatim.errors import NotSupported
from verbatim.model.quantize import Quantization, WeightPacking, pack, squared_error
from verbatim.placement.offload.files import read_whole
from verbatim.placement.offload.recipe import Held, cook
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.units import Slot, Unit, Units

_ROUTER = re.compile(
    r"(^|\.)(gate|\w+_gate|\w*router\w*)(\.|$)"
)  # chooses experts: small, and kept exact
_WIDTH = 16  # a stack of narrower ones is no stack of matrices: a convolution, say
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(slots=True)
class Compression:
    """What was packed, and how far off it is.

    Attributes:
        packed, exact: matrices in few bits, and those that stayed as they were.
        error: of each packed one: its root mean square error over its root mean square.
    """

    quantization: Quantization
    packed: list[Slot]
    exact: list[Slot]
    error: dict[str, float] = field(default_factory=dict)
    _squares: tuple[float, float] = (0.0, 0.0)  # of all errors, and of all weights

    def info(self) -> dict[str, Any]:
        """As plain values, for `LLM.info`."""
        before = sum(slot.nbytes for slot in self.packed)
        after = sum(slot.stored_bytes for slot in self.packed)
        weights = sum(slot.parameter.numel() for slot in self.packed)
        worst = max(self.error, key=lambda name: self.error[name])
        return {
            "format": self.quantization.name,
            "packed": _patterns(self.packed),
            "exact": _patterns(self.exact),
            "bytes_before": before,
            "bytes_after": after,
            "bits_per_weight": round(8 * after / weights, 3),
            "relative_error": _ratio(*self._squares),
            "worst": f"{worst}: {self.error[worst]:.2g}",
        }

    def pack(self, scratch: Scratch) -> None:
        """Read what was chosen, one parameter at a time, and put it packed where its tier is.

        Raises:
            ModelError: one holds NaN, an infinity or a number too large; the message names it.
            TierFailed: it can't be read, or the disk tier has no room.
        """
        for slot in self.packed:
            assert slot.packing is not None
            weight = cook(slot.recipe, read_whole)
            packed = pack(weight, slot.packing, slot.name)
            wrong, all_of_it = squared_error(weight, packed, slot.packing)
            self.error[slot.name] = _ratio(wrong, all_of_it)
            self._squares = self._squares[0] + wrong, self._squares[1] + all_of_it
            on_disk = slot.tier == "disk"
            slot.recipe = scratch.keep(slot.name, packed) if on_disk else Held(packed)
            slot.in_place = False


def choose(units: Units, quantization: Quantization) -> Compression:
    """Settle which slots will be packed, and what they will take, without reading anything.

    These are the matrices that multiply hidden states: of linear layers (GPT-2's kind, too) and of stacked
    experts. Embeddings, norms, biases and what routes tokens to experts stay exact, and so does a head that
    is tied to the embedding, and a matrix that would not become smaller.

    Raises:
        NotSupported: there are none.
    """
    found: dict[Slot, WeightPacking] = {}
    slot_of = {slot.parameter: slot for slot in units.slots}
    looked_up = {slot for unit in units.order for slot in unit.slots if _is_embedding(unit)}
    for unit in units.order:
        for path, layer in unit.module.named_modules():
            for name, parameter in layer.named_parameters(recurse=False):
                slot = slot_of[parameter]
                columns = _columns(path, layer, name, parameter)
                if columns is not None and slot not in looked_up:
                    found[slot] = WeightPacking(
                        tuple(parameter.shape), parameter.dtype, quantization, columns
                    )
    packed = [slot for slot in units.slots if slot in found and found[slot].nbytes < slot.nbytes]
    for slot in packed:
        slot.packing = found[slot]
        slot.stored_bytes = found[slot].nbytes
    if not packed:
        raise NotSupported(
            f"quantization={quantization.name!r}: the model has no linear layers or stacked experts that "
            "would be smaller for it"
        )
    exact = [s for s in units.slots if s.packing is None and s.parameter.ndim > 1]
    return Compression(quantization, packed, exact)


def _columns(path: str, layer: nn.Module, name: str, parameter: nn.Parameter) -> bool | None:
    """Does it multiply by columns (`[K, N]`) or by rows (`[N, K]`)? None: by neither, or it stays exact."""
    if not parameter.is_floating_point() or _ROUTER.search(path):
        return None
    if isinstance(layer, nn.Linear):
        return False if name == "weight" else None
    if type(layer).__name__ == "Conv1D":  # transformers', which GPT-2 has
        return True if name == "weight" else None
    stacked = parameter.ndim == 3 and min(parameter.shape[1:]) >= _WIDTH
    return bool(getattr(layer, "is_transposed", False)) if stacked else None


def _is_embedding(unit: Unit) -> bool:
    return isinstance(unit.module, nn.Embedding)


def _ratio(wrong: float, all_of_it: float) -> float:
    return float((wrong / all_of_it) ** 0.5) if all_of_it else 0.0


def _patterns(slots: list[Slot]) -> list[str]:
    """Their names with a star for each number, once each."""
    return list(dict.fromkeys(_NUMBER.sub("*", slot.name) for slot in slots))
