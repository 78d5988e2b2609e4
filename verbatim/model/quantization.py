"""What weights in few bits may be: `Quantization`, and the names of the usual ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `LLM(quantization=...)` may be, beside "int8" and "int4".

    Args:
        bits: of a code, 8 or 4.
        group_size: weights that share a scale and a lower end: 32, 64 or 128.
        head_bits: of a code of the embedding of tokens and of the head, 8 or 4; None leaves both as they
            are.
        activation_bits: 8 rounds what linear layers and the head multiply their weights with to codes of
            8 bits, group by group of each row (`integers.py`): faster at many rows, and another
            model. None leaves activations as they are.

    Raises:
        InvalidRequest: another number.
    """

    bits: int = 4
    group_size: int = 64
    head_bits: int | None = 8
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", (8, 4)),
            ("group_size", GROUP_SIZES),
            ("head_bits", (8, 4, None)),
            ("activation_bits", (8, None)),
        ):
            value = getattr(self, name)
            if type(value) not in (int, type(None)) or value not in allowed:
                raise InvalidRequest(f"Quantization({name}={value!r}): must be one of {allowed}")

    @property
    def name(self) -> str:
        """ "int4-g64-head8-a8": part of the numerics key. Without the parts that say nothing new."""
        head = {self.bits: "", None: "-head-exact"}.get(self.head_bits, f"-head{self.head_bits}")
        activations = "" if self.activation_bits is None else f"-a{self.activation_bits}"
        return f"int{self.bits}-g{self.group_size}{head}{activations}"

    @property
    def of_weights(self) -> Quantization:
        """How weights are packed, whatever becomes of activations."""
        return replace(self, activation_bits=None)

    @property
    def of_head(self) -> Quantization | None:
        """How the embedding and the head are packed; None: they are not."""
        return None if self.head_bits is None else replace(self, bits=self.head_bits)


# w8a8: weights and activations in 8 bits, as others call it.
_NAMES = {
    "int8": Quantization(8),
    "int4": Quantization(4),
    "w8a8": Quantization(8, activation_bits=8),
    "w4a8": Quantization(4, activation_bits=8),
}


def settle_quantization(value: Any) -> Quantization | None:
    """What `quantization` names.

    Raises:
        NotSupported: weights are not held in that.
    """
    if value is None or isinstance(value, Quantization):
        return value
    found = _NAMES.get(value) if type(value) is str else None
    if found is None:
        raise NotSupported(
            f"quantization={value!r}: must be None, {', '.join(map(repr, _NAMES))} or a "
            "Quantization(bits, group_size, head_bits, activation_bits)"
        )
    return found
