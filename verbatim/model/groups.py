"""Quantization of groups in torch: the reference of the packing kernels.

`quantize.py` describes the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.weight_packing import HEAD_BYTES, WeightPacking, stretches

LARGEST = 2.0**126  # largest weight, so that a group's range is finite
PIECE = 1 << 20  # elements packed at once
_HIGH_BITS = -0x10000  # the bits of a float32 that a bf16 keeps


def unfit(name: str) -> ModelError:
    """Return the error for a weight that can't be quantized."""
    return ModelError(
        f"quantization: {name} has NaN, an infinity or a number beyond {LARGEST:.3g}, which can't be "
        "quantized"
    )


def _encode(x: Tensor, dim: int, bits: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups to bytes (two codes per byte with 4 bits), with scale and low as bf16."""
    levels = 2**bits - 1
    low, high = x.aminmax(dim=dim, keepdim=True)
    if not bool((torch.maximum(high, -low) <= LARGEST).all()):  # a NaN is not, either
        raise unfit(name)
    low = _round_down(low + 0.0)  # -0 becomes 0
    scale = _round_up((high - low) / levels + 0.0)
    code = (x - low).div_(scale).round_().clamp_(0, levels)
    code = code.masked_fill_(scale == 0, 0).to(torch.uint8)
    if bits == 4:
        size = code.shape[dim]
        half = (size + 1) // 2
        first, last = code.narrow(dim, 0, half).clone(), code.narrow(dim, half, size - half)
        first.narrow(dim, 0, size - half).bitwise_or_(last << 4)
        code = first
    return code, _as_bf16(scale), _as_bf16(low)


def _decode(code: Tensor, scale: Tensor, low: Tensor, dim: int, size: int, bits: int) -> Tensor:
    """Dequantize groups of `size` elements to float32."""
    if bits == 4:
        code = torch.cat([code & 15, code >> 4], dim).narrow(dim, 0, size)
    return low.float() + scale.float() * code


def _round_up(x: Tensor) -> Tensor:
    """Round to the next bf16 away from zero, in float32."""
    return (x.view(torch.int32) + 0xFFFF & _HIGH_BITS).view(torch.float32)


def _round_down(x: Tensor) -> Tensor:
    """Round down to a bf16, in float32."""
    truncated = (x.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, _round_up(x), truncated)


def _as_bf16(x: Tensor) -> Tensor:
    """Convert float32 values that are exact in bf16, bit for bit."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _as_heads(data: Tensor) -> Tensor:
    """Return bytes at any address as bf16."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


# ---- [..., N, K] ----


def pack_rows(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    """Quantize `weight` `[..., N, K]` into `out`, `[packing.nbytes]` uint8."""
    depth, bits = packing.depth, packing.quantization.bits
    target = out.view(packing.vectors, packing.vector_bytes)
    rows = weight.reshape(packing.vectors, depth)
    step = max(1, PIECE // depth)
    for begin in range(0, len(rows), step):
        x = rows[begin : begin + step].float()
        codes, heads, at = [], [], 0
        for count, size in stretches(depth, packing.quantization.group_size):
            groups = x[:, at : at + count * size].reshape(len(x), count, size)
            code, scale, low = _encode(groups, -1, bits, name)
            codes.append(code.flatten(1))
            heads.append(torch.cat([scale, low], -1).view(torch.uint8).flatten(1))
            at += count * size
        torch.cat(codes + heads, 1, out=target[begin : begin + step])


def unpack_rows(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    """Dequantize the output of `pack_rows` into the contiguous `out`."""
    depth, bits = packing.depth, packing.quantization.bits
    source = packed.view(packing.vectors, packing.vector_bytes)
    target = out.view(packing.vectors, depth)
    step = max(1, PIECE // depth)
    for begin in range(0, len(source), step):
        rows = source[begin : begin + step]
        codes = rows[:, : (depth * bits + 7) // 8]
        heads = _as_heads(rows[:, codes.shape[1] :])
        at, code_at, head_at = 0, 0, 0
        for count, size in stretches(depth, packing.quantization.group_size):
            nbytes = (size * bits + 7) // 8
            code = codes[:, code_at : code_at + count * nbytes].reshape(len(rows), count, nbytes)
            head = heads[:, head_at : head_at + 2 * count].reshape(len(rows), count, 2)
            groups = _decode(code, head[..., :1], head[..., 1:], -1, size, bits)
            target[begin : begin + step, at : at + count * size] = groups.flatten(1)
            at, code_at = at + count * size, code_at + count * nbytes
            head_at += 2 * count


# ---- [..., K, N] ----


def pack_columns(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    """Quantize `weight` `[..., K, N]` into `out`, `[packing.nbytes]` uint8."""
    bits, width = packing.quantization.bits, packing.shape[-1]
    at = 0
    for matrix in weight.reshape(-1, packing.depth, width):
        row = 0
        for count, size in _pieces(packing):
            groups = matrix[row : row + count * size].float().reshape(count, size, width)
            code, scale, low = _encode(groups, -2, bits, name)
            heads = torch.cat([scale, low], -2).view(torch.uint8)
            made = torch.cat([heads.flatten(1), code.flatten(1)], 1).flatten()
            out[at : at + len(made)] = made
            at, row = at + len(made), row + count * size
    assert at == len(out)


def unpack_columns(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    """Dequantize the output of `pack_columns` into the contiguous `out`."""
    bits, width = packing.quantization.bits, packing.shape[-1]
    at = 0
    for matrix in out.view(-1, packing.depth, width):
        row = 0
        for count, size in _pieces(packing):
            nbytes = width * (HEAD_BYTES + (size * bits + 7) // 8)
            groups = packed[at : at + count * nbytes].view(count, nbytes)
            heads = _as_heads(groups[:, : width * HEAD_BYTES])
            scale, low = heads.view(count, 2, width).split(1, 1)
            code = groups[:, width * HEAD_BYTES :].reshape(count, -1, width)
            made = _decode(code, scale, low, -2, size, bits)
            matrix[row : row + count * size] = made.view(-1, width)
            at, row = at + count * nbytes, row + count * size


def _pieces(packing: WeightPacking) -> list[tuple[int, int]]:
    """Return `stretches` in pieces that are processed at once."""
    found = []
    for count, size in stretches(packing.depth, packing.quantization.group_size):
        step = max(1, PIECE // (size * packing.shape[-1]))
        found += [(min(step, count - done), size) for done in range(0, count, step)]
    return found
