"""GGUF, llama.cpp's format: blocks of 32 codes, or of 256 with scales of their own for each 16 or 32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported
from verbatim.kernels.packed_rows import unfold
from verbatim.model.quantization import Quantization
from verbatim.model.stored import Stored, stamp_of
from verbatim.model.weight_packing import Encoding, WeightPacking
from verbatim.weights.formats.checkpoint import laid_out
from verbatim.weights.formats.stored import grouped
from verbatim.weights.lazy import Computed, LazyWeight, Traced, traced

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What transformers does to the tensors of these can be done to tensors that are not read yet.
_PROCESSORS = (
    "TensorProcessor",
    "LlamaTensorProcessor",
    "Qwen2MoeTensorProcessor",
    "NemotronTensorProcessor",
    "Gemma2TensorProcessor",
)


def read_gguf(
    path: Path, reader: Any, config: Any, empty: Any, dtype: torch.dtype
) -> dict[str, Traced]:
    """Return the tensors of a GGUF file, traced, by transformers' names.

    Args:
        reader: gguf's, of the file.
        config: of the file's model.
        empty: the module on the meta device.
        dtype: of decoded weights.

    Raises:
        NotSupported: an architecture whose tensors transformers rearranges in other ways.
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
            f"{path}: {architecture} in GGUF is decoded to the model's dtype when it is opened, which only a "
            "model in memory, without a placement, can be"
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
            table[names[tensor.name]] = _processed(processor, tensor.name, lazy, names)
        elif kind != "rope_freqs":  # computed from the config
            table[tensor.name] = lazy
    for name, parts in halves.items():
        pair = [parts[kind] for kind in ("ffn_gate_exps", "ffn_up_exps") if kind in parts]
        table[name] = torch.cat(pair, 1)
    return table


def _processed(processor: Any, name: str, tensor: Tensor, names: dict[str, str]) -> Tensor:
    """Return a tensor after what transformers does to it.

    A matrix only has its rows reordered, which leaves the blocks of quantized ones whole.
    """
    if "ffn_gate_inp_shexp" in name:
        return tensor.reshape(1, -1)
    if tensor.ndim != 2:
        made: Tensor = processor.process(tensor.float(), name, tensor_key_mapping=names).weights
        return made
    rows = torch.arange(len(tensor))
    order = processor.process(rows[:, None], name, tensor_key_mapping=names).weights.flatten()
    return tensor if torch.equal(order, rows) else tensor.index_select(0, order)


def _lazy(path: Path, tensor: Any, dtype: torch.dtype, stamp: Any) -> LazyWeight:
    """Return the lazy weight of a tensor, as it lies in the file."""
    kind = tensor.tensor_type
    shape = tuple(int(n) for n in reversed(tensor.shape))
    own = _FLOATS.get(kind.name, torch.uint8)
    stored_shape = shape if own.is_floating_point else tuple(map(int, tensor.data.shape))
    begin, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    stored = Stored(tensor.name, path, begin, nbytes, own, stored_shape, stamp)
    if own.is_floating_point:
        return stored
    full_name = f"{path}: {tensor.name}"
    if len(shape) >= 2 and kind.name in _KINDS:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[kind][1]
        encoding, bits, split = _KINDS[kind.name]
        packing = WeightPacking(shape, dtype, Quantization(bits, 32, None), encoding=encoding)
        one = replace(packing, shape=shape[-2:])

        def compute(raw: Tensor) -> Tensor:
            blocks = raw.unflatten(1, (-1, block_bytes))
            if split is None:
                _halves(blocks[..., HALVES[encoding]], full_name)
                return raw.flatten()
            code, heads = split(blocks, full_name)
            return laid_out(code.flatten(1), heads, one)

        return grouped(full_name, packing, compute, (stored,))

    def decode(raw: Tensor) -> Tensor:
        from gguf import dequantize

        values = torch.from_numpy(dequantize(raw.numpy(), kind))
        return values.to(dtype)

    return Computed(decode, (stored,), shape=shape, dtype=dtype)


def _halves(data: Tensor, name: str) -> Tensor:
    """Return bytes `[..., 2 * n]` as float16, bit for bit."""
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
    """Return what codes of IQ4 types stand for, -127 to 113, plus 128."""
    from gguf.quants import IQ4_NL

    numbers = torch.tensor(IQ4_NL.kvalues, dtype=torch.int8).view(torch.uint8) ^ 128
    return numbers[code.int()]


# Where the float16 numbers of a block lie.
HALVES = {
    Encoding.Q2_K: slice(80, 84),
    Encoding.Q3_K: slice(108, 110),
    Encoding.Q4_K: slice(0, 4),
    Encoding.Q5_K: slice(0, 4),
    Encoding.Q6_K: slice(208, 210),
}
# Encoding, bits, and what gives codes and heads of blocks `[N, blocks, bytes]`; None: they stay as they are.
_KINDS: dict[str, tuple[Encoding, int, Callable[..., tuple[Tensor, Tensor]] | None]] = {
    "Q8_0": (Encoding.HALF, 8, _q8_0),
    "Q4_0": (Encoding.HALF, 4, _q4_0),
    "Q5_0": (Encoding.HALF, 8, _q5_0),
    "IQ4_NL": (Encoding.HALF, 8, _iq4_nl),
    "IQ4_XS": (Encoding.SIGNED, 8, _iq4_xs),
    # `quantization="int4"` is for those of more than 4 bits.
    **{kind.name: (kind, 4 if kind.name < "Q5" else 8, None) for kind in HALVES},
}
