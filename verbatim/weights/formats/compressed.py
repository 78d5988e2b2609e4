"""compressed-tensors (integers, packed in words or not, FP8 and FP4) and NVIDIA's ModelOpt (FP8, NVFP4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packing import Encoding
from verbatim.model.stored import read_stored
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, nibbles
from verbatim.weights.formats.floats import FP8, finish_fp8, mxfp4, nvfp4, scaled
from verbatim.weights.lazy import LazyWeight, Stored

_BLOCK = 128  # rows and columns of an FP8 block, which the config does not have


def read_compressed(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    kinds = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    kinds |= {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
    groups = (checkpoint.quantization.get("config_groups") or {}).values()
    formats = {g.get("format") or checkpoint.quantization.get("format") for g in groups}
    # A group may quantize activations only.
    options = [g["weights"] for g in groups if g.get("weights")]
    if not formats or not formats <= kinds:
        raise NotSupported(
            f"{checkpoint.folder}: config.json: format={sorted(map(str, formats))} of compressed-tensors is "
            f"not supported: must be of {sorted(kinds)}"
        )
    blocks = [o["block_structure"] for o in options if o.get("block_structure")]
    block = blocks[0] if blocks and all(b == blocks[0] for b in blocks) else None
    for name in checkpoint.names(".weight_scale"):
        weight = f"{name}.weight"
        packed, scale = f"{name}.weight_packed", f"{name}.weight_scale"
        factor = f"{name}.weight_global_scale"
        if factor in checkpoint.remaining:
            yield weight, nvfp4(checkpoint, weight, packed, scale, factor, inverted=True)
        elif packed in checkpoint.remaining and checkpoint.remaining[packed].dtype is torch.uint8:
            yield weight, mxfp4(checkpoint, weight, packed, scale)
        elif packed in checkpoint.remaining:
            yield weight, _words(checkpoint, name, options)
        elif weight in checkpoint.remaining and checkpoint.remaining[weight].dtype in FP8:
            is_blockwise = _is_blockwise(checkpoint, weight, scale)
            yield weight, scaled(checkpoint, weight, scale, block if is_blockwise else None)
        else:
            zeros, size = _zero_points(checkpoint, name, options, torch.int8), _group_size(options)
            yield weight, scaled(checkpoint, weight, scale, [1, size] if size else None, zeros)
        checkpoint.drop(
            *(f"{name}.input_{kind}" for kind in ("scale", "zero_point", "global_scale"))
        )
        checkpoint.drop(f"{name}.weight_zero_point", f"{name}.weight_shape")
    finish_fp8(checkpoint)


def _is_blockwise(checkpoint: QuantizedCheckpoint, weight: str, scale: str) -> bool:
    """Return whether scales are those of blocks, by their shape, instead of the tensor's or of rows."""
    scales, rows = checkpoint.remaining[scale].shape, checkpoint.remaining[weight].shape[0]
    return len(scales) == 2 and scales not in ((1, 1), (rows, 1))


def _words(checkpoint: QuantizedCheckpoint, name: str, options: list[dict[str, Any]]) -> LazyWeight:
    words = checkpoint.take(f"{name}.weight_packed", torch.int32, shape=(None, None))
    scales = checkpoint.take(f"{name}.weight_scale", *SCALES, shape=(words.shape[0], None))
    all_bits = possible_bits = {option.get("num_bits") for option in options}
    depth = None
    for stored in checkpoint.take_optional(f"{name}.weight_shape", shape=(2,)):
        width, depth = map(int, read_stored(stored).tolist())
        if width != words.shape[0]:
            raise checkpoint.wrong(words)
        if len(all_bits) > 1:  # groups differ
            possible_bits = {
                n for n in (4, 8) if n in all_bits and -(-depth * n // 32) == words.shape[1]
            }
    if possible_bits not in ({4}, {8}):
        raise NotSupported(
            f"{checkpoint.folder}: {name}: num_bits={sorted(map(str, all_bits))} in config.json: "
            "compressed-tensors must have 4 or 8 bits, and weight_shape must tell which"
        )
    bits = 4 if possible_bits == {4} else 8
    per_word = 32 // bits
    depth = words.shape[1] * per_word if depth is None else depth
    by_order = {o.get("actorder") for o in options} & {"group", "dynamic"}
    if by_order or f"{name}.weight_g_idx" in checkpoint.remaining:
        raise NotSupported(f"{checkpoint.folder}: {name}.weight_g_idx: groups that are reordered")
    shape = (words.shape[0], depth)
    size = _group_size(options) or -(-depth // max(1, scales.shape[1]))
    if scales.shape[1] != -(-depth // size) or -(-depth // per_word) != words.shape[1]:
        raise checkpoint.wrong(scales)

    def codes(words: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        code = nibbles(words, bits)[:, :depth]
        if zeros is None:
            return code, scales, 0.0
        return code, scales, nibbles(zeros.t(), bits)[:, : len(scales)].int().t()

    zeros = _zero_points(checkpoint, name, options, torch.int32)
    if any(zero.shape != (-(-shape[0] // per_word), scales.shape[1]) for zero in zeros):
        raise checkpoint.wrong(zeros[0])
    kind, parts = (Encoding.ZERO_POINT if zeros else Encoding.SIGNED), (words, scales, *zeros)
    return checkpoint.grouped(f"{name}.weight", shape, kind, bits, size, codes, parts)


def _group_size(options: list[dict[str, Any]]) -> int | None:
    """Return the group size in the config; None if there is none, or if groups of matrices differ."""
    sizes = {int(o["group_size"]) if o.get("strategy") == "group" else None for o in options}
    return sizes.pop() if len(sizes) == 1 else None


def _zero_points(
    checkpoint: QuantizedCheckpoint, name: str, options: list[dict[str, Any]], dtype: torch.dtype
) -> tuple[Stored, ...]:
    zeros = checkpoint.take_optional(f"{name}.weight_zero_point", dtype)
    if not zeros and all(option.get("symmetric") is False for option in options):
        raise ModelError(
            f"{checkpoint.folder} lacks {name}.weight_zero_point, as config.json says symmetric=false"
        )
    return zeros


def read_modelopt(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix.

    Raises:
        NotSupported: `quant_algo` uses integers, or scales activations per channel.
    """
    for suffix in ("weight_scale", "weight_scale_inv"):
        for name in checkpoint.names(f".{suffix}"):
            weight, scale = f"{name}.weight", f"{name}.{suffix}"
            stored, factor = checkpoint.remaining.get(weight), f"{name}.weight_scale_2"
            if f"{name}.pre_quant_scale" in checkpoint.remaining:
                stored = None
            if stored is not None and stored.dtype in FP8:
                scales = checkpoint.remaining[scale].shape
                if len(scales) == 4 and scales[1::2] == (1, 1):  # blockwise scales of ModelOpt
                    scales = scales[::2]
                    checkpoint.remaining[scale] = replace(checkpoint.remaining[scale], shape=scales)
                is_blockwise = _is_blockwise(checkpoint, weight, scale)
                block = [_BLOCK, _BLOCK] if is_blockwise else None
                yield weight, scaled(checkpoint, weight, scale, block)
            elif (
                stored is not None
                and stored.dtype is torch.uint8
                and factor in checkpoint.remaining
            ):
                yield weight, nvfp4(checkpoint, weight, weight, scale, factor)
            else:
                algorithm = str(checkpoint.quantization.get("quant_algo"))[:80]
                raise NotSupported(
                    f"{checkpoint.folder}: {name}: quant_algo={algorithm!r} of modelopt is not supported: "
                    "its weights must be FP8 or NVFP4, without pre_quant_scale"
                )
            checkpoint.drop(f"{name}.input_scale")
    finish_fp8(checkpoint)
