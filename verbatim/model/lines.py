"""Weights that begin at a cache line.

A checkpoint's file is mapped, and its header is as long as it is: most weights of most files begin somewhere
within a line. A product then reads every vector of them across two lines, which costs nothing at a few rows,
where memory is the limit, and a tenth from 16 rows on (measured). So those are copied once, when the model is
opened; what begins at a line stays mapped.
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
_SMALL = 1 << 16  # bytes of a weight that stays in the nearest cache wherever it begins
_DONTNEED = 4  # of madvise on Linux


def begin_at_lines(module: nn.Module) -> None:
    """Copy the weights that don't; none where the copies would take half of what memory is left.

    The pages of the file that were read for a copy are let go of at once, so that the peak is one weight.
    """
    weights = [p for p in module.parameters() if p.data_ptr() % _LINE and p.nbytes >= _SMALL]
    if sum(p.nbytes for p in weights) > available_memory() // 2:
        return
    files = _mapped_files() if weights else []
    for parameter in weights:
        before = parameter.data
        parameter.data = before.clone()  # torch's own memory begins at a line
        _let_go(before, files)


def _mapped_files() -> list[tuple[int, int]]:
    """Where in memory files lie, (begin, end) in ascending order; none where that can't be known."""
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


def _let_go(tensor: Tensor, files: list[tuple[int, int]]) -> None:
    """Whole pages of a tensor that nobody uses any more; memory that is no file's is left alone."""
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
