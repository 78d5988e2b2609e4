"""An unnamed file for what leaves memory, which disappears with the process."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.weights.files import DirectFile, bytes_of, pages, up
from verbatim.weights.lazy import Stored

_Bytes = npt.NDArray[np.uint8]
_UNFLUSHED = 64 << 20  # bytes that may be in the page cache before they are flushed
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})  # by the file system


class Scratch(DirectFile):
    """Room in the disk tier's folder, reserved before it is written so that it can't run out later.

    Any thread may read and write, one at a time may reserve.

    The file never has a name (O_TMPFILE), or loses it at once, so that nothing is left behind by a
    process that is killed.

    Args:
        folder: on the disk to use; None: the system's folder for temporary files.
        limit: bytes that may be reserved; None: as many as the disk has.
        beside: another file in this folder, within the same limit.

    Attributes:
        nbytes: that are reserved.

    Raises:
        TierFailed: the folder can't be written to.
    """

    def __init__(
        self, folder: Path | None, limit: int | None, beside: Scratch | None = None
    ) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        self.limit = limit
        # Of all files that share the limit.
        self._total: list[int] = [0] if beside is None else beside._total
        self._unflushed = 0
        try:
            fd = _unnamed(self.folder)
        except OSError as error:
            raise TierFailed(
                f"disk tier: can't write to the folder {self.folder}: {error.strerror}"
            ) from error
        super().__init__(self.folder / f"(unnamed file {fd})", fd=fd)

    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes`, in whole pages; return their offset.

        Raises:
            TierFailed: the disk is full, or they are more than the limit.
        """
        at, nbytes = self.nbytes, up(nbytes)
        needed = self._total[0] + nbytes
        if self.limit is not None and needed > self.limit:
            raise TierFailed(
                f"disk tier: {needed} bytes are needed in {self.folder}, and disk_limit is "
                f"{self.limit}"
            )
        try:
            os.posix_fallocate(self._fd, at, max(1, nbytes))
        except OSError as error:
            raise TierFailed(
                f"disk tier: no room for {nbytes} bytes in {self.folder}: {error.strerror}"
            ) from error
        self.nbytes = at + nbytes
        self._total[0] = needed
        return at

    def another(self) -> Scratch:
        """Open another file in this folder, within the same limit.

        Raises:
            TierFailed: it can't be opened.
        """
        return Scratch(self.folder, self.limit, self)

    def close(self) -> None:
        """Give the room back. May be called again."""
        self._total[0] -= self.nbytes
        self.nbytes = 0
        super().close()

    def write_from(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Write `views`, one after the other, from `offset` on.

        Args:
            direct: as for `read`. Without it, the page cache is flushed and dropped.

        Raises:
            TierFailed: it can't be written.
        """
        total = sum(map(len, views))
        nbytes = self._move(os.pwritev, "writing to", views, offset, total, direct=direct)
        self._unflushed += 0 if direct else nbytes
        if self._unflushed >= _UNFLUSHED:  # only what is written can be forgotten
            self._unflushed = 0
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                raise TierFailed(
                    f"disk tier: writing to {self.folder} failed: {error.strerror or error}"
                ) from error
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def keep(self, name: str, tensor: Tensor) -> Stored:
        """Write a tensor; return where it is."""
        at = self.reserve(tensor.nbytes)
        self.write_from([bytes_of(tensor.cpu())], at)
        return Stored(name, self.path, at, tensor.nbytes, tensor.dtype, tuple(tensor.shape))


class RamScratch:
    """One reservation in RAM, allocated at its first use; with the methods of a file's."""

    def __init__(self) -> None:
        self._nbytes, self._memory = 0, pages(0)

    def reserve(self, nbytes: int) -> int:
        """Set the size, in bytes; return offset 0."""
        self._nbytes = nbytes
        return 0

    def release(self) -> None:
        """Free the memory; its contents are lost."""
        self._memory = pages(0)

    def read(self, views: list[memoryview], offset: int, *, direct: bool = True) -> None:
        """Fill `views`, one after the other, from `offset` on; `direct` has no effect."""
        for view, own in self._places(views, offset):
            np.copyto(view, own)

    def write_from(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Write `views`, one after the other, from `offset` on; `direct` has no effect."""
        for view, own in self._places(views, offset):
            np.copyto(own, view)

    def _places(self, views: list[memoryview], offset: int) -> Iterator[tuple[_Bytes, _Bytes]]:
        if not len(self._memory):
            self._memory = pages(self._nbytes)
        for view in views:
            yield np.asarray(view), self._memory.numpy()[offset : offset + len(view)]
            offset += len(view)


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
