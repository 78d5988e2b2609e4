"""A file without a name: what leaves memory, and is gone with the process."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.weights.files import PAGE, File, bytes_of, up
from verbatim.weights.lazy import Stored

_VIEWS = 1024  # that one call of the system takes
_UNFLUSHED = 64 << 20  # bytes that may lie in the page cache until the disk has them
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})  # by the file system


class Scratch:
    """Room in the disk tier's folder, reserved before it is written so that it can't run out later.

    The file never has a name (O_TMPFILE), or loses it at once, so that nothing is left behind by a
    process that is killed.

    Args:
        folder: on the disk to use; None: the system's folder for temporary files.
        limit: bytes that may be reserved; None: as many as the disk has.

    Raises:
        TierFailed: the folder can't be written to.
    """

    def __init__(self, folder: Path | None, limit: int | None) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        self.limit = limit
        self.nbytes = 0  # reserved
        self.bytes_read = self.bytes_written = 0
        self._unflushed = 0
        self._lock = threading.Lock()
        try:
            self._fd = _unnamed(self.folder)
        except OSError as error:
            raise TierFailed(
                f"disk tier: can't write to the folder {self.folder}: {error.strerror}"
            ) from error
        self.path = self.folder / f"(unnamed file {self._fd})"
        self._direct = _direct(self._fd)

    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes`, in whole pages; return their offset.

        Raises:
            TierFailed: the disk is full, or they are more than the limit.
        """
        with self._lock:
            at, nbytes = self.nbytes, up(nbytes)
            if self.limit is not None and at + nbytes > self.limit:
                raise TierFailed(
                    f"disk tier: {at + nbytes} bytes are needed in {self.folder}, and disk_limit is "
                    f"{self.limit}"
                )
            try:
                os.posix_fallocate(self._fd, at, max(1, nbytes))
            except OSError as error:
                raise TierFailed(
                    f"disk tier: no room for {nbytes} bytes in {self.folder}: {error.strerror}"
                ) from error
            self.nbytes = at + nbytes
        return at

    def write(self, data: Tensor, offset: int) -> None:
        """Put a contiguous tensor at `offset`.

        Raises:
            TierFailed: it can't be written.
        """
        self.write_from([bytes_of(data)], offset)

    def write_from(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Put what lies in `views` at `offset`, one behind the other.

        Args:
            direct: past the page cache; all addresses and lengths and the offset are whole pages. Without
                it, the page cache is told to write and forget.

        Raises:
            TierFailed: it can't be written.
        """
        nbytes = self._move(os.pwritev, views, offset, direct, f"writing to {self.folder}")
        with self._lock:
            self.bytes_written += nbytes
            self._unflushed += 0 if direct else nbytes
            flush = self._unflushed >= _UNFLUSHED
            if flush:
                self._unflushed = 0
        if flush:  # only what is written can be forgotten
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise TierFailed(
                    f"disk tier: writing to {self.folder} failed: {error.strerror or error}"
                ) from error
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Fill `views`, one behind the other, from `offset`; `direct` as for `write_from`.

        Raises:
            TierFailed: it can't be read.
        """
        nbytes = self._move(os.preadv, views, offset, direct, f"reading from {self.folder}")
        with self._lock:
            self.bytes_read += nbytes

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        views: list[memoryview],
        offset: int,
        direct: bool,
        doing: str,
    ) -> int:
        total, done = sum(map(len, views)), 0
        direct = direct and self._direct >= 0
        while done < total:
            try:
                count = move(self._direct if direct else self._fd, views[:_VIEWS], offset + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # not by this file system
                    direct = False
                    continue
                raise TierFailed(
                    f"disk tier: {doing} failed after {done} of {total} bytes: "
                    f"{error.strerror or error}"
                ) from error
            if not count:
                raise TierFailed(f"disk tier: {doing} ended after {done} of {total} bytes")
            done += count
            views = _behind(views, count)
            direct = direct and count % PAGE == 0
        if not direct:
            os.posix_fadvise(self._fd, offset, total, os.POSIX_FADV_DONTNEED)
        return total

    def keep(self, name: str, tensor: Tensor) -> Stored:
        """Write a tensor down, for `Weights` to stream."""
        at = self.reserve(tensor.nbytes)
        self.write(tensor, at)
        return Stored(name, self.path, at, tensor.nbytes, tensor.dtype, tuple(tensor.shape))

    def file(self) -> File:
        """Open the file for reading with O_DIRECT; the caller closes it."""
        return File(self.path, fd=os.dup(self._fd), again=f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Give the disk space back. Again does nothing."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


def _behind(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of `views` after `nbytes` bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def _direct(fd: int) -> int:
    """Open the file again with O_DIRECT; return -1 if that is not possible."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return -1


def _unnamed(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    fd, name = tempfile.mkstemp(dir=folder, prefix="verbatim-")
    os.unlink(name)
    return fd
