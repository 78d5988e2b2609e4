"""Integer codes with a scale and a zero point per group.

GPTQ, AWQ and AutoRound pack them in int32 words; HQQ (Badri and Shaji 2023) has fractional zero points.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packing import Encoding
from verbatim.model.stored import read_stored
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, nibbles
from verbatim.weights.lazy import LazyWeight, Stored

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
_SPECIAL = frozenset(
    "*+?^$()[]{}|\\"
)  # characters that make a rule of AutoRound a regular expression
_HQQ = {"nbits": 4, "axis": 1}  # the supported settings


def read_gptq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    usual = checkpoint.option("bits", None, 4, 8), checkpoint.option("group_size", 128)
    version = checkpoint.option("checkpoint_format", "gptq", "gptq", "gptq_v2")
    ordered = bool(checkpoint.option("desc_act", False))

    def unpacked(
        bits: int, words: Tensor, zeros: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Version 1 subtracts a word of ones, in which a zero point of 0 borrows from the next.
        ones = sum(1 << at for at in range(0, 32, bits)) if version == "gptq" else 0
        zero = nibbles(zeros + ones, bits)[:, : scales.shape[1]].int()
        return nibbles(words.t(), bits), scales.t(), zero.t()

    def codes(bits: int, size: int, *parts: Tensor) -> Any:
        depth = parts[0].shape[0] * 32 // bits
        groups = torch.arange(depth) // (size if size > 0 else depth)
        if not all(torch.equal(order.to(groups.dtype), groups) for order in parts[3:]):
            raise ModelError(
                f"{checkpoint.folder}: its g_idx reorders groups, and config.json says desc_act=false"
            )
        return unpacked(bits, *parts[:3])

    def values(bits: int, words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
        (code, scale, zero), groups = unpacked(bits, words, zeros, scales), order.long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise ModelError(f"{checkpoint.folder}: a g_idx refers to missing groups")
        return scale.float()[:, groups] * (code.float() - zero[:, groups])

    for name, shape, parts, bits, size in _matrices(checkpoint, *usual, by_columns=False):
        weight, integers = f"{name}.weight", (torch.int32, torch.int64)
        if ordered and f"{name}.g_idx" not in checkpoint.remaining:
            raise ModelError(
                f"{checkpoint.folder} lacks {name}.g_idx, as config.json says desc_act"
            )
        parts += checkpoint.take_optional(f"{name}.g_idx", *integers, shape=shape[1:])
        if ordered:
            yield weight, checkpoint.rounded(shape, partial(values, bits), parts, weight)
        else:
            kind, compute = Encoding.ZERO_POINT, partial(codes, bits, size)
            yield weight, checkpoint.grouped(weight, shape, kind, bits, size, compute, parts)


def read_awq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    bits = checkpoint.option("bits", checkpoint.quantization.get("w_bit"), 4)
    size = checkpoint.option("group_size", checkpoint.quantization.get("q_group_size", 128))
    checkpoint.option("version", "gemm", "gemm", "GEMM")
    order = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        code: Tensor = nibbles(words, bits).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
        return code

    def codes(words: Tensor, zeros: Tensor, scales: Tensor) -> Any:
        return columns(words), scales.t(), columns(zeros).int()

    for name, shape, parts, _, group in _matrices(checkpoint, bits, size, by_columns=True):
        weight, kind = f"{name}.weight", Encoding.ZERO_POINT
        yield weight, checkpoint.grouped(weight, shape, kind, bits, group, codes, parts)


def _matrices(
    checkpoint: QuantizedCheckpoint, bits: int, size: int, *, by_columns: bool
) -> Iterator[tuple[str, tuple[int, int], tuple[Stored, ...], int, int]]:
    """Yield the name, shape, tensors (words, zero points, scales), bits and group size of each matrix.

    Args:
        bits, size: the usual setting; a `size` of 0 or less: all of K.
        by_columns: whether a word holds codes of several columns (AWQ) instead of several rows.
    """
    usual = bits, size
    for name in checkpoint.names(".qweight"):
        bits, size = _setting_of(checkpoint, name, *usual, (4,) if by_columns else (4, 8))
        words = checkpoint.take(f"{name}.qweight", torch.int32, shape=(None, None))
        (depth, width), per_word = words.shape, 32 // bits
        shape = (width * per_word, depth) if by_columns else (width, depth * per_word)
        groups = -(-shape[1] // size) if size > 0 else 1
        zero_shape = groups, -(-shape[0] // per_word)
        zeros = checkpoint.take(f"{name}.qzeros", torch.int32, shape=zero_shape)
        scales = checkpoint.take(f"{name}.scales", *SCALES, shape=(groups, shape[0]))
        yield name, shape, (words, zeros, scales), bits, size


def _setting_of(
    checkpoint: QuantizedCheckpoint, name: str, bits: int, size: int, allowed: tuple[int, ...]
) -> tuple[int, int]:
    """Return the bits and group size of a matrix: of the first rule in the config for its name, or the usual.

    Rules are the entries of GPTQModel's `dynamic`, regular expressions after "+:" or "-:" (not quantized),
    and of AutoRound's `extra_config`, names or regular expressions.
    """
    for kind in ("dynamic", "extra_config"):
        for rule, other in (checkpoint.quantization.get(kind) or {}).items():
            applies: Any = rule == name
            if kind == "dynamic":
                applies = not rule.startswith("-:") and re.match(rule.removeprefix("+:"), name)
            elif _SPECIAL & set(rule):
                applies = re.search(rule, name)
            if not applies or not other:
                continue
            bits = bits if other.get("bits") is None else int(other["bits"])
            size = size if other.get("group_size") is None else int(other["group_size"])
            if bits not in allowed:
                raise NotSupported(
                    f"{checkpoint.folder}: config.json: {kind}: {rule[:80]} has bits={bits}: must be one of "
                    f"{list(allowed)}"
                )
            return bits, size
    return bits, size


def read_auto_round(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix, stored as in GPTQ or AWQ."""
    kind = checkpoint.option("packing_format", "auto_round:auto_gptq", *_AUTO_ROUND)
    read, version = _AUTO_ROUND[kind]
    quantization = {**checkpoint.quantization, "checkpoint_format": version, "version": version}
    checkpoint.quantization = quantization
    yield from read(checkpoint)


# Reader and format version, by `packing_format`.
_AUTO_ROUND = {
    "auto_round": (read_gptq, "gptq_v2"),
    "auto_round:gptqmodel": (read_gptq, "gptq_v2"),
    "auto_round:auto_gptq": (read_gptq, "gptq"),
    "auto_round:gptq": (read_gptq, "gptq"),
    "auto_round:auto_awq": (read_awq, "gemm"),
    "auto_round:awq": (read_awq, "gemm"),
}


def read_hqq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix.

    Raises:
        NotSupported: codes don't have 4 bits, or groups are not along K.
    """
    names = dict.fromkeys(checkpoint.names(".W_q"))
    config = checkpoint.option("quant_config", None) or {}
    for settings in (config, *config.values()):  # common settings, or one entry per matrix
        if isinstance(settings, Mapping):
            params = settings.get("weight_quant_params")
            _check_hqq(checkpoint, "config.json", params if isinstance(params, Mapping) else {})
    for name in names:
        stored = {key: checkpoint.take_optional(f"{name}.{key}") for key in _HQQ}
        _check_hqq(checkpoint, name, {k: int(read_stored(*t)) for k, t in stored.items() if t})
        stored_shape = read_stored(checkpoint.take(f"{name}.shape", shape=(2,)))
        width, depth = shape = tuple(map(int, stored_shape.tolist()))
        codes = checkpoint.take(f"{name}.W_q", shape=(None, None))
        rows, size = codes.shape  # each row holds two groups
        if (
            codes.dtype is not torch.uint8
            or width < 0
            or 2 * rows * size != width * depth
            or depth % max(1, size)
        ):
            raise NotSupported(
                f"{checkpoint.folder}: {codes.name} is {codes.dtype} {[rows, size]}: HQQ must have nbits=4, "
                "axis=1, view_as_float=False and a group_size that divides K"
            )
        scales = (
            checkpoint.take(f"{name}.{key}", *SCALES, shape=(2 * rows, 1))
            for key in ("scale", "zero")
        )
        weight, parts, compute = f"{name}.weight", (codes, *scales), partial(_centered, width)
        yield (
            weight,
            checkpoint.grouped(weight, shape, Encoding.CENTERED, 4, size, compute, parts),
        )
    # The stored settings of a layer follow from its tensors.
    unused = [key.rpartition(".") for key in checkpoint.remaining]
    parameters = "bias", "weight"
    checkpoint.drop(
        *(f"{name}.{key}" for name, _, key in unused if name in names and key not in parameters)
    )


def _check_hqq(checkpoint: QuantizedCheckpoint, where: str, settings: Mapping[str, Any]) -> None:
    for key, supported in _HQQ.items():
        if (value := settings.get(key, supported)) != supported:
            raise NotSupported(
                f"{checkpoint.folder}: {where}: {key}={str(value)[:80]} of HQQ: must be {supported}"
            )


def _centered(
    width: int, codes: Tensor, scale: Tensor, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale * (code - zero) as scale * (code - 8) + middle, with both rounded to bfloat16."""
    middle = scale.float() * (8 - zero.float())
    code = torch.cat([codes >> 4, codes & 15])
    scale, middle = (x.bfloat16().float() for x in (scale, middle))
    return code.view(width, -1), scale.view(width, -1), middle.view(width, -1)
