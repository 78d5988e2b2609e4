"""Quantization to blocks of 256 weights in torch: GGUF's Q2_K to Q6_K, in their file layout, and NVFP4.

A block has groups of 16 or 32 codes. In GGUF's types each group has an integer scale, and in some an integer
minimum, which are multiplied by float16 factors of the block. In NVFP4 each group has an FP8 scale (E4M3),
which is multiplied by a float32 factor of the block. `kernels/blocks.h` reads the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.kernels.packing import BLOCK, BLOCKS, E2M1, Encoding
from verbatim.quantization.rows import fold, nearest, unfold

# Smallest nonzero factor of NVFP4, so that weights are 0 or at least 2^-126: kernels flush smaller ones to 0.
SMALLEST_FACTOR = 2.0**-116
_LARGEST_SCALE = {Encoding.Q2_K: 15, Encoding.Q3_K: 31, Encoding.Q6_K: 127}  # of groups of 16


def pack_blocks(x: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Quantize rows `[n, K]` of float32.

    Returns:
        The blocks, uint8 `[n, bytes]`, and their float16 or float32 factors, which may be infinite.
    """
    if encoding is Encoding.NVFP4:
        return _pack_nvfp4(x)
    bits, max_scale = int(encoding.name[1]), _LARGEST_SCALE.get(encoding, 63)
    groups = x.reshape(-1, 16 if encoding in _LARGEST_SCALE else 8, 16 if max_scale != 63 else 32)
    low, high = groups.aminmax(dim=-1)
    if encoding in (Encoding.Q3_K, Encoding.Q6_K):
        middle = 2 ** (bits - 1)
        d, scale = _factors(torch.maximum(high, -low) / (middle - 1), max_scale)
        zero, halves, least = middle * (d * scale), [d], scale
    else:
        low = low.clamp(max=0)
        d, scale = _factors((high - low) / (2**bits - 1), max_scale)
        dmin, least = _factors(-low, max_scale)
        zero, halves = dmin * least, [d, dmin]
    step = (d * scale)[..., None]
    code = ((groups + zero[..., None]) / step).round().masked_fill(step == 0, 0)
    code = code.clamp(0, 2**bits - 1).to(torch.uint8).flatten(1)
    factors = torch.cat(halves, 1).half()
    factor_bytes = factors.view(torch.uint8)
    if encoding is Encoding.Q6_K:
        signed = scale.to(torch.int8).view(torch.uint8)
        parts = [_plane(code, 0, 4, 64), _plane(code, 4, 2), signed, factor_bytes]
    elif encoding is Encoding.Q3_K:
        shifted = (scale + 32).to(torch.uint8)
        scales = [_plane(shifted, 0, 4, 8), _plane(shifted, 4, 2, 4)]
        parts = [_plane(code, 2, 1), _plane(code, 0, 2), *scales, factor_bytes]
    elif encoding is Encoding.Q2_K:
        scales = [scale.to(torch.uint8) | least.to(torch.uint8) << 4]
        parts = [*scales, _plane(code, 0, 2), factor_bytes]
    else:
        (a, b), (c, e) = (part.to(torch.uint8).split(4, 1) for part in (scale, least))
        scales = [a | b >> 4 << 6, c | e >> 4 << 6, b & 15 | e << 4]
        upper = [_plane(code, 4, 1)] if encoding is Encoding.Q5_K else []
        parts = [factor_bytes, *scales, *upper, _plane(code, 0, 4)]
    return torch.cat(parts, 1).view(len(x), -1), factors


def unpack_blocks(packed: Tensor, encoding: Encoding) -> Tensor:
    """Dequantize rows of blocks, uint8 `[n, bytes]`, to float32 `[n, K]`."""
    if encoding is Encoding.NVFP4:
        return _unpack_nvfp4(packed)
    from gguf import GGMLQuantizationType, dequantize

    numbers = dequantize(packed.cpu().numpy(), GGMLQuantizationType[encoding.name])
    values = torch.from_numpy(numbers).to(packed.device)
    # As in the kernels, a zero of types with symmetric codes is never -0.
    return values + 0.0 if encoding in (Encoding.Q3_K, Encoding.Q6_K) else values


def nvfp4_blocks(code: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Pack FP4 codes `[n, K]`, FP8 scales `[n, K / 16]` and float32 factors `[n, K / 256]` into blocks.

    A block, in uint8 `[n, bytes]`, consists of its factor, scales and codes.
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


def _factors(x: Tensor, max_value: int) -> tuple[Tensor, Tensor]:
    """Split numbers >= 0 `[blocks, groups]` into a float16 factor per block and integers 0 to `max_value`."""
    factor = (x.amax(1, keepdim=True) / max_value).half().float()
    return factor, (x / factor).round().nan_to_num(0).clamp(0, max_value)


def _plane(code: Tensor, first: int, bits: int, span: int = 32) -> Tensor:
    """Pack `bits` bits of codes `[blocks, n]`, from bit `first` on; codes `span` apart share a byte."""
    parts = (code >> first & (1 << bits) - 1).unflatten(1, (-1, 8 // bits, span))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    plane: Tensor = (parts << shifts).sum(-2, dtype=torch.uint8).flatten(1)
    return plane
