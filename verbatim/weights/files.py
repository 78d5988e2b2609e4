"""Reading files past the page cache, so that what is read is not kept twice."""

from __future__ import annotations

import errno
import fcntl
import os
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


def up(nbytes: int) -> int:
    """`nbytes` in whole pages."""
    return -(-nbytes // PAGE) * PAGE


class File:
    """A file that is read in whole pages.

    Attributes:
        direct: it is read by O_DIRECT. Where the file system can't, the page cache is told to forget
            what was read.
    """

    def __init__(
        self,
        path: Path,
        *,
        stamp: Stamp | None = None,
        fd: int | None = None,
        again: str | None = None,
    ) -> None:
        """Args:
        path: of the file, for messages as well.
        stamp: what it must be; None: anything.
        fd: the file, where it has no name any more; it is closed by `close`.
        again: where to open it again by O_DIRECT, if it has no name.
        """
        self.path = path
        self.direct = True
        self._stamp = stamp
        try:
            try:
                self._fd = os.open(again or path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                if fd is not None:
                    os.close(fd)
            except OSError:
                self.direct = False
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise TierFailed(f"disk tier: can't open {path}: {error.strerror}") from error
        try:
            self.check()
        except TierFailed:
            self.close()
            raise

    def check(self) -> None:
        """Check that the file is unchanged.

        Raises:
            TierFailed: somebody has written to it, or it is another file.
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
        done = 0
        while done < needed:
            try:
                count = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:
                    self._read_through_the_cache()
                    continue
                raise TierFailed(
                    f"disk tier: reading {self.path} at byte {offset + done} failed: "
                    f"{error.strerror or error}"
                ) from error
            done += count
            # A direct read goes on at whole pages, so one that stops within a page has met the end.
            if done < needed and (count == 0 or (self.direct and done % PAGE)):
                raise TierFailed(
                    f"disk tier: {self.path} ends at byte {offset + done}, and {needed - done} bytes of "
                    "weights should follow: it was cut short since it was opened"
                )
        if not self.direct:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def _read_through_the_cache(self) -> None:
        """Some file systems let a file be opened for direct reads, and then refuse them."""
        self.direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def close(self) -> None:
        """Close the file; again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def pages(nbytes: int) -> Tensor:
    """Uninitialised memory of `nbytes`, uint8, that begins at a whole page."""
    with torch.inference_mode(False):
        block = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    shift = -block.data_ptr() % PAGE
    return block[shift : shift + nbytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.view(torch.uint8).flatten().numpy()
    return memoryview(array)


def buffer_bytes(nbytes: int) -> int:
    """Bytes of a buffer through which `read_into` reads tensors of at most `nbytes`."""
    return up(min(nbytes + PAGE, CHUNK + PAGE))


def read_into(out: npt.NDArray[np.uint8], stored: Stored, file: File, buffer: Tensor) -> int:
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


def read_whole(stored: Stored) -> Tensor:
    """Read one tensor of a file with O_DIRECT.

    Raises:
        TierFailed: it can't be read.
    """
    out = torch.empty(stored.nbytes, dtype=torch.uint8)
    file = File(stored.path, stamp=stored.stamp)
    try:
        read_into(out.numpy(), stored, file, pages(buffer_bytes(stored.nbytes)))
    finally:
        file.close()
    return out.view(stored.dtype).view(stored.shape)
