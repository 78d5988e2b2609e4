"""Layout of the weights of a model that is read from files.

Checkpoint files are mapped, and the length of their headers is arbitrary, so most weights are not aligned to
cache lines. A product then reads every vector across two lines, which costs nothing at a few rows, where
memory is the limit, and a tenth from 16 rows on (measured). So unaligned weights are copied once, when the
model is opened; aligned ones stay mapped.

Matrices `[in, out]`, as GPT-2, Llama 4 and gpt-oss have them, are copied to the layout of `[out, in]`, which
products read faster, with bit-identical results. The parameters keep their shapes.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from verbatim.model.experts import is_transposed, stacked_parameters
from verbatim.options import available_memory

_LINE = 64  # bytes
_SMALL = 1 << 16  # bytes below which a weight stays in the L1 or L2 cache anyway
_DONTNEED = 4  # of madvise on Linux


def begin_at_lines(module: nn.Module) -> None:
    """Copy unaligned weights, and those stored by columns, as far as half of the available memory holds them.

    The file's pages are released after each copy, so the peak is one weight.
    """
    room = available_memory() // 2
    large = [p for p in module.parameters() if p.nbytes >= _SMALL]
    columns = {p for p in _by_columns(module) if p.is_contiguous()}.intersection(large)
    unaligned = {p for p in large if p.data_ptr() % _LINE}
    if sum(p.nbytes for p in columns | unaligned) > room:
        columns.clear()
    if sum(p.nbytes for p in unaligned) > room:
        unaligned.clear()
    weights = [p for p in large if p in columns or p in unaligned]
    files = _mapped_files() if weights else []
    for parameter in weights:
        before = parameter.data
        # torch allocates aligned memory
        parameter.data = before.mT.contiguous().mT if parameter in columns else before.clone()
        _release_pages(before, files)


def _by_columns(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the matrices `[in, out]` of linear layers, and `[experts, in, out]` of experts."""
    from transformers.pytorch_utils import Conv1D

    for layer in module.modules():
        if type(layer) is Conv1D:
            yield layer.weight
        elif is_transposed(layer):
            yield from stacked_parameters(layer)


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
