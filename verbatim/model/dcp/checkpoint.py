"""A DCP checkpoint on disk: one folder, or one per pipeline stage."""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from reprlib import repr as shown  # limits depth and length
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import _storage_type_to_dtype_map

from verbatim.common.untrusted import check_names, reason
from verbatim.errors import ModelError
from verbatim.model.dcp.records import METADATA, TENSOR, Record, unpickle
from verbatim.model.stored import Stored, read_stored, stamp_of

FILE = ".metadata"
_LATEST = "latest"
_STAGE = re.compile(r"^pp(\d+)$")
# Prefixes that FSDP, activation checkpointing and torch.compile add to names, and DDP at their beginning.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(?:module\.)+"
)
_MODULE = re.compile(r"(?:^|(?<=\.))module\.")  # of DDP inside of another wrapper or an app's state
_OPTIMIZERS = ("optimizer.", "optim.")
_MAX_DIMENSIONS = 64  # torch's limit
_MAX_NAME = 10_000  # characters
_MAX_OVERHEAD = 1 << 20  # bytes, limit for torch.save's overhead, which is 2 KB
_CLASS_PREFIX = "torch.distributed.checkpoint."

Size = tuple[int, ...]


def plain_name(name: str) -> str:
    """Return the name of a tensor without the prefixes of wrappers."""
    return _WRAPPERS.sub("", name)


def find_dcp(source: str | os.PathLike[str]) -> Path | None:
    """Return the resolved folder of a DCP checkpoint: `source` or the target of `latest` in it; else None.

    Raises:
        ModelError: `latest` is broken or not a checkpoint, or the folder can't be read.
    """
    folder = Path(os.path.expanduser(source))
    if _is_dcp(folder):
        return folder.resolve()
    if os.path.exists(folder / "config.json"):  # a Hugging Face checkpoint
        return None
    latest = folder if folder.name == _LATEST else folder / _LATEST
    if not os.path.lexists(latest):
        return None
    if not os.path.exists(latest):
        raise ModelError(f"{latest} links to {os.readlink(latest)!r}, which does not exist")
    if not _is_dcp(latest):
        raise ModelError(f"{latest} links to {latest.resolve()}, which holds no {FILE}")
    return latest.resolve()


def _is_dcp(folder: Path) -> bool:
    # os.path returns False for names that are too long, where Path raises.
    return os.path.isfile(folder / FILE) or bool(_stages(folder))


def _stages(folder: Path) -> list[Path]:
    """Return the folders `pp0`, `pp1`, ... in order."""
    if not os.path.isdir(folder):
        return []
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror or error}") from None
    stages = [(int(m[1]), p) for p in paths if (m := _STAGE.match(p.name)) and os.path.isdir(p)]
    return [path for _, path in sorted(stages)]


class DcpCheckpoint:
    """The tensors of a checkpoint, in one or several folders.

    Args:
        folder: the result of `find_dcp`.

    Raises:
        ModelError: a stage is missing, or a `.metadata` is unreadable or refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._folders_of: dict[str, list[_Folder]] = {}
        for number, path in enumerate([folder] if (folder / FILE).is_file() else _stages(folder)):
            if path is not folder and path.name != f"pp{number}":
                raise ModelError(f"{folder} has a stage {path.name} but no pp{number}")
            if not (path / FILE).is_file():
                raise ModelError(f"{path} holds no {FILE}: saving it did not finish")
            dcp_folder = _Folder(path)
            for key in dcp_folder.tensors:
                self._folders_of.setdefault(key, []).append(dcp_folder)

    def names(self, keys: Sequence[str]) -> dict[str, str]:
        """Map plain names (without wrappers and the model's prefix) of the model's tensors to stored names.

        Args:
            keys: a few plain names that the model must have, to determine the prefix.

        Raises:
            ModelError: two tensors have the same plain name, or no tensor is named in `keys`.
        """
        plain: dict[str, str] = {}
        for name in self._folders_of:
            short = _MODULE.sub("", plain_name(name))
            if short in plain:
                raise ModelError(
                    f"{self.folder}: {plain[short]} and {name} stand for the same tensor"
                )
            plain[short] = name
        prefix = _prefix(self.folder, plain, keys)
        return {
            short[len(prefix) :]: name
            for short, name in plain.items()
            if short.startswith(prefix) and (prefix or not short.startswith(_OPTIMIZERS))
        }

    def tensor(self, key: str, read: Callable[[Stored], Tensor] = read_stored) -> Tensor:
        """Return a tensor, joined from its chunks, which must form a grid.

        Args:
            read: function that reads a tensor from a file; it may return a traced tensor.

        Raises:
            ModelError: a file is missing or truncated; a chunk has another dtype or size than `.metadata`
                says; the chunks don't cover the tensor; or two stages have it.
        """
        first, *others = self._folders_of[key]
        for other in others:
            both = f"both {first.folder.name} and {other.folder.name}"
            raise ModelError(f"{self.folder}: {both} hold {key}")
        return first.tensor(key, read)


def _prefix(folder: Path, plain: dict[str, str], keys: Sequence[str]) -> str:
    """Return the prefix of the model's tensors, such as "model." if {"model": state_dict} was saved."""
    for key in keys:
        prefixes = {n[: -len(key)] for n in plain if n == key or n.endswith("." + key)}
        for common in ("model.", ""):
            if common in prefixes:
                return common
        if len(prefixes) > 1:
            raise ModelError(f"{folder}: {key} is stored more than once, under {sorted(prefixes)}")
        if prefixes:
            return prefixes.pop()
    raise ModelError(
        f"{folder} holds none of the model's tensors: expected {', '.join(keys[:2])}, ..., found "
        f"{', '.join(sorted(plain)[:3]) or 'none'}; does the config describe another architecture?"
    )


class _Chunk(NamedTuple):
    """A rectangular part of a tensor, and its location in a file."""

    offsets: Size
    sizes: Size
    relative_path: str
    begin: int
    length: int


class _Folder:
    """A folder with a `.metadata`; its entries are checked when they are read.

    Attributes:
        tensors: the entry of each tensor, by name. Other saved objects are never read.

    Raises:
        ModelError: the `.metadata` can't be read, or is not from DCP.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = path = folder / FILE
        try:
            metadata = unpickle(path.read_bytes(), METADATA)
        except ModelError as error:
            raise ModelError(f"{path} is refused: {error}") from None
        except Exception as error:  # a damaged pickle leads to arbitrary exceptions
            raise ModelError(f"{path} can't be read: {reason(error)}") from None
        fields = self._fields(metadata, "metadata.Metadata")
        entries, places = fields.get("state_dict_metadata"), fields.get("storage_data")
        if type(entries) is not dict or type(places) is not dict:
            raise self._error("it lists no tensors or no storage for them")
        self.tensors: dict[str, dict[str, Any]] = {}
        for key, entry in entries.items():
            if type(key) is not str or len(key) > _MAX_NAME or type(entry) is not Record:
                raise self._error(f"an entry {shown(key)} is {shown(entry)}")
            if entry.name == f"{_CLASS_PREFIX}metadata.TensorStorageMetadata":
                self.tensors[key] = self._fields(entry, "metadata.TensorStorageMetadata")
        self._storage: dict[tuple[str, Size], Any] = {}
        for index, place in places.items():
            index_fields = self._fields(index, "metadata.MetadataIndex")
            if type(key := index_fields.get("fqn")) is str and key in self.tensors:
                self._storage[key, self._size(index_fields.get("offset") or (), key)] = place

    def _dtype(self, key: str) -> torch.dtype:
        properties = self.tensors[key].get("properties")
        state = properties.state if type(properties) is Record else None
        if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
            raise self._error(f"{key} has no dtype")
        return state[0]

    def tensor(self, key: str, read: Callable[[Stored], Tensor]) -> Tensor:
        """See `DcpCheckpoint.tensor`."""
        size = self._size(self.tensors[key].get("size"), key)
        if 0 in size:
            return torch.empty(size, dtype=self._dtype(key))
        chunks = self._chunks(key, size)
        total, elements = sum(prod(chunk.sizes) for chunk in chunks), prod(size)
        if total < elements:
            raise self._error(f"chunks of {key} are missing: they don't cover its {list(size)}")
        if total > elements:
            raise self._error(f"chunks of {key} overlap")
        try:
            shapes = {c.offsets: torch.empty(c.sizes, device="meta") for c in chunks}
            fits = _joined(shapes, len(size)).shape == size
        except (ValueError, RuntimeError):
            fits = False
        if not fits:
            raise self._error(
                f"{key} is cut into {len(chunks)} chunks that overlap or do not form a grid"
            )
        return _joined({c.offsets: self._read(key, c, read) for c in chunks}, len(size))

    def _chunks(self, key: str, size: Size) -> list[_Chunk]:
        """Return the non-empty chunks of one tensor, all within it and with a valid location."""
        listed = self.tensors[key].get("chunks")
        if type(listed) is not list:
            raise self._error(f"{key} has no chunks")
        chunks = []
        for entry in listed:
            box = self._fields(entry, "metadata.ChunkStorageMetadata")
            offsets, sizes = self._size(box.get("offsets"), key), self._size(box.get("sizes"), key)
            if not len(offsets) == len(sizes) == len(size) or any(
                o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)
            ):
                raise self._error(
                    f"{key} is {list(size)}, and a chunk of {list(sizes)} begins at {list(offsets)}"
                )
            if 0 in sizes:
                continue
            if (key, offsets) not in self._storage:
                raise self._error(f"{key} has no storage entry for its chunk at {list(offsets)}")
            place = self._fields(self._storage[key, offsets], "filesystem._StorageInfo")
            path, transforms = place.get("relative_path"), place.get("transform_descriptors")
            begin: Any = place.get("offset")
            length: Any = place.get("length")
            if type(path) is not str or not (_is_count(begin) and _is_count(length)):
                raise self._error(
                    f"{key} has the invalid location {shown(path)}, {shown(begin)}, {shown(length)}"
                )
            if transforms:
                raise self._error(
                    f"{key} was saved with the transforms {shown(transforms)}, which are not "
                    "supported"
                )
            limit = prod(sizes) * self._dtype(key).itemsize + _MAX_OVERHEAD
            if length > limit:
                raise self._error(
                    f"{key} takes {length} bytes for a chunk of {list(sizes)}: at most {limit}"
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
        name, dtype = f"{key}{list(chunk.offsets)}", self._dtype(key)
        try:
            offset, count, strides = _locate_elements(path, chunk, dtype)
        except ModelError as error:
            raise ModelError(
                f"{path}: {key} is not a tensor as torch.save writes it: {error}"
            ) from None
        in_order = strides == torch.empty(chunk.sizes, device="meta").stride()
        shape = chunk.sizes if in_order else (count,)
        numbers = read(Stored(name, path, offset, count * dtype.itemsize, dtype, shape, stamp))
        if in_order:
            return numbers
        # Contiguous, as the choice of matrix products depends on strides.
        return numbers.as_strided(chunk.sizes, strides).clone(memory_format=torch.contiguous_format)

    def _path(self, relative_path: str) -> Path:
        """Return the path of a file; refuse names outside of the folder.

        Links are followed, as the hub's cache has them: creating one requires write access to the folder, and
        its target is only read as a tensor.
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
        """Return the attributes of an object of DCP's class `name`."""
        is_right = type(record) is Record and record.name == _CLASS_PREFIX + name
        state = (record.state or {}) if is_right else None  # None if it has no attributes
        if type(state) is not dict:
            raise self._error(f"a {_CLASS_PREFIX}{name} is missing")
        return state

    def _size(self, value: Any, key: str) -> Size:
        size = value
        if type(value) is Record and value.name == "torch.Size" and type(value.args) is tuple:
            size = value.args[0] if value.args else ()
        if type(size) is not tuple or len(size) > _MAX_DIMENSIONS or not all(map(_is_count, size)):
            raise self._error(f"{key} has the size or offset {shown(size)}")
        return size

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self._file}: {what}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _joined(parts: dict[Size, Tensor], num_dims: int) -> Tensor:
    """Join the chunks of a tensor, by their offsets. Raises ValueError if they leave gaps or overlap."""
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


def _locate_elements(path: Path, chunk: _Chunk, dtype: torch.dtype) -> tuple[int, int, Size]:
    """Locate the elements of a chunk in a file, without reading them; raise ModelError if it has others.

    Returns:
        The byte offset of the first element, the number of elements including gaps, and the strides.
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
        stored = next((one for one in rest if isinstance(one, torch.dtype)), None)
        stored = stored or _storage_type_to_dtype_map()[kind.name.removeprefix("torch.")]
        offset = numbers.start + first * dtype.itemsize
        count = 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        end = min(numbers.stop, skip + chunk.length)
        valid = all(type(n) is int and n >= 0 for n in (first, *strides))
        valid = valid and offset + count * dtype.itemsize <= end
    except ModelError:
        raise
    except Exception:  # damaged bytes lead to arbitrary exceptions
        raise ModelError("the file has other contents at its offset") from None
    if stored != dtype or size != chunk.sizes:
        raise ModelError(
            f"it is {stored} {shown([*size])}, but .metadata has {dtype} {list(chunk.sizes)}"
        )
    if order not in (None, sys.byteorder.encode()):
        raise ModelError(f"it has the byte order {shown(order)}")
    if any(isinstance(one, dict) and one for one in rest):  # negated or conjugated when it is read
        raise ModelError(
            "it is stored negated or conjugated; save it with resolve_neg() or resolve_conj()"
        )
    if not valid:
        raise ModelError("its data is incomplete")
    return start + offset, count, tuple(strides)


def _entries_of(data: Any, skip: int) -> dict[str, slice]:
    """Return the locations of the entries of an archive by torch.save, all uncompressed."""
    with zipfile.ZipFile(data) as archive:
        entries = archive.infolist()
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
        raise ModelError("it is compressed, which torch.save does not do")
    (described,) = (e.filename for e in entries if e.filename.endswith("/data.pkl"))
    if min(e.header_offset for e in entries) != skip:
        raise ModelError("the file has other contents at its offset")
    places = {}
    for entry in entries:
        # Not read by zipfile, which would verify checksums; torch.save may omit them.
        name, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
        begin = entry.header_offset + 30 + name + extra
        places[entry.filename.removeprefix(described.removesuffix("data.pkl"))] = slice(
            begin, begin + entry.file_size
        )
    return places
