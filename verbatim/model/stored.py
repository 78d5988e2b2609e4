"""Tensors in files: their places, and reading them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verbatim.errors import ModelError

Stamp = tuple[int, int, int, int]


def stamp_of(fd: int) -> Stamp:
    """Return the device, inode, size and modification time of a file, which change when it does."""
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        offset: byte offset of its data in the file.
        stamp: the file's stamp when its header was read; None: only this process writes to the file.
    """

    name: str
    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stamp: Stamp | None = None


def read_stored(stored: Stored) -> Tensor:
    """Read one tensor of a file through the page cache.

    Raises:
        ModelError: it can't be read, or the file has changed.
    """
    with torch.inference_mode(False):
        out = torch.empty(stored.nbytes, dtype=torch.uint8)
    try:
        with stored.path.open("rb") as file:
            if stored.stamp is not None and stamp_of(file.fileno()) != stored.stamp:
                raise ModelError(f"{stored.path} changed while the model was opened")
            file.seek(stored.offset)
            if file.readinto(out.numpy().data) < stored.nbytes:
                raise ModelError(f"{stored.path} ends within {stored.name}: it was cut short")
    except OSError as error:
        raise ModelError(f"{stored.path} can't be read: {error.strerror or error}") from None
    return out.view(stored.dtype).view(stored.shape)
