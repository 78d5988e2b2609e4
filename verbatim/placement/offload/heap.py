"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_MAPPED = 4 << 20  # bytes from which an allocation goes back to the system as soon as it is freed
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap:
    """Gives freed memory back to the system where too much of it has piled up.

    A layer's results differ in size from micro-batch to micro-batch, and what outlives the layer lies between
    what doesn't. So glibc's heap grows from layer to layer, to twice what is in use (measured); what is
    free in it would count against a budget.

    Args:
        limit: bytes that may be free and kept; None: any number.
    """

    def __init__(self, limit: int | None) -> None:
        library = ctypes.CDLL(None)
        self._limit = limit
        if limit is not None and hasattr(library, "mallopt"):
            # glibc raises this by itself up to 32 MB, and large tensors would then be taken from the heap.
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        self._info = getattr(library, "mallinfo2", None)  # glibc alone has it
        self._trim = getattr(library, "malloc_trim", None)
        if self._info is not None:
            self._info.restype = _Info

    @property
    def free_bytes(self) -> int:
        """Kept and not used; 0 where the C library doesn't tell."""
        return 0 if self._info is None else int(self._info().fordblks)

    def tidy(self) -> None:
        """Give back what is free, if it is more than the limit."""
        if self._limit is not None and self._trim is not None and self.free_bytes > self._limit:
            self._trim(0)
