"""Quantized checkpoints: the lazy weight of each matrix, decoded from what its format stores.

`decode` replaces the tensors of a quantized matrix (codes, scales, zero points) by one lazy weight under the
name of the plain matrix, so everything that reads lazy weights reads a quantized checkpoint. A format of
integers in groups is decoded through the engine's own packed layout (`quantize.py`): a matrix held packed and
one held decoded are bit for bit the same weights. FP8 is decoded to the model's dtype.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError, NotSupported, VerbatimError
from verbatim.model.quantization import GROUP_SIZES, Quantization
from verbatim.model.quantize import pack, unpack
from verbatim.model.weight_packing import WeightPacking, stretches
from verbatim.untrusted import reason
from verbatim.weights.files import read_whole
from verbatim.weights.lazy import Computed, LazyWeight, Stored

_aten = torch.ops.aten
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Twice the values of MXFP4 (E2M1) codes, plus 12: integers of 8 bits.
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]) + 12
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Computes a matrix from the stored tensors of its format.

    Attributes:
        shape, dtype: of the matrix.
        compute: returns it from the tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[..., Tensor]

    def __call__(self, *parts: Tensor) -> Tensor:
        return self.compute(*parts)


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Computes a matrix from the stored tensors of its format, through the packed layout.

    Attributes:
        packing: of the matrix.
        pack: returns the packed bytes from the tensors: `[..., N, vector_bytes]` by rows,
            `[..., matrix_bytes]` by columns.
    """

    packing: WeightPacking
    pack: Callable[..., Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packing.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.packing.dtype

    def __call__(self, *parts: Tensor) -> Tensor:
        return unpack(self.pack(*parts).flatten(), self.packing)


def stored_packing(lazy: LazyWeight) -> tuple[WeightPacking, LazyWeight] | None:
    """Return the packing that a lazy weight has in its file, and the lazy weight of its packed bytes.

    A stack or concatenation of packed matrices along any dimension but K is packed as well.
    None of any other weight.
    """
    if not isinstance(lazy, Computed):
        return None
    if isinstance(lazy.func, Grouped):
        return lazy.func.packing, replace(lazy, func=lazy.func.pack)
    if lazy.func not in (_aten.stack.default, _aten.cat.default):
        return None
    pairs = [pair for part in lazy.args[0] if (pair := stored_packing(part)) is not None]
    packings, parts = [packing for packing, _ in pairs], [part for _, part in pairs]
    if len(pairs) < len(lazy.args[0]) or packings[0].columns:
        return None
    dim = lazy.args[1] if len(lazy.args) > 1 else 0
    first = packings[0]
    shape = list(first.shape)
    if lazy.func is _aten.stack.default:
        if not 0 <= dim <= len(shape) - 2:
            return None
        shape.insert(dim, len(packings))
    else:
        if not 0 <= dim <= len(shape) - 2:
            return None
        shape[dim] = sum(packing.shape[dim] for packing in packings)
    if any(replace(packing, shape=first.shape) != first for packing in packings):
        return None
    return replace(first, shape=tuple(shape)), replace(lazy, args=(parts, dim))


def as_stored(stored: WeightPacking, wanted: WeightPacking | None) -> WeightPacking:
    """Return the stored packing, with the activations of the one that the user wants instead."""
    bits = None if wanted is None else wanted.quantization.activation_bits
    return replace(stored, quantization=replace(stored.quantization, activation_bits=bits))


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a transformers config, or of a model inside it."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def forget_quantization(config: Any) -> None:
    """Remove every `quantization_config`, so that transformers builds plain modules."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None and "quantization_config" in part.__dict__:
            del part.quantization_config


def decode(
    folder: Path, stored: Mapping[str, Stored], quantization: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, LazyWeight]:
    """Return the lazy weights of a quantized checkpoint, by the names of the plain model.

    Args:
        stored: the tensors of its files.
        quantization: the `quantization_config` of its config.json.
        dtype: of the decoded weights.

    Raises:
        NotSupported: a variant of the format that is not read.
        ModelError: tensors of a matrix are missing, or of another shape than the format says.
    """
    reader = _FORMATS[
        quantization.get("quant_method") or "bitsandbytes"
    ]  # as `check_config` allows
    checkpoint = _Checkpoint(folder, dict(stored), quantization, dtype)
    try:
        decoded = dict(reader(checkpoint))
    except VerbatimError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{folder}: its quantization_config is damaged: {reason(error)}"
        ) from error
    return {**checkpoint.left, **decoded}


@dataclass(slots=True)
class _Checkpoint:
    """The tensors of a quantized checkpoint.

    Attributes:
        left: tensors that no format has taken: those of unquantized modules.
    """

    folder: Path
    left: dict[str, Stored]
    quantization: Mapping[str, Any]
    dtype: torch.dtype

    def names(self, suffix: str) -> list[str]:
        """Return the names that end in `suffix`, without it."""
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]

    def take(self, name: str) -> Stored:
        """Remove and return a tensor."""
        if name not in self.left:
            raise ModelError(f"{self.folder} lacks {name}, which its quantization needs")
        return self.left.pop(name)

    def drop(self, *names: str) -> None:
        """Remove what is not needed for the weights, if it is there."""
        for name in names:
            self.left.pop(name, None)

    def option(self, name: str, default: Any, *allowed: Any) -> Any:
        """Return an option of the quantization.

        Raises:
            NotSupported: it is not one of `allowed`.
        """
        value = self.quantization.get(name, default)
        if allowed and value not in allowed:
            raise NotSupported(
                f"{self.folder}: config.json: {name}={str(value)[:80]!r} of its quantization is not "
                f"supported: must be one of {list(allowed)}"
            )
        return value

    def grouped(
        self,
        name: str,
        shape: tuple[int, ...],
        bits: int,
        size: int,
        columns: bool,
        codes: Callable[..., tuple[Tensor, Tensor, Tensor]],
        parts: tuple[Stored, ...],
    ) -> LazyWeight:
        """Return the lazy weight of codes in groups.

        Args:
            size: elements of a group; at most 0: all of a row.
            codes: returns of the parts: codes `[..., N, K]`, and scale and low `[..., N, groups]`.
        """
        depth = shape[-2 if columns else -1]
        whole = size <= 0 or size >= depth
        ours = [g for g in sorted(GROUP_SIZES, reverse=True) if whole or size % g == 0]
        if not ours:
            raise NotSupported(
                f"{self.folder}: {name} has groups of {size}: must be a multiple of {GROUP_SIZES[0]}"
            )
        packing = WeightPacking(shape, self.dtype, Quantization(bits, ours[0], None), columns)
        repeat = -(-depth // ours[0]) if whole else size // ours[0]
        one = functools.partial(_pack_codes, f"{self.folder}: {name}", packing, repeat, codes)

        def make(*tensors: Tensor) -> Tensor:
            if len(shape) == 2:
                return one(*tensors)
            # Expert by expert, as codes take several times the memory of a packed matrix.
            return torch.stack([one(*expert) for expert in zip(*tensors, strict=True)])

        return Computed(Grouped(packing, make), parts, {}, None)

    def rounded(
        self,
        shape: tuple[int, ...],
        values: Callable[..., Tensor],
        parts: tuple[Stored, ...],
        name: str,
    ) -> LazyWeight:
        """Return the lazy weight of values that are rounded to 8 bits in groups of 32."""
        packing = WeightPacking(shape, self.dtype, Quantization(8, 32, None))

        def make(*tensors: Tensor) -> Tensor:
            packed = pack(values(*tensors).to(self.dtype).contiguous(), packing, name)
            return packed.view(*shape[:-1], packing.vector_bytes)

        return Computed(Grouped(packing, make), parts, {}, None)

    def wrong(self, name: str) -> ModelError:
        """Return the error for a tensor of another shape."""
        return ModelError(f"{self.folder}: {name} has not the shape that its quantization says")


def _pack_codes(
    name: str,
    packing: WeightPacking,
    repeat: int,
    codes: Callable[..., tuple[Tensor, Tensor, Tensor]],
    *parts: Tensor,
) -> Tensor:
    """Return codes and groups of another format in the packed layout; scale and low are rounded to bf16."""
    bits, group = packing.quantization.bits, packing.quantization.group_size
    code, scale, low = codes(*parts)
    heads = torch.stack([scale, low], -1).to(torch.bfloat16)
    if not bool(heads.isfinite().all()):
        raise ModelError(f"{name} has scales that are NaN or infinite")
    heads = heads.repeat_interleave(repeat, -2)[..., : -(-packing.depth // group), :].contiguous()
    pieces, at = [], 0
    for count, size in stretches(packing.depth, group):
        part = code[..., at : at + count * size].unflatten(-1, (count, size))
        if bits == 4:
            half = (size + 1) // 2
            upper = torch.nn.functional.pad(part[..., half:], (0, 2 * half - size))
            part = part[..., :half] | upper << 4
        pieces.append(part)
        at += count * size
    if not packing.columns:
        codes_ = [piece.flatten(-2) for piece in pieces]
        return torch.cat([*codes_, heads.view(torch.uint8).flatten(-2)], -1)
    rows, at = [], 0
    for piece in pieces:  # [..., N, groups, bytes]
        count = piece.shape[-2]
        head = heads[..., at : at + count, :].movedim(-3, -1).contiguous().view(torch.uint8)
        rows.append(
            torch.cat([head.flatten(-2), piece.movedim(-3, -1).flatten(-2)], -1).flatten(-2)
        )
        at += count
    return torch.cat(rows, -1)


def _nibbles(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words `[..., n]` to codes `[..., n * 32 / bits]`, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def _affine(code: Tensor, scale: Tensor, zero: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scale and low of scale * (code - zero).

    The scale is rounded first, so that a zero point shifts by the scale that is used.
    """
    scale = scale.to(torch.bfloat16).float()
    return code, scale, scale * -zero


# ---- GPTQ and AWQ: 8 codes of 4 bits in an int32 ----


def _gptq(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    bits = checkpoint.option("bits", None, 4, 8)
    size, per_word = checkpoint.option("group_size", 128), 32 // bits
    offset = (
        0 if checkpoint.option("checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq_v2" else 1
    )
    ordered = bool(checkpoint.option("desc_act", False))

    def codes(words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None = None) -> Any:
        code = _nibbles(words.t(), bits)
        groups = torch.arange(code.shape[1]) // (size if size > 0 else code.shape[1])
        if order is not None and not torch.equal(order.to(groups.dtype), groups):
            raise ModelError(
                f"{checkpoint.folder}: its g_idx reorders groups, and config.json says desc_act=false"
            )
        zero = _nibbles(zeros, bits)[:, : scales.shape[1]].float().t() + offset
        return _affine(code, scales.float().t(), zero)

    def values(words: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
        zero = _nibbles(zeros, bits)[:, : scales.shape[1]].float() + offset
        code, groups = _nibbles(words.t(), bits).t().float(), order.long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
            raise ModelError(f"{checkpoint.folder}: a g_idx names groups that are not there")
        matrix: Tensor = (scales.float()[groups] * (code - zero[groups])).t()
        return matrix

    for name in checkpoint.names(".qweight"):
        words = checkpoint.take(f"{name}.qweight")
        parts = (words, checkpoint.take(f"{name}.qzeros"), checkpoint.take(f"{name}.scales"))
        shape = (words.shape[1], words.shape[0] * per_word)
        order = f"{name}.g_idx"
        if order in checkpoint.left or ordered:
            parts = (*parts, checkpoint.take(order))  # type: ignore[assignment]
        groups = -(-shape[1] // size) if size > 0 else 1
        if parts[2].shape != (groups, shape[0]) or parts[1].shape != (
            groups,
            -(-shape[0] // per_word),
        ):
            raise checkpoint.wrong(f"{name}.scales")
        if len(parts) == 4 and parts[3].shape != (shape[1],):
            raise checkpoint.wrong(order)
        weight = f"{name}.weight"
        if ordered:
            yield weight, checkpoint.rounded(shape, values, parts, weight)
        else:
            yield weight, checkpoint.grouped(weight, shape, bits, size, False, codes, parts)


def _awq(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    bits = checkpoint.option("bits", checkpoint.quantization.get("w_bit"), 4)
    size = checkpoint.option("group_size", checkpoint.quantization.get("q_group_size", 128))
    checkpoint.option("version", "gemm", "gemm", "GEMM")
    order = torch.tensor(_AWQ_ORDER).argsort()

    def columns(words: Tensor) -> Tensor:
        found: Tensor = _nibbles(words, bits).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
        return found

    def codes(words: Tensor, zeros: Tensor, scales: Tensor) -> Any:
        return _affine(columns(words), scales.float().t(), columns(zeros).float())

    for name in checkpoint.names(".qweight"):
        words = checkpoint.take(f"{name}.qweight")
        parts = (words, checkpoint.take(f"{name}.qzeros"), checkpoint.take(f"{name}.scales"))
        shape = (words.shape[1] * 8, words.shape[0])
        groups = -(-shape[1] // size) if size > 0 else 1
        if parts[2].shape != (groups, shape[0]) or parts[1].shape != (groups, words.shape[1]):
            raise checkpoint.wrong(f"{name}.scales")
        weight = f"{name}.weight"
        yield weight, checkpoint.grouped(weight, shape, bits, size, False, codes, parts)


# ---- FP8: one scale for a tensor, a row or a block ----


def _scaled(
    checkpoint: _Checkpoint, name: str, scale: str, block: list[int] | None
) -> tuple[str, LazyWeight]:
    """Return the lazy weight of FP8 values times their scales, in the model's dtype.

    Args:
        block: rows and columns of a block; None: a scale for the tensor or for each row.
    """
    parts = checkpoint.take(name), checkpoint.take(scale)
    shape, blocks = parts[0].shape, parts[1].shape
    if block and len(blocks) == len(shape):
        # The last block of a dimension may be short.
        sizes = [1] * (len(shape) - 2) + list(block)
    elif len(blocks) == len(shape):
        if any(m and n % m for n, m in zip(shape, blocks, strict=True)):
            raise NotSupported(
                f"{checkpoint.folder}: config.json names no size for the blocks of {name}, and "
                f"{list(shape)} is no multiple of its {list(blocks)} scales"
            )
        sizes = [-(-n // max(1, m)) for n, m in zip(shape, blocks, strict=True)]
    else:
        sizes = []
    if (sizes and any(-(-n // b) != m for n, b, m in zip(shape, sizes, blocks, strict=True))) or (
        not sizes and torch.Size(blocks).numel() not in (1, shape[0])
    ):
        raise checkpoint.wrong(scale)

    def values(weight: Tensor, scales: Tensor) -> Tensor:
        scales = scales.float()
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{checkpoint.folder}: {scale} has numbers that are NaN or infinite")
        if not sizes:
            scales = scales.view(-1, *[1] * (len(shape) - 1))
        for dim, size in enumerate(sizes):
            if size > 1 and scales.shape[dim] > 1:
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
        return (weight.float() * scales).to(checkpoint.dtype)

    return name, Computed(Decoded(shape, checkpoint.dtype, values), parts, {}, None)


def _fp8(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    for suffix in ("_scale_inv", "_scale"):
        for name in checkpoint.names(suffix):
            if (stored := checkpoint.left.get(name)) is not None and stored.dtype in _FP8:
                block = checkpoint.quantization.get("weight_block_size")
                yield _scaled(checkpoint, name, f"{name}{suffix}", block)
                # Of a layer, or of a matrix of fused experts.
                for prefix in (name.removesuffix("weight"), f"{name}_"):
                    kinds = ("activation_scale", "input_scale", "input_scale_ub")
                    checkpoint.drop(*(prefix + kind for kind in kinds))
    _drop_cache_scales(checkpoint)
    _refuse_fp8(checkpoint)


def _drop_cache_scales(checkpoint: _Checkpoint) -> None:
    """Drop the scales of a quantized KV cache, which are not used."""
    for suffix in ("k_scale", "v_scale", "q_scale"):
        checkpoint.drop(*(f"{name}.{suffix}" for name in checkpoint.names(f".{suffix}")))


def _refuse_fp8(checkpoint: _Checkpoint) -> None:
    for name, stored in checkpoint.left.items():
        if stored.dtype in _FP8:
            raise ModelError(f"{checkpoint.folder} lacks the scales of {name}, which is FP8")


# ---- MXFP4: 4 bits each, and an exponent for 32 of them ----


def _mxfp4(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    def codes(blocks: Tensor, exponents: Tensor) -> Any:
        code = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)
        scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)
        return _E2M1.to(torch.uint8)[code.int()], scale, scale * -12

    for name in checkpoint.names("_blocks"):
        blocks = checkpoint.take(f"{name}_blocks")
        parts = blocks, checkpoint.take(f"{name}_scales")
        if blocks.shape[:-1] != parts[1].shape or blocks.shape[-1:] != (16,):
            raise checkpoint.wrong(f"{name}_blocks")
        *outer, width, groups, _ = blocks.shape
        # transformers keeps these experts as [experts, K, N].
        shape = (*outer, groups * 32, width)
        yield name, checkpoint.grouped(name, shape, 8, 32, True, codes, parts)


# ---- compressed-tensors ----


def _compressed(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    kinds = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    groups = (checkpoint.quantization.get("config_groups") or {}).values()
    formats = {g.get("format") or checkpoint.quantization.get("format") for g in groups}
    options = [g.get("weights") or {} for g in groups]
    if not formats or not formats <= kinds:
        raise NotSupported(
            f"{checkpoint.folder}: config.json: format={sorted(map(str, formats))} of compressed-tensors is "
            f"not supported: must be of {sorted(kinds)}"
        )
    blocks = [o["block_structure"] for o in options if o.get("block_structure")]
    block = blocks[0] if blocks and all(b == blocks[0] for b in blocks) else None
    for name in checkpoint.names(".weight_scale"):
        weight = f"{name}.weight"
        if f"{name}.weight_packed" in checkpoint.left:
            yield weight, _packed_integers(checkpoint, name, options)
        elif checkpoint.left[weight].dtype in _FP8:
            yield _scaled(checkpoint, weight, f"{name}.weight_scale", block)
        else:
            yield weight, _plain_integers(checkpoint, name)
        checkpoint.drop(f"{name}.input_scale", f"{name}.input_zero_point")
        checkpoint.drop(f"{name}.weight_zero_point", f"{name}.weight_shape")
    _drop_cache_scales(checkpoint)
    _refuse_fp8(checkpoint)


def _packed_integers(
    checkpoint: _Checkpoint, name: str, options: list[dict[str, Any]]
) -> LazyWeight:
    words, scales = (
        checkpoint.take(f"{name}.weight_packed"),
        checkpoint.take(f"{name}.weight_scale"),
    )
    all_bits = {option.get("num_bits") for option in options}
    if all_bits not in ({4}, {8}):
        raise NotSupported(
            f"{checkpoint.folder}: config.json: num_bits={sorted(map(str, all_bits))} of compressed-tensors "
            "is not supported: must be 4 or 8, the same in all groups"
        )
    bits = 4 if all_bits == {4} else 8
    per_word = 32 // bits
    depth = words.shape[1] * per_word
    if f"{name}.weight_shape" in checkpoint.left:
        depth = int(read_whole(checkpoint.take(f"{name}.weight_shape"))[1])
    if f"{name}.weight_g_idx" in checkpoint.left:
        raise NotSupported(f"{checkpoint.folder}: {name}.weight_g_idx: groups that are reordered")
    shape = (words.shape[0], depth)
    sizes = {int(o["group_size"]) for o in options if o.get("strategy") == "group"}
    size = next(iter(sizes)) if len(sizes) == 1 else -(-depth // scales.shape[1])
    if scales.shape != (shape[0], -(-depth // size)) or -(-depth // per_word) != words.shape[1]:
        raise checkpoint.wrong(f"{name}.weight_scale")
    zeros = f"{name}.weight_zero_point"

    def codes(words: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        zero: Tensor | float = float(1 << bits - 1)
        if zeros is not None:
            zero = _nibbles(zeros.t(), bits)[:, : len(scales)].float().t()
        return _affine(_nibbles(words, bits)[:, :depth], scales.float(), zero)

    parts: tuple[Stored, ...] = (words, scales)
    if zeros in checkpoint.left:
        parts = (*parts, checkpoint.take(zeros))
    return checkpoint.grouped(f"{name}.weight", shape, bits, size, False, codes, parts)


def _plain_integers(checkpoint: _Checkpoint, name: str) -> LazyWeight:
    weight, scales = checkpoint.take(f"{name}.weight"), checkpoint.take(f"{name}.weight_scale")
    shape = weight.shape
    count = torch.Size(scales.shape).numel()
    if weight.dtype is not torch.int8 or len(shape) != 2 or (count % shape[0] and count != 1):
        raise checkpoint.wrong(f"{name}.weight")
    size = shape[1] // max(1, count // shape[0])

    def codes(weight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Any:
        scales = scales.float()
        scales = scales.reshape(1, 1).expand(shape[0], -1) if count == 1 else scales
        zero = 128.0 if zeros is None else zeros.float().view(-1, scales.shape[1]) + 128
        return _affine(_unsigned(weight), scales.reshape(shape[0], -1), zero)

    parts: tuple[Stored, ...] = (weight, scales)
    if f"{name}.weight_zero_point" in checkpoint.left:
        parts = (*parts, checkpoint.take(f"{name}.weight_zero_point"))
    return checkpoint.grouped(f"{name}.weight", shape, 8, size, False, codes, parts)


def _unsigned(weight: Tensor) -> Tensor:
    """Shift int8 by 128."""
    return weight.view(torch.uint8) ^ 128


# ---- bitsandbytes ----


def _bnb(checkpoint: _Checkpoint) -> Iterator[tuple[str, LazyWeight]]:
    for name in checkpoint.names(".SCB"):
        weight = f"{name}.weight"
        parts = checkpoint.take(weight), checkpoint.take(f"{name}.SCB")
        shape = parts[0].shape
        if parts[0].dtype is not torch.int8 or parts[1].shape != shape[:1]:
            raise checkpoint.wrong(weight)

        def codes(weight: Tensor, scales: Tensor) -> Any:
            return _affine(_unsigned(weight), scales.float()[:, None] / 127, 128.0)

        checkpoint.drop(f"{name}.weight_format")
        yield weight, checkpoint.grouped(weight, shape, 8, 0, False, codes, parts)
    for kind in ("nf4", "fp4"):
        for name in checkpoint.names(f".quant_state.bitsandbytes__{kind}"):
            yield name, _bnb_4bit(checkpoint, name, kind)


def _bnb_4bit(checkpoint: _Checkpoint, name: str, kind: str) -> LazyWeight:
    state = read_whole(checkpoint.take(f"{name}.quant_state.bitsandbytes__{kind}"))
    try:
        fields = json.loads(bytes(state.tolist()))
        shape = tuple(int(n) for n in fields["shape"])
        block = int(fields["blocksize"])
        nested = int(fields.get("nested_blocksize") or 0)
        offset = float(fields.get("nested_offset") or 0)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{checkpoint.folder}: the quant_state of {name} is damaged") from None
    keys = ["", ".absmax", ".quant_map"]
    keys += [".nested_absmax", ".nested_quant_map"] if nested else []
    parts = tuple(checkpoint.take(f"{name}{key}") for key in keys)
    numel = torch.Size(shape).numel()
    peaks = -(-numel // block) if block > 0 else -1
    if len(shape) != 2 or parts[0].nbytes != -(-numel // 2) or parts[2].shape != (16,):
        raise checkpoint.wrong(name)
    if torch.Size(parts[1].shape).numel() != peaks:
        raise checkpoint.wrong(f"{name}.absmax")

    def values(codes: Tensor, absmax: Tensor, table: Tensor, *nests: Tensor) -> Tensor:
        data = codes.contiguous().view(torch.uint8).flatten()  # stored in any dtype
        code = torch.stack([data >> 4, data & 15], -1).flatten()[:numel]
        peaks = absmax.flatten()
        if nests:
            outer = nests[0].repeat_interleave(nested)[: len(peaks)]
            peaks = nests[1][peaks.int()] * outer + offset
        return (table[code.int()] * peaks.repeat_interleave(block)[:numel]).view(shape)

    return checkpoint.rounded(shape, values, parts, name)


_FORMATS: dict[str, Callable[[_Checkpoint], Iterator[tuple[str, LazyWeight]]]] = {
    "awq": _awq,
    "bitsandbytes": _bnb,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
