"""Weights in 8 or 4 bits: how a matrix becomes bytes, and how bytes become the matrix again.

A matrix is cut into groups of neighbours along its contraction dimension (the last group of a row may be
short), and an element of a group is held as a whole number:

    code = round((w - low) / scale)        w is read back as low + scale * code

with `low` the group's least element and `scale` its range over 2^bits - 1, both bf16 and rounded outwards,
so that no element is more than half a step off. `scale * code` is exact in float32 (8 bits times 8), so an
element is read back with one rounding to float32, and one more to bf16 where the model is in bf16: the same
bits by every backend. Nothing depends on the number of threads.

At equal bytes, bf16 heads and smaller groups err less than float32 heads and larger groups, and `low` is
worth its two bytes at 8 bits as well as at 4 (benchmarks/quantize.py --formats).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verbatim import kernels
from verbatim.errors import InvalidRequest, ModelError, NotSupported

GROUP_SIZES = (32, 64, 128)
LARGEST = 2.0**126  # of a weight, so that a group's range is still a number
_HEAD_BYTES = 4  # (scale, low) of a group, two bf16
_HIGH_BITS = -0x10000  # of a float32: those that a bf16 keeps
_PIECE = 1 << 20  # elements that are packed at once
_SUFFIX = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `LLM(quantization=...)` may be, beside "int8" and "int4".

    Args:
        bits: of a code, 8 or 4.
        group_size: weights that share a scale and a lower end: 32, 64 or 128.
        head_bits: of a code of the embedding of tokens and of the head, 8 or 4; None leaves both as they
            are.
        activation_bits: 8 rounds what linear layers and the head multiply their weights with to codes of
            8 bits, group by group of each row (`integers.py`): faster at many rows, and another
            model. None leaves activations as they are.

    Raises:
        InvalidRequest: another number.
    """

    bits: int = 4
    group_size: int = 64
    head_bits: int | None = 8
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("bits", (8, 4)),
            ("group_size", GROUP_SIZES),
            ("head_bits", (8, 4, None)),
            ("activation_bits", (8, None)),
        ):
            value = getattr(self, name)
            if type(value) not in (int, type(None)) or value not in allowed:
                raise InvalidRequest(f"Quantization({name}={value!r}): must be one of {allowed}")

    @property
    def name(self) -> str:
        """ "int4-g64-head8-a8": part of the numerics key. Without the parts that say nothing new."""
        head = {self.bits: "", None: "-head-exact"}.get(self.head_bits, f"-head{self.head_bits}")
        activations = "" if self.activation_bits is None else f"-a{self.activation_bits}"
        return f"int{self.bits}-g{self.group_size}{head}{activations}"

    @property
    def of_weights(self) -> Quantization:
        """How weights are packed, whatever becomes of activations."""
        return replace(self, activation_bits=None)

    @property
    def of_head(self) -> Quantization | None:
        """How the embedding and the head are packed; None: they are not."""
        return None if self.head_bits is None else replace(self, bits=self.head_bits)


# w8a8: weights and activations in 8 bits, as others call it.
_NAMES = {
    "int8": Quantization(8),
    "int4": Quantization(4),
    "w8a8": Quantization(8, activation_bits=8),
    "w4a8": Quantization(4, activation_bits=8),
}


def settle_quantization(value: Any) -> Quantization | None:
    """What `quantization` names.

    Raises:
        NotSupported: weights are not held in that.
    """
    if value is None or isinstance(value, Quantization):
        return value
    found = _NAMES.get(value) if type(value) is str else None
    if found is None:
        raise NotSupported(
            f"quantization={value!r}: must be None, {', '.join(map(repr, _NAMES))} or a "
            "Quantization(bits, group_size, head_bits, activation_bits)"
        )
    return found


@dataclass(frozen=True, slots=True)
class WeightPacking:
    """How one parameter lies in bytes.

    Rows that are multiplied (`[..., N, K]`, as nn.Linear has them) lie one after another: the codes of a
    row, then (scale, low) of each of its groups. Columns that are (`[..., K, N]`, as GPT-2 has them) lie
    group by group: N scales, N lows, then the codes row by row. In 4 bits, byte i of a group holds its
    elements i (low half) and i + ceil(size / 2).

    Attributes:
        shape, dtype: of the parameter.
        columns: K is the last dimension but one; else it is the last.
        interleaved: a matrix of rows, laid out anew for products of whole numbers (`integers.py`), which
            is how its activations are multiplied then. `pack` and `unpack` don't know of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization
    columns: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) >= 2 and self.dtype.is_floating_point

    @property
    def multiplies_codes(self) -> bool:
        """Does it multiply activations in few bits, as it will when it is interleaved?"""
        return self.quantization.activation_bits is not None

    @property
    def depth(self) -> int:
        """K."""
        return self.shape[-2 if self.columns else -1]

    @property
    def vectors(self) -> int:
        """How many runs of K elements there are."""
        return math.prod(self.shape[:-2]) * self.shape[-1 if self.columns else -2]

    @property
    def vector_bytes(self) -> int:
        """What K elements take."""
        groups = -(-self.depth // self.quantization.group_size)
        return (self.depth * self.quantization.bits + 7) // 8 + groups * _HEAD_BYTES

    @property
    def vector_words(self) -> int:
        """What K elements take where they are interleaved, in words of four bytes."""
        bits = self.quantization.bits
        groups = stretches(self.depth, self.quantization.group_size)
        return sum(count * (1 + -(-size * bits // 32)) for count, size in groups)

    @property
    def nbytes(self) -> int:
        """Packed."""
        if self.interleaved:
            return -(-self.shape[0] // 32) * 32 * self.vector_words * 4
        return self.vectors * self.vector_bytes


def pack(
    weight: Tensor, packing: WeightPacking, name: str = "a weight", *, backend: str = "auto"
) -> Tensor:
    """`weight` to `[packing.nbytes]` uint8.

    Args:
        name: of the weight, for the message.
        backend: as of `unpack`; columns are packed by torch. All give the same bits.

    Raises:
        ModelError: a NaN, an infinity, or a number too large.
    """
    return _pack(weight, packing, name, backend)[0]


def pack_and_measure(
    weight: Tensor, packing: WeightPacking, name: str = "a weight"
) -> tuple[Tensor, tuple[float, float]]:
    """`pack` and `squared_error` of what it gives, in one pass where the kernel serves."""
    packed, squares = _pack(weight, packing, name, "auto")
    return packed, squares or squared_error(weight, packed, packing)


def _pack(
    weight: Tensor, packing: WeightPacking, name: str, backend: str
) -> tuple[Tensor, tuple[float, float] | None]:
    assert tuple(weight.shape) == packing.shape
    out = torch.empty(packing.nbytes, dtype=torch.uint8)
    if not weight.numel():
        return out, (0.0, 0.0)
    function = None if packing.columns else _pack_function(backend)
    with torch.no_grad():
        if function is not None and weight.is_cpu and weight.dtype in _SUFFIX:
            squares = (ctypes.c_double * 2)()
            rows = weight.contiguous()
            if not function(
                out.data_ptr(),
                rows.data_ptr(),
                packing.vectors,
                packing.depth,
                packing.quantization.bits,
                packing.quantization.group_size,
                _SUFFIX[weight.dtype],
                squares,
                torch.get_num_threads(),
            ):
                raise _unfit(name)
            return out, (squares[0], squares[1])
        if packing.columns:
            _pack_columns(weight, packing, name, out)
        else:
            _pack_rows(weight, packing, name, out)
    return out, None


def unpack(
    packed: Tensor, packing: WeightPacking, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`[packing.nbytes]` uint8 back to the parameter.

    Args:
        out: contiguous, to be filled and returned; None makes a new tensor.
        backend: "kernel", "torch", "auto" for the kernel where it can serve, or one of
            `kernels.available()`. All give the same bits.
    """
    assert packed.dtype == torch.uint8 and packed.shape == (packing.nbytes,)
    assert not packing.interleaved
    if out is None:
        out = torch.empty(packing.shape, dtype=packing.dtype)
    assert out.is_contiguous() and tuple(out.shape) == packing.shape and out.dtype == packing.dtype
    if not out.numel():
        return out
    functions = _functions(backend) if packing.dtype in _SUFFIX else None
    if functions is None:
        (_unpack_columns if packing.columns else _unpack_rows)(packed, packing, out)
        return out
    assert packed.is_contiguous() and packed.is_cpu and out.is_cpu
    shape = (
        (math.prod(packing.shape[:-2]), packing.depth, packing.shape[-1])
        if packing.columns
        else (packing.vectors, packing.depth)
    )
    functions[packing.columns](
        out.data_ptr(),
        packed.data_ptr(),
        *shape,
        packing.quantization.bits,
        packing.quantization.group_size,
        _SUFFIX[packing.dtype],
        torch.get_num_threads(),
    )
    return out


def unpack_rows(packed: Tensor, packing: WeightPacking, rows: Tensor) -> Tensor:
    """Some rows, `rows` `[n]` by number, of a matrix in few bits: `[n, K]`."""
    assert not packing.columns and len(packing.shape) == 2
    some = packed.view(packing.vectors, packing.vector_bytes)[rows]
    return unpack(some.flatten(), replace(packing, shape=(len(some), packing.depth)))


def rounded(weight: Tensor, packing: WeightPacking, name: str = "a weight") -> Tensor:
    """What packing and unpacking leave of `weight`: a parameter, or some rows of one."""
    packing = replace(packing, shape=tuple(weight.shape))
    return unpack(pack(weight, packing, name), packing)


def squared_error(weight: Tensor, packed: Tensor, packing: WeightPacking) -> tuple[float, float]:
    """The sums of (unpacked - weight)^2 and of weight^2, without unpacking all of it at once."""
    group, width = packing.quantization.group_size, packing.shape[-1]
    lines = weight.numel() // max(1, width)
    step = max(1, _PIECE // max(1, width))
    if packing.columns:
        step = -(-step // group) * group  # whole groups, and of one matrix
    rows = weight.reshape(lines, width)
    wrong = all_of_it = 0.0
    line = byte = 0
    while line < lines:
        left = packing.depth - line % packing.depth if packing.columns else lines - line
        piece = replace(packing, shape=(min(step, left), width))
        true = rows[line : line + piece.shape[0]].float()
        off = unpack(packed[byte : byte + piece.nbytes], piece).float().sub_(true)
        wrong += float(torch.linalg.vector_norm(off, dtype=torch.float64)) ** 2
        all_of_it += float(torch.linalg.vector_norm(true, dtype=torch.float64)) ** 2
        line, byte = line + piece.shape[0], byte + piece.nbytes
    return wrong, all_of_it


@functools.cache
def _pack_function(backend: str) -> Callable[..., int] | None:
    """The kernel that packs rows; None is torch."""
    library = find_library(backend)
    if library is None:
        return None
    function: Any = library.vb_pack_rows
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int] * 3
    function.argtypes += [ctypes.c_void_p, ctypes.c_int]
    return function  # type: ignore[no-any-return]


def find_library(backend: str) -> ctypes.CDLL | None:
    """The library that `backend` means; None is torch."""
    if backend == "torch":
        return None
    name: str | None = backend
    if backend in ("auto", "kernel"):
        name = kernels.instruction_set()
        if name is None and backend == "auto":
            return None
    if name is None or name not in kernels.available():
        known = ["auto", "kernel", "torch", *kernels.available()]
        raise ValueError(f"backend={backend!r}: must be one of {known} that was built")
    return kernels.load(name)


@functools.cache
def _functions(backend: str) -> dict[bool, Callable[..., None]] | None:
    """The kernels that unpack rows and columns, by `WeightPacking.columns`; None is torch."""
    library = find_library(backend)
    if library is None:
        return None
    found: dict[bool, Callable[..., None]] = {}
    for columns, lengths in ((False, 2), (True, 3)):
        function = getattr(library, "vb_unpack_columns" if columns else "vb_unpack_rows")
        function.restype = None
        function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * lengths + [ctypes.c_int] * 4
        found[columns] = function
    return found


# ---- Groups, along dimension -1 or -2 ----


def _unfit(name: str) -> ModelError:
    return ModelError(
        f"quantization: {name} holds NaN, an infinity or a number beyond {LARGEST:.3g}, which no group of "
        "few bits can hold"
    )


def _encode(x: Tensor, dim: int, bits: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Groups as bytes (two codes to a byte in 4 bits), with scale and low as bf16, `dim` kept."""
    levels = 2**bits - 1
    low, high = x.aminmax(dim=dim, keepdim=True)
    if not bool((torch.maximum(high, -low) <= LARGEST).all()):  # a NaN is not, either
        raise _unfit(name)
    low = _round_down(low + 0.0)  # -0 becomes 0
    scale = _round_up((high - low) / levels + 0.0)
    code = (x - low).div_(scale).round_().clamp_(0, levels)
    code = code.masked_fill_(scale == 0, 0).to(torch.uint8)
    if bits == 4:
        size = code.shape[dim]
        half = (size + 1) // 2
        first, last = code.narrow(dim, 0, half).clone(), code.narrow(dim, half, size - half)
        first.narrow(dim, 0, size - half).bitwise_or_(last << 4)
        code = first
    return code, _as_bf16(scale), _as_bf16(low)


def _decode(code: Tensor, scale: Tensor, low: Tensor, dim: int, size: int, bits: int) -> Tensor:
    """What `_encode` made, read back in float32; `size` is that of the groups."""
    if bits == 4:
        code = torch.cat([code & 15, code >> 4], dim).narrow(dim, 0, size)
    return low.float() + scale.float() * code


def _round_up(x: Tensor) -> Tensor:
    """To the next bf16 away from zero, in float32."""
    return (x.view(torch.int32) + 0xFFFF & _HIGH_BITS).view(torch.float32)


def _round_down(x: Tensor) -> Tensor:
    """To the next bf16 that is not above, in float32."""
    truncated = (x.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.where(x < 0, _round_up(x), truncated)


def _as_bf16(x: Tensor) -> Tensor:
    """Float32 that are bf16, with their bits as they are."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _as_heads(data: Tensor) -> Tensor:
    """Bytes at any address as bf16."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def stretches(depth: int, group: int) -> list[tuple[int, int]]:
    """(groups, size of each): the whole ones, then the short one."""
    found = [(depth // group, group), (1, depth % group)]
    return [(count, size) for count, size in found if count and size]


# ---- [..., N, K] ----


def _pack_rows(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    depth, bits = packing.depth, packing.quantization.bits
    target = out.view(packing.vectors, packing.vector_bytes)
    rows = weight.reshape(packing.vectors, depth)
    step = max(1, _PIECE // depth)
    for begin in range(0, len(rows), step):
        x = rows[begin : begin + step].float()
        codes, heads, at = [], [], 0
        for count, size in stretches(depth, packing.quantization.group_size):
            groups = x[:, at : at + count * size].reshape(len(x), count, size)
            code, scale, low = _encode(groups, -1, bits, name)
            codes.append(code.flatten(1))
            heads.append(torch.cat([scale, low], -1).view(torch.uint8).flatten(1))
            at += count * size
        torch.cat(codes + heads, 1, out=target[begin : begin + step])


def _unpack_rows(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    depth, bits = packing.depth, packing.quantization.bits
    source = packed.view(packing.vectors, packing.vector_bytes)
    target = out.view(packing.vectors, depth)
    step = max(1, _PIECE // depth)
    for begin in range(0, len(source), step):
        rows = source[begin : begin + step]
        codes = rows[:, : (depth * bits + 7) // 8]
        heads = _as_heads(rows[:, codes.shape[1] :])
        at, code_at, head_at = 0, 0, 0
        for count, size in stretches(depth, packing.quantization.group_size):
            nbytes = (size * bits + 7) // 8
            code = codes[:, code_at : code_at + count * nbytes].reshape(len(rows), count, nbytes)
            head = heads[:, head_at : head_at + 2 * count].reshape(len(rows), count, 2)
            groups = _decode(code, head[..., :1], head[..., 1:], -1, size, bits)
            target[begin : begin + step, at : at + count * size] = groups.flatten(1)
            at, code_at = at + count * size, code_at + count * nbytes
            head_at += 2 * count


# ---- [..., K, N] ----


def _pack_columns(weight: Tensor, packing: WeightPacking, name: str, out: Tensor) -> None:
    bits, width = packing.quantization.bits, packing.shape[-1]
    at = 0
    for matrix in weight.reshape(-1, packing.depth, width):
        row = 0
        for count, size in _pieces(packing):
            groups = matrix[row : row + count * size].float().reshape(count, size, width)
            code, scale, low = _encode(groups, -2, bits, name)
            heads = torch.cat([scale, low], -2).view(torch.uint8)
            made = torch.cat([heads.flatten(1), code.flatten(1)], 1).flatten()
            out[at : at + len(made)] = made
            at, row = at + len(made), row + count * size
    assert at == len(out)


def _unpack_columns(packed: Tensor, packing: WeightPacking, out: Tensor) -> None:
    bits, width = packing.quantization.bits, packing.shape[-1]
    at = 0
    for matrix in out.view(-1, packing.depth, width):
        row = 0
        for count, size in _pieces(packing):
            nbytes = width * (_HEAD_BYTES + (size * bits + 7) // 8)
            groups = packed[at : at + count * nbytes].view(count, nbytes)
            heads = _as_heads(groups[:, : width * _HEAD_BYTES])
            scale, low = heads.view(count, 2, width).split(1, 1)
            code = groups[:, width * _HEAD_BYTES :].reshape(count, -1, width)
            made = _decode(code, scale, low, -2, size, bits)
            matrix[row : row + count * size] = made.view(-1, width)
            at, row = at + count * nbytes, row + count * size


def _pieces(packing: WeightPacking) -> list[tuple[int, int]]:
    """`stretches`, in pieces that are worked on at once."""
    found = []
    for count, size in stretches(packing.depth, packing.quantization.group_size):
        step = max(1, _PIECE // (size * packing.shape[-1]))
        found += [(min(step, count - done), size) for done in range(0, count, step)]
    return found
