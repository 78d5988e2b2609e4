"""NVIDIA's ModelOpt: FP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from verbatim.errors import NotSupported
from verbatim.weights.formats.checkpoint import QuantizedCheckpoint
from verbatim.weights.formats.fp4 import nvfp4
from verbatim.weights.formats.fp8 import FP8, finish_fp8, scaled
from verbatim.weights.lazy import LazyWeight

_BLOCK = 128  # rows and columns of a block of FP8, which the config does not name


def read_modelopt(checkpoint: QuantizedCheckpoint) -> Iterator[tuple[str, LazyWeight]]:
    """Yield the lazy weight of each matrix.

    Raises:
        NotSupported: a `quant_algo` with integers, or that multiplies activations with numbers per channel.
    """
    for suffix in ("weight_scale", "weight_scale_inv"):
        for name in checkpoint.names(f".{suffix}"):
            weight, scale = f"{name}.weight", f"{name}.{suffix}"
            stored, factor = checkpoint.left.get(weight), f"{name}.weight_scale_2"
            if f"{name}.pre_quant_scale" in checkpoint.left:
                stored = None
            if stored is not None and stored.dtype in FP8:
                scales = checkpoint.left[scale].shape
                if len(scales) == 4 and scales[1::2] == (
                    1,
                    1,
                ):  # of blocks, as ModelOpt writes them
                    scales = scales[::2]
                    checkpoint.left[scale] = replace(checkpoint.left[scale], shape=scales)
                of_blocks = len(scales) == 2 and scales not in ((1, 1), (stored.shape[0], 1))
                block = [_BLOCK, _BLOCK] if of_blocks else None
                yield weight, scaled(checkpoint, weight, scale, block)
            elif stored is not None and stored.dtype is torch.uint8 and factor in checkpoint.left:
                yield weight, nvfp4(checkpoint, weight, weight, scale, factor)
            else:
                algorithm = str(checkpoint.quantization.get("quant_algo"))[:80]
                raise NotSupported(
                    f"{checkpoint.folder}: {name}: quant_algo={algorithm!r} of modelopt is not supported: "
                    "its weights must be FP8 or NVFP4, without pre_quant_scale"
                )
            checkpoint.drop(f"{name}.input_scale")
    finish_fp8(checkpoint)
