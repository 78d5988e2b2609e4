"""Alignment of weights to cache lines.

Checkpoint files are mapped, and the length of their headers is arbitrary, so most weights are not aligned to
cache lines. A product then reads every vector across two lines, which costs nothing at a few rows, where
memory is the limit, and a tenth from 16 rows on (measured). So unaligned weights are copied once, when the
model is opened; aligned ones stay mapped.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
from typing import Any

from torch import Tensor, nn

from verbatim.options import available_memory

_LINE = 64  # bytes
_SMALL = 1 << 16  # bytes below which a weight stays in the L1 or L2 cache anyway
_DONTNEED = 4  # of madvise on Linux


def begin_at_lines(module: nn.Module) -> None:
    """Copy unaligned weights, unless the copies would take half of the available memory.

    The file's pages are released after each copy, so the peak is one weight.
    """
    weights = [p for p in module.parameters() if p.data_ptr() % _LINE and p.nbytes >= _SMALL]
    if sum(p.nbytes for p in weights) > available_memory() // 2:
        return
    files = _mapped_files() if weights else []
    for parameter in weights:
        before = parameter.data
        parameter.data = before.clone()  # torch allocates aligned memory
        _release_pages(before, files)


def _mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges of mapped files, (begin, end), sorted; empty if unknown."""
    found = []
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                place, _, _, _, number, *path = line.split(maxsplit=5)
                if path and number != "0":
                    begin, end = place.split("-")
                    found.append((int(begin, 16), int(end, 16)))
    except OSError:
        return []
    return sorted(found)


def _release_pages(tensor: Tensor, files: list[tuple[int, int]]) -> None:
    """Release the whole pages of an unused tensor, if they are mapped from a file."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    place = bisect.bisect_right(files, (begin, 1 << 64)) - 1
    if place < 0 or end <= begin or files[place][1] < end:
        return
    madvise = _madvise()
    if madvise is not None:
        madvise(begin, end - begin, _DONTNEED)


@functools.cache
def _madvise() -> Any:
    function: Any = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
