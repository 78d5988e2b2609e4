"""The bytes of one chunk: a tensor as torch.save writes it, and nothing else."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.dcp.metadata import Place, Size
from verbatim.model.dcp.records import Record, Unpickler, record

_SMALL = 64  # bytes of an entry that is a word


# Storages that are of one dtype; other dtypes are said beside.
_STORED_AS = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Called(Record):
    """What a function of the pickle was called with."""

    __slots__ = ("args",)
    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> _Called:
        made = super().__new__(cls, *args)
        assert isinstance(made, _Called)
        made.args = args
        return made


class _Tensor(_Called):
    __slots__ = ()


class _Parameter(_Called):
    __slots__ = ()


class _Unpickler(Unpickler):
    """Of a tensor's description. torch's own refuses what runs code, but not what takes memory."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _Tensor,
        ("torch._utils", "_rebuild_parameter"): _Parameter,
        ("torch.storage", "UntypedStorage"): record("UntypedStorage"),
        ("collections", "OrderedDict"): record("hooks"),  # none: it is empty
        **{
            ("torch", name): value if isinstance(value, torch.dtype) else record(name)
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) or name.endswith("Storage")
        },
    }
    dispatch = Unpickler.dispatch.copy()

    def persistent_load(self, pid: Any) -> Any:
        """A storage, by what is said of it: its kind and the name of its bytes are among that."""
        return pid


_Unpickler.dispatch[pickle.BINPERSID[0]] = pickle._Unpickler.dispatch[pickle.BINPERSID[0]]


class _Part(io.RawIOBase):
    """`length` bytes of a file, from `start`."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._at += count
        return count


def read_chunk(path: Path, place: Place, dtype: torch.dtype, sizes: Size) -> Tensor:
    """The tensor at `place` in a file, on the CPU.

    Raises:
        ModelError: there is something else, or a tensor of another dtype or size.
    """
    try:
        with _archive_at(path, place) as (part, _):
            part.seek(0)
            tensor = torch.load(part, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile):  # torch's words advise to trust the file
        raise ModelError("there is something else in its place") from None
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise ModelError("there is something else in its place")
    _check_kind(tensor.dtype, tuple(tensor.shape), dtype, sizes)
    return tensor


@dataclass(frozen=True, slots=True)
class Numbers:
    """Where the numbers of a chunk lie in its file, as they are.

    Attributes:
        offset: of the first byte.
        count: how many there are, gaps between them included.
        strides: as of a tensor.
    """

    offset: int
    count: int
    strides: Size


def find_numbers(path: Path, place: Place, dtype: torch.dtype, sizes: Size) -> Numbers:
    """Where the numbers of the chunk at `place` lie, without reading them.

    Raises:
        ModelError: there is something else, or a tensor of another dtype or size.
    """
    try:
        with _archive_at(path, place) as (part, archive):
            found = archive.tensor
            while isinstance(found, _Parameter):
                found = found.args[0]
            assert isinstance(found, _Tensor)
            storage, begin, size, strides, *rest = found.args
            _, kind, name, *_ = storage
            first, nbytes = archive.find(part, f"data/{name}")
            order = archive.read(part, "byteorder")
    except ModelError:
        raise
    except Exception:  # a description that is none fails in any way it likes
        raise ModelError("there is something else in its place") from None
    own = next((one for one in rest if isinstance(one, torch.dtype)), None)
    own = _STORED_AS.get(kind.__name__) if own is None else own
    _check_kind(own, tuple(size), dtype, sizes)
    if order not in (None, sys.byteorder.encode()):
        raise ModelError(f"its numbers are in the order of bytes {order!r}")
    if any(isinstance(one, dict) and one for one in rest):  # negated or conjugated when it is read
        raise ModelError("its numbers are not as they lie there; save it with resolve_neg()")
    if not all(type(n) is int for n in (begin, *strides)):
        raise ModelError("there is something else in its place")
    count = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    ends = (begin + count) * dtype.itemsize
    if min(begin, *strides, 0) < 0 or ends > nbytes or first + nbytes > place.length:
        raise ModelError("its numbers are not all there")
    return Numbers(place.offset + first + begin * dtype.itemsize, count, tuple(strides))


@dataclass(slots=True)
class _Archive:
    """What torch.save wrote: entries that lie there as they are."""

    prefix: str  # of their names
    tensor: Any  # what its description says
    entries: dict[str, zipfile.ZipInfo]

    def find(self, part: IO[bytes], name: str) -> tuple[int, int]:
        """Where the bytes of an entry begin in `part`, and how many there are."""
        entry = self.entries[self.prefix + name]
        return _data_of(part, entry), entry.file_size

    def read(self, part: IO[bytes], name: str) -> bytes | None:
        """A small entry; None where there is none."""
        if self.prefix + name not in self.entries:
            return None
        begin, nbytes = self.find(part, name)
        part.seek(begin)
        return part.read(min(nbytes, _SMALL))


def _check_kind(found: torch.dtype | None, size: Size, dtype: torch.dtype, sizes: Size) -> None:
    if found != dtype or size != sizes:
        raise ModelError(f"it is {found} {list(size)}, and by .metadata {dtype} {list(sizes)}")


@contextmanager
def _archive_at(path: Path, place: Place) -> Iterator[tuple[IO[bytes], _Archive]]:
    """The archive at `place` in a file, checked, and the bytes that it is read from."""
    with open(path, "rb", buffering=0) as file:
        part = io.BufferedReader(_Part(file, place.offset, place.length))
        yield part, _check_archive(part)


def _check_archive(part: IO[bytes]) -> _Archive:
    """Before torch reads an archive.

    Raises:
        ModelError: entries that are compressed, which may take a thousand times their bytes; torch.save
            writes none. Two entries of a name, or more than one table of them: torch may read the
            other one. A description of something else than a tensor.
    """
    with zipfile.ZipFile(part) as archive:
        entries = archive.infolist()
        names = {entry.filename.lower() for entry in entries}
        first = min((entry.header_offset for entry in entries), default=-1)
        if first != 0 or archive.comment or len(names) < len(entries):
            raise ModelError("there is something else in its place")
        if any(
            e.compress_type != zipfile.ZIP_STORED or e.file_size > e.compress_size for e in entries
        ):
            raise ModelError("it is compressed, which torch.save does not do")
    described = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(described) != 1:
        raise ModelError("there is something else in its place")
    part.seek(_data_of(part, described[0]))
    tensor = _Unpickler(io.BytesIO(part.read(described[0].file_size))).load()
    prefix = described[0].filename.removesuffix("data.pkl")
    return _Archive(prefix, tensor, {entry.filename: entry for entry in entries})


def _data_of(part: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin. Beside zipfile, which insists on checksums; torch.save can leave them
    out.
    """
    part.seek(entry.header_offset)
    name, extra = struct.unpack("<26xHH", part.read(30))
    return int(entry.header_offset + 30 + name + extra)
