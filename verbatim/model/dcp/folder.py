"""A DCP checkpoint on disk: one folder, or one per pipeline stage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown

import numpy as np
import torch
from torch import Tensor

from verbatim.errors import ModelError, first_line
from verbatim.model.dcp.metadata import Metadata, Size, StoredTensor
from verbatim.model.dcp.payload import Numbers, find_numbers

_FILE = ".metadata"
_LATEST = "latest"
_STAGE = re.compile(r"^pp(\d+)$")


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


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A box of a tensor, and the location of its elements."""

    path: Path
    offsets: Size
    sizes: Size
    numbers: Numbers

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the box."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


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
        for number, path in enumerate(paths):
            if path is not folder and path.name != f"pp{number}":
                raise ModelError(f"{folder} has a stage {path.name} and no pp{number}")
            if not (path / _FILE).is_file():
                raise ModelError(f"{path} holds no {_FILE}: it was not saved to its end")
        self._stages = [_Stage(path) for path in paths]
        self._home: dict[str, _Stage] = {}
        self._twice: dict[str, _Stage] = {}
        for stage in self._stages:
            for key in stage.metadata.keys:
                (self._twice if key in self._home else self._home)[key] = stage

    @property
    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._home)

    def size(self, key: str) -> tuple[int, ...]:
        return self._home[key].metadata.size(key)

    def dtype(self, key: str) -> torch.dtype:
        return self._home[key].metadata.dtype(key)

    def check(self, keys: Iterable[str]) -> None:
        """Check tensors before anything is read: chunks that don't fit, missing or truncated files.

        Raises:
            ModelError: with the file.
        """
        for key in keys:
            if key in self._twice:
                first, second = self._home[key].folder.name, self._twice[key].folder.name
                raise ModelError(f"{self.folder}: both {first} and {second} hold {key}")
            self._home[key].take(key)

    def read(self, key: str) -> Tensor:
        """Read a checked tensor, chunk by chunk.

        Raises:
            ModelError: a chunk is not a tensor.
        """
        whole = torch.empty(self.size(key), dtype=self.dtype(key))
        for chunk in self.chunks(key):
            nbytes, at = chunk.numbers.count * whole.itemsize, chunk.numbers.offset
            raw = torch.from_numpy(np.fromfile(chunk.path, np.uint8, nbytes, offset=at))
            whole[chunk.box] = raw.view(whole.dtype).as_strided(chunk.sizes, chunk.numbers.strides)
        return whole

    def chunks(self, key: str) -> Iterator[TensorLayout]:
        """Yield the locations of a checked tensor's elements, chunk by chunk, without reading them.

        Raises:
            ModelError: a chunk is not a tensor.
        """
        return self._home[key].chunks(key)


class _Stage:
    """One folder with a `.metadata`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = Metadata(folder / _FILE)
        self._taken: dict[str, StoredTensor] = {}

    def take(self, key: str) -> None:
        """Check the locations of a tensor."""
        stored = self.metadata.tensor(key)
        for chunk in stored.chunks:
            if chunk.place is not None:
                place = chunk.place
                path, size = self._file(place.relative_path)
                if place.offset + place.length > size:
                    raise ModelError(
                        f"{path} is cut short: it has {size} bytes, and {key} ends at "
                        f"{place.offset + place.length}"
                    )
        self._taken[key] = stored

    def _file(self, relative_path: str) -> tuple[Path, int]:
        """Return a file of this folder and its size; refuse a name outside of the folder.

        The file may be a link, as in the hub's cache: creating one requires access to the folder, and
        its target is only read as a tensor.
        """
        name = Path(relative_path)
        if name.anchor or ".." in name.parts:
            raise ModelError(
                f"{self.folder / _FILE} is refused: it leads to {shown(relative_path)}, out of its folder"
            )
        path = self.folder / name
        try:
            if not path.is_file():
                raise ModelError(f"{path} is missing")
            return path, path.stat().st_size
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.folder}: {shown(relative_path)} can't be read: {type(error).__name__}"
            ) from None

    def chunks(self, key: str) -> Iterator[TensorLayout]:
        stored = self._taken[key]
        for chunk in stored.chunks:
            if chunk.place is None:
                continue
            path = self.folder / chunk.place.relative_path
            try:
                numbers = find_numbers(path, chunk.place, stored.dtype, chunk.sizes)
            except Exception as error:  # damaged bytes lead to arbitrary exceptions
                raise ModelError(
                    f"{path}: {key} is no tensor as torch.save writes it: {first_line(error)}"
                ) from None
            yield TensorLayout(path, chunk.offsets, chunk.sizes, numbers)
