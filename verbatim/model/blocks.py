"""Blocks of 256 numbers in torch: GGUF's types Q2_K to Q6_K, as they lie in a file, and NVFP4.

A block has groups of 16 or 32 codes. In GGUF's types a group has a scale and sometimes a minimum: small
integers that are multiplied with float16 numbers of the block. In NVFP4 it has a scale in FP8 (E4M3), which
is multiplied with a float32 number. `kernels/blocks.h` reads the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.kernels.packed_rows import fold, unfold
from verbatim.model.weight_packing import BLOCK, BLOCKS, E2M1, Encoding, nearest

# The least factor of NVFP4 but 0: numbers are 0 or at least 2^-126, as kernels take smaller ones for 0.
SMALLEST_FACTOR = 2.0**-116
_LARGEST_SCALE = {Encoding.Q2_K: 15, Encoding.Q3_K: 31, Encoding.Q6_K: 127}  # of groups of 16


def pack_blocks(x: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Quantize rows `[n, K]` of float32.

    Returns:
        Their blocks, uint8 `[n, bytes]`, and the float16 or float32 numbers of these, which must be finite.
    """
    if encoding is Encoding.NVFP4:
        return _pack_nvfp4(x)
    bits, most = int(encoding.name[1]), _LARGEST_SCALE.get(encoding, 63)
    groups = x.reshape(-1, 16 if encoding in _LARGEST_SCALE else 8, 16 if most != 63 else 32)
    low, high = groups.aminmax(dim=-1)
    if encoding in (Encoding.Q3_K, Encoding.Q6_K):
        middle = 2 ** (bits - 1)
        d, scale = _factors(torch.maximum(high, -low) / (middle - 1), most)
        zero, halves, least = middle * (d * scale), [d], scale
    else:
        low = low.clamp(max=0)
        d, scale = _factors((high - low) / (2**bits - 1), most)
        dmin, least = _factors(-low, most)
        zero, halves = dmin * least, [d, dmin]
    step = (d * scale)[..., None]
    code = ((groups + zero[..., None]) / step).round().masked_fill(step == 0, 0)
    code = code.clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
    ends = torch.cat(halves, 1).half()
    end = ends.view(torch.uint8)
    if encoding is Encoding.Q6_K:
        signed = scale.to(torch.int8).view(torch.uint8)
        parts = [_plane(code, 0, 4, 64), _plane(code, 4, 2), signed, end]
    elif encoding is Encoding.Q3_K:
        moved = (scale + 32).to(torch.uint8)
        scales = [_plane(moved, 0, 4, 8), _plane(moved, 4, 2, 4)]
        parts = [_plane(code, 2, 1), _plane(code, 0, 2), *scales, end]
    elif encoding is Encoding.Q2_K:
        scales = [scale.to(torch.uint8) | least.to(torch.uint8) << 4]
        parts = [*scales, _plane(code, 0, 2), end]
    else:
        (a, b), (c, e) = (part.to(torch.uint8).split(4, 1) for part in (scale, least))
        scales = [a | b >> 4 << 6, c | e >> 4 << 6, b & 15 | e << 4]
        upper = [_plane(code, 4, 1)] if encoding is Encoding.Q5_K else []
        parts = [end, *scales, *upper, _plane(code, 0, 4)]
    return torch.cat(parts, 1).view(len(x), -1), ends


def unpack_blocks(packed: Tensor, encoding: Encoding) -> Tensor:
    """Dequantize rows of blocks, uint8 `[n, bytes]`, to float32 `[n, K]`."""
    if encoding is Encoding.NVFP4:
        return _unpack_nvfp4(packed)
    from gguf import GGMLQuantizationType, dequantize

    numbers = dequantize(packed.cpu().numpy(), GGMLQuantizationType[encoding.name])
    values = torch.from_numpy(numbers).to(packed.device)
    # As in the kernels, a zero of codes around a middle is never -0.
    return values + 0.0 if encoding in (Encoding.Q3_K, Encoding.Q6_K) else values


def nvfp4_blocks(code: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Return the blocks of codes of FP4 `[n, K]`, scales `[n, K / 16]` in FP8 and float32 `[n, K / 256]`.

    Returns:
        uint8 `[n, bytes]`: of each block the factor, the scales and the codes.
    """
    parts = [factor[..., None], scale.unflatten(-1, (-1, BLOCK // 16))]
    data = [part.contiguous().view(torch.uint8) for part in parts]
    codes = fold(code, 32).unflatten(-1, (-1, BLOCK // 2))
    return torch.cat([*data, codes], -1).flatten(1)


def _pack_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.unflatten(-1, (-1, BLOCK // 16, 16))
    peak = groups.abs().amax(-1)
    factor = peak.amax(-1) / (448 * E2M1.max())
    factor = factor.masked_fill(factor < SMALLEST_FACTOR, 0)
    scale = (peak / E2M1.max() / factor[..., None]).nan_to_num(0).to(torch.float8_e4m3fn)
    step = (scale.float() * factor[..., None])[..., None]
    code = nearest((groups / step).nan_to_num(0), E2M1)
    code = code.masked_fill(step == 0, 0).to(torch.uint8)
    return nvfp4_blocks(code.flatten(1), scale.flatten(1), factor), factor


def _unpack_nvfp4(packed: Tensor) -> Tensor:
    blocks = packed.unflatten(-1, (-1, BLOCKS[Encoding.NVFP4]))
    factor, scale, codes = blocks.split([4, BLOCK // 16, BLOCK // 2], -1)
    code = unfold(codes, 32)
    step = scale.contiguous().view(torch.float8_e4m3fn).float() * factor.contiguous().view(
        torch.float32
    )
    matrix: Tensor = (
        E2M1.to(code.device)[code.int()].unflatten(-1, (-1, 16)) * step[..., None]
    ).flatten(1)
    return matrix


def _factors(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return numbers `[blocks, groups]` of at least 0 as a float16 of each block times 0 to `most`."""
    whole = (x.amax(1, keepdim=True) / most).half().float()
    return whole, (x / whole).round().nan_to_num(0).clamp(0, most)


def _plane(code: Tensor, first: int, bits: int, span: int = 32) -> Tensor:
    """Return the bits from `first` on of codes `[blocks, n]`; those of codes `span` apart share a byte."""
    parts = (code >> first & (1 << bits) - 1).unflatten(1, (-1, 8 // bits, span))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    plane: Tensor = (parts << shifts).sum(-2, dtype=torch.uint8).flatten(1)
    return plane
