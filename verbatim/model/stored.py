"""Reading tensors from files, and locating them by the headers of safetensors files."""

from __future__ import annotations

import json
import operator
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verbatim.common.untrusted import reason
from verbatim.errors import ModelError

Stamp = tuple[int, int, int, int]

DTYPES = {  # by the names of safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # bytes, the limit of safetensors


def stamp_of(file: int | Path) -> Stamp:
    """Return device, inode, size and modification time of a path or file descriptor, to detect changes."""
    stat = os.stat(file)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        offset: byte offset of its data in the file.
        stamp: the file's stamp when its header was read; None: only this process writes to the file.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stamp: Stamp | None = None


def read_stored(stored: Stored) -> Tensor:
    """Read a tensor through the page cache; raise ModelError if it can't be read or the file has changed."""
    with torch.inference_mode(False):
        out = torch.empty(stored.nbytes, dtype=torch.uint8)
    try:
        with stored.path.open("rb") as file:
            if stored.stamp is not None and stamp_of(file.fileno()) != stored.stamp:
                raise ModelError(f"{stored.path} changed while the model was opened")
            file.seek(stored.offset)
            if file.readinto(out.numpy().data) < stored.nbytes:
                raise ModelError(f"{stored.path} ends within {stored.name}: it was cut short")
    except OSError as error:
        raise ModelError(f"{stored.path} can't be read: {error.strerror or error}") from None
    return out.view(stored.dtype).view(stored.shape)


def stored_in(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, from its header; ModelError: it is damaged."""

    def damaged(why: str) -> ModelError:
        return ModelError(f"{path} is damaged or cut short: {why}")

    try:
        with path.open("rb") as file:
            stamp = stamp_of(file.fileno())
            size = stamp[2]
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise damaged(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = map(operator.index, entry["data_offsets"])
            if entry["dtype"] not in DTYPES:  # transformers reports it as missing if needed
                continue
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            # Unlike `torch.Size`, `empty` refuses negative numbers and numbers that overflow.
            if end - begin != torch.empty(shape, dtype=dtype, device="meta").nbytes:
                raise damaged(f"a tensor of {list(shape)} has {end - begin} bytes")
            if not 0 <= begin <= end <= size - 8 - length:
                raise damaged(
                    f"a tensor ends at byte {8 + length + end} and the file at {size}: it was cut short"
                )
            offset = 8 + length + begin
            tensors[name] = Stored(name, path, offset, end - begin, dtype, shape, stamp)
    except ModelError:
        raise
    except Exception as error:  # damaged headers raise anything; their text is not quoted
        raise damaged(reason(error) if path.exists() else "a dangling link") from None
    return tensors
