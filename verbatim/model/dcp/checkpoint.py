"""A DCP checkpoint on disk: one folder, or one per pipeline stage."""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor
from torch.storage import _storage_type_to_dtype_map

from verbatim.errors import ModelError
from verbatim.model.dcp.metadata import Metadata, Size, StoredChunk
from verbatim.model.dcp.records import TENSOR, unpickle
from verbatim.model.stored import Stored, read_stored, stamp_of

_FILE = ".metadata"
_LATEST = "latest"
_STAGE = re.compile(r"^pp(\d+)$")
# Prefixes that FSDP, DDP, activation checkpointing and torch.compile add to names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
Box = tuple[Size, Size]  # the first corner, and that behind the last
_OPTIMIZERS = ("optimizer.", "optim.")


def find_dcp(source: str | os.PathLike[str]) -> Path | None:
    """Return the resolved folder of the DCP checkpoint at a path, or None.

    It is the folder itself, or the target of `latest` in it.

    Raises:
        ModelError: `latest` is broken or not a checkpoint; or the folder can't be read.
    """
    folder = Path(os.path.expanduser(source))
    if _is_dcp(folder):
        return folder.resolve()
    if os.path.exists(folder / "config.json"):  # in Hugging Face's format
        return None
    latest = folder if folder.name == _LATEST else folder / _LATEST
    if not os.path.lexists(latest):
        return None
    if not os.path.exists(latest):
        raise ModelError(f"{latest} leads to {os.readlink(latest)!r}, and that is not there")
    if not _is_dcp(latest):
        raise ModelError(f"{latest} leads to {latest.resolve()}, which holds no {_FILE}")
    return latest.resolve()


def _is_dcp(folder: Path) -> bool:
    # os.path returns False for names that are too long, where Path raises.
    return os.path.isfile(folder / _FILE) or bool(_stages(folder))


def _stages(folder: Path) -> list[Path]:
    """Return `pp0`, `pp1`, ... in order."""
    if not os.path.isdir(folder):
        return []
    try:
        paths = list(folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} can't be read: {error.strerror or error}") from None
    found = [(int(m[1]), p) for p in paths if (m := _STAGE.match(p.name)) and os.path.isdir(p)]
    return [path for _, path in sorted(found)]


class DcpCheckpoint:
    """The tensors of a checkpoint, by name. Other saved bytes are never read.

    Args:
        folder: the result of `find_dcp`.

    Raises:
        ModelError: a stage is missing, or a `.metadata` is unreadable or refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = [folder] if (folder / _FILE).is_file() else _stages(folder)
        self._home: dict[str, Metadata] = {}
        self._twice: dict[str, Metadata] = {}
        for number, path in enumerate(paths):
            if path is not folder and path.name != f"pp{number}":
                raise ModelError(f"{folder} has a stage {path.name} and no pp{number}")
            if not (path / _FILE).is_file():
                raise ModelError(f"{path} holds no {_FILE}: it was not saved to its end")
            metadata = Metadata(path / _FILE)
            for key in metadata.keys:
                (self._twice if key in self._home else self._home)[key] = metadata

    def size(self, key: str) -> Size:
        """Return the size of a tensor."""
        return self._home[key].size(key)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._home[key].dtype(key)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(prod(self.size(key)) * self.dtype(key).itemsize for key in self._home)

    def names(self, keys: Sequence[str]) -> dict[str, str]:
        """Map plain names to those in the checkpoint, for tensors with the model's prefix.

        Args:
            keys: some plain names, to find the prefix.

        Raises:
            ModelError: two tensors have one name, or none has a name of `keys`.
        """
        plain: dict[str, str] = {}
        for name in self._home:
            short = _WRAPPERS.sub("", name)
            if short in plain:
                raise ModelError(f"{self.folder}: {plain[short]} and {name} are one name")
            plain[short] = name
        prefix = _prefix(self.folder, plain, keys)
        return {
            short[len(prefix) :]: name
            for short, name in plain.items()
            if short.startswith(prefix) and (prefix or not short.startswith(_OPTIMIZERS))
        }

    def tensor(self, key: str, read: Callable[[Stored], Tensor] = read_stored) -> Tensor:
        """Return a tensor, put together from its chunks.

        Args:
            read: returns a tensor of a file, also a traced one.

        Raises:
            ModelError: missing or truncated files; chunks that are not tensors of its dtype and size, or
                don't cover it.
        """
        metadata = self._home[key]
        if key in self._twice:
            first, second = metadata.path.parent.name, self._twice[key].path.parent.name
            raise ModelError(f"{self.folder}: both {first} and {second} hold {key}")
        size, dtype = metadata.size(key), metadata.dtype(key)
        if 0 in size:
            return torch.empty(size, dtype=dtype)
        chunks = metadata.chunks(key)
        total, elements = sum(prod(chunk.sizes) for chunk in chunks), prod(size)
        if total < elements:
            raise _uncovered(metadata, key, size)
        if total > elements:
            raise ModelError(f"{metadata.path}: chunks of {key} overlap")

        def joined(box: Box, chunks: list[StoredChunk]) -> Tensor:
            if len(chunks) == 1:
                (chunk,) = chunks
                if (chunk.offsets, _end(chunk)) != box:
                    raise _uncovered(metadata, key, size)
                return _chunk(metadata, key, chunk, read)
            dim, parts = _cut(box, chunks)
            return torch.cat([joined(*part) for part in parts], dim)

        try:
            return joined(((0,) * len(size), size), chunks)
        except (_NoGrid, RecursionError):
            raise ModelError(
                f"{metadata.path}: {key} is cut into {len(chunks)} chunks that overlap or form no grid"
            ) from None


class _NoGrid(Exception):
    """Chunks that no cut separates."""


def _prefix(folder: Path, plain: dict[str, str], keys: Sequence[str]) -> str:
    """Return the prefix of the model's names: "model." of {"model": state_dict}, or ""."""
    for key in keys:
        found = {n[: -len(key)] for n in plain if n == key or n.endswith("." + key)}
        for usual in ("model.", ""):
            if usual in found:
                return usual
        if len(found) > 1:
            raise ModelError(f"{folder}: {key} is there more than once, under {sorted(found)}")
        if found:
            return found.pop()
    raise ModelError(
        f"{folder} holds none of the model's tensors: it wants {', '.join(keys[:2])}, ..., and there "
        f"are {', '.join(sorted(plain)[:3]) or 'none'}; is it another architecture than the config's?"
    )


def _end(chunk: StoredChunk) -> Size:
    return tuple(o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True))


def _cut(box: Box, chunks: list[StoredChunk]) -> tuple[int, list[tuple[Box, list[StoredChunk]]]]:
    """Return a dimension along which a box can be cut without cutting a chunk, and its parts."""
    (begin, end), groups = box, list[list[StoredChunk]]()
    for dim in range(len(begin)):
        groups, at = [], -1
        for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
            if chunk.offsets[dim] >= at:
                groups.append([])
            groups[-1].append(chunk)
            at = max(at, _end(chunk)[dim])
        if len(groups) > 1:
            edges = [begin[dim], *(group[0].offsets[dim] for group in groups[1:]), end[dim]]
            boxes = [
                ((*begin[:dim], first, *begin[dim + 1 :]), (*end[:dim], last, *end[dim + 1 :]))
                for first, last in pairwise(edges)
            ]
            return dim, list(zip(boxes, groups, strict=True))
    raise _NoGrid


def _uncovered(metadata: Metadata, key: str, size: Size) -> ModelError:
    return ModelError(
        f"{metadata.path}: chunks of {key} are missing: they don't cover its {list(size)}"
    )


def _chunk(
    metadata: Metadata, key: str, chunk: StoredChunk, read: Callable[[Stored], Tensor]
) -> Tensor:
    path = _file(metadata.path, chunk.relative_path)
    with path.open("rb") as file:
        stamp = stamp_of(file.fileno())
    end = chunk.begin + chunk.length
    if end > stamp[2]:
        raise ModelError(f"{path} is cut short: it has {stamp[2]} bytes, and {key} ends at {end}")
    name, dtype = f"{key}{list(chunk.offsets)}", metadata.dtype(key)
    try:
        offset, count, strides = _find_numbers(path, chunk, dtype)
    except ModelError as error:
        raise ModelError(f"{path}: {key} is no tensor as torch.save writes it: {error}") from None
    in_order = strides == torch.empty(chunk.sizes, device="meta").stride()
    shape = chunk.sizes if in_order else (count,)
    found = read(Stored(name, path, offset, count * dtype.itemsize, dtype, shape, stamp))
    if in_order:
        return found
    # Contiguous, as other strides would select other matrix products.
    return found.as_strided(chunk.sizes, strides).clone(memory_format=torch.contiguous_format)


def _file(metadata: Path, relative_path: str) -> Path:
    """Return a file of a checkpoint's folder; refuse a name outside of the folder.

    The file may be a link, as in the hub's cache: creating one requires access to the folder, and its target
    is only read as a tensor.
    """
    name = Path(relative_path)
    if name.anchor or ".." in name.parts:
        raise ModelError(
            f"{metadata} is refused: it leads to {shown(relative_path)}, out of its folder"
        )
    path = metadata.parent / name
    try:
        if not path.is_file():
            raise ModelError(f"{path} is missing")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{metadata.parent}: {shown(relative_path)} can't be read: {type(error).__name__}"
        ) from None
    return path


def _find_numbers(path: Path, chunk: StoredChunk, dtype: torch.dtype) -> tuple[int, int, Size]:
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
