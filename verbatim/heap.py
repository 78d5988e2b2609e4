"""Returning of freed memory to the system, instead of keeping it in the C library or torch."""

from __future__ import annotations

import ctypes

import torch

_M_MMAP_THRESHOLD = -3
_MAPPED = 4 << 20  # size of allocations that are returned to the system as soon as they are freed
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


def trim_heap() -> None:
    """Return the C library's free memory to the system; glibc keeps some for each thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def give_back_freed() -> None:
    """Return free memory to the system and to the GPU."""
    trim_heap()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap:
    """Limits the free memory that the C library keeps.

    The outputs of a layer differ in size from micro-batch to micro-batch, and those that outlive the layer
    fragment the heap, which grows to twice the memory in use (measured) and counts against a budget.

    Args:
        limit: maximum free bytes to keep; None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        library = ctypes.CDLL(None)
        self._limit = limit
        if limit is not None and hasattr(library, "mallopt"):
            # glibc raises this by itself up to 32 MB, and large tensors would then be taken from the heap.
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        self._info = getattr(library, "mallinfo2", None)  # glibc only
        if self._info is not None:
            self._info.restype = _Info

    @property
    def free_bytes(self) -> int:
        """Free bytes kept by the C library; 0 if it does not report them."""
        return 0 if self._info is None else int(self._info().fordblks)

    def tidy(self) -> None:
        """Return free memory to the system if it is over the limit."""
        if self._limit is not None and self.free_bytes > self._limit:
            trim_heap()
