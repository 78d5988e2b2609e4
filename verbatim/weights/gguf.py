"""GGUF files, llama.cpp's format: config and tokenizer, read by transformers, and weights.

`formats/gguf.py` leaves the weights of most architectures in the file. Those of others are decoded to the
model's dtype by transformers.
"""

from __future__ import annotations

import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verbatim.errors import ModelError, NotSupported, first_line
from verbatim.model.loader import read_config, resolve_dtype
from verbatim.untrusted import reason, refuse_lfs_pointer
from verbatim.weights.formats.gguf import read_gguf
from verbatim.weights.lazy import Traced
from verbatim.weights.skeleton import ModelFiles

_NEEDS = {"gguf": "gguf", "accelerate": "accelerate"}
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def find_gguf(model: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file of `model`: itself, or the one in a folder without other weights.

    Raises:
        ModelError: a folder has several.
    """
    path = Path(os.path.expanduser(os.fspath(model)))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no file {path}")
        return path.resolve()
    if not os.path.isdir(path) or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise ModelError(f"{path} holds {len(found)} GGUF files ({names}); name one of them")
    return found[0].resolve() if found else None


def gguf_files(path: Path, dtype: str | torch.dtype, *, in_memory: bool) -> ModelFiles:
    """Return the model of a GGUF file, and its tokenizer, if any.

    With `dtype="auto"` it is bfloat16, or float32 if every tensor of the file is.

    Args:
        in_memory: as of `open_files`.

    Raises:
        NotSupported: missing packages, a file of several parts, or an architecture that is only decoded in
            memory.
        ModelError, UnsupportedModel: it can't be read, or transformers does not support it.
    """
    missing = [package for name, package in _NEEDS.items() if find_spec(name) is None]
    if missing:
        raise NotSupported(
            f"{path}: reading a GGUF file needs {' and '.join(missing)}: pip install '.[gguf]'"
        )
    parts = _PART.search(path.name)
    if parts is not None:
        raise NotSupported(
            f"{path} is one of {int(parts[1])} parts; join them with llama.cpp's gguf-split --merge"
        )
    refuse_lfs_pointer(path)
    reader = _open(path)
    if dtype == "auto":
        is_float32 = all(tensor.tensor_type.name == "F32" for tensor in reader.tensors)
        dtype = "float32" if is_float32 else "bfloat16"
    where = {"trust_remote_code": False, "local_files_only": True, "gguf_file": path.name}
    config = read_config(str(path.parent), where)
    _scale_rope(path, config, reader)
    resolved = resolve_dtype(dtype, config)
    has_tokenizer = "tokenizer.ggml.model" in reader.fields

    def tensors(empty: Any) -> tuple[dict[str, Traced] | None, torch.dtype]:
        try:
            return read_gguf(path, reader, config, empty, resolved), resolved
        except NotSupported:
            if not in_memory:
                raise
            return None, resolved

    return ModelFiles(
        str(path),
        path,
        config,
        tensors,
        lambda: _tokenizer(path) if has_tokenizer else None,
        lambda module, _: module.generation_config,
        weights=[path],
    )


def _open(path: Path) -> Any:
    """Return gguf's reader of a file, without integers in place of weights."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # whatever a damaged file leads to
        raise ModelError(f"{path} is damaged or cut short: {reason(error)}") from None
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("I8", "I16", "I32", "I64"):
            raise ModelError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}: weights must be floating-point numbers "
                "or quantized"
            )
    return reader


def _scale_rope(path: Path, config: Any, reader: Any) -> None:
    """Put what a file says of rotary frequencies, and transformers does not read, into the config.

    `rope_freqs.weight` (Llama 3.1) holds what each frequency is divided by. transformers knows such numbers
    as "longrope", for short and for long sequences; here both are the same.
    """
    rope = {
        name.partition(".rope.")[2]: field.contents()
        for name, field in reader.fields.items()
        if ".rope." in name and not name.startswith("gpt-oss.")  # which transformers reads
    }
    named = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    factors = [float(x) for data in named for x in data.flatten()]
    kind = rope.get("scaling.type", "linear")
    # As in llama.cpp, 0 is no factor, and "linear" is the default.
    factor = (kind != "none" and rope.get("scaling.factor", rope.get("scale_linear"))) or 1
    is_number = isinstance(factor, int | float) and 0 < factor < math.inf
    if kind not in ("none", "linear") or not is_number or (factors and factor != 1):
        raise NotSupported(
            f"{path}: rope.scaling.type={kind!r} with factor={factor!r} is not read from GGUF files"
        )
    own = getattr(config, "rope_parameters", None) or {}
    if own.get("rope_type") != "default":  # with kinds of layers, the config has their frequencies
        return
    if factors:
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        rotated = int(head_dim * own.get("partial_rotary_factor", 1))
        if 2 * len(factors) != rotated or not all(0 < x < math.inf for x in factors):
            raise ModelError(f"{path}: rope_freqs.weight must be {rotated // 2} positive numbers")
        length = config.max_position_embeddings
        own |= dict(rope_type="longrope", factor=1.0, attention_factor=1.0)
        own |= dict(short_factor=factors, long_factor=factors)
        own |= dict(original_max_position_embeddings=length)
    elif factor != 1:
        own |= dict(rope_type="linear", factor=float(factor))


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # of any of its many readers
        raise ModelError(f"{path}: its tokenizer can't be read: {first_line(error)}") from error
