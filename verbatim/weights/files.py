"""Reading of files without the page cache, so that data is not in memory twice."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.model.stored import Stamp, Stored, stamp_of

PAGE = 4096  # offsets, lengths and addresses of direct reads are multiples of it
CHUNK = 8 << 20  # bytes of one read
_VIEWS = 1024  # buffers of one system call


def up(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class DirectFile:
    """A file that is read, and perhaps written, without the page cache.

    Attributes:
        nbytes: of the file, when it was opened.
        direct: whole pages are moved with O_DIRECT. False where the file system does not support it: the
            moved pages are then dropped from the page cache.
    """

    def __init__(self, path: Path, *, stamp: Stamp | None = None, fd: int | None = None) -> None:
        """Args:
        path: the file; messages name it, too.
        stamp: the expected `stamp_of` the file; None: not checked.
        fd: an open file without a name, which is read and written, and closed by `close`.
        """
        self.path = path
        self._stamp, self._direct = stamp, -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise TierFailed(f"can't open {path}: {error.strerror}") from error
        self.nbytes = os.fstat(self._fd).st_size
        try:
            mode = (os.O_RDONLY if fd is None else os.O_RDWR) | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(f"/proc/self/fd/{self._fd}", mode)
        except (OSError, AttributeError):  # not supported by the file system, or not Linux
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
            TierFailed: it was changed or replaced.
        """
        if self._stamp is not None and stamp_of(self._fd) != self._stamp:
            raise TierFailed(f"{self.path} changed since the model was opened")

    def read(self, views: list[memoryview], offset: int, *, direct: bool = True) -> int:
        """Fill `views`, one after the other, from `offset` on, as far as the file went when it was opened.

        Args:
            direct: past the page cache; all addresses and lengths and the offset are whole pages.

        Returns:
            The number of bytes read.

        Raises:
            TierFailed: a system error, or the file is shorter now.
        """
        needed = max(1, min(sum(map(len, views)), self.nbytes - offset))
        return self._move(os.preadv, "reading", views, offset, needed, direct=direct)

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
        """Move at least `needed` bytes between the file and `views`, in order."""
        done, is_cached = 0, False
        while done < needed:
            direct = direct and self.direct and done % PAGE == 0
            try:
                count = move(self._direct if direct else self._fd, views[:_VIEWS], offset + done)
            except OSError as error:
                if (
                    direct and error.errno == errno.EINVAL
                ):  # opened with O_DIRECT, but not supported
                    self.direct = False
                    continue
                raise TierFailed(
                    f"{doing} {self.path} at byte {offset + done} failed: {error.strerror or error}"
                ) from error
            if not count:
                raise TierFailed(
                    f"{self.path} ends at byte {offset + done}, and {needed - done} bytes "
                    "should follow: it was cut short since it was opened"
                )
            done += count
            is_cached |= not direct
            views = _behind(views, count)
        if is_cached:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        """Close the file. May be called again."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


class OpenFiles:
    """Files that are opened on first use, and closed together.

    Args:
        held: open files that their owners close.
    """

    def __init__(self, *held: DirectFile | None) -> None:
        self._held = {file.path: file for file in held if file is not None}
        self._opened: dict[Path, DirectFile] = {}

    def of(self, path: Path, stamp: Stamp | None = None) -> DirectFile:
        """Return the open file; TierFailed if it can't be opened, or its stamp differs."""
        file = self._held.get(path) or self._opened.get(path)
        if file is None:
            file = self._opened[path] = DirectFile(path, stamp=stamp)
        return file

    def check(self) -> None:
        """Raise TierFailed if a file was changed since it was opened."""
        for file in self._opened.values():
            file.check()

    def close(self) -> None:
        """Close the files that were opened here."""
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
    """Return `nbytes` of uint8 memory, zeros, aligned to a page.

    It is in huge pages where the system has them: a direct read then takes a few large requests in place of
    many small ones, and less processor time.

    Raises:
        MemoryError: there is no such amount.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes can't be allocated: {error.strerror}") from None
    with suppress(OSError, AttributeError):  # not in this kernel, or not Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


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
        out: array of its bytes. numpy copies them in this thread; torch would use all threads.

    Returns:
        The number of bytes read.

    Raises:
        TierFailed: it can't be read.
    """
    view, done, total = bytes_of(buffer), 0, 0
    while done < stored.nbytes:
        at = (stored.offset + done) // PAGE * PAGE
        skip = stored.offset + done - at
        wanted = min(stored.nbytes - done, len(view) - skip)
        total += file.read([view[: up(skip + wanted)]], at)
        np.copyto(out[done : done + wanted], np.asarray(view[skip : skip + wanted]))
        done += wanted
    return total


def read_whole(stored: Stored, file: DirectFile | None = None) -> Tensor:
    """Read one tensor of a file without the page cache.

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
