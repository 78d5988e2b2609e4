"""bitsandbytes: int8 with one scale per row; NF4 and FP4 with one scale per block."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.kernels.packing import TABLES, Encoding
from verbatim.model.stored import read_stored
from verbatim.quantization.rows import unfold
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint
from verbatim.weights.formats.floats import scaled
from verbatim.weights.lazy import LazyWeight


def read_bitsandbytes(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix."""
    for name in checkpoint.names(".SCB"):
        scales, stored = (checkpoint.remaining.get(f"{name}.{key}") for key in ("SCB", "weight"))
        if scales is not None and stored is not None and scales.shape != stored.shape[:1]:
            raise checkpoint.wrong(scales)
        yield (
            f"{name}.weight",
            scaled(checkpoint, f"{name}.weight", f"{name}.SCB", None, divisor=127),
        )
        checkpoint.drop(f"{name}.weight_format")
    for kind in (Encoding.NF4, Encoding.FP4):
        for name in checkpoint.names(f".quant_state.bitsandbytes__{kind.name.lower()}"):
            yield name, _four_bits(checkpoint, name, kind)


def _four_bits(checkpoint: QuantizedCheckpoint, name: str, kind: Encoding) -> LazyWeight:
    state = read_stored(
        checkpoint.take(f"{name}.quant_state.bitsandbytes__{kind.name.lower()}")
    ).flatten()
    try:
        fields = json.loads(bytes(state.tolist()))
        shape = tuple(int(n) for n in fields["shape"])
        block = int(fields["blocksize"])
        nested = int(fields.get("nested_blocksize") or 0)
        offset = float(fields.get("nested_offset") or 0)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{checkpoint.folder}: the quant_state of {name} is damaged") from None
    numel = torch.Size(shape).numel()
    peaks = -(-numel // block) if block > 0 else -1
    # Nested quantization stores the scales as bytes.
    absmax = checkpoint.take(f"{name}.absmax", *((torch.uint8,) if nested > 0 else SCALES))
    parts = [checkpoint.take(name), absmax]
    if torch.Size(absmax.shape).numel() != peaks:
        raise checkpoint.wrong(absmax)
    if len(shape) != 2 or min(shape) < 0 or parts[0].nbytes != -(-numel // 2):
        raise checkpoint.wrong(parts[0])
    sizes = {"quant_map": 16}
    if nested > 0:
        sizes |= {"nested_absmax": -(-peaks // nested), "nested_quant_map": 256}
    parts += [checkpoint.take(f"{name}.{key}", *SCALES, shape=(n,)) for key, n in sizes.items()]

    def flat(codes: Tensor, absmax: Tensor, *nests: Tensor) -> tuple[Tensor, Tensor]:
        data = codes.contiguous().view(torch.uint8).flatten()  # may be stored in any dtype
        code = unfold(data << 4 | data >> 4, 1)[:numel]  # the upper nibble comes first
        peaks = absmax.flatten()
        if nests:
            outer = nests[0].repeat_interleave(nested)[: len(peaks)]
            peaks = nests[1][peaks.int()] * outer + offset
        return code, peaks

    def codes(words: Tensor, absmax: Tensor, _: Tensor, *nests: Tensor) -> Any:
        code, peaks = flat(words, absmax, *nests)
        # The last block may be short.
        scales = peaks.repeat_interleave(block // size)[: numel // size]
        return code.view(shape), scales.view(shape[0], -1), 0.0

    def values(words: Tensor, absmax: Tensor, table: Tensor, *nests: Tensor) -> Tensor:
        code, peaks = flat(words, absmax, *nests)
        return (table[code.int()] * peaks.repeat_interleave(block)[:numel]).view(shape)

    # Blocks continue from row to row; each packed group lies within one block.
    size = math.gcd(block, shape[1])
    is_standard = torch.equal(read_stored(parts[2]).float(), TABLES[kind])
    if not is_standard or size % 32:
        return checkpoint.rounded(shape, values, tuple(parts), name)
    return checkpoint.grouped(name, shape, kind, 4, size, codes, tuple(parts))
