"""FP4 (E2M1) by rows: NVFP4 and MXFP4 of compressed-tensors and of NVIDIA's ModelOpt."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.gguf_blocks import SMALLEST_FACTOR, nvfp4_blocks
from verbatim.model.groups import PIECE
from verbatim.model.quantization import Quantization
from verbatim.model.weight_packing import BLOCK, E2M1, Encoding, WeightPacking
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint, pairs
from verbatim.weights.formats.stored import Decoded, Grouped
from verbatim.weights.lazy import Computed, LazyWeight, Stored

_LARGEST = 2.0**109  # a factor; scales are at most 448, and codes 6


def powers(exponents: Tensor) -> Tensor:
    """Return the float32 scales of E8M0 exponents, uint8."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def mxfp4_rows(checkpoint: QuantizedCheckpoint, weight: str, packed: str, scale: str) -> LazyWeight:
    """Return the lazy weight of MXFP4 by rows, two codes in a byte, with E8M0 scales of 32 elements."""
    parts, shape = _parts(checkpoint, packed, scale, 32, torch.uint8)

    def codes(data: Tensor, exponents: Tensor) -> Any:
        return pairs(data), powers(exponents), 0.0

    return checkpoint.grouped(weight, shape, Encoding.MXFP4, 4, 32, codes, parts)


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
    parts, shape = _parts(checkpoint, packed, scale, 16, torch.float8_e4m3fn)
    parts = (*parts, checkpoint.take(factor, *SCALES))
    if math.prod(parts[2].shape) != 1:
        raise checkpoint.wrong(parts[2])
    full_name = f"{checkpoint.folder}: {weight}"

    def read(data: Tensor, scales: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = number.float().reshape(())
        number = 1 / number if inverted else number
        if not SMALLEST_FACTOR <= float(number) <= _LARGEST:
            raise ModelError(
                f"{full_name} has a scale that is NaN, infinite, too large or not positive"
            )
        if bool(scales.float().isnan().any()):
            raise ModelError(f"{full_name} has scales that are NaN")
        return pairs(data), scales, number

    def values(*tensors: Tensor) -> Tensor:
        code, scales, number = read(*tensors)
        groups = E2M1[code.int()].unflatten(-1, (-1, 16))
        matrix: Tensor = (groups * (scales.float() * number)[..., None]).flatten(1)
        return matrix.to(checkpoint.dtype)

    def blocks(data: Tensor, scales: Tensor, number: Tensor) -> Tensor:
        step = max(1, PIECE // shape[1])  # rows laid out at once
        rows = []
        for parts in zip(data.split(step), scales.split(step), strict=True):
            code, scale, factor = read(*parts, number)
            factors = factor.expand(len(code), shape[1] // BLOCK)
            rows.append(nvfp4_blocks(code, scale, factors))
        return torch.cat(rows).flatten()

    if shape[1] % BLOCK:
        return Computed(Decoded(shape, checkpoint.dtype, values), parts, {}, None)
    kind = Quantization(4, 32, None)
    packing = WeightPacking(shape, checkpoint.dtype, kind, encoding=Encoding.NVFP4)
    return Computed(Grouped(full_name, packing, blocks), parts, {}, None)


def _parts(
    checkpoint: QuantizedCheckpoint, packed: str, scale: str, size: int, dtype: torch.dtype
) -> tuple[tuple[Stored, ...], tuple[int, int]]:
    """Return codes and scales of a matrix `[N, K]`, and its shape."""
    codes = checkpoint.take(packed, torch.uint8, shape=(None, None))
    shape = codes.shape[0], 2 * codes.shape[1]
    scales = checkpoint.take(scale, dtype, shape=(shape[0], -(-shape[1] // size)))
    return (codes, scales), shape
