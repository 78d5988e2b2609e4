"""A file without a name: what leaves memory, and is gone with the process."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path

from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.placement.offload.files import File, bytes_of, up
from verbatim.placement.offload.recipe import Stored

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
        self._lock = threading.Lock()
        try:
            self._fd = _unnamed(self.folder)
        except OSError as error:
            raise TierFailed(
                f"disk tier: can't write to the folder {self.folder}: {error.strerror}"
            ) from error
        self.path = self.folder / f"(unnamed file {self._fd})"

    def reserve(self, nbytes: int) -> int:
        """Where the next `nbytes`, in whole pages, may be written.

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
        view = bytes_of(data)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                raise TierFailed(
                    f"disk tier: writing {len(view)} bytes to {self.folder} failed: {error.strerror}"
                ) from error
        self.bytes_written += done

    def read(self, into: Tensor, offset: int) -> None:
        """Fill a contiguous tensor from `offset`.

        Raises:
            TierFailed: it can't be read.
        """
        view = bytes_of(into)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise TierFailed(
                    f"disk tier: reading {len(view)} bytes from {self.folder} failed: {error.strerror}"
                ) from error
            if not count:
                raise TierFailed(f"disk tier: the file in {self.folder} ends at {offset + done}")
            done += count
        self.bytes_read += done

    def keep(self, name: str, tensor: Tensor) -> Stored:
        """Write a tensor down, for `Weights` to stream."""
        at = self.reserve(tensor.nbytes)
        self.write(tensor, at)
        return Stored(name, self.path, at, tensor.nbytes, tensor.dtype, tuple(tensor.shape))

    def file(self) -> File:
        """The same file, read past the page cache; the caller closes it."""
        return File(self.path, fd=os.dup(self._fd), again=f"/proc/self/fd/{self._fd}")

    def close(self) -> None:
        """Give the disk space back. Again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
