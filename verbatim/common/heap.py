"""Returns freed memory of the C library and torch to the system."""

from __future__ import annotations

import ctypes

import torch

_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 4 << 20  # minimum size of allocations that go back to the system when freed
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


def trim_heap() -> None:
    """Return the C library's free memory to the system; glibc keeps some for each thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def release_free_memory() -> None:
    """Return free memory of the C library to the system, and free memory of torch to the GPU."""
    trim_heap()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap:
    """Limits the free memory that the C library retains to `limit` bytes; None: no limit.

    The outputs of a layer differ in size between micro-batches. Outputs that outlive the layer fragment the
    heap, which grows to twice the memory in use (measured) and counts against a memory budget.
    """

    def __init__(self, limit: int | None) -> None:
        library = ctypes.CDLL(None)
        self._limit = limit
        if limit is not None and hasattr(library, "mallopt"):
            # Else glibc raises this threshold up to 32 MB, and allocates large tensors in the heap.
            library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        self._info = getattr(library, "mallinfo2", None)  # glibc only
        if self._info is not None:
            self._info.restype = _MallInfo2

    @property
    def free_bytes(self) -> int:
        """Free bytes retained by the C library; 0 if it does not report them."""
        return 0 if self._info is None else int(self._info().fordblks)

    def tidy(self) -> None:
        """Return free memory to the system if it is over the limit."""
        if self._limit is not None and self.free_bytes > self._limit:
            trim_heap()
