"""Reading of files past the page cache, so that data is not kept twice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.weights.lazy import Stamp, Stored, stamp_of

PAGE = 4096  # offsets, lengths and addresses of direct reads are multiples of it
CHUNK = 8 << 20  # bytes of one read
_VIEWS = 1024  # that one call of the system takes


def up(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class DirectFile:
    """A file that is read, and perhaps written, past the page cache.

    Attributes:
        direct: O_DIRECT is used for whole pages. Else, where the file system can't, the page cache is told to
            forget what was moved.
    """

    def __init__(self, path: Path, *, stamp: Stamp | None = None, fd: int | None = None) -> None:
        """Args:
        path: of the file, for messages as well.
        stamp: what it must be; None: anything.
        fd: the open file, if it has no name: read and written, and closed by `close`.
        """
        self.path = path
        self._stamp, self._direct = stamp, -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise TierFailed(f"disk tier: can't open {path}: {error.strerror}") from error
        try:
            mode = (os.O_RDONLY if fd is None else os.O_RDWR) | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(f"/proc/self/fd/{self._fd}", mode)
        except (OSError, AttributeError):  # not by this file system, or no Linux
            pass
        self.direct = self._direct >= 0
        try:
            self.check()
        except TierFailed:
            self.close()
            raise

    def check(self) -> None:
        """Check that the file is unchanged.

        Raises:
            TierFailed: it was written to, or it is another file.
        """
        if self._stamp is not None and stamp_of(self._fd) != self._stamp:
            raise TierFailed(f"disk tier: {self.path} changed since the model was opened")

    def read(self, into: memoryview, offset: int, needed: int) -> int:
        """Fill `into` from `offset` on, and `needed` bytes of it at least: the file may end before the rest.

        All three are whole pages, but for `needed`.

        Returns:
            Bytes read.

        Raises:
            TierFailed: an error of the system, or the file ends too soon.
        """
        return self._move(os.preadv, "reading", [into], offset, needed, direct=True)

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        doing: str,
        views: list[memoryview],
        offset: int,
        needed: int,
        *,
        direct: bool,
    ) -> int:
        """Move at least `needed` bytes between `views`, one after the other, and the file."""
        done, is_cached = 0, False
        while done < needed:
            direct = direct and self.direct and done % PAGE == 0
            try:
                count = move(self._direct if direct else self._fd, views[:_VIEWS], offset + done)
            except OSError as error:
                if (
                    direct and error.errno == errno.EINVAL
                ):  # opened for direct reads, and refuses them
                    self.direct = False
                    continue
                raise TierFailed(
                    f"disk tier: {doing} {self.path} at byte {offset + done} failed: "
                    f"{error.strerror or error}"
                ) from error
            if not count:
                raise TierFailed(
                    f"disk tier: {self.path} ends at byte {offset + done}, and {needed - done} bytes "
                    "should follow: it was cut short since it was opened"
                )
            done += count
            is_cached |= not direct
            views = _behind(views, count)
        if is_cached:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


class OpenFiles:
    """Files that are opened when they are first needed, and closed together.

    Args:
        held: files that others have opened, and will close.
    """

    def __init__(self, *held: DirectFile | None) -> None:
        self._held = {file.path: file for file in held if file is not None}
        self._opened: dict[Path, DirectFile] = {}

    def of(self, path: Path, stamp: Stamp | None = None) -> DirectFile:
        """Return the open file; TierFailed if it can't be opened, or is not what `stamp` says."""
        file = self._held.get(path) or self._opened.get(path)
        if file is None:
            file = self._opened[path] = DirectFile(path, stamp=stamp)
        return file

    def check(self) -> None:
        """Raise TierFailed where a file was written to since it was opened."""
        for file in self._opened.values():
            file.check()

    def close(self) -> None:
        """Close those that were opened here."""
        for file in self._opened.values():
            file.close()
        self._opened = {}


def _behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of `views` after `nbytes` bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def pages(nbytes: int) -> Tensor:
    """Return `nbytes` of uninitialised memory, uint8, that begin at a page."""
    with torch.inference_mode(False):
        block = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    shift = -block.data_ptr() % PAGE
    return block[shift : shift + nbytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.view(torch.uint8).flatten().numpy()
    return memoryview(array)


def buffer_bytes(nbytes: int) -> int:
    """Return the bytes of a buffer through which `read_into` reads tensors of at most `nbytes`."""
    return up(min(nbytes + PAGE, CHUNK + PAGE))


def read_into(out: npt.NDArray[np.uint8], stored: Stored, file: DirectFile, buffer: Tensor) -> int:
    """Read one tensor of a file, through a buffer of whole pages.

    Args:
        out: of its bytes. They are copied in this thread alone; torch would take others.

    Returns:
        Bytes read.

    Raises:
        TierFailed: it can't be read.
    """
    view, done, total = bytes_of(buffer), 0, 0
    while done < stored.nbytes:
        at = (stored.offset + done) // PAGE * PAGE
        skip = stored.offset + done - at
        wanted = min(stored.nbytes - done, len(view) - skip)
        total += file.read(view[: up(skip + wanted)], at, skip + wanted)
        np.copyto(out[done : done + wanted], np.asarray(view[skip : skip + wanted]))
        done += wanted
    return total


def read_whole(stored: Stored, file: DirectFile | None = None) -> Tensor:
    """Read one tensor of a file past the page cache.

    Args:
        file: the open file; None: opened by its path.

    Raises:
        TierFailed: it can't be read.
    """
    out = torch.empty(stored.nbytes, dtype=torch.uint8)
    opened = DirectFile(stored.path, stamp=stored.stamp) if file is None else file
    try:
        read_into(out.numpy(), stored, opened, pages(buffer_bytes(stored.nbytes)))
    finally:
        if file is None:
            opened.close()
    return out.view(stored.dtype).view(stored.shape)
