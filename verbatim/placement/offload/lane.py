"""Copies between RAM and a device that has memory of its own, beside what the device computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from verbatim.errors import OutOfBlocks
from verbatim.weights.files import pages, up


class Lane:
    """A stream of copies to a device.

    Args:
        device: a GPU. A CPU stands for one in tests: memory is as distinct, and copies are plain ones.

    Attributes:
        buffer: the memory of `through`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: list[Tensor] = []  # as long as these are, their memory is pinned
        self.buffer = pages(0)

    def mark(self) -> Any:
        """Return an event behind all that this thread has launched so far."""
        stream = self._stream
        return None if stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Begin the block's copies once `mark` has passed, and wait for them at its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:
                self.wait()

    def wait(self) -> None:
        """Wait for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def keep(self, data: Tensor, *, near: bool) -> Tensor:
        """Return a copy of a tensor on the device, or else in RAM for it, until `release`."""
        flat = data.contiguous().view(-1).view(torch.uint8)
        if near:
            memory = self.memory(flat.nbytes)
        else:
            memory = staging(flat.nbytes, self.device)
            self._pinned.append(memory)
        return memory.copy_(flat).view(data.dtype).view(data.shape)

    def through(self, nbytes: int) -> Tensor:
        """Return RAM through which one thread at a time copies; the same memory each time."""
        if self.buffer.nbytes < nbytes:
            self.buffer = pages(0)  # before more is allocated
            self.buffer = staging(up(nbytes + nbytes // 8), self.device)
        return self.buffer[:nbytes]

    def release(self) -> None:
        """Unpin what is kept in RAM, and free the buffer."""
        self._pinned.clear()
        self.buffer = pages(0)

    def memory(self, nbytes: int) -> Tensor:
        """Return `nbytes` of uint8 memory of the device."""
        with torch.inference_mode(False):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                raise OutOfBlocks(
                    f"{nbytes} bytes can't be allocated on {self.device}: lower gpu="
                ) from None


def staging(nbytes: int, device: torch.device | None) -> Tensor:
    """Return zeros of RAM that begin with a page; for a GPU they are pinned, as long as this tensor lives.

    Args:
        device: to which they are copied; None: to none.
    """
    memory = pages(nbytes)
    if device is not None and device.type == "cuda" and nbytes:
        cuda: Any = torch.cuda.cudart()
        # Not torch's pinned memory, which is rounded up to powers of two. Where the system allows no more of
        # it, copies are slower.
        with torch.cuda.device(device):
            if int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0:
                weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
            else:
                with suppress(RuntimeError):  # takes the error, which the next launch would raise
                    torch.ones(1, device=device)
    return memory
