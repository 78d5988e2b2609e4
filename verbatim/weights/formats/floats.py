"""FP8 and plain int8, with one scale per tensor, row, group or block; and FP4 (E2M1): MXFP4 and NVFP4."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packing import BLOCK, Encoding, Packing, WeightPacking
from verbatim.quantization.blocks import SMALLEST_FACTOR, nvfp4_blocks, unpack_blocks
from verbatim.quantization.matrix import pieces
from verbatim.quantization.rows import unfold
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, grouped
from verbatim.weights.lazy import Computed, LazyWeight, Stored

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (*SCALES, torch.float8_e8m0fnu)
_LARGEST = 2.0**109  # largest factor of NVFP4; scales are at most 448, and codes 6


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

    It is held packed, except E5M2, and FP8 with blocks along K that no group size divides.

    Args:
        name: the weight; int8, E4M3 or E5M2.
        scale: its scales; float32, float16, bfloat16 or E8M0, which may be stored as bytes.
        block: rows and columns of a block. None: scales are per tensor, per row, or per column of a stack
            `[experts, K, N]`; those of integers may also divide each row into groups.
        zeros: int8 zero points of integers, one per scale; empty: none.
        divisor: number by which the scales are divided.
    """
    bytes_too = (torch.uint8,) if checkpoint.quantization.get("scale_fmt") == "ue8m0" else ()
    parts = checkpoint.take(name, torch.int8, *FP8), checkpoint.take(scale, *_SCALES, *bytes_too)
    shape, blocks = parts[0].shape, parts[1].shape
    count, is_integer = torch.Size(blocks).numel(), parts[0].dtype is torch.int8
    columns = len(shape) == 3 and not block and blocks == (shape[0], 1, shape[2])
    if len(shape) == 3 and checkpoint.quantization.get("quant_method") == "fbgemm_fp8":
        # Llama 4: scales of columns, stored as `[experts, N, 1]` for one of the two stacks.
        columns, column_shape = True, (shape[0], 1, shape[2])
        if blocks not in (column_shape, (shape[0], shape[2], 1)):
            raise checkpoint.wrong(parts[1])
        blocks = column_shape
    if is_integer and not block and count != 1:  # as many blocks along K as there are scales
        block = [1, -(-shape[-1] // max(1, blocks[-1] if len(blocks) > 1 else 1))]
    # A single scale is the whole tensor's, unless its shape is that of a smaller block.
    is_whole = len(blocks) < len(shape) or all(map(operator.le, shape[-2:], block or shape[-2:]))
    if block and not (count == 1 and is_whole):
        # The last block of a dimension may be short.
        sizes = [1] * (len(shape) - 2) + list(block)
        stored, blocks = blocks, tuple(-(-n // b) for n, b in zip(shape, sizes, strict=True))
        if stored != blocks and (len(stored) == len(shape) or count != torch.Size(blocks).numel()):
            raise checkpoint.wrong(parts[1])
    elif len(blocks) == len(shape):
        if any(m not in (1, n) for n, m in zip(shape, blocks, strict=True)):
            raise NotSupported(
                f"{checkpoint.folder}: config.json gives no block size for {name}, which has "
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

    def numbers(scales: Tensor) -> Tensor:
        is_bytes = scales.dtype is torch.uint8
        return (scales.view(torch.float8_e8m0fnu) if is_bytes else scales).float()

    def by_rows(x: Tensor, rows: int) -> Tensor:
        """Expand scales or zero points to one per row and block of K: `[N, blocks of K]`."""
        if columns:
            return x.reshape(-1, 1)
        x = x.reshape(blocks[-2:])
        return x.expand(rows, -1) if len(x) == 1 else x.repeat_interleave(sizes[-2], 0)[:rows]

    def codes(weight: Tensor, scales: Tensor, *zeros: Tensor) -> Any:
        code = weight.view(torch.uint8)
        if is_integer:
            code = code ^ 128
        elif bool((code & 127 == 127).any()):
            raise ModelError(f"{checkpoint.folder}: {name} contains NaN")
        code = code.t() if columns else code
        zero = by_rows(zeros[0].int(), len(code)) + 128 if zeros else 0.0
        return code, by_rows(numbers(scales) / divisor, len(code)), zero

    def values(weight: Tensor, scales: Tensor) -> Tensor:
        scales = numbers(scales).reshape(blocks)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{checkpoint.folder}: {scale} contains NaN or infinite values")
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
    scales = [
        (name, name + end) for end in ("_scale_inv", "_scale") for name in checkpoint.names(end)
    ]
    # As in DeepSeek V4 and in Mistral Large 4.
    ends = ".scale", ".qscale_weight"
    scales += [(f"{name}.weight", name + end) for end in ends for name in checkpoint.names(end)]
    for name, scale in scales:
        if (stored := checkpoint.remaining.get(name)) is not None and stored.dtype in FP8:
            yield name, scaled(checkpoint, name, scale, block)
            # Activation scales of a layer, or of a matrix of fused experts.
            for prefix in (name.removesuffix("weight"), f"{name}_"):
                kinds = ("activation_scale", "input_scale", "input_scale_ub", "qscale_act")
                checkpoint.drop(*(prefix + kind for kind in kinds))
    finish_fp8(checkpoint)


def finish_fp8(checkpoint: QuantizedCheckpoint) -> None:
    """Drop the scales of a quantized KV cache, which are unused, and refuse FP8 weights without scales."""
    for suffix in ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale"):
        checkpoint.drop(*(f"{name}.{suffix}" for name in checkpoint.names(f".{suffix}")))
    for name, stored in checkpoint.remaining.items():
        if stored.dtype in FP8:
            raise ModelError(f"{checkpoint.folder} lacks the scales of {name}, which is FP8")


def read_mxfp4(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each stack of experts."""
    for name in checkpoint.names("_blocks"):
        yield name, mxfp4(checkpoint, name, f"{name}_blocks", f"{name}_scales")


def mxfp4(checkpoint: QuantizedCheckpoint, name: str, packed: str, scale: str) -> LazyWeight:
    """Return the lazy weight of an MXFP4 matrix: two codes per byte, and an E8M0 scale per 32 elements.

    Args:
        packed: name of the codes: a matrix `[N, K / 2]`, or a stack `[experts, N, K / 32, 16]`, which in
            transformers has the shape `[experts, K, N]`.
    """
    codes = checkpoint.take(packed, torch.uint8)
    stacks = len(codes.shape) == 4 and codes.shape[-1] == 16
    if not stacks and len(codes.shape) != 2:
        raise checkpoint.wrong(codes)
    groups = codes.shape[:-1] if stacks else (codes.shape[0], -(-codes.shape[1] // 16))
    parts = codes, checkpoint.take(scale, torch.uint8, shape=groups)
    depth = 32 * groups[-1] if stacks else 2 * codes.shape[1]
    shape = (groups[0], depth, groups[1]) if stacks else (groups[0], depth)

    def split(data: Tensor, exponents: Tensor) -> Any:
        powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
        return unfold(data, 1).view(-1, depth), powers, 0.0

    return checkpoint.grouped(name, shape, Encoding.MXFP4, 4, 32, split, parts, columns=stacks)


def nvfp4(
    checkpoint: QuantizedCheckpoint,
    weight: str,
    packed: str,
    scale: str,
    factor: str,
    *,
    inverted: bool = False,
) -> LazyWeight:
    """Return the lazy weight of an NVFP4 matrix: `code * (scale * factor)`, in float32.

    It is packed if K is a multiple of 256, else decoded, which is exact in bfloat16 except for the factor.

    Args:
        scale: name of the FP8 (E4M3) scales, one per 16 elements.
        factor: name of the float32 scale of the whole matrix.
        inverted: whether the file has the reciprocal of the factor.
    """
    codes = checkpoint.take(packed, torch.uint8, shape=(None, None))
    shape = codes.shape[0], 2 * codes.shape[1]
    scales = checkpoint.take(scale, torch.float8_e4m3fn, shape=(shape[0], -(-shape[1] // 16)))
    parts = codes, scales, checkpoint.take(factor, *SCALES)
    if math.prod(parts[2].shape) != 1:
        raise checkpoint.wrong(parts[2])
    full_name, missing = f"{checkpoint.folder}: {weight}", -shape[1] % BLOCK

    def blocks(data: Tensor, scales: Tensor, number: Tensor) -> Tensor:
        number = number.float().reshape(())
        number = 1 / number if inverted else number
        if not (number == 0 or SMALLEST_FACTOR <= float(number) <= _LARGEST):
            raise ModelError(
                f"{full_name} has a scale that is NaN, infinite, too large or not positive"
            )
        if bool(scales.float().isnan().any()):
            raise ModelError(f"{full_name} has scales that are NaN")
        if missing:
            data = pad(data, (0, missing // 2))
            scales = pad(scales.view(torch.uint8), (0, missing // 16)).view(scales.dtype)
        factors = number.expand(1, 2 * data.shape[1] // BLOCK)
        return torch.cat(
            [
                nvfp4_blocks(unfold(rows, 1), row_scales, factors.expand(len(rows), -1))
                for rows, row_scales in pieces(shape[1], data, scales)
            ]
        )

    def values(*tensors: Tensor) -> Tensor:
        unpacked = unpack_blocks(blocks(*tensors), Encoding.NVFP4)
        return unpacked[:, : shape[1]].to(checkpoint.dtype).contiguous()

    if missing:
        return Computed(values, parts, shape=shape, dtype=checkpoint.dtype)
    packing = WeightPacking(shape, checkpoint.dtype, Packing(4, 32, Encoding.NVFP4))
    return grouped(full_name, packing, lambda *tensors: blocks(*tensors).flatten(), parts)
