"""The report on the quantized weights of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verbatim.kernels.packing import Packing, WeightPacking
from verbatim.quantization.formats import Quantization

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(slots=True)
class PackingReport:
    """The quantized weights of a model, and their errors.

    Attributes:
        quantization: the requested format; None: all weights stay in the checkpoint's formats.
        packed: the layout of each quantized weight, by name.
        exact: names of the matrices that are not quantized.
        squares: the sums of squared errors and of squared weights, by name of the quantized weight.
        rounded: names of weights that are rounded to quantized values when read, but stored unquantized.
    """

    quantization: Quantization | None
    packed: dict[str, WeightPacking]
    exact: list[str]
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)

    def info(self) -> dict[str, Any]:
        """Return plain values, for `LLM.info`."""
        packings = self.packed.values()
        requested, is_mixed = None, True
        if self.quantization is not None:
            requested, group = self.quantization.name, self.quantization.group_size
            bits = self.quantization.bits, self.quantization.head_bits
            own = {Packing(n, group) for n in bits if n is not None}
            is_mixed = not own.issuperset(packing.rows for packing in packings)
        numbers = [math.prod(packing.shape) for packing in packings]
        after = sum(packing.nbytes for packing in packings)
        before = sum(n * p.dtype.itemsize for n, p in zip(numbers, packings, strict=True))
        info: dict[str, Any] = {
            "format": "+".join(sorted({p.name for p in packings})) if is_mixed else requested,
            "requested": requested,
            "packed": _patterns(self.packed),
            "exact": _patterns(self.exact),
            "bytes_before": before,
            "bytes_after": after,
            "bits_per_weight": round(8 * after / sum(numbers), 3),
        }
        if self.rounded:
            info["rounded"] = _patterns(self.rounded)
        if self.quantization is not None and self.quantization.activation_bits is not None:
            inputs = [name for name, packing in self.packed.items() if packing.interleaved]
            info["activation_bits"] = self.quantization.activation_bits
            info["activations_packed"] = _patterns(inputs)
        if self.squares:  # empty for weights that were already quantized in the checkpoint
            error = {name: _ratio(*pair) for name, pair in self.squares.items()}
            worst = max(error, key=lambda name: error[name])
            totals = [sum(sums) for sums in zip(*self.squares.values(), strict=True)]
            info["relative_error"] = _ratio(*totals)
            info["worst"] = f"{worst}: {error[worst]:.2g}"
        return info


def _patterns(names: Iterable[str]) -> list[str]:
    """Return the distinct names, with a star in place of each number."""
    return list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def _ratio(wrong: float, all_of_it: float) -> float:
    """Return the relative root mean square error, from two sums of squares."""
    return float((wrong / all_of_it) ** 0.5) if all_of_it else 0.0
