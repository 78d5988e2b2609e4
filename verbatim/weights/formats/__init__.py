"""Quantized checkpoints: the lazy weight of each matrix, from what its format stores.

`decode` replaces the tensors of a quantized matrix (codes, scales, zero points) by one lazy weight under the
name of the plain matrix, so everything that reads lazy weights reads a quantized checkpoint. Codes keep their
bits and get another layout (`Encoding` of `model/weight_packing.py`); a matrix kept packed and a decoded one
have the same weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verbatim.errors import ModelError, VerbatimError
from verbatim.untrusted import parts_of, reason
from verbatim.weights.formats.bitsandbytes import read_bitsandbytes
from verbatim.weights.formats.checkpoint import QuantizedCheckpoint
from verbatim.weights.formats.compressed import read_compressed
from verbatim.weights.formats.fp4 import read_mxfp4
from verbatim.weights.formats.fp8 import read_fp8
from verbatim.weights.formats.gptq import read_auto_round, read_awq, read_gptq
from verbatim.weights.formats.modelopt import read_modelopt
from verbatim.weights.formats.torchao import read_torchao
from verbatim.weights.lazy import LazyWeight, Stored

# By `quant_method`, as in `QUANTIZATIONS` of `untrusted.py`.
_FORMATS: dict[str, Callable[[QuantizedCheckpoint], Iterator[tuple[str, LazyWeight]]]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "torchao": read_torchao,
}


def forget_quantization(config: Any) -> None:
    """Remove every `quantization_config`, so that transformers builds plain modules."""
    for part in parts_of(config):
        if "quantization_config" in part.__dict__:
            del part.quantization_config


def decode(
    folder: Path, stored: Mapping[str, Stored], quantization: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """Return the lazy weights of a quantized checkpoint, by the names of the plain model.

    Args:
        stored: the tensors of its files.
        quantization: the `quantization_config` of its config.json.
        dtype: dtype of decoded weights.

    Raises:
        NotSupported: a variant of the format that is not read.
        ModelError: tensors of a matrix are missing, or of another shape than the format says.
    """
    # `check_config` allows no other.
    reader = _FORMATS[quantization.get("quant_method") or "bitsandbytes"]
    checkpoint = QuantizedCheckpoint(folder, dict(stored), quantization, dtype)
    try:
        decoded = dict(reader(checkpoint))
    except VerbatimError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{folder}: its quantization_config is damaged: {reason(error)}"
        ) from error
    return {**checkpoint.left, **decoded}
