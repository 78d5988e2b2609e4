"""GGUF files (llama.cpp): blocks of 32 codes, or of 256 codes with a scale for each 16 or 32.

transformers reads the config and the tokenizer. For most architectures, weights are lazy; for others,
transformers decodes all weights to the model's dtype.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.common.untrusted import check_stored, reason
from verbatim.errors import ModelError, NotSupported, first_line
from verbatim.kernels.packing import Encoding, Packing, WeightPacking
from verbatim.model.limits import eos_ids_of
from verbatim.model.loader import (
    LoadedModel,
    ModelSource,
    empty_module,
    read_config,
    resolve_dtype,
)
from verbatim.model.stored import DTYPES, Stored, stamp_of
from verbatim.quantization.rows import unfold
from verbatim.weights.formats.checkpoint import grouped, packed_codes
from verbatim.weights.lazy import Computed, LazyWeight, Traced, traced
from verbatim.weights.skeleton import fill

_SHARD_SUFFIX = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_ENDS = ("eot", "eom")  # of a turn and of a message, where completions end, too
# transformers' tensor processors that work on tensors without data.
_PROCESSORS = (
    "TensorProcessor",
    "LlamaTensorProcessor",
    "Qwen2MoeTensorProcessor",
    "NemotronTensorProcessor",
    "Gemma2TensorProcessor",
)


def find_gguf(model: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file of `model`: the file itself, or the only one in a folder without other weights.

    Raises:
        ModelError: the file does not exist, or the folder has several.
    """
    path = Path(os.path.expanduser(os.fspath(model)))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no file {path}")
        return path.resolve()
    if not os.path.isdir(path) or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}); name one of them")
    return files[0].resolve() if files else None


def open_gguf(path: Path, source: ModelSource, tokenizer: Any, *, in_memory: bool) -> LoadedModel:
    """Open a GGUF file with lazy weights, and its tokenizer, if any.

    `dtype="auto"` means bfloat16, or float32 if all tensors of the file are float32.

    Args:
        tokenizer, in_memory: as for `open_files`.

    Raises:
        NotSupported: packages are missing, the file is one of several parts, or the architecture can only be
            decoded in memory.
        ModelError, UnsupportedModel: the file can't be read, or transformers does not support it.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise NotSupported(
            f"{path}: reading a GGUF file needs {' and '.join(missing)}: pip install '.[gguf]'"
        )
    parts = _SHARD_SUFFIX.search(path.name)
    if parts is not None:
        raise NotSupported(
            f"{path} is one of {int(parts[1])} parts; join them with llama.cpp's gguf-split --merge"
        )
    check_stored(path)
    reader, dtype = _open(path), source.dtype
    if dtype == "auto":
        is_float32 = all(tensor.tensor_type.name == "F32" for tensor in reader.tensors)
        dtype = "float32" if is_float32 else "bfloat16"
    where = {"trust_remote_code": False, "local_files_only": True, "gguf_file": path.name}
    config = read_config(str(path.parent), where)
    _scale_rope(path, config, reader)
    fields = (reader.fields.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS)
    ends = [field.contents() for field in fields if field is not None]
    config.eos_token_id = sorted({*eos_ids_of(config), *(i for i in ends if type(i) is int)})
    resolved = resolve_dtype(dtype)
    if tokenizer is None and "tokenizer.ggml.model" in reader.fields:
        tokenizer = _tokenizer(path)
    empty = empty_module(path, config)
    try:
        tensors = _tensors(path, reader, config, empty, resolved)
    except NotSupported:
        if not in_memory:
            raise
        tensors = None
    loaded = LoadedModel(empty, tokenizer or None, None, str(path), folder=path.parent)
    loaded.files, loaded.wrapper = [path], config
    return fill(path, loaded, tensors, source, resolved, in_memory=in_memory)


def _open(path: Path) -> Any:
    """Open a file with the gguf package; refuse integer weights."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except Exception as error:  # a damaged file may raise any exception
        raise ModelError(f"{path} is damaged or cut short: {reason(error)}") from None
    for tensor in reader.tensors:
        if tensor.tensor_type.name in ("I8", "I16", "I32", "I64"):
            raise ModelError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}: weights must be floating-point numbers "
                "or quantized"
            )
    return reader


def _scale_rope(path: Path, config: Any, reader: Any) -> None:
    """Add to the config the scaling of rotary frequencies that transformers does not read from the file.

    `rope_freqs.weight` (Llama 3.1) holds the divisor of each frequency. transformers supports divisors as
    "longrope", with separate lists for short and long sequences, which are equal here.
    """
    rope = {
        name.partition(".rope.")[2]: field.contents()
        for name, field in reader.fields.items()
        if ".rope." in name and not name.startswith("gpt-oss.")  # transformers reads gpt-oss's
    }
    named = (tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    factors = [float(x) for data in named for x in data.flatten()]
    kind = rope.get("scaling.type", "linear")
    # As in llama.cpp, 0 means no factor, and "linear" is the default.
    factor = (kind != "none" and rope.get("scaling.factor", rope.get("scale_linear"))) or 1
    is_number = isinstance(factor, int | float) and 0 < factor < math.inf
    if kind not in ("none", "linear") or not is_number or (factors and factor != 1):
        raise NotSupported(
            f"{path}: rope.scaling.type={kind!r} with factor={factor!r} is not read from GGUF files"
        )
    rope_config = getattr(config, "rope_parameters", None) or {}
    if rope_config.get("rope_type") != "default":  # configs with several layer types have their own
        return
    if factors:
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        rotated = int(head_dim * rope_config.get("partial_rotary_factor", 1))
        if 2 * len(factors) != rotated or not all(0 < x < math.inf for x in factors):
            raise ModelError(f"{path}: rope_freqs.weight must be {rotated // 2} positive numbers")
        length = config.max_position_embeddings
        rope_config |= dict(rope_type="longrope", factor=1.0, attention_factor=1.0)
        rope_config |= dict(short_factor=factors, long_factor=factors)
        rope_config |= dict(original_max_position_embeddings=length)
    elif factor != 1:
        rope_config |= dict(rope_type="linear", factor=float(factor))


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # its readers raise any exception
        raise ModelError(f"{path}: its tokenizer can't be read: {first_line(error)}") from error


def _tensors(
    path: Path, reader: Any, config: Any, empty: Any, dtype: torch.dtype
) -> dict[str, Traced]:
    """Return the traced tensors of a GGUF file, by transformers' names; decoded weights are in `dtype`.

    Raises:
        NotSupported: transformers rearranges tensors of this architecture in other ways.
    """
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    (architecture,) = read_field(reader, "general.architecture")
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = kind(config.to_dict())
    if type(processor).__name__ not in _PROCESSORS or is_gguf_arch_supported(architecture):
        raise NotSupported(
            f"{path}: {architecture} in GGUF is decoded to the model's dtype when it is opened, "
            "which is supported only in memory, without a placement"
        )
    names = get_gguf_hf_weights_map(empty, processor)
    stamp = stamp_of(path)
    table: dict[str, Any] = {}
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in reader.tensors:
        lazy = traced(_lazy(path, tensor, dtype, stamp))
        owner, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        if kind in ("ffn_gate_exps", "ffn_up_exps") and f"{owner}.{kind}" in names:
            halves.setdefault(names[f"{owner}.{kind}"], {})[kind] = lazy
        elif kind == "ffn_down_exps" and f"{owner}.{kind}" in names:
            table[names[f"{owner}.{kind}"]] = lazy
        elif tensor.name in names:
            table[names[tensor.name]] = _process(processor, tensor.name, lazy, names)
        elif kind != "rope_freqs":  # computed from the config
            table[tensor.name] = lazy
    for name, parts in halves.items():
        pair = [parts[kind] for kind in ("ffn_gate_exps", "ffn_up_exps") if kind in parts]
        table[name] = torch.cat(pair, 1)
    return table


def _process(processor: Any, name: str, tensor: Tensor, names: dict[str, str]) -> Tensor:
    """Process a tensor as transformers does; only rows of matrices are reordered, so blocks stay intact."""
    if "ffn_gate_inp_shexp" in name:
        return tensor.reshape(1, -1)
    if tensor.ndim != 2:
        output: Tensor = processor.process(tensor.float(), name, tensor_key_mapping=names).weights
        return output
    rows = torch.arange(len(tensor))
    order = processor.process(rows[:, None], name, tensor_key_mapping=names).weights.flatten()
    return tensor if torch.equal(order, rows) else tensor.index_select(0, order)


def _lazy(path: Path, tensor: Any, dtype: torch.dtype, stamp: Any) -> LazyWeight:
    kind = tensor.tensor_type
    shape = tuple(int(n) for n in reversed(tensor.shape))
    stored_dtype = DTYPES.get(kind.name, torch.uint8)
    stored_shape = shape if stored_dtype.is_floating_point else tuple(map(int, tensor.data.shape))
    begin, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    stored = Stored(tensor.name, path, begin, nbytes, stored_dtype, stored_shape, stamp)
    if stored_dtype.is_floating_point:
        return stored
    full_name = f"{path}: {tensor.name}"
    if len(shape) >= 2 and kind.name in _KINDS:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[kind][1]
        encoding, bits, split = _KINDS[kind.name]
        packing = WeightPacking(shape, dtype, Packing(bits, 32, encoding))
        matrix = replace(packing, shape=shape[-2:])

        def compute(raw: Tensor) -> Tensor:
            blocks = raw.unflatten(1, (-1, block_bytes))
            if split is None:
                _halves(blocks[..., HALVES[encoding]], full_name)
                return raw.flatten()
            code, heads = split(blocks, full_name)
            return packed_codes(code.flatten(1), heads, matrix)

        return grouped(full_name, packing, compute, (stored,))

    def decode(raw: Tensor) -> Tensor:
        from gguf import dequantize

        try:
            values = torch.from_numpy(dequantize(raw.numpy(), kind))
        except NotImplementedError:
            raise NotSupported(f"{full_name}: the gguf package can't decode {kind.name}") from None
        return values.to(dtype)

    return Computed(decode, (stored,), shape=shape, dtype=dtype)


def _halves(data: Tensor, name: str) -> Tensor:
    """Return bytes `[..., 2 * n]` as float16 numbers `[..., n]`, which must be finite."""
    halves = data.contiguous().view(torch.float16)
    if not bool(halves.isfinite().all()):
        raise ModelError(f"{name} has scales that are NaN or infinite")
    return halves


def _q8_0(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return blocks[..., 2:] ^ 128, _halves(blocks[..., :2], name).squeeze(-1).view(torch.int16)


def _q4_0(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return unfold(blocks[..., 2:], 16), _halves(blocks[..., :2], name).squeeze(-1).view(torch.int16)


def _q5_0(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    code, heads = _q4_0(blocks[..., [0, 1, *range(6, 22)]], name)
    fifth = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (code | fifth.flatten(-2) << 4) + (128 - 16), heads


def _iq4_nl(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    code, heads = _q4_0(blocks, name)
    return _iq4_numbers(code), heads


def _iq4_xs(blocks: Tensor, name: str) -> tuple[Tensor, Tensor]:
    d = _halves(blocks[..., :2], name).float()
    lower = unfold(blocks[..., 4:8], 1)
    upper = (blocks[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(-2)
    scale = d * ((lower | upper << 4).float() - 32)
    return _iq4_numbers(unfold(blocks[..., 8:], 16)), scale.flatten(1).view(torch.int32)


def _iq4_numbers(code: Tensor) -> Tensor:
    """Return the values of IQ4 codes, -127 to 113, plus 128."""
    from gguf.quants import IQ4_NL

    numbers = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8).view(torch.uint8) ^ 128
    return numbers[code.int()]


# Bytes of a block that hold its float16 scales.
HALVES = {
    Encoding.Q2_K: slice(80, 84),
    Encoding.Q3_K: slice(108, 110),
    Encoding.Q4_K: slice(0, 4),
    Encoding.Q5_K: slice(0, 4),
    Encoding.Q6_K: slice(208, 210),
}
# (encoding, bits, function from blocks `[N, blocks, bytes]` to codes and heads; None: bytes are unchanged).
_KINDS: dict[str, tuple[Encoding, int, Callable[..., tuple[Tensor, Tensor]] | None]] = {
    "Q8_0": (Encoding.HALF, 8, _q8_0),
    "Q4_0": (Encoding.HALF, 4, _q4_0),
    "Q5_0": (Encoding.HALF, 8, _q5_0),
    "IQ4_NL": (Encoding.HALF, 8, _iq4_nl),
    "IQ4_XS": (Encoding.SIGNED, 8, _iq4_xs),
    # `quantization="int4"` requantizes the types with more than 4 bits.
    **{kind.name: (kind, 4 if kind.name < "Q5" else 8, None) for kind in HALVES},
}
