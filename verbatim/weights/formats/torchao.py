"""torchao, as transformers stores it: the types of tensors are in the files' metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packing import Encoding
from verbatim.model.stored import read_stored
from verbatim.quantization.rows import unfold
from verbatim.weights.formats.checkpoint import QuantizedCheckpoint
from verbatim.weights.formats.floats import scaled
from verbatim.weights.lazy import LazyWeight

_UNUSED = ("act_quant_scale", "act_quant_zero_point")  # scales of activations


def read_torchao(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    from safetensors import safe_open

    metadata: dict[str, str] = {}
    for path in {stored.path for stored in checkpoint.remaining.values()}:
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata() or {}
    readers = {
        "Float8Tensor": _scaled,
        "Int4Tensor": _int4,
        "Int8Tensor": _scaled,
        "IntxUnpackedToInt8Tensor": _scaled,
    }
    for name, text in metadata.items():
        fields = json.loads(text) if "." in name else {}
        kind = fields.get("_type", "Tensor")
        if kind == "Tensor":
            continue
        owner, _, leaf = name.rpartition(".")
        prefix = f"{owner}._{leaf}_"
        if kind not in readers or f"{prefix}act_pre_scale" in checkpoint.remaining:
            raise NotSupported(
                f"{checkpoint.folder}: {name} is a {str(kind)[:80]} of torchao: must be one of "
                f"{', '.join(readers)}, without act_pre_scale"
            )
        block = [int(n) for n in fields["_data"]["block_size"]][-2:]
        if len(block) != 2 or min(block) < 1:
            raise ModelError(f"{checkpoint.folder}: the block_size of {name} is {block}")
        yield name, readers[kind](checkpoint, name, prefix, block)
        checkpoint.drop(*(f"{prefix}{unused}" for unused in _UNUSED))


def _scaled(
    checkpoint: QuantizedCheckpoint, name: str, prefix: str, block: list[int]
) -> LazyWeight:
    zeros = checkpoint.take_optional(f"{prefix}zero_point", torch.int8)
    # Symmetric formats store zeros as zero points; without zero points, a scale keeps all its bits.
    zeros = tuple(zero for zero in zeros if bool(read_stored(zero).any()))
    data, scale = (checkpoint.remaining.get(f"{prefix}{key}") for key in ("qdata", "scale"))
    if data is not None and scale is not None and len(data.shape) == 2:
        count = math.prod(-(-n // size) for n, size in zip(data.shape, block, strict=True))
        if math.prod(scale.shape) != count:
            raise checkpoint.wrong(scale)
    return scaled(checkpoint, f"{prefix}qdata", f"{prefix}scale", block, zeros)


def _int4(checkpoint: QuantizedCheckpoint, name: str, prefix: str, block: list[int]) -> LazyWeight:
    data = checkpoint.take(f"{prefix}qdata", torch.int8, torch.uint8)
    *outer, width, half = data.shape
    shape, size = (*outer, width, 2 * half), block[1]
    groups = (*outer, shape[-1] // size if size > 0 else 0, width)
    if block[0] != 1 or len(outer) > 1:
        raise checkpoint.wrong(data)
    scales, zero_points = (
        checkpoint.take(f"{prefix}{key}", torch.bfloat16, shape=groups)
        for key in ("scale", "zero_point")
    )

    def codes(words: Tensor, scales: Tensor, zeros: Tensor) -> Any:
        return unfold(words.view(torch.uint8), 1) ^ 8, scales.t(), zeros.float().t()

    return checkpoint.grouped(
        name, shape, Encoding.CENTERED, 4, size, codes, (data, scales, zero_points)
    )
