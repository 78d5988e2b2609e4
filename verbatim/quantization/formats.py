"""The formats of quantized weights (`Quantization`) and of quantized K and V, and their names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.kernels.packing import Packing, WeightPacking

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantization format, for `LLM(quantization=...)`.

    Args:
        bits: bits per weight, 8 or 4.
        group_size: number of weights that share a scale and a minimum: 32, 64 or 128.
        head_bits: bits per weight of the token embedding and the head, 8 or 4. None: not quantized.
        activation_bits: 8: also quantize the inputs of linear layers and of the head to 8 bits, per group of
            each row (`integers.py`); faster for large batches, but less accurate. None: not quantized.

    Raises:
        InvalidRequest: a value is not allowed.
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
        """Name such as "int4-g64-head8-a8", part of the numerics key; default parts are omitted."""
        head = {self.bits: "", None: "-head-exact"}.get(self.head_bits, f"-head{self.head_bits}")
        activations = "" if self.activation_bits is None else f"-a{self.activation_bits}"
        return f"int{self.bits}-g{self.group_size}{head}{activations}"

    def packing(
        self, shape: tuple[int, ...], dtype: torch.dtype, columns: bool = False
    ) -> WeightPacking:
        """Return the layout of a weight in this format; see `WeightPacking` for the arguments."""
        rows, interleaved = Packing(self.bits, self.group_size), self.activation_bits is not None
        return WeightPacking(tuple(shape), dtype, rows, columns, interleaved)

    @property
    def of_weights(self) -> Quantization:
        """The format of the weights, without quantized activations."""
        return replace(self, activation_bits=None)

    @property
    def of_head(self) -> Quantization | None:
        """The format of the embedding and the head; None if they are not quantized."""
        return None if self.head_bits is None else replace(self, bits=self.head_bits)


# In common notation, w8a8 means 8-bit weights and activations.
_NAMES = {
    "int8": Quantization(8),
    "int4": Quantization(4),
    "w8a8": Quantization(8, activation_bits=8),
    "w4a8": Quantization(4, activation_bits=8),
}


def resolve_quantization(value: Any) -> Quantization | None:
    """Return the format for the argument `quantization`; raise NotSupported if it is unknown."""
    if value is None or isinstance(value, Quantization):
        return value
    format_ = _NAMES.get(value) if type(value) is str else None
    if format_ is None:
        raise NotSupported(
            f"quantization={value!r}: must be None, {', '.join(map(repr, _NAMES))} or a "
            "Quantization(bits, group_size, head_bits, activation_bits)"
        )
    return format_


# The formats of K and V. A row is one token's vector of one KV head, so it depends on that token alone. At
# equal size, asymmetric scales with larger groups (64 at 8 bits, 32 at 4) are more accurate than symmetric
# ones with smaller groups (32 and 16), especially with outlier channels (benchmarks/kv.py --formats).
# verbatim/kernels/attention_groups.h has the same group sizes.
KV_PACKINGS = {packing.name: packing for packing in (Packing(8, 64), Packing(4, 32))}

KVDtype = torch.dtype | Packing
_FLOATS: dict[str, KVDtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_kv_dtype(kv_dtype: str | torch.dtype) -> KVDtype:
    """Return the dtype or packing named by `kv_dtype`; raise NotSupported if there is none."""
    known = {**_FLOATS, **KV_PACKINGS}
    match = known.get(str(kv_dtype).removeprefix("torch."))
    if match is None:
        raise NotSupported(f"kv_dtype={kv_dtype!r}: must be 'auto' or one of {sorted(known)}")
    return match


def row_nbytes(dtype: KVDtype, width: int) -> int:
    """Return the bytes of one head's vector of `width` elements."""
    return dtype.row_bytes(width) if isinstance(dtype, Packing) else width * dtype.itemsize
