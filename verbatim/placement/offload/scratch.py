"""An unnamed file for data moved out of memory, which disappears with the process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.weights.files import DirectFile, bytes_of, pages, round_to_pages
from verbatim.weights.lazy import Stored

_Bytes = npt.NDArray[np.uint8]
_UNFLUSHED = 64 << 20  # bytes that may be in the page cache before they are flushed


class Scratch(DirectFile):
    """A file in the disk tier's folder. Space is reserved before it is written, so it can't run out later.

    Any thread may read and write; only one at a time may reserve. The file never has a name (O_TMPFILE), or
    loses it at once, so that a killed process leaves no file.

    Args:
        folder: folder on the disk to use; None: the system's folder for temporary files.
        limit: maximum bytes to reserve; None: limited only by the disk.
        sibling: a file in this folder with which the limit is shared; None: none.

    Attributes:
        nbytes: reserved bytes.

    Raises:
        TierFailed: the folder can't be written to.
    """

    def __init__(
        self, folder: Path | None, limit: int | None, sibling: Scratch | None = None
    ) -> None:
        # Resolved, as the working directory may change before `open_sibling`.
        self.folder = (Path(tempfile.gettempdir()) if folder is None else folder).resolve()
        self.limit = limit
        # Reserved bytes of all files that share the limit.
        self._total: list[int] = [0] if sibling is None else sibling._total
        self._unflushed = 0
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="verbatim-", buffering=0) as file:
                fd = os.dup(file.fileno())
        except OSError as error:
            raise TierFailed(
                f"disk tier: can't write to the folder {self.folder}: {error.strerror}"
            ) from error
        super().__init__(self.folder / f"(unnamed file {fd})", fd=fd)

    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes`, in whole pages; return their offset.

        Raises:
            TierFailed: the disk is full, or the limit would be exceeded.
        """
        at, nbytes = self.nbytes, round_to_pages(nbytes)
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

    def open_sibling(self) -> Scratch:
        """Open another file in this folder, which shares the limit."""
        return Scratch(self.folder, self.limit, self)

    def close(self) -> None:
        """Close the file and free its space. May be called again."""
        self._total[0] -= self.nbytes
        self.nbytes = 0
        super().close()

    def write_from(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Write `views` in order, from `offset` on.

        Args:
            direct: as for `read`. Without it, the page cache is flushed and dropped.

        Raises:
            TierFailed: the file can't be written.
        """
        total = sum(map(len, views))
        nbytes = self._move(os.pwritev, "writing to", views, offset, total, direct=direct)
        self._unflushed += 0 if direct else nbytes
        if self._unflushed >= _UNFLUSHED:  # only written pages can be dropped from the page cache
            self._unflushed = 0
            self.flush()
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Wait until all writes are on the disk; raise TierFailed if one failed."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise TierFailed(
                f"disk tier: writing to {self.folder} failed: {error.strerror or error}"
            ) from error

    def store(self, name: str, tensor: Tensor) -> Stored:
        """Write a tensor, and return its location."""
        at = self.reserve(tensor.nbytes)
        self.write_from([bytes_of(tensor.cpu())], at)
        return Stored(name, self.path, at, tensor.nbytes, tensor.dtype, tuple(tensor.shape))


class RamScratch:
    """A reservation in RAM with the interface of `Scratch`, allocated on first use."""

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
        """Fill `views` in order, from `offset` on; `direct` has no effect."""
        for view, stored in self._places(views, offset):
            np.copyto(view, stored)

    def write_from(self, views: list[memoryview], offset: int, *, direct: bool = False) -> None:
        """Write `views` in order, from `offset` on; `direct` has no effect."""
        for view, stored in self._places(views, offset):
            np.copyto(stored, view)

    def _places(self, views: list[memoryview], offset: int) -> Iterator[tuple[_Bytes, _Bytes]]:
        if not len(self._memory):
            self._memory = pages(self._nbytes)
        for view in views:
            yield np.asarray(view), self._memory.numpy()[offset : offset + len(view)]
            offset += len(view)
