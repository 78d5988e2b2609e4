"""The bytes of one chunk: a tensor as torch.save writes it, and nothing else."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.model.dcp.metadata import Place, Size
from verbatim.model.dcp.records import Unpickler, record


class _Unpickler(Unpickler):
    """Of a tensor's description. torch's own refuses what runs code, but not what takes memory."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): record("tensor"),
        ("torch._utils", "_rebuild_tensor_v3"): record("tensor"),
        ("torch._utils", "_rebuild_parameter"): record("parameter"),
        ("torch.storage", "UntypedStorage"): record("UntypedStorage"),
        ("collections", "OrderedDict"): record("hooks"),  # none: it is empty
        **{
            ("torch", name): value if isinstance(value, torch.dtype) else record(name)
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) or name.endswith("Storage")
        },
    }
    dispatch = Unpickler.dispatch.copy()

    def persistent_load(self, pid: Any) -> None:
        """A storage: torch finds its bytes."""


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
        with open(path, "rb", buffering=0) as file:
            part = io.BufferedReader(_Part(file, place.offset, place.length))
            _check_archive(part)
            part.seek(0)
            tensor = torch.load(part, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile):  # torch's words advise to trust the file
        raise ModelError("there is something else in its place") from None
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or not tensor.is_cpu:
        raise ModelError("there is something else in its place")
    if tensor.dtype != dtype or tensor.shape != sizes:
        raise ModelError(
            f"it is {tensor.dtype} {list(tensor.shape)}, and by .metadata {dtype} {list(sizes)}"
        )
    return tensor


def _check_archive(part: IO[bytes]) -> None:
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
    # Read beside zipfile, which insists on checksums; torch.save can leave them out.
    part.seek(described[0].header_offset)
    name, extra = struct.unpack("<26xHH", part.read(30))
    part.seek(name + extra, io.SEEK_CUR)
    _Unpickler(io.BytesIO(part.read(described[0].file_size))).load()
