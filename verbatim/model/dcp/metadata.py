"""DCP's `.metadata`: tensors, their chunks, and the place of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as shown  # of any depth and length
from typing import Any

import torch

from verbatim.errors import ModelError
from verbatim.model.dcp.records import METADATA, Record, unpickle
from verbatim.untrusted import reason

_MOST_DIMENSIONS = 64  # torch's limit
_LONGEST_NAME = 10_000  # characters
_MOST_OVERHEAD = 1 << 20  # limit for torch.save's overhead in bytes; it is 2 KB
_CLASSES = "torch.distributed.checkpoint.metadata."

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file in the checkpoint's folder that hold it."""

    offsets: Size
    sizes: Size
    relative_path: str
    begin: int
    length: int


class Metadata:
    """A `.metadata` file. Entries are checked when they are read.

    Args:
        path: the file.

    Raises:
        ModelError: it can't be read, or is not DCP's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = unpickle(path.read_bytes(), METADATA)
        except ModelError as error:
            raise ModelError(f"{path} is refused: {error}") from None
        except Exception as error:  # a damaged pickle leads to arbitrary exceptions
            raise ModelError(f"{path} can't be read: {reason(error)}") from None
        fields = self._fields(found, f"{_CLASSES}Metadata")
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not dict or type(places) is not dict:
            raise self._wrong("it lists no tensors or no places")
        self._tensors: dict[str, dict[str, Any]] = {}
        for key, entry in entries.items():
            if type(key) is not str or len(key) > _LONGEST_NAME or type(entry) is not Record:
                raise self._wrong(f"an entry {shown(key)} is {shown(entry)}")
            if entry.name == f"{_CLASSES}TensorStorageMetadata":
                self._tensors[key] = self._fields(entry, entry.name)
        self._places: dict[tuple[str, Size], Any] = {}
        for index, place in places.items():
            where = self._fields(index, f"{_CLASSES}MetadataIndex")
            if type(key := where.get("fqn")) is str and key in self._tensors:
                self._places[key, self._size(where.get("offset") or (), key)] = place

    @property
    def keys(self) -> list[str]:
        """The names of the tensors; other saved bytes are ignored."""
        return list(self._tensors)

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

    def chunks(self, key: str) -> list[StoredChunk]:
        """Return the chunks of one tensor that are not empty.

        Raises:
            ModelError: one is out of the tensor, or has no place or too large a one.
        """
        size, listed = self.size(key), self._tensors[key].get("chunks")
        if type(listed) is not list:
            raise self._wrong(f"{key} has no chunks")
        return [chunk for entry in listed if (chunk := self._chunk(key, size, entry)) is not None]

    def _chunk(self, key: str, size: Size, entry: Any) -> StoredChunk | None:
        box = self._fields(entry, f"{_CLASSES}ChunkStorageMetadata")
        offsets, sizes = self._size(box.get("offsets"), key), self._size(box.get("sizes"), key)
        if not len(offsets) == len(sizes) == len(size) or any(
            o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)
        ):
            raise self._wrong(
                f"{key} is {list(size)}, and a chunk of {list(sizes)} begins at {list(offsets)}"
            )
        if 0 in sizes:
            return None
        if (key, offsets) not in self._places:
            raise self._wrong(f"{key} has no place for its chunk at {list(offsets)}")
        place = self._fields(
            self._places[key, offsets], "torch.distributed.checkpoint.filesystem._StorageInfo"
        )
        path, transforms = place.get("relative_path"), place.get("transform_descriptors")
        begin: Any = place.get("offset")
        length: Any = place.get("length")
        if type(path) is not str or not (_is_count(begin) and _is_count(length)):
            raise self._wrong(f"{key} lies at {shown(path)}, {shown(begin)}, {shown(length)}")
        if transforms:
            raise self._wrong(f"{key} was saved through {shown(transforms)}, which is not undone")
        most = prod(sizes) * self.dtype(key).itemsize + _MOST_OVERHEAD
        if length > most:
            raise self._wrong(
                f"{key} takes {length} bytes for a chunk of {list(sizes)}: at most {most}"
            )
        return StoredChunk(offsets, sizes, path, begin, length)

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        # An object without attributes is pickled without a state.
        state = (record.state or {}) if type(record) is Record and record.name == name else None
        if type(state) is not dict:
            raise self._wrong(f"a {name} is missing")
        return state

    def _size(self, value: Any, key: str) -> Size:
        size = value
        if type(value) is Record and value.name == "torch.Size" and type(value.args) is tuple:
            size = value.args[0] if value.args else ()
        if type(size) is not tuple or len(size) > _MOST_DIMENSIONS or not all(map(_is_count, size)):
            raise self._wrong(f"{key} has the size or offset {shown(size)}")
        return size

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
