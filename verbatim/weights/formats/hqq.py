"""HQQ (Badri and Shaji 2023): 4-bit codes, and a scale and a fractional zero point for each group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import NotSupported
from verbatim.model.stored import read_stored
from verbatim.model.weight_packing import Encoding
from verbatim.weights.formats.checkpoint import SCALES, QuantizedCheckpoint
from verbatim.weights.lazy import LazyWeight

_ONLY = {"nbits": 4, "axis": 1}


def read_hqq(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix.

    Raises:
        NotSupported: another number of bits, or groups that are not along K.
    """
    names = dict.fromkeys(checkpoint.names(".W_q"))
    config = checkpoint.option("quant_config", None) or {}
    for each in (config, *config.values()):  # of all matrices, or of each
        if isinstance(each, Mapping):
            params = each.get("weight_quant_params")
            _check(checkpoint, "config.json", params if isinstance(params, Mapping) else {})
    for name in names:
        stored = {key: checkpoint.take_if_there(f"{name}.{key}") for key in _ONLY}
        _check(checkpoint, name, {k: int(read_stored(*t)) for k, t in stored.items() if t})
        stored_shape = read_stored(checkpoint.take(f"{name}.shape", shape=(2,)))
        width, depth = shape = tuple(map(int, stored_shape.tolist()))
        codes = checkpoint.take(f"{name}.W_q", shape=(None, None))
        rows, size = codes.shape  # of two groups each
        if (
            codes.dtype is not torch.uint8
            or 2 * rows * size != width * depth
            or depth % max(1, size)
        ):
            raise NotSupported(
                f"{checkpoint.folder}: {codes.name} is {codes.dtype} {[rows, size]}: HQQ must have nbits=4, "
                "axis=1, view_as_float=False and a group_size that divides K"
            )
        scales = (
            checkpoint.take(f"{name}.{key}", *SCALES, shape=(2 * rows, 1))
            for key in ("scale", "zero")
        )
        weight, parts, compute = f"{name}.weight", (codes, *scales), partial(_centered, width)
        yield (
            weight,
            checkpoint.grouped(weight, shape, Encoding.CENTERED, 4, size, compute, parts),
        )
    left = [key.rpartition(".") for key in checkpoint.left]
    # Settings of a layer, which its tensors show.
    kept = "bias", "weight"
    checkpoint.drop(
        *(f"{name}.{key}" for name, _, key in left if name in names and key not in kept)
    )


def _check(checkpoint: QuantizedCheckpoint, where: str, settings: Mapping[str, Any]) -> None:
    for key, only in _ONLY.items():
        if (value := settings.get(key, only)) != only:
            raise NotSupported(
                f"{checkpoint.folder}: {where}: {key}={str(value)[:80]} of HQQ: must be {only}"
            )


def _centered(
    width: int, codes: Tensor, scale: Tensor, zero: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale * (code - zero) as scale * (code - 8) + middle, with both rounded to bfloat16."""
    middle = scale.float() * (8 - zero.float())
    code = torch.cat([codes >> 4, codes & 15])
    scale, middle = (x.bfloat16().float() for x in (scale, middle))
    return code.view(width, -1), scale.view(width, -1), middle.view(width, -1)
