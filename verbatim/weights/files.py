"""Direct file reads that bypass the page cache, so that data is not in memory twice."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
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

PAGE = 4096  # bytes; unit of the offsets, lengths and addresses of direct reads
CHUNK = 8 << 20  # bytes per read
_IOV_MAX = 1024  # buffers per system call


def round_to_pages(nbytes: int) -> int:
    """Round `nbytes` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class DirectFile:
    """A file that is read, and optionally written, without the page cache; closed when it is freed.

    Attributes:
        nbytes: size of the file when it was opened.
        direct: whether O_DIRECT is used for whole pages. If the file system does not support it, the pages
            are dropped from the page cache afterwards.
    """

    def __init__(self, path: Path, *, stamp: Stamp | None = None, fd: int | None = None) -> None:
        """Open a file.

        Args:
            path: the file, also named in messages.
            stamp: the expected `stamp_of` the file; None: not checked.
            fd: an open unnamed file to read and write, closed by `close`; None: open `path` for reading.
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
        self._finalizer = weakref.finalize(self, _close, self._fd, self._direct)
        self._finalizer.atexit = False  # other threads may still read
        try:
            self.check()
        except TierFailed:
            self.close()
            raise

    def check(self) -> None:
        """Raise TierFailed if the file was changed or replaced."""
        if self._stamp is not None and stamp_of(self._fd) != self._stamp:
            raise TierFailed(f"{self.path} changed since the model was opened")

    def read(self, views: list[memoryview], offset: int, *, direct: bool = True) -> int:
        """Fill `views` in order from `offset` on, up to the size that the file had when opened.

        Args:
            direct: bypass the page cache; all addresses, lengths and the offset are multiples of `PAGE`.

        Returns:
            The number of bytes read.

        Raises:
            TierFailed: the read failed, or the file is shorter now.
        """
        needed = max(1, min(sum(map(len, views)), self.nbytes - offset))
        return self._move(os.preadv, "reading", views, offset, needed, direct=direct)

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        action: str,
        views: list[memoryview],
        offset: int,
        needed: int,
        *,
        direct: bool,
    ) -> int:
        """Read or write at least `needed` bytes, using `views` in order."""
        done, is_cached = 0, False
        while done < needed:
            direct = direct and self.direct and done % PAGE == 0
            try:
                count = move(self._direct if direct else self._fd, views[:_IOV_MAX], offset + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # O_DIRECT is not supported after all
                    self.direct = False
                    continue
                raise TierFailed(
                    f"{action} {self.path} at byte {offset + done} failed: {error.strerror or error}"
                ) from error
            if not count:
                raise TierFailed(
                    f"{self.path} ends at byte {offset + done}, but {needed - done} bytes should "
                    "follow: it was cut short since it was opened"
                )
            done += count
            is_cached |= not direct
            views = _without_first(views, count)
        if is_cached:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        """Close the file. May be called again."""
        self._fd = self._direct = -1
        self._finalizer()


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


class OpenFiles:
    """Files that are opened on first use and closed together.

    Args:
        borrowed: open files to use as well; their owners close them.
    """

    def __init__(self, *borrowed: DirectFile | None) -> None:
        self._borrowed = {file.path: file for file in borrowed if file is not None}
        self._opened: dict[Path, DirectFile] = {}

    def of(self, path: Path, stamp: Stamp | None = None) -> DirectFile:
        """Return the open file; raise TierFailed if it can't be opened, or has another stamp."""
        file = self._borrowed.get(path) or self._opened.get(path)
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


def _without_first(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return `views` without their first `nbytes` bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def pages(nbytes: int) -> Tensor:
    """Return `nbytes` of page-aligned memory, uint8 zeros.

    Huge pages are used if available: a direct read then takes a few large requests instead of many small
    ones, and less CPU time.

    Raises:
        MemoryError: there is not enough memory.
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
    """Return a view of the bytes of a contiguous tensor."""
    array: Any = tensor.view(torch.uint8).flatten().numpy()
    return memoryview(array)


def buffer_bytes(nbytes: int) -> int:
    """Return the size of a buffer through which `read_into` reads tensors of at most `nbytes`."""
    return round_to_pages(min(nbytes + PAGE, CHUNK + PAGE))


def read_into(out: npt.NDArray[np.uint8], stored: Stored, file: DirectFile, buffer: Tensor) -> int:
    """Read a tensor from a file, through a buffer of whole pages.

    Args:
        out: destination of its bytes. numpy copies in this thread only; torch would use all threads.

    Returns:
        The number of bytes read.

    Raises:
        TierFailed: the file can't be read.
    """
    view, done, total = bytes_of(buffer), 0, 0
    while done < stored.nbytes:
        at = (stored.offset + done) // PAGE * PAGE
        skip = stored.offset + done - at
        count = min(stored.nbytes - done, len(view) - skip)
        total += file.read([view[: round_to_pages(skip + count)]], at)
        np.copyto(out[done : done + count], np.asarray(view[skip : skip + count]))
        done += count
    return total


def read_whole(stored: Stored, file: DirectFile | None = None) -> Tensor:
    """Read a tensor from a file without the page cache; raise TierFailed if that fails.

    Args:
        file: the open file; None: opened by its path.
    """
    out = torch.empty(stored.nbytes, dtype=torch.uint8)
    opened = DirectFile(stored.path, stamp=stored.stamp) if file is None else file
    try:
        read_into(out.numpy(), stored, opened, pages(buffer_bytes(stored.nbytes)))
    finally:
        if file is None:
            opened.close()
    return out.view(stored.dtype).view(stored.shape)
