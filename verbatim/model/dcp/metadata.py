"""DCP's `.metadata`, read without running anything of it.

The file is a pickle, and torch itself unpickles it. Here its classes become records that hold what they
were given and do nothing, and a class that is not one of them is refused. Only then is it looked at:
which tensors there are, in which chunks, and where in which file each chunk lies.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verbatim.errors import ModelError

_MOST_CELLS = 4_000_000  # of the grid on which the chunks of one tensor are laid out

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of one chunk lie; the names are those that torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor."""

    offsets: Size
    sizes: Size
    place: Place | None  # None for an empty box, of which nothing is read


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the checkpoint holds it: its chunks cover it exactly once."""

    dtype: torch.dtype
    size: Size
    chunks: tuple[Chunk, ...]


class _Record:
    """What a class of the pickle becomes. It keeps its arguments and its state, whatever they are."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        # Because this is here, unpickling never sets an attribute by a name from the file.
        self.state = state


def _record(name: str) -> type[_Record]:
    return type(name, (_Record,), {"__slots__": ()})


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (module, name): _record(name)
    for module, names in {
        _METADATA: (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        # Where they were before torch 2.3.
        "torch.distributed._shard.sharded_tensor.metadata": (
            "TensorProperties",
            "MEM_FORMAT_ENCODING",
        ),
        # The folder that was saved to, as the Python and the system that saved it name its class.
        "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    }.items()
    for name in names
}
_ALLOWED["torch", "Size"] = tuple
_ALLOWED |= {("torch", n): d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ModelError(
                f"it asks for {module}.{name}, which DCP's metadata has no need of; nothing was run"
            ) from None


class Metadata:
    """What a `.metadata` file says. Entries are checked when they are asked for.

    Args:
        path: the file.

    Raises:
        ModelError: it can't be read, or holds something that is not DCP's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                root = _Unpickler(file).load()
        except ModelError as error:
            raise ModelError(f"{path} is refused: {error}") from None
        except Exception as error:  # a damaged pickle fails in any way it likes
            what = str(error).splitlines()
            raise ModelError(f"{path} can't be read: {what[0] if what else type(error)}") from None
        fields = self._fields(root, "Metadata")
        entries = fields.get("state_dict_metadata")
        places = fields.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self._wrong("it lists no tensors or no places")
        self._tensors: dict[str, dict[str, Any]] = {}
        for key, entry in entries.items():
            if not isinstance(key, str) or not isinstance(entry, _Record):
                raise self._wrong(f"an entry is named {key!r}")
            if type(entry).__name__ == "TensorStorageMetadata":
                self._tensors[key] = self._fields(entry, "TensorStorageMetadata")
        self._places = dict(self._listed(places))

    @property
    def keys(self) -> list[str]:
        """The names of the tensors; whatever else was saved, as bytes, is never touched."""
        return list(self._tensors)

    def dtype(self, key: str) -> torch.dtype:
        """Of one tensor."""
        properties = self._tensors[key].get("properties")
        state = properties.state if isinstance(properties, _Record) else None
        if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
            raise self._wrong(f"{key} has no dtype")
        return state[0]

    def size(self, key: str) -> Size:
        """Of one tensor."""
        return self._size(self._tensors[key].get("size"), key)

    def tensor(self, key: str) -> StoredTensor:
        """One tensor, whose chunks were checked.

        Raises:
            ModelError: they overlap, leave something out, or have no place.
        """
        size, listed = self.size(key), self._tensors[key].get("chunks")
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
            chunks.append(Chunk(offsets, sizes, place))
        self._check_cover(key, size, chunks)
        return StoredTensor(self.dtype(key), size, tuple(chunks))

    def _check_cover(self, key: str, size: Size, chunks: list[Chunk]) -> None:
        """Every element lies in one chunk, counted on the grid that the chunks' edges make."""
        filled = [chunk for chunk in chunks if chunk.place is not None]
        if len(filled) == 1 and filled[0].sizes == size:
            return
        if 0 in size:
            return
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
        if count.max(initial=0) > 1:
            raise self._wrong(f"chunks of {key} overlap")
        if count.min(initial=1) < 1:
            raise self._wrong(f"chunks of {key} are missing: they don't cover its {list(size)}")

    def _listed(self, places: dict[Any, Any]) -> Iterator[tuple[tuple[str, Size], Place]]:
        for index, info in places.items():
            where = self._fields(index, "MetadataIndex")
            key, offset = where.get("fqn"), where.get("offset")
            if key not in self._tensors:
                continue
            fields = self._fields(info, "_StorageInfo")
            path, transforms = fields.get("relative_path"), fields.get("transform_descriptors")
            start: Any = fields.get("offset")
            length: Any = fields.get("length")
            if not isinstance(path, str) or not (_is_count(start) and _is_count(length)):
                raise self._wrong(f"{key} lies at {path!r}, {start!r}, {length!r}")
            if transforms:
                raise self._wrong(f"{key} was saved through {transforms!r}, which is not undone")
            yield (key, self._size(offset or (), key)), Place(path, start, length)

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        if not isinstance(record, _Record) or type(record).__name__ != name:
            raise self._wrong(f"a {name} is missing")
        # An object without fields is pickled without a state.
        state = record.state or {}
        if not isinstance(state, dict):
            raise self._wrong(f"a {name} has no fields")
        return state

    def _size(self, value: Any, key: str) -> Size:
        if not isinstance(value, tuple) or not all(_is_count(n) for n in value):
            raise self._wrong(f"{key} has the size or offset {value!r}")
        return value

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
