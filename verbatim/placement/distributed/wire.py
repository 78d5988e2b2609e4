"""Encoding of messages: plain data as JSON, followed by the raw bytes of tensors.

Decoding runs no code from a message. Values are numbers, strings, lists, tuples, mappings, tensors, dtypes,
devices, and objects of the classes in `FIELDS`. Paths are sent as absolute strings.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.batch import (
    Adapter,
    Batch,
    Candidates,
    Choices,
    Draw,
    IdValues,
    LowRank,
    SamplePlan,
    SampleRow,
    Support,
)
from verbatim.core import Completion, DraftStats, FinishReason, Metrics, Result
from verbatim.errors import VerbatimError
from verbatim.kernels.packing import Packing
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape
from verbatim.model.device import Device
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import ModelSource
from verbatim.options import SENT_DTYPES
from verbatim.params import SamplingParams
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import EngineOptions
from verbatim.quantization.formats import KV_PACKINGS

PREFIX = struct.Struct("<4sIQ")  # magic, bytes of JSON, bytes of arrays
MAGIC = b"vbt3"
_MAX_HEADER = 1 << 28
_MAX_ARRAYS = 1 << 38
# Keys that mark values of types that JSON lacks; no other key begins with a null character.
_ARRAY, _DTYPE, _TUPLE, _PAIRS = "\0array", "\0dtype", "\0tuple", "\0pairs"
_IDS = "\0ids"  # a long list of integers, as a tensor
_OBJECT, _REFERENCE = "\0object", "\0same"  # an object of `FIELDS`; a reference to an earlier one
_LONG_LIST = 64  # longer lists of integers are sent as tensors
_ALIGNED = 16
_FEW_BYTES = 1 << 16  # smaller arrays are copied into the message
_SCALARS = frozenset({type(None), bool, int, float, str})

_DTYPES: dict[str, torch.dtype | Packing] = {**SENT_DTYPES, **KV_PACKINGS}
# The names of dtypes and of KV cache formats, as accepted by `LLM`.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The parameters that the sampler uses; the others are used by the engine.
_SAMPLER_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "support",
)
# The engine options that only the head uses.
_HEAD_OPTIONS = {"quantization", "fused", "prefix_folder", "prefix_folder_bytes"}
# Classes with all fields sent.
_COMPLETE: tuple[Any, ...] = (
    *(Adapter, LowRank, Batch, SamplePlan, SampleRow, IdValues, Candidates, Support, Draw),
    *(Choices, LayerShape, StateShape, Result, Completion, Metrics, DraftStats),
    *(ModelSource, Offload, Device, EarlyExit),
)

# The sent fields of each class, which are the arguments of its constructor.
FIELDS: dict[type, tuple[str, ...]] = {
    **{kind: tuple(signature(kind).parameters) for kind in _COMPLETE},
    SamplingParams: _SAMPLER_FIELDS,
    EngineOptions: tuple(n for n in signature(EngineOptions).parameters if n not in _HEAD_OPTIONS),
    FinishReason: ("value",),
    torch.device: ("type", "index"),
}
_KINDS = {kind.__name__: kind for kind in FIELDS}

Buffer = bytes | memoryview
Message = dict[str, Any]


class Garbage(VerbatimError):
    """Bytes that are not a message."""


def encode(message: Mapping[str, Any]) -> list[Buffer]:
    """Encode a message as buffers to be sent in order.

    Raises:
        TypeError: a value is not plain data, a tensor on the CPU or an object of `FIELDS`.
    """
    writer = _Writer()
    header = json.dumps(writer.plain(message), separators=(",", ":")).encode()
    header += b" " * (-(PREFIX.size + len(header)) % _ALIGNED)
    buffers: list[Buffer] = []
    size = 0
    for array in writer.arrays:
        if data := bytes_of(array.contiguous()):
            padding = -len(data) % _ALIGNED
            buffers += [data, bytes(padding)] if padding else [data]
            size += len(data) + padding
    return [PREFIX.pack(MAGIC, len(header), size) + header, *buffers]


def bytes_of(array: Tensor) -> Buffer:
    """Return the bytes of a contiguous tensor: a view, or, if it is small, a copy, which is faster."""
    if array.nbytes < _FEW_BYTES:
        return ctypes.string_at(array.data_ptr(), array.nbytes)
    return memoryview(array.detach().reshape(-1).view(torch.uint8).numpy().data)


def sizes(prefix: bytes | bytearray) -> tuple[int, int]:
    """Return the bytes of JSON and of arrays that follow a message's prefix; raise Garbage if it is none."""
    magic, header, arrays = PREFIX.unpack(prefix)
    if magic != MAGIC or header > _MAX_HEADER or arrays > _MAX_ARRAYS:
        raise Garbage(f"{bytes(prefix[:8])!r} is not how a message of Verbatim's cluster begins")
    return header, arrays


def decode(header: bytes | bytearray, arrays: bytearray) -> dict[str, Any]:
    """Decode a message; its tensors are views of `arrays`. Raises Garbage for other bytes."""
    try:
        message = json.loads(header, object_hook=_Reader(arrays).put_in)
    except Exception as error:  # constructors of the objects may raise any error
        raise Garbage(f"not a message of Verbatim's cluster: {error}") from None
    if not isinstance(message, dict):
        raise Garbage(f"not a message of Verbatim's cluster: {type(message).__name__}")
    return message


class _Writer:
    """Converts values to plain data, and collects the tensors in order."""

    def __init__(self) -> None:
        self.arrays: list[Tensor] = []
        # The number of each sent object, by id, and the object itself, so that no id is reused.
        self._sent: dict[int, tuple[int, Any]] = {}

    def plain(self, value: Any) -> Any:
        if type(value) in _SCALARS:  # first, as most values are scalars
            return value
        if type(value) in FIELDS:
            return self._object(value)
        if isinstance(value, Tensor):
            self.arrays.append(value)
            return {_ARRAY: [DTYPE_NAMES[value.dtype], list(value.shape)]}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: self.plain(entry) for key, entry in value.items()}
            return {_PAIRS: [[self.plain(key), self.plain(x)] for key, x in value.items()]}
        if isinstance(value, list):
            if len(value) > _LONG_LIST and set(map(type, value)) == {int}:
                return {_IDS: self.plain(torch.tensor(value, dtype=torch.int64))}
            return [self.plain(entry) for entry in value]
        if isinstance(value, tuple):
            return {_TUPLE: [self.plain(entry) for entry in value]}
        if isinstance(value, Path):
            return str(value.absolute())
        if isinstance(value, int | float | str):
            return value
        if isinstance(value, torch.dtype | Packing):
            return {_DTYPE: DTYPE_NAMES[value]}
        raise TypeError(f"{type(value).__name__} is not plain data")

    def _object(self, value: Any) -> Any:
        if id(value) in self._sent:
            return {_REFERENCE: self._sent[id(value)][0]}
        kind = type(value)
        entries = [self.plain(getattr(value, name)) for name in FIELDS[kind]]
        self._sent[id(value)] = len(self._sent), value
        return {_OBJECT: [kind.__name__, *entries]}


class _Reader:
    """Converts plain data back to values, in the order in which it was written."""

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw
        self._offset = 0
        self._objects: list[Any] = []
        self._converters: dict[str, Callable[[Any], Any]] = {
            _ARRAY: lambda entry: self._array(*entry),
            _DTYPE: _DTYPES.__getitem__,
            _TUPLE: tuple,
            _PAIRS: dict,
            _IDS: Tensor.tolist,
            _OBJECT: lambda entry: self._object(*entry),
            _REFERENCE: lambda number: self._objects[number],
        }

    def put_in(self, entry: dict[str, Any]) -> Any:
        if len(entry) == 1:
            ((key, value),) = entry.items()
            if key.startswith("\0"):
                return self._converters[key](value)
        return entry

    def _array(self, name: str, shape: list[int]) -> Tensor:
        dtype = SENT_DTYPES[name]
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"an array of shape {shape}")
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._offset + nbytes > len(self._raw):
            raise ValueError("an array goes beyond the end")
        array = torch.frombuffer(self._raw, dtype=dtype, count=count, offset=self._offset)
        self._offset += nbytes + -nbytes % _ALIGNED
        return array.view(shape)

    def _object(self, name: str, *entries: Any) -> Any:
        kind: Any = _KINDS[name]
        instance = kind(**dict(zip(FIELDS[kind], entries, strict=True)))
        self._objects.append(instance)
        return instance
