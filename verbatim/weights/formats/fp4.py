"""FP4 (E2M1): MXFP4 of gpt-oss, and MXFP4 and NVFP4 by rows of compressed-tensors and NVIDIA's ModelOpt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from verbatim.errors import ModelError
from verbatim.kernels.packed_rows import unfold
from verbatim.model.blocks import SMALLEST_FACTOR, nvfp4_blocks, unpack_blocks
from verbatim.model.groups import PIECE
from verbatim.model.quantization import Quantization
from verbatim.model.weight_packing import BLOCK, Encoding, WeightPacking
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint
from verbatim.weights.formats.stored import grouped
from verbatim.weights.lazy import Computed, LazyWeight

_LARGEST = 2.0**109  # a factor; scales are at most 448, and codes 6


def read_mxfp4(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each stack of experts."""
    for name in checkpoint.names("_blocks"):
        yield name, mxfp4(checkpoint, name, f"{name}_blocks", f"{name}_scales")


def mxfp4(checkpoint: QuantizedCheckpoint, name: str, packed: str, scale: str) -> LazyWeight:
    """Return the lazy weight of MXFP4, two codes in a byte, with E8M0 scales of 32 elements.

    Args:
        packed: name of the codes: a matrix `[N, K / 2]`; or stacks `[experts, N, K / 32, 16]`, which
            transformers keeps as `[experts, K, N]`.
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
    """Return the lazy weight of NVFP4: `code * (scale * factor)`, in float32.

    It is packed if K is a multiple of 256, else decoded, which is exact in bfloat16 up to the factor.

    Args:
        scale: name of the FP8 (E4M3) scales of 16 elements.
        factor: name of the float32 number of the matrix.
        inverted: the factor is stored as 1 over it.
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
        step = max(1, PIECE // shape[1])  # rows laid out at once
        return torch.cat(
            [
                nvfp4_blocks(unfold(rows, 1), own, factors.expand(len(rows), -1))
                for rows, own in zip(data.split(step), scales.split(step), strict=True)
            ]
        )

    def values(*tensors: Tensor) -> Tensor:
        found = unpack_blocks(blocks(*tensors), Encoding.NVFP4)
        return found[:, : shape[1]].to(checkpoint.dtype).contiguous()

    if missing:
        return Computed(values, parts, shape=shape, dtype=checkpoint.dtype)
    kind = Quantization(4, 32, None)
    packing = WeightPacking(shape, checkpoint.dtype, kind, encoding=Encoding.NVFP4)
    return grouped(full_name, packing, lambda *tensors: blocks(*tensors).flatten(), parts)
