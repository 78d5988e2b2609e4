"""DCP's `.metadata`: tensors, their chunks, and the location of each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as shown  # of any depth and length
from typing import Any

import numpy as np
import torch

from verbatim.errors import ModelError
from verbatim.model.dcp.records import MOST_DIMENSIONS, PickledObject, read_records

_LONGEST_NAME = 10_000  # characters
_MOST_CELLS = 4_000_000  # cells of the grid of one tensor's chunks
_MOST_OVERHEAD = 1 << 20  # limit for torch.save's overhead in bytes; it is 2 KB

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of one chunk's bytes, in a file of the checkpoint's folder."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor."""

    offsets: Size
    sizes: Size
    place: Place | None  # None for an empty box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor; its chunks cover it exactly once."""

    dtype: torch.dtype
    size: Size
    chunks: tuple[StoredChunk, ...]


class Metadata:
    """A `.metadata` file. Entries are checked when they are read.

    Args:
        path: the file.

    Raises:
        ModelError: it can't be read, or is not DCP's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fields = self._fields(read_records(path), "Metadata")
        entries = fields.get("state_dict_metadata")
        places = fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self._wrong("it lists no tensors or no places")
        self._tensors: dict[str, dict[str, Any]] = {}
        for key, entry in entries.items():
            if not isinstance(key, str) or len(key) > _LONGEST_NAME:
                raise self._wrong(f"an entry is named {shown(key)}")
            if not isinstance(entry, PickledObject):
                raise self._wrong(f"{key} is {shown(entry)}")
            if type(entry).__name__ == "TensorStorageMetadata":
                self._tensors[key] = self._fields(entry, "TensorStorageMetadata")
        self._places = dict(self._listed(places))

    @property
    def keys(self) -> list[str]:
        """The names of the tensors; other saved bytes are ignored."""
        return list(self._tensors)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        properties = self._tensors[key].get("properties")
        state = properties.state if isinstance(properties, PickledObject) else None
        if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
            raise self._wrong(f"{key} has no dtype")
        return state[0]

    def size(self, key: str) -> Size:
        """Return the size of one tensor."""
        return self._size(self._tensors[key].get("size"), key)

    def tensor(self, key: str) -> StoredTensor:
        """Return one tensor with checked chunks.

        Raises:
            ModelError: chunks overlap, are incomplete, or have no location or too large a one.
        """
        size, dtype, listed = self.size(key), self.dtype(key), self._tensors[key].get("chunks")
        if not isinstance(listed, list):
            raise self._wrong(f"{key} has no chunks")
        chunks = []
        for entry in listed:
            fields = self._fields(entry, "ChunkStorageMetadata")
            offsets = self._size(fields.get("offsets"), key)
            sizes = self._size(fields.get("sizes"), key)
            if not len(offsets) == len(sizes) == len(size) or any(
                o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)
            ):
                raise self._wrong(
                    f"{key} is {list(size)}, and a chunk of {list(sizes)} begins at {list(offsets)}"
                )
            place = None if 0 in sizes else self._places.get((key, offsets))
            if place is None and 0 not in sizes:
                raise self._wrong(f"{key} has no place for its chunk at {list(offsets)}")
            most = prod(sizes) * dtype.itemsize + _MOST_OVERHEAD
            if place is not None and place.length > most:  # they would all be read
                raise self._wrong(
                    f"{key} takes {place.length} bytes for a chunk of {list(sizes)}: at most {most}"
                )
            chunks.append(StoredChunk(offsets, sizes, place))
        self._check_cover(key, size, chunks)
        return StoredTensor(dtype, size, tuple(chunks))

    def _check_cover(self, key: str, size: Size, chunks: list[StoredChunk]) -> None:
        """Check that every element is in exactly one chunk, by a grid of the chunks' edges."""
        filled = [chunk for chunk in chunks if chunk.place is not None]
        if len(filled) == 1 and filled[0].sizes == size:
            return
        if 0 in size:
            return
        # Check the number of elements first: it bounds the cost of the grid by the size of the tensor.
        total, elements = sum(prod(c.sizes) for c in filled), prod(size)
        if total > elements:
            raise self._wrong(f"chunks of {key} overlap")
        if total < elements:
            raise self._wrong(f"chunks of {key} are missing: they don't cover its {list(size)}")
        edges = [
            sorted({0, size[d]} | {c.offsets[d] for c in filled}
                   | {c.offsets[d] + c.sizes[d] for c in filled})
            for d in range(len(size))
        ]  # fmt: skip
        if prod([len(e) - 1 for e in edges]) > _MOST_CELLS:
            raise self._wrong(f"{key} is cut into {len(filled)} chunks that form no grid")
        index = [{edge: i for i, edge in enumerate(e)} for e in edges]
        count = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
        for c in filled:
            box = tuple(
                slice(at[o], at[o + s]) for at, o, s in zip(index, c.offsets, c.sizes, strict=True)
            )
            count[box] += 1
        if count.max(initial=0) > 1:  # overlapping elements are missing elsewhere
            raise self._wrong(f"chunks of {key} overlap")

    def _listed(self, places: dict[Any, Any]) -> Iterator[tuple[tuple[str, Size], Place]]:
        for index, info in places.items():
            where = self._fields(index, "MetadataIndex")
            key, offset = where.get("fqn"), where.get("offset")
            if not isinstance(key, str) or key not in self._tensors:
                continue
            fields = self._fields(info, "_StorageInfo")
            path, transforms = fields.get("relative_path"), fields.get("transform_descriptors")
            start: Any = fields.get("offset")
            length: Any = fields.get("length")
            if not isinstance(path, str) or not (_is_count(start) and _is_count(length)):
                raise self._wrong(f"{key} lies at {shown(path)}, {shown(start)}, {shown(length)}")
            if transforms:
                raise self._wrong(
                    f"{key} was saved through {shown(transforms)}, which is not undone"
                )
            yield (key, self._size(offset or (), key)), Place(path, start, length)

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        if not isinstance(record, PickledObject) or type(record).__name__ != name:
            raise self._wrong(f"a {name} is missing")
        # An object without fields is pickled without a state.
        state = record.state or {}
        if not isinstance(state, dict):
            raise self._wrong(f"a {name} has no fields")
        return state

    def _size(self, value: Any, key: str) -> Size:
        if (
            not isinstance(value, tuple)
            or len(value) > MOST_DIMENSIONS
            or not all(_is_count(n) for n in value)
        ):
            raise self._wrong(f"{key} has the size or offset {shown(value)}")
        return tuple(value)

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
