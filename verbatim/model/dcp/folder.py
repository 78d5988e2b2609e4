"""One folder of a DCP checkpoint: its `.metadata`, and the tensors in its files."""

from __future__ import annotations

import mmap
import struct
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from reprlib import repr as shown  # of any depth and length
from typing import Any

import torch
from torch import Tensor
from torch.storage import _storage_type_to_dtype_map

from verbatim.errors import ModelError
from verbatim.model.dcp.records import METADATA, TENSOR, Record, unpickle
from verbatim.model.stored import Stored, read_stored, stamp_of
from verbatim.untrusted import check_names, reason

FILE = ".metadata"
_MOST_DIMENSIONS = 64  # torch's limit
_LONGEST_NAME = 10_000  # characters
_MOST_OVERHEAD = 1 << 20  # limit for torch.save's overhead in bytes; it is 2 KB
_CLASSES = "torch.distributed.checkpoint."

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor, and the bytes of a file in the folder that hold it."""

    offsets: Size
    sizes: Size
    relative_path: str
    begin: int
    length: int


class DcpFolder:
    """A folder with a `.metadata`. Entries are checked when they are read.

    Attributes:
        keys: the names of the tensors. Other saved bytes are never read.

    Raises:
        ModelError: the `.metadata` can't be read, or is not DCP's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = path = folder / FILE
        try:
            found = unpickle(path.read_bytes(), METADATA)
        except ModelError as error:
            raise ModelError(f"{path} is refused: {error}") from None
        except Exception as error:  # a damaged pickle leads to arbitrary exceptions
            raise ModelError(f"{path} can't be read: {reason(error)}") from None
        fields = self._fields(found, "metadata.Metadata")
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not dict or type(places) is not dict:
            raise self._wrong("it lists no tensors or no places")
        self._tensors: dict[str, dict[str, Any]] = {}
        for key, entry in entries.items():
            if type(key) is not str or len(key) > _LONGEST_NAME or type(entry) is not Record:
                raise self._wrong(f"an entry {shown(key)} is {shown(entry)}")
            if entry.name == f"{_CLASSES}metadata.TensorStorageMetadata":
                self._tensors[key] = self._fields(entry, "metadata.TensorStorageMetadata")
        self._places: dict[tuple[str, Size], Any] = {}
        for index, place in places.items():
            where = self._fields(index, "metadata.MetadataIndex")
            if type(key := where.get("fqn")) is str and key in self._tensors:
                self._places[key, self._size(where.get("offset") or (), key)] = place
        self.keys = list(self._tensors)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        properties = self._tensors[key].get("properties")
        state = properties.state if type(properties) is Record else None
        if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
            raise self._wrong(f"{key} has no dtype")
        return state[0]

    def size(self, key: str) -> Size:
        """Return the size of one tensor."""
        return self._size(self._tensors[key].get("size"), key)

    def tensor(self, key: str, read: Callable[[Stored], Tensor] = read_stored) -> Tensor:
        """Return a tensor, put together from its chunks, which must form a grid.

        Args:
            read: returns a tensor of a file, also a traced one.

        Raises:
            ModelError: missing or truncated files; chunks that are not tensors of its dtype and size, or
                don't cover it.
        """
        size = self.size(key)
        if 0 in size:
            return torch.empty(size, dtype=self.dtype(key))
        chunks = self._chunks(key, size)
        total, elements = sum(prod(chunk.sizes) for chunk in chunks), prod(size)
        if total < elements:
            raise self._wrong(f"chunks of {key} are missing: they don't cover its {list(size)}")
        if total > elements:
            raise self._wrong(f"chunks of {key} overlap")
        try:
            shapes = {c.offsets: torch.empty(c.sizes, device="meta") for c in chunks}
            fits = _joined(shapes, len(size)).shape == size
        except (ValueError, RuntimeError):
            fits = False
        if not fits:
            raise self._wrong(
                f"{key} is cut into {len(chunks)} chunks that overlap or form no grid"
            )
        return _joined({c.offsets: self._read(key, c, read) for c in chunks}, len(size))

    def _chunks(self, key: str, size: Size) -> list[_Chunk]:
        """Return the chunks of one tensor that are not empty.

        Raises:
            ModelError: one is out of the tensor, or has no place or too large a one.
        """
        listed = self._tensors[key].get("chunks")
        if type(listed) is not list:
            raise self._wrong(f"{key} has no chunks")
        chunks = []
        for entry in listed:
            box = self._fields(entry, "metadata.ChunkStorageMetadata")
            offsets, sizes = self._size(box.get("offsets"), key), self._size(box.get("sizes"), key)
            if not len(offsets) == len(sizes) == len(size) or any(
                o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)
            ):
                raise self._wrong(
                    f"{key} is {list(size)}, and a chunk of {list(sizes)} begins at {list(offsets)}"
                )
            if 0 in sizes:
                continue
            if (key, offsets) not in self._places:
                raise self._wrong(f"{key} has no place for its chunk at {list(offsets)}")
            place = self._fields(self._places[key, offsets], "filesystem._StorageInfo")
            path, transforms = place.get("relative_path"), place.get("transform_descriptors")
            begin: Any = place.get("offset")
            length: Any = place.get("length")
            if type(path) is not str or not (_is_count(begin) and _is_count(length)):
                raise self._wrong(f"{key} lies at {shown(path)}, {shown(begin)}, {shown(length)}")
            if transforms:
                raise self._wrong(
                    f"{key} was saved through {shown(transforms)}, which is not undone"
                )
            most = prod(sizes) * self.dtype(key).itemsize + _MOST_OVERHEAD
            if length > most:
                raise self._wrong(
                    f"{key} takes {length} bytes for a chunk of {list(sizes)}: at most {most}"
                )
            chunks.append(_Chunk(offsets, sizes, path, begin, length))
        return chunks

    def _read(self, key: str, chunk: _Chunk, read: Callable[[Stored], Tensor]) -> Tensor:
        path = self._path(chunk.relative_path)
        stamp = stamp_of(path)
        end = chunk.begin + chunk.length
        if end > stamp[2]:
            raise ModelError(
                f"{path} is cut short: it has {stamp[2]} bytes, and {key} ends at {end}"
            )
        name, dtype = f"{key}{list(chunk.offsets)}", self.dtype(key)
        try:
            offset, count, strides = _find_numbers(path, chunk, dtype)
        except ModelError as error:
            raise ModelError(
                f"{path}: {key} is no tensor as torch.save writes it: {error}"
            ) from None
        in_order = strides == torch.empty(chunk.sizes, device="meta").stride()
        shape = chunk.sizes if in_order else (count,)
        found = read(Stored(name, path, offset, count * dtype.itemsize, dtype, shape, stamp))
        if in_order:
            return found
        # Contiguous, as other strides would select other matrix products.
        return found.as_strided(chunk.sizes, strides).clone(memory_format=torch.contiguous_format)

    def _path(self, relative_path: str) -> Path:
        """Return a file of the folder; refuse a name outside of it.

        The file may be a link, as in the hub's cache: creating one requires access to the folder, and its
        target is only read as a tensor.
        """
        check_names(self._file, [relative_path])
        path = self.folder / relative_path
        try:
            if not path.is_file():
                raise ModelError(f"{path} is missing")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.folder}: {shown(relative_path)} can't be read: {type(error).__name__}"
            ) from None
        return path

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        """Return the attributes of an object of a class of DCP."""
        is_right = type(record) is Record and record.name == _CLASSES + name
        state = (record.state or {}) if is_right else None  # without attributes, it has no state
        if type(state) is not dict:
            raise self._wrong(f"a {_CLASSES}{name} is missing")
        return state

    def _size(self, value: Any, key: str) -> Size:
        size = value
        if type(value) is Record and value.name == "torch.Size" and type(value.args) is tuple:
            size = value.args[0] if value.args else ()
        if type(size) is not tuple or len(size) > _MOST_DIMENSIONS or not all(map(_is_count, size)):
            raise self._wrong(f"{key} has the size or offset {shown(size)}")
        return size

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self._file}: {what}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _joined(parts: dict[Size, Tensor], num_dims: int) -> Tensor:
    """Put the chunks of a tensor together, by their offsets; ValueError if they leave gaps or overlap."""
    for dim in reversed(range(num_dims)):
        rows: dict[Size, list[Size]] = {}
        for offsets in sorted(parts):
            rows.setdefault(offsets[:dim], []).append(offsets)
        joined = {}
        for at, row in rows.items():
            tensors = [parts[offsets] for offsets in row]
            ends = accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
            if any(offsets[dim] != end for offsets, end in zip(row, ends, strict=False)):
                raise ValueError(row)
            joined[at] = torch.cat(tensors, dim) if len(tensors) > 1 else tensors[0]
        parts = joined
    return parts[()]


def _find_numbers(path: Path, chunk: _Chunk, dtype: torch.dtype) -> tuple[int, int, Size]:
    """Find the elements of a chunk, without reading them.

    Returns:
        The byte offset of the first one in the file, the number of elements and gaps, and the strides.

    Raises:
        ModelError: there is something else, or a tensor of another dtype or size.
    """
    start = chunk.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    skip = chunk.begin - start
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(
                file.fileno(), skip + chunk.length, offset=start, access=mmap.ACCESS_READ
            ) as data,
        ):
            entries = _entries_of(data, skip)
            described = unpickle(data[entries["data.pkl"]], TENSOR)
            order = data[entries["byteorder"]] if "byteorder" in entries else None
        while described.name == "torch._utils._rebuild_parameter":
            described = described.args[0]
        storage, first, size, strides, *rest = described.args
        _, kind, name, *_ = storage
        numbers = entries[f"data/{name}"]
        own = next((one for one in rest if isinstance(one, torch.dtype)), None)
        own = own or _storage_type_to_dtype_map()[kind.name.removeprefix("torch.")]
        offset = numbers.start + first * dtype.itemsize
        count = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        end = min(numbers.stop, skip + chunk.length)
        valid = all(type(n) is int and n >= 0 for n in (first, *strides))
        valid = valid and offset + count * dtype.itemsize <= end
    except ModelError:
        raise
    except Exception:  # damaged bytes lead to arbitrary exceptions
        raise ModelError("there is something else in its place") from None
    if own != dtype or size != chunk.sizes:
        raise ModelError(
            f"it is {own} {shown([*size])}, and by .metadata {dtype} {list(chunk.sizes)}"
        )
    if order not in (None, sys.byteorder.encode()):
        raise ModelError(f"its numbers are in the order of bytes {shown(order)}")
    if any(isinstance(one, dict) and one for one in rest):  # negated or conjugated when it is read
        raise ModelError("its numbers are not as they lie there; save it with resolve_neg()")
    if not valid:
        raise ModelError("its numbers are not all there")
    return start + offset, count, tuple(strides)


def _entries_of(data: Any, skip: int) -> dict[str, slice]:
    """Return the places of the entries of an archive of torch.save, which compresses none."""
    with zipfile.ZipFile(data) as archive:
        entries = archive.infolist()
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
        raise ModelError("it is compressed, which torch.save does not do")
    (described,) = (e.filename for e in entries if e.filename.endswith("/data.pkl"))
    if min(e.header_offset for e in entries) != skip:
        raise ModelError("there is something else in its place")
    places = {}
    for entry in entries:
        # Without zipfile's checksums, which torch.save may omit.
        name, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
        begin = entry.header_offset + 30 + name + extra
        places[entry.filename.removeprefix(described.removesuffix("data.pkl"))] = slice(
            begin, begin + entry.file_size
        )
    return places
