"""FP8 and plain int8 with one scale for a tensor, a row, a group or a block."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.model.weight_packing import Encoding
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint
from verbatim.weights.lazy import Computed, LazyWeight, Stored

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (*SCALES, torch.float8_e8m0fnu)


def scaled(
    checkpoint: QuantizedCheckpoint,
    name: str,
    scale: str,
    block: list[int] | None,
    zeros: tuple[Stored, ...] = (),
    *,
    divisor: float = 1.0,
) -> LazyWeight:
    """Return the lazy weight of FP8 or int8 values times their scales.

    It is packed, unless it is E5M2, or FP8 with blocks of another size along K than a group can have.

    Args:
        block: rows and columns of a block; None: a scale for the tensor, for each row, or for each column of
            a stack `[experts, K, N]`; or, of integers, for as many groups of a row as there are scales.
        zeros: the zero points of integers, int8, one for each scale; or none.
        divisor: of the scales.
    """
    parts = checkpoint.take(name, torch.int8, *FP8), checkpoint.take(scale, *_SCALES)
    shape, blocks = parts[0].shape, parts[1].shape
    count, is_integer = torch.Size(blocks).numel(), parts[0].dtype is torch.int8
    columns = len(shape) == 3 and not block and blocks == (shape[0], 1, shape[2])
    if len(shape) == 3 and checkpoint.quantization.get("quant_method") == "fbgemm_fp8":
        # Llama 4: the scales of columns, which are `[experts, N, 1]` of one of the two stacks.
        columns, width = True, (shape[0], 1, shape[2])
        if blocks not in (width, (shape[0], shape[2], 1)):
            raise checkpoint.wrong(parts[1])
        blocks = width
    if is_integer and not block and count != 1:  # as many along K as there are scales
        block = [1, -(-shape[-1] // max(1, blocks[-1] if len(blocks) > 1 else 1))]
    # One scale is the tensor's, unless it is written as that of a smaller block.
    is_whole = len(blocks) < len(shape) or all(map(operator.le, shape[-2:], block or shape[-2:]))
    if block and not (count == 1 and is_whole):
        # The last block of a dimension may be short.
        sizes = [1] * (len(shape) - 2) + list(block)
        found, blocks = blocks, tuple(-(-n // b) for n, b in zip(shape, sizes, strict=True))
        if found != blocks and (len(found) == len(shape) or count != torch.Size(blocks).numel()):
            raise checkpoint.wrong(parts[1])
    elif len(blocks) == len(shape):
        if any(m not in (1, n) for n, m in zip(shape, blocks, strict=True)):
            raise NotSupported(
                f"{checkpoint.folder}: config.json names no size for the blocks of {name}, which has "
                f"{list(blocks)} scales"
            )
        sizes = [n // m for n, m in zip(shape, blocks, strict=True)]
    elif count in (1, shape[0]):
        blocks = (count, *[1] * (len(shape) - 1))
        sizes = [shape[0] // count, *shape[1:]]
    else:
        raise checkpoint.wrong(parts[1])
    for zero in zeros:
        if torch.Size(zero.shape).numel() != count:
            raise checkpoint.wrong(zero)

    def by_rows(x: Tensor, rows: int) -> Tensor:
        """Return a number of each row and block of K: `[N, blocks of K]`."""
        if columns:
            return x.reshape(-1, 1)
        x = x.reshape(blocks[-2:])
        return x.expand(rows, -1) if len(x) == 1 else x.repeat_interleave(sizes[-2], 0)[:rows]

    def codes(weight: Tensor, scales: Tensor, *zeros: Tensor) -> Any:
        code = weight.view(torch.uint8)
        if is_integer:
            code = code ^ 128
        elif bool((code & 127 == 127).any()):
            raise ModelError(f"{checkpoint.folder}: {name} has numbers that are NaN")
        code = code.t() if columns else code
        zero = by_rows(zeros[0].int(), len(code)) + 128 if zeros else 0.0
        return code, by_rows(scales.float() / divisor, len(code)), zero

    def values(weight: Tensor, scales: Tensor) -> Tensor:
        scales = scales.float().reshape(blocks)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{checkpoint.folder}: {scale} has numbers that are NaN or infinite")
        for dim, size in enumerate(sizes):
            if size > 1 and scales.shape[dim] > 1:
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
        return (weight.float() * scales).to(checkpoint.dtype)

    size = 0 if columns else sizes[-1]
    matrices = len(shape) == 2 or (len(shape) == 3 and blocks[:1] == shape[:1])
    is_e4m3 = parts[0].dtype is torch.float8_e4m3fn and checkpoint.group_size(shape[-1], size)
    if matrices and (is_integer or is_e4m3):
        kind = Encoding.FP8 if not is_integer else Encoding.ZERO_POINT if zeros else Encoding.SIGNED
        tensors = *parts, *zeros
        return checkpoint.grouped(name, shape, kind, 8, size, codes, tensors, columns=columns)
    if is_integer:
        raise checkpoint.wrong(parts[0])
    return Computed(values, parts, shape=shape, dtype=checkpoint.dtype)


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
