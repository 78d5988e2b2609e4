"""GPTQ, AWQ and AutoRound: codes in int32, a zero point and an fp16 scale for each group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.model.weight_packing import Encoding
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, nibbles
from verbatim.weights.lazy import LazyWeight, Stored

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word


def read_gptq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    bits = checkpoint.option("bits", None, 4, 8)
    size = checkpoint.option("group_size", 128)
    version = checkpoint.option("checkpoint_format", "gptq", "gptq", "gptq_v2")
    ordered = bool(checkpoint.option("desc_act", False))

    def unpacked(words: Tensor, zeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        zero = nibbles(zeros, bits)[:, : scales.shape[1]].int() + (version == "gptq")
        return nibbles(words.t(), bits), scales.t(), zero.t()

    def codes(words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> Any:
        depth = words.shape[0] * 32 // bits
        groups = torch.arange(depth) // (size if size > 0 else depth)
        if order is not None and not torch.equal(order.to(groups.dtype), groups):
            raise ModelError(
                f"{checkpoint.folder}: its g_idx reorders groups, and config.json says desc_act=false"
            )
        return unpacked(words, zeros, scales)

    def values(words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
        (code, scale, zero), groups = unpacked(words, zeros, scales), order.long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise ModelError(f"{checkpoint.folder}: a g_idx names groups that are not there")
        return scale.float()[:, groups] * (code.float() - zero[:, groups])

    for name, shape, parts in _matrices(checkpoint, bits, size, by_columns=False):
        weight, integers = f"{name}.weight", (torch.int32, torch.int64)
        if ordered and f"{name}.g_idx" not in checkpoint.left:
            raise ModelError(
                f"{checkpoint.folder} lacks {name}.g_idx, as config.json says desc_act"
            )
        parts += checkpoint.take_if_there(f"{name}.g_idx", *integers, shape=shape[1:])
        if ordered:
            yield weight, checkpoint.rounded(shape, values, parts, weight)
        else:
            kind = Encoding.ZERO_POINT
            yield weight, checkpoint.grouped(weight, shape, kind, bits, size, codes, parts)


def read_awq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    bits = checkpoint.option("bits", checkpoint.quantization.get("w_bit"), 4)
    size = checkpoint.option("group_size", checkpoint.quantization.get("q_group_size", 128))
    checkpoint.option("version", "gemm", "gemm", "GEMM")
    order = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        found: Tensor = nibbles(words, bits).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
        return found

    def codes(words: Tensor, zeros: Tensor, scales: Tensor) -> Any:
        return columns(words), scales.t(), columns(zeros).int()

    for name, shape, parts in _matrices(checkpoint, bits, size, by_columns=True):
        weight, kind = f"{name}.weight", Encoding.ZERO_POINT
        yield weight, checkpoint.grouped(weight, shape, kind, bits, size, codes, parts)


def _matrices(
    checkpoint: QuantizedCheckpoint, bits: int, size: int, *, by_columns: bool
) -> Iterator[tuple[str, tuple[int, int], tuple[Stored, ...]]]:
    """Yield the name of each matrix, its shape, and its tensors: words, zero points, scales.

    Args:
        size: of a group; at most 0: all of K.
        by_columns: a word has codes of several columns, as in AWQ; else of several rows.
    """
    per_word = 32 // bits
    for name in checkpoint.names(".qweight"):
        words = checkpoint.take(f"{name}.qweight", torch.int32, shape=(None, None))
        depth, width = words.shape
        shape = (width * per_word, depth) if by_columns else (width, depth * per_word)
        groups = -(-shape[1] // size) if size > 0 else 1
        zero_shape = groups, -(-shape[0] // per_word)
        zeros = checkpoint.take(f"{name}.qzeros", torch.int32, shape=zero_shape)
        scales = checkpoint.take(f"{name}.scales", *SCALES, shape=(groups, shape[0]))
        yield name, shape, (words, zeros, scales)


def read_auto_round(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix, which lies as GPTQ's or AWQ's do.

    Raises:
        NotSupported: matrices with several numbers of bits, or group sizes.
    """
    kind = checkpoint.option("packing_format", "auto_round:auto_gptq", *_AUTO_ROUND)
    own = {name: checkpoint.quantization.get(name) for name in ("bits", "group_size", "sym")}
    for name, settings in (checkpoint.quantization.get("extra_config") or {}).items():
        other = {key: value for key, value in settings.items() if own.get(key, value) != value}
        if other and settings.get("bits", 0) < 16:  # those of 16 bits are not quantized
            raise NotSupported(
                f"{checkpoint.folder}: config.json: extra_config: {name[:80]} has {other}, and the other "
                "matrices have not: must be the same for all"
            )
    read, version = _AUTO_ROUND[kind]
    quantization = {**checkpoint.quantization, "checkpoint_format": version, "version": version}
    checkpoint.quantization = quantization
    yield from read(checkpoint)


# By packing format: the one that it is, and its version.
_AUTO_ROUND = {
    "auto_round": (read_gptq, "gptq_v2"),
    "auto_round:gptqmodel": (read_gptq, "gptq_v2"),
    "auto_round:auto_gptq": (read_gptq, "gptq"),
    "auto_round:gptq": (read_gptq, "gptq"),
    "auto_round:auto_awq": (read_awq, "gemm"),
    "auto_round:awq": (read_awq, "gemm"),
}
