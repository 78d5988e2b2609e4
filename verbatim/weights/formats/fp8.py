"""FP8 with one scale for a tensor, a row or a block; MXFP4 with one for 32 elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.model.weight_packing import Encoding
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, pairs
from verbatim.weights.formats.fp4 import powers
from verbatim.weights.formats.stored import Decoded
from verbatim.weights.lazy import Computed, LazyWeight

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaled(
    checkpoint: QuantizedCheckpoint, name: str, scale: str, block: list[int] | None
) -> LazyWeight:
    """Return the lazy weight of FP8 values times their scales.

    It is packed, unless it is E5M2 or has blocks of another size along K than a group can have.

    Args:
        block: rows and columns of a block; None: a scale for the tensor, for each row, or for each column of
            a stack `[experts, K, N]`.
    """
    parts = checkpoint.take(name), checkpoint.take(scale, *SCALES, torch.float8_e8m0fnu)
    shape, blocks = parts[0].shape, parts[1].shape
    stacks = len(shape) == 3 and not block
    columns = stacks and blocks == (shape[0], 1, shape[2])
    if stacks and checkpoint.quantization.get("quant_method") == "fbgemm_fp8":
        # Llama 4: the scales of columns, which are `[experts, N, 1]` of one of the two stacks.
        columns, width = True, (shape[0], 1, shape[2])
        if blocks not in (width, (shape[0], shape[2], 1)):
            raise checkpoint.wrong(parts[1])
        blocks = width
    if block and len(blocks) == len(shape):
        # The last block of a dimension may be short.
        sizes = [1] * (len(shape) - 2) + list(block)
    elif len(blocks) == len(shape):
        if any(m not in (1, n) for n, m in zip(shape, blocks, strict=True)):
            raise NotSupported(
                f"{checkpoint.folder}: config.json names no size for the blocks of {name}, which has "
                f"{list(blocks)} scales"
            )
        sizes = [n // m for n, m in zip(shape, blocks, strict=True)]
    else:
        sizes = []
    if (sizes and any(-(-n // b) != m for n, b, m in zip(shape, sizes, blocks, strict=True))) or (
        not sizes and torch.Size(blocks).numel() not in (1, shape[0])
    ):
        raise checkpoint.wrong(parts[1])

    def by_rows(scales: Tensor, rows: int) -> Tensor:
        """Return the scales of each row of a matrix: `[N, blocks of K]`."""
        if not sizes:
            return scales.view(-1, 1).expand(rows, 1)
        if len(scales) == 1:
            return scales.expand(rows, -1)
        return scales.repeat_interleave(sizes[-2], 0)[:rows]

    def codes(weight: Tensor, scales: Tensor) -> Any:
        code = weight.view(torch.uint8)
        if bool((code & 127 == 127).any()):
            raise ModelError(f"{checkpoint.folder}: {name} has numbers that are NaN")
        if columns:
            return code.t(), scales.float().view(-1, 1), 0.0
        return code, by_rows(scales.float(), len(code)), 0.0

    def values(weight: Tensor, scales: Tensor) -> Tensor:
        scales = scales.float()
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{checkpoint.folder}: {scale} has numbers that are NaN or infinite")
        scales = scales.view(blocks if sizes else (-1, *[1] * (len(shape) - 1)))
        for dim, size in enumerate(sizes):
            if size > 1 and scales.shape[dim] > 1:
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
        return (weight.float() * scales).to(checkpoint.dtype)

    size = sizes[-1] if sizes and not columns else 0
    matrices = len(shape) == 2 or (len(shape) == 3 and blocks[:1] == shape[:1])
    is_e4m3 = parts[0].dtype is torch.float8_e4m3fn
    if is_e4m3 and matrices and checkpoint.group_size(shape[-1], size):
        kind = Encoding.FP8
        return checkpoint.grouped(name, shape, kind, 8, size, codes, parts, columns=columns)
    return Computed(Decoded(shape, checkpoint.dtype, values), parts, {}, None)


def read_fp8(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each FP8 matrix."""
    block = checkpoint.quantization.get("weight_block_size")
    for suffix in ("_scale_inv", "_scale"):
        for name in checkpoint.names(suffix):
            if (stored := checkpoint.left.get(name)) is not None and stored.dtype in FP8:
                yield name, scaled(checkpoint, name, f"{name}{suffix}", block)
                # Of a layer, or of a matrix of fused experts.
                for prefix in (name.removesuffix("weight"), f"{name}_"):
                    kinds = ("activation_scale", "input_scale", "input_scale_ub")
                    checkpoint.drop(*(prefix + kind for kind in kinds))
    finish_fp8(checkpoint)


def finish_fp8(checkpoint: QuantizedCheckpoint) -> None:
    """Drop the scales of a quantized KV cache, which are not used, and refuse weights without scales."""
    for suffix in ("k_scale", "v_scale", "q_scale"):
        checkpoint.drop(*(f"{name}.{suffix}" for name in checkpoint.names(f".{suffix}")))
    for name, stored in checkpoint.left.items():
        if stored.dtype in FP8:
            raise ModelError(f"{checkpoint.folder} lacks the scales of {name}, which is FP8")


def read_mxfp4(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each stack of experts."""

    def codes(blocks: Tensor, exponents: Tensor) -> Any:
        return pairs(blocks).flatten(-2), powers(exponents), 0.0

    for name in checkpoint.names("_blocks"):
        blocks = checkpoint.take(f"{name}_blocks", torch.uint8)
        *outer, width, groups, last = blocks.shape
        if last != 16:
            raise checkpoint.wrong(blocks)
        scales = (*outer, width, groups)
        parts = blocks, checkpoint.take(f"{name}_scales", torch.uint8, shape=scales)
        # transformers keeps these experts as [experts, K, N].
        shape = (*outer, groups * 32, width)
        kind = Encoding.MXFP4
        yield name, checkpoint.grouped(name, shape, kind, 4, 32, codes, parts, columns=True)
