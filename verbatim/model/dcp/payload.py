"""The bytes of one chunk: a tensor in torch.save's format, and nothing else."""

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

from verbatim.errors import ModelError
from verbatim.model.dcp.metadata import Place, Size
from verbatim.model.dcp.records import PickledObject, Unpickler, record

_SMALL = 64  # bytes of a short text entry


# Storages of one dtype; other dtypes are stored separately.
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
    "ComplexFloatStorage": torch.complex64,
}


class _Called(PickledObject):
    """The arguments of a function call in the pickle."""

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
    """Unpickler of a tensor's description. torch's refuses code, but not excessive memory."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _Tensor,
        ("torch._utils", "_rebuild_parameter"): _Parameter,
        ("torch.storage", "UntypedStorage"): record("UntypedStorage"),
        ("collections", "OrderedDict"): record("hooks"),  # always empty
        **{
            ("torch", name): value if isinstance(value, torch.dtype) else record(name)
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) or name.endswith("Storage")
        },
    }
    dispatch = Unpickler.dispatch.copy()

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage, with its type and the name of its bytes."""
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


@dataclass(frozen=True, slots=True)
class Numbers:
    """The location of a chunk's elements in its file.

    Attributes:
        offset: offset of the first byte.
        count: number of elements, including gaps.
        strides: as in a tensor.
    """

    offset: int
    count: int
    strides: Size


def find_numbers(path: Path, place: Place, dtype: torch.dtype, sizes: Size) -> Numbers:
    """Find the elements of the chunk at `place`, without reading them.

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
    except Exception:  # an invalid description leads to arbitrary exceptions
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
    """An archive of torch.save, with uncompressed entries."""

    prefix: str  # of the entries' names
    tensor: Any  # its description
    entries: dict[str, zipfile.ZipInfo]

    def find(self, part: IO[bytes], name: str) -> tuple[int, int]:
        """Return the offset of an entry's bytes in `part`, and their number."""
        entry = self.entries[self.prefix + name]
        return _data_of(part, entry), entry.file_size

    def read(self, part: IO[bytes], name: str) -> bytes | None:
        """Return a small entry, or None."""
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
    """Yield the bytes at `place` in a file, and the checked archive in them."""
    with open(path, "rb", buffering=0) as file:
        part = io.BufferedReader(_Part(file, place.offset, place.length))
        yield part, _check_archive(part)


def _check_archive(part: IO[bytes]) -> _Archive:
    """Check an archive before torch reads it.

    Raises:
        ModelError: compressed entries, which may expand a thousandfold and which torch.save does not write;
            duplicate names or tables of entries, of which torch may read the other one; or a description
            of something other than a tensor.
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
    """Return the offset of an entry's bytes, without zipfile's checksums, which torch.save may omit."""
    part.seek(entry.header_offset)
    name, extra = struct.unpack("<26xHH", part.read(30))
    return int(entry.header_offset + 30 + name + extra)
