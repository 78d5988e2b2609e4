"""Readers of quantized checkpoints: the lazy weight of each matrix, from the tensors of its format.

`decode` replaces the tensors of a quantized matrix (codes, scales, zero points) by one lazy weight under the
name of the plain matrix, so everything that reads lazy weights can read a quantized checkpoint. Codes are
rearranged into the packed layout (`Encoding` of `kernels/packing.py`), with weights bit-identical to
decoded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from verbatim.common.untrusted import parts_of, reason
from verbatim.errors import ModelError, NotSupported, VerbatimError
from verbatim.weights.formats.bitsandbytes import read_bitsandbytes
from verbatim.weights.formats.checkpoint import QuantizedCheckpoint
from verbatim.weights.formats.compressed import read_compressed, read_modelopt
from verbatim.weights.formats.floats import read_fp8, read_mxfp4
from verbatim.weights.formats.integers import read_auto_round, read_awq, read_gptq, read_hqq
from verbatim.weights.formats.torchao import read_torchao
from verbatim.weights.lazy import LazyWeight, Stored

Reader = Callable[[QuantizedCheckpoint], Iterator[tuple[str, LazyWeight]]]
_FORMATS: dict[str, Reader] = {  # by `quant_method`
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "hqq": read_hqq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
    "mxfp8": read_fp8,
    "torchao": read_torchao,
}


def forget_quantization(config: Any) -> None:
    """Remove every `quantization_config`, so that transformers builds plain modules."""
    for part in parts_of(config):
        if "quantization_config" in part.__dict__:
            del part.quantization_config


def reader_of(source: object, quantization: Mapping[str, Any]) -> Reader:
    """Return the reader of a `quantization_config`; raise NotSupported if there is none."""
    by_bits = "bitsandbytes" if quantization.keys() & {"load_in_4bit", "load_in_8bit"} else None
    method = quantization.get("quant_method") or by_bits
    if not isinstance(method, str) or method not in _FORMATS:
        raise NotSupported(
            f"{source}: config.json: quant_method={str(method)[:80]!r} is not supported: must be one of "
            f"{', '.join(_FORMATS)}; or quantize an unquantized checkpoint, with quantization="
        )
    return _FORMATS[method]


def decode(
    folder: Path, stored: Mapping[str, Stored], quantization: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """Return the lazy weights of a quantized checkpoint, by the names of the plain model.

    Args:
        stored: the tensors of the checkpoint's files, by name.
        quantization: the `quantization_config` of its config.json.
        dtype: dtype of decoded weights.

    Raises:
        NotSupported: the format or variant is not supported.
        ModelError: tensors are missing, or have other shapes than the format requires.
    """
    reader = reader_of(folder, quantization)
    checkpoint = QuantizedCheckpoint(folder, dict(stored), quantization, dtype)
    try:
        decoded = dict(reader(checkpoint))
    except VerbatimError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{folder}: its quantization_config is damaged: {reason(error)}"
        ) from error
    return {**checkpoint.remaining, **decoded}
