"""Quantized checkpoints in the formats of other programs, and the values that they encode.

A writer returns the tensors of a matrix `[N, K]`, by name suffix, and the dequantized values in float32,
computed by the formulas of the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from support.requests_mixed import generated, mixed_requests
from support.stages import staged
from verbatim import LLM

Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
_NOT_QUANTIZED = re.compile(r"embed|norm|lm_head|gate\.weight|router|bias")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def to_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes `[n, m]` into int32 `[n, m * bits / 32]`; code `order[i]` of a word is at bit `i * bits`."""
    per_word = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    words = codes.long().unflatten(1, (-1, per_word))
    if order is not None:
        words = words[..., list(order)]
    total = (words << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).contiguous()


def integers(
    weight: Tensor, bits: int, size: int, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize along K; return unsigned codes `[N, K]`, scales and zero points `[N, groups]`, and values."""
    most = 2**bits - 1
    groups = weight.float().unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) / (most // 2)).to(dtype)
        zero = torch.full_like(low, 2 ** (bits - 1))
    else:
        scale = ((high - low) / most).to(dtype)
        zero = (-low / scale.float()).round().clamp(0, most)
    wide = scale.float()[..., None]
    codes = ((groups / wide).round() + zero[..., None]).clamp(0, most)
    values = (codes - zero[..., None]) * wide
    return codes.flatten(1).int(), scale, zero.int(), values.flatten(1)


def gptq(
    bits: int = 4, size: int = 32, *, symmetric: bool = False, order: bool = False, v2: bool = False
) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        places = torch.arange(weight.shape[1])
        if order:  # columns in the order of quantization
            places = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        codes, scale, zero, values = integers(weight[:, places], bits, size, symmetric, torch.half)
        back = places.argsort()
        tensors = {
            "qweight": to_words(codes[:, back], bits).t(),
            # The first version subtracts 1 from all zero points of a word at once.
            "qzeros": to_words(zero.t(), bits) - int(not v2) * (0xFFFFFFFF // (2**bits - 1)),
            "scales": scale.t(),
            "g_idx": (back // size).int(),
        }
        return tensors, values[:, back]

    return write


def awq(size: int = 32) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale, zero, values = integers(weight, 4, size, False, torch.half)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": to_words(codes.t(), 4, order),
            "qzeros": to_words(zero.t(), 4, order),
            "scales": scale.t(),
        }
        return tensors, values

    return write


def packed(bits: int = 4, size: int = 32, *, symmetric: bool = True) -> Writer:
    """Return a writer of compressed-tensors' pack-quantized format."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scale, zero, values = integers(weight, bits, size, symmetric, torch.bfloat16)
        tensors = {
            "weight_packed": to_words(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = to_words(zero.t(), bits).t()
        return tensors, values

    return write


def int8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write compressed-tensors' int-quantized format, scaled by rows."""
    codes, scale, _, values = integers(weight, 8, weight.shape[1], True, torch.bfloat16)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}, values


def fp8(block: tuple[int, int] | str, scale_name: str = "weight_scale_inv") -> Writer:
    """Return a writer of FP8 with a scale per block, per row ("row") or for the tensor ("tensor")."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, depth = weight.shape
        wanted = {"row": (1, depth), "tensor": (rows, depth)}
        high, wide = wanted[block] if isinstance(block, str) else block
        scale = torch.zeros(-(-rows // high), -(-depth // wide))
        values, stored = (
            torch.empty(rows, depth),
            torch.empty(rows, depth, dtype=torch.float8_e4m3fn),
        )
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scale[i, j] = weight[at].abs().max() / 448
                stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                values[at] = stored[at].float() * scale[i, j]
        return {
            "weight": stored,
            scale_name: scale.flatten() if block == "tensor" else scale,
        }, values

    return write


def mxfp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write FP8 in blocks of 32 along K, with a shared exponent stored as a byte."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1, keepdim=True) / 448).log2().ceil()
    stored = (groups / torch.exp2(exponent)).to(torch.float8_e4m3fn)
    values = (stored.float() * torch.exp2(exponent)).flatten(-2)
    scales = (exponent + 127).to(torch.uint8).squeeze(-1)
    return {"weight": stored.flatten(-2), "weight_scale_inv": scales}, values


def fbgemm(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write FP8 of `[N, K]` scaled by rows, and of stacks `[experts, K, N]` scaled by columns."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write MXFP4 of `[..., N, K]`: blocks of 32 along K with a shared exponent."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().int()
    scaled = groups / torch.exp2(exponent.float())[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * torch.exp2(exponent.float())[..., None]).flatten(-2)
    pairs = codes.unflatten(-1, (-1, 2))
    blocks = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponent + 127).to(torch.uint8)}, values


def fp4(kind: str) -> Writer:
    """Return a writer of FP4, two codes in a byte: compressed-tensors' "nvfp4" or "mxfp4", or "modelopt"."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if kind == "mxfp4":
            stored, values = mxfp4(weight)
            packed = stored["blocks"].flatten(-2)
            return {"weight_packed": packed, "weight_scale": stored["scales"]}, values
        groups = weight.float().unflatten(-1, (-1, 16))
        factor = weight.abs().max() / (6 * 448)
        if kind == "nvfp4":
            inverse = 1 / factor
            factor = 1 / inverse
        scale = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        step = (scale.float() * factor)[..., None]
        codes = ((groups / step)[..., None] - E2M1).abs().argmin(-1)
        values = (E2M1[codes] * step).flatten(-2)
        pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
        packed = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        own = {"weight_scale": scale, "input_scale": torch.tensor(1.0)}
        if kind == "nvfp4":
            return own | {"weight_packed": packed, "weight_global_scale": inverse[None]}, values
        return own | {"weight": packed, "weight_scale_2": factor}, values

    return write


NF4 = torch.tensor(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)


def nf4(*, nested: bool = False) -> Writer:
    """Return a writer of bitsandbytes' NF4 in blocks of 64; `nested` also quantizes the scales."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        blocks = weight.float().reshape(-1, 64)
        peaks = blocks.abs().amax(1)
        state: dict[str, Any] = dict(
            quant_type="nf4", blocksize=64, dtype="float32", shape=list(weight.shape)
        )
        tensors = {"weight.absmax": peaks, "weight.quant_map": NF4}
        if nested:
            offset, table = float(peaks.mean()), torch.linspace(-1, 1, 256)
            spread = (peaks - offset).split(256)
            outer = torch.stack([part.abs().max() for part in spread])
            wide = outer.repeat_interleave(256)[: len(peaks)]
            small = ((peaks - offset) / wide)[:, None].sub(table).abs().argmin(1)
            peaks = table[small] * wide + offset
            tensors |= {
                "weight.absmax": small.to(torch.uint8),
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": table,
            }
            state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
        codes = (blocks / peaks[:, None])[..., None].sub(NF4).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        return tensors, (NF4[codes] * peaks[:, None]).view(weight.shape)

    return write


def hqq(size: int = 64) -> Writer:
    """Return a writer of 4-bit HQQ: groups continue across rows; a byte has a code of each half of them."""

    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.float().view(-1, size)
        low, high = groups.aminmax(dim=1, keepdim=True)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float() + 0.3).half()  # fitted zero points are not integers
        codes = (groups / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
        upper, lower = codes.chunk(2)
        tensors = {
            "W_q": upper << 4 | lower,
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor(weight.shape),
            "nbits": torch.tensor(4, dtype=torch.int32),
            "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        }
        return tensors, ((codes - zero.float()) * scale.float()).view(weight.shape)

    return write


def bnb_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Write bitsandbytes' LLM.int8() format."""
    peaks = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / peaks[:, None])).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": peaks, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (peaks[:, None] / 127)


def save(
    folder: Path, module: Any, write: Writer, quantization: dict[str, Any], names: str = "."
) -> None:
    """Write a quantized checkpoint of a module, and set the module's weights to the dequantized values.

    Args:
        names: regular expression of the names of the matrices to quantize.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.state_dict().items():
        if parameter.ndim == 1 or _NOT_QUANTIZED.search(name) or not re.search(names, name):
            tensors[name] = parameter
            continue
        if parameter.ndim == 2:
            stored, values = write(parameter.float())
            prefix = name.removesuffix("weight")
            tensors |= {prefix + end: tensor for end, tensor in stored.items()}
        elif write is mxfp4:
            stored, values = write(parameter.float().transpose(1, 2))
            values = values.transpose(1, 2)
            tensors |= {f"{name}_{end}": tensor for end, tensor in stored.items()}
        elif write is fbgemm:
            stored, values = write(parameter.float())
            scale = stored["weight_scale"]
            tensors[name] = stored["weight"]
            tensors[f"{name}_scale"] = scale.mT if name.endswith("down_proj") else scale
        else:
            values = _save_experts(tensors, name, parameter.float(), write)
        parameter.copy_(values)
    _write(folder, module, tensors, quantization, {"format": "pt"})


def _save_experts(tensors: dict[str, Tensor], name: str, stack: Tensor, write: Writer) -> Tensor:
    """Write a stack of experts as one set of tensors per expert; return the dequantized stack."""
    path, _, own = name.rpartition(".")
    values = []
    for number, matrix in enumerate(stack):
        parts = matrix.chunk(2) if own == "gate_up_proj" else [matrix]
        names = ["gate_proj", "up_proj"] if own == "gate_up_proj" else [own]
        made = []
        for part, short in zip(parts, names, strict=True):
            stored, held = write(part)
            made.append(held)
            tensors |= {f"{path}.{number}.{short}.{end}": t for end, t in stored.items()}
        values.append(torch.cat(made))
    return torch.stack(values)


def _torchao(weight: Tensor, kind: str) -> tuple[Any, Tensor]:
    """Return torchao's quantized tensor of a matrix, and its dequantized values."""
    from torchao.quantization import (
        Float8Tensor,
        Int4Tensor,
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
        PerRow,
        PerTensor,
    )

    if kind == "int4":  # torchao can quantize to it on a GPU only
        groups = weight.unflatten(1, (-1, 64))
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + scale.float() * 8).bfloat16()
        wide, middle = scale.float()[..., None], zero.float()[..., None]
        code = ((groups - middle) / wide).round().clamp(-8, 7).flatten(1).to(torch.int8)
        both = (code[:, ::2] & 15) | (code[:, 1::2] << 4)
        held = Int4Tensor(
            both, scale.t().contiguous(), zero.t().contiguous(), [1, 64], weight.shape
        )
        return held, (code.float().unflatten(1, (-1, 64)) * wide + middle).flatten(1)
    if kind == "int8 groups":
        made = IntxUnpackedToInt8Tensor.from_hp(weight, (1, 64), torch.int4)
    elif kind == "int8 rows":
        made = Int8Tensor.from_hp(weight, PerRow())
    else:
        granularity = PerRow() if kind == "float8 rows" else PerTensor()
        made = Float8Tensor.from_hp(weight, granularity=granularity)
    return made, made.dequantize()


def save_torchao(folder: Path, module: Any, kind: str) -> None:
    """Write a checkpoint of torchao tensors as transformers does, and set the weights to its values.

    Args:
        kind: "int8 rows", "int8 groups", "float8 rows", "float8 tensor" or "int4".
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = {}
    for name, tensor in module.state_dict().items():
        state[name] = tensor.data
        if name.endswith("proj.weight"):
            state[name], values = _torchao(tensor.float(), kind)
            tensor.copy_(values)
    tensors, metadata = flatten_tensor_state_dict(state)
    _write(folder, module, tensors, {"quant_method": "torchao"}, metadata)


def _write(
    folder: Path,
    module: Any,
    tensors: dict[str, Tensor],
    quantization: dict[str, Any],
    metadata: dict[str, str],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = module.config.to_dict() | {"quantization_config": quantization}
    config["architectures"] = [type(module).__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata)


def hub_snapshot(root: Path, monkeypatch: Any, *, offline: bool = True) -> Path:
    """Make `root` the hub's cache; return the folder of "some/model" in it, which the caller fills."""
    home = root / "hub" / "models--some--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    for module in ("huggingface_hub.constants", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", offline, raising=False)
    monkeypatch.setattr("transformers.utils.hub.HF_HUB_OFFLINE", offline, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub"))
    return home / "snapshots" / ("0" * 40)


def opening_fails(error: type[Exception], message: str, *args: Any, **options: Any) -> None:
    """Check that `LLM` rejects these arguments with an error whose message matches a pattern."""
    with pytest.raises(error, match=message):
        LLM(*args, **options)


def check_other_placements(folder: Path, *others: Any, **options: Any) -> None:
    """Check that a checkpoint gives equal results in memory, in two stages and in placements `others`."""
    requests = mixed_requests(4)
    expected = generated(LLM(folder, **options), *requests)
    for placement in (staged(), *others):
        assert generated(LLM(folder, placement=placement, **options), *requests) == expected, (
            placement
        )
