"""Encoding of messages: plain data as JSON, and the arrays as they are in memory.

Nothing that is read can run: there are numbers, text, lists, tuples, mappings, tensors, dtypes, and objects
of the classes in `FIELDS`. A path is sent as absolute text.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
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
    LowRank,
    SamplePlan,
    SampleRow,
    Support,
)
from verbatim.core import Completion, DraftStats, FinishReason, Metrics, Result
from verbatim.device import Device
from verbatim.errors import VerbatimError
from verbatim.kernels.options import Packing
from verbatim.kv.quantized import PACKINGS
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape
from verbatim.model.loader import ModelSource
from verbatim.options import SENT_DTYPES
from verbatim.params import SamplingParams
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import EngineOptions

PREFIX = struct.Struct("<4sIQ")  # magic, bytes of JSON, bytes of arrays
MAGIC = b"vbt3"
_MAX_HEADER = 1 << 28
_MAX_ARRAYS = 1 << 38
# Keys that stand for what JSON lacks; no message of ours has one otherwise.
_ARRAY, _DTYPE, _TUPLE, _PAIRS = "\0array", "\0dtype", "\0tuple", "\0pairs"
_DEVICE = "\0device"  # torch's, by its name
_IDS = "\0ids"  # a long list of whole numbers, as an array
_OBJECT, _SAME = "\0object", "\0same"  # an object of `FIELDS`; one that came before
_LONG = 64  # entries of a list
_ALIGNED = 16
_FEW_BYTES = 1 << 16
_SCALARS = frozenset({type(None), bool, int, float, str})

_DTYPES: dict[str, torch.dtype | Packing] = {**SENT_DTYPES, **PACKINGS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What a sampler asks of a request's parameters; the rest decides what the engine does around it.
_DRAWN_WITH = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "support",
)
# Of the options of an engine; the others are those of the head alone.
_OPENED_WITH = (
    *("kv_dtype", "kv_bytes", "block_size", "max_batch_tokens", "max_sequences", "max_waiting"),
    *("max_length", "prefix_cache", "num_threads", "default_batch_tokens", "prompt_rows"),
    "device",
)
_WHOLE: tuple[Any, ...] = (
    *(Adapter, LowRank, Batch, SamplePlan, SampleRow, Candidates),
    *(Choices, LayerShape, StateShape, Result, Completion, Metrics, DraftStats),
    *(ModelSource, Offload, Device),
)

# The fields of each class that are sent, and of which the receiver makes the object again.
FIELDS: dict[type, tuple[str, ...]] = {
    **{kind: tuple(field.name for field in fields(kind)) for kind in _WHOLE},
    Support: Support._fields,
    Draw: Draw._fields,
    SamplingParams: _DRAWN_WITH,
    EngineOptions: _OPENED_WITH,
    FinishReason: ("value",),
}
_KINDS = {kind.__name__: kind for kind in FIELDS}

Buffer = bytes | memoryview
Message = dict[str, Any]


def dtype_named(dtype: torch.dtype | Packing) -> str:
    """Return the name of a dtype, or of a format of K and V, as `LLM` accepts it."""
    return _NAMES[dtype]


class Garbage(VerbatimError):
    """Bytes that are not a message."""


def encode(message: Mapping[str, Any]) -> list[Buffer]:
    """Encode a message as buffers that are sent one after another.

    Raises:
        TypeError: it holds something else than plain data, tensors on the CPU and objects of `FIELDS`.
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
    """Return the bytes of a contiguous tensor: a copy if they are few, which is faster than a view."""
    if array.nbytes < _FEW_BYTES:
        return ctypes.string_at(array.data_ptr(), array.nbytes)
    return memoryview(array.detach().reshape(-1).view(torch.uint8).numpy().data)


def sizes(prefix: bytes | bytearray) -> tuple[int, int]:
    """Return the bytes of JSON and of arrays behind these `PREFIX.size` ones.

    Raises:
        Garbage: nothing of ours begins like that.
    """
    magic, header, arrays = PREFIX.unpack(prefix)
    if magic != MAGIC or header > _MAX_HEADER or arrays > _MAX_ARRAYS:
        raise Garbage(f"{bytes(prefix[:8])!r} is not how a message of Verbatim's cluster begins")
    return header, arrays


def decode(header: bytes | bytearray, arrays: bytearray) -> dict[str, Any]:
    """Decode a message, whose tensors are views of `arrays`.

    Raises:
        Garbage: this is no message.
    """
    try:
        message = json.loads(header, object_hook=_Reader(arrays).put_in)
    except Exception as error:  # the objects' own checks raise more than those of this file
        raise Garbage(f"not a message of Verbatim's cluster: {error}") from None
    if not isinstance(message, dict):
        raise Garbage(f"not a message of Verbatim's cluster: {type(message).__name__}")
    return message


class _Writer:
    """Converts values to plain data, and collects the arrays in their order."""

    def __init__(self) -> None:
        self.arrays: list[Tensor] = []
        self._sent: dict[
            int, tuple[int, Any]
        ] = {}  # id to number; the objects, so that ids stay theirs

    def plain(self, value: Any) -> Any:
        if type(value) in _SCALARS:  # first: most values are
            return value
        if type(value) in FIELDS:
            return self._object(value)
        if isinstance(value, Tensor):
            self.arrays.append(value)
            return {_ARRAY: [_NAMES[value.dtype], list(value.shape)]}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: self.plain(entry) for key, entry in value.items()}
            return {_PAIRS: [[self.plain(key), self.plain(x)] for key, x in value.items()]}
        if isinstance(value, list):
            if len(value) > _LONG and set(map(type, value)) == {int}:
                return {_IDS: self.plain(torch.tensor(value, dtype=torch.int64))}
            return [self.plain(entry) for entry in value]
        if isinstance(value, tuple):
            return {_TUPLE: [self.plain(entry) for entry in value]}
        if isinstance(value, Path):
            return str(value.absolute())
        if isinstance(value, int | float | str):
            return value
        if isinstance(value, torch.dtype | Packing):
            return {_DTYPE: _NAMES[value]}
        if isinstance(value, torch.device):
            return {_DEVICE: str(value)}
        raise TypeError(f"{type(value).__name__} is not plain data")

    def _object(self, value: Any) -> Any:
        if id(value) in self._sent:
            return {_SAME: self._sent[id(value)][0]}
        kind = type(value)
        entries = [self.plain(getattr(value, name)) for name in FIELDS[kind]]
        self._sent[id(value)] = len(self._sent), value
        return {_OBJECT: [kind.__name__, *entries]}


class _Reader:
    """Converts plain data back. JSON is read in the order in which it was written."""

    def __init__(self, raw: bytearray) -> None:
        self._raw = raw
        self._offset = 0
        self._objects: list[Any] = []
        self._made: dict[str, Callable[[Any], Any]] = {
            _ARRAY: lambda entry: self._array(*entry),
            _DTYPE: _DTYPES.__getitem__,
            _DEVICE: torch.device,
            _TUPLE: tuple,
            _PAIRS: dict,
            _IDS: Tensor.tolist,
            _OBJECT: lambda entry: self._object(*entry),
            _SAME: lambda number: self._objects[number],
        }

    def put_in(self, entry: dict[str, Any]) -> Any:
        if len(entry) == 1:
            ((key, value),) = entry.items()
            if key.startswith("\0"):
                return self._made[key](value)
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
        found = torch.frombuffer(self._raw, dtype=dtype, count=count, offset=self._offset)
        self._offset += nbytes + -nbytes % _ALIGNED
        return found.view(shape)

    def _object(self, name: str, *entries: Any) -> Any:
        kind: Any = _KINDS[name]
        made = kind(**dict(zip(FIELDS[kind], entries, strict=True)))
        self._objects.append(made)
        return made
