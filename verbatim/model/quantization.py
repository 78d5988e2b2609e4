"""`Quantization`: the options of weight quantization, and the names of common ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from verbatim.errors import InvalidRequest, NotSupported

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization format, for `LLM(quantization=...)`.

    Args:
        bits: bits per weight, 8 or 4.
        group_size: weights that share a scale and a minimum: 32, 64 or 128.
        head_bits: bits per weight of the token embedding and the head, 8 or 4. None: not quantized.
        activation_bits: 8: also quantize the inputs of linear layers and of the head to 8 bits, per group of
            each row (`integers.py`); faster at many rows, and other outputs. None: not quantized.

    Raises:
        InvalidRequest: a value that is not allowed.
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
        """Part of the numerics key, such as "int4-g64-head8-a8"; default parts are left out."""
        head = {self.bits: "", None: "-head-exact"}.get(self.head_bits, f"-head{self.head_bits}")
        activations = "" if self.activation_bits is None else f"-a{self.activation_bits}"
        return f"int{self.bits}-g{self.group_size}{head}{activations}"

    @property
    def of_weights(self) -> Quantization:
        """The format of the weights alone, without activations."""
        return replace(self, activation_bits=None)

    @property
    def of_head(self) -> Quantization | None:
        """The format of the embedding and the head; None if they are not quantized."""
        return None if self.head_bits is None else replace(self, bits=self.head_bits)


# w8a8: 8-bit weights and activations, in common notation.
_NAMES = {
    "int8": Quantization(8),
    "int4": Quantization(4),
    "w8a8": Quantization(8, activation_bits=8),
    "w4a8": Quantization(4, activation_bits=8),
}


def resolve_quantization(value: Any) -> Quantization | None:
    """Return the format that `quantization` names.

    Raises:
        NotSupported: an unknown format.
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
