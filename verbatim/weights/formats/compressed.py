"""compressed-tensors: integers in words or plain, and FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.model.weight_packing import Encoding
from verbatim.weights.files import read_whole
from verbatim.weights.formats.checkpoint import QuantizedCheckpoint, nibbles
from verbatim.weights.formats.fp8 import FP8, finish_fp8, scaled
from verbatim.weights.lazy import LazyWeight, Stored


def read_compressed(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    kinds = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    groups = (checkpoint.quantization.get("config_groups") or {}).values()
    formats = {g.get("format") or checkpoint.quantization.get("format") for g in groups}
    options = [g.get("weights") or {} for g in groups]
    if not formats or not formats <= kinds:
        raise NotSupported(
            f"{checkpoint.folder}: config.json: format={sorted(map(str, formats))} of compressed-tensors is "
            f"not supported: must be of {sorted(kinds)}"
        )
    blocks = [o["block_structure"] for o in options if o.get("block_structure")]
    block = blocks[0] if blocks and all(b == blocks[0] for b in blocks) else None
    for name in checkpoint.names(".weight_scale"):
        weight = f"{name}.weight"
        if f"{name}.weight_packed" in checkpoint.left:
            yield weight, _words(checkpoint, name, options)
        elif checkpoint.left[weight].dtype in FP8:
            yield weight, scaled(checkpoint, weight, f"{name}.weight_scale", block)
        else:
            yield weight, _plain(checkpoint, name)
        checkpoint.drop(f"{name}.input_scale", f"{name}.input_zero_point")
        checkpoint.drop(f"{name}.weight_zero_point", f"{name}.weight_shape")
    finish_fp8(checkpoint)


def _words(checkpoint: QuantizedCheckpoint, name: str, options: list[dict[str, Any]]) -> LazyWeight:
    words = checkpoint.take(f"{name}.weight_packed")
    scales = checkpoint.take(f"{name}.weight_scale")
    all_bits = {option.get("num_bits") for option in options}
    if all_bits not in ({4}, {8}):
        raise NotSupported(
            f"{checkpoint.folder}: config.json: num_bits={sorted(map(str, all_bits))} of compressed-tensors "
            "is not supported: must be 4 or 8, the same in all groups"
        )
    bits = 4 if all_bits == {4} else 8
    per_word = 32 // bits
    depth = words.shape[1] * per_word
    if f"{name}.weight_shape" in checkpoint.left:
        depth = int(read_whole(checkpoint.take(f"{name}.weight_shape"))[1])
    if f"{name}.weight_g_idx" in checkpoint.left:
        raise NotSupported(f"{checkpoint.folder}: {name}.weight_g_idx: groups that are reordered")
    shape = (words.shape[0], depth)
    sizes = {int(o["group_size"]) for o in options if o.get("strategy") == "group"}
    size = next(iter(sizes)) if len(sizes) == 1 else -(-depth // scales.shape[1])
    if scales.shape != (shape[0], -(-depth // size)) or -(-depth // per_word) != words.shape[1]:
        raise checkpoint.wrong(f"{name}.weight_scale")

    def codes(words: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        code = nibbles(words, bits)[:, :depth]
        if zeros is None:
            return code, scales, 0.0
        return code, scales, nibbles(zeros.t(), bits)[:, : len(scales)].int().t()

    zeros = checkpoint.take_if_there(f"{name}.weight_zero_point")
    kind, parts = _encoding(zeros), (words, scales, *zeros)
    return checkpoint.grouped(f"{name}.weight", shape, kind, bits, size, codes, parts)


def _plain(checkpoint: QuantizedCheckpoint, name: str) -> LazyWeight:
    weight, scales = checkpoint.take(f"{name}.weight"), checkpoint.take(f"{name}.weight_scale")
    shape = weight.shape
    count = torch.Size(scales.shape).numel()
    if weight.dtype is not torch.int8 or len(shape) != 2 or (count % shape[0] and count != 1):
        raise checkpoint.wrong(f"{name}.weight")
    size = shape[1] // max(1, count // shape[0])

    def codes(weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        scales = scales.reshape(1, 1).expand(shape[0], 1) if count == 1 else scales
        scales = scales.reshape(shape[0], -1)
        zero = 0.0 if zeros is None else zeros.int().view(-1, scales.shape[1]) + 128
        return unsigned(weight), scales, zero

    zeros = checkpoint.take_if_there(f"{name}.weight_zero_point")
    kind, parts = _encoding(zeros), (weight, scales, *zeros)
    return checkpoint.grouped(f"{name}.weight", shape, kind, 8, size, codes, parts)


def _encoding(zeros: tuple[Stored, ...]) -> Encoding:
    return Encoding.ZERO_POINT if zeros else Encoding.SIGNED


def unsigned(weight: Tensor) -> Tensor:
    """Shift int8 by 128."""
    return weight.view(torch.uint8) ^ 128
