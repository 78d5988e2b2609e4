"""Measurement of this machine's speeds, in about a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from timeit import repeat
from typing import Any

import torch

from verbatim.errors import TierFailed
from verbatim.model.products import linear
from verbatim.placement.offload.lane import Lane, staging
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import READERS, Ring, Use, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import CHUNK, OpenFiles, bytes_of
from verbatim.weights.lazy import Stored

ROWS = (1, 8, 64, 512)  # for which products are measured
_MOST_READ = 256_000_000  # bytes of files that count as one size
_READ_S = 0.5
_RING = 8  # chunks
_WRITTEN = 64_000_000  # bytes
_WEIGHTS = 64_000_000  # bytes; more than a cache holds


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates, in bytes and seconds. What else a step takes of memory and processor follows from the products.

    Attributes:
        read_rate: bytes/s from the disk, with the reads that stream weights.
        write_rate: bytes/s to the disk tier's folder.
        product_s: for each number of rows, ascending: seconds for each element of a matrix that these
            rows are multiplied with.
        bus_rate: bytes/s of copies from RAM to the GPU; None: without one.
    """

    read_rate: float
    write_rate: float
    product_s: tuple[tuple[int, float], ...]
    bus_rate: float | None = None

    def product(self, rows: float) -> float:
        """Return seconds per element of a matrix, for a number of rows that was not measured."""
        (first, least), (last, most) = self.product_s[0], self.product_s[-1]
        if rows <= first:
            return least if rows > 0 else 0.0
        for (below, low), (above, high) in zip(self.product_s, self.product_s[1:], strict=False):
            if rows <= above:
                return low + (high - low) * (rows - below) / (above - below)
        return most * rows / last

    def memory_rate(self, itemsize: int) -> float:
        """Return the bytes/s of memory, which limits the product of a single row.

        Args:
            itemsize: of an element of the products' matrices.
        """
        return itemsize / self.product(1)


# One core's share of a machine of 2025, in round numbers, and a disk that is neither fast nor slow.
NOMINAL = Machine(
    read_rate=1.5e9,
    write_rate=0.8e9,
    product_s=((1, 8e-11), (8, 9e-11), (64, 3e-10), (512, 2e-9)),
)

# A GPU of 2023 on PCIe 4.
NOMINAL_GPU = replace(
    NOMINAL, product_s=((1, 1e-12), (8, 1e-12), (64, 2e-12), (512, 3e-12)), bus_rate=2.4e10
)

_found: dict[tuple[Any, ...], Any] = {}


def measure(
    tensors: Sequence[Stored],
    folder: Path | None,
    dtype: torch.dtype,
    disk_limit: int | None = None,
    device: torch.device | None = None,
) -> Machine:
    """Measure what a plan for a model needs; results are cached in this process.

    Args:
        tensors: of the checkpoint, which are read.
        folder: the disk tier's, to which 64 MB are written; None: not written to, and as slow as reading.
        dtype: in which the model computes.
        disk_limit: bytes that may be written to the folder at a time.
        device: that computes, if its memory is not RAM.

    Raises:
        TierFailed: the checkpoint can't be read, or there is no such folder.
    """
    disk = os.stat(tensors[0].path).st_dev if tensors else 0
    # Small files are read in less time than a chunk takes.
    size = min(_MOST_READ, sum(stored.nbytes for stored in tensors)) // CHUNK
    write_rate = read_rate = _once(("read", disk, size), lambda: _reading(tensors))
    if folder is not None and (disk_limit is None or disk_limit >= _WRITTEN):
        write_rate = _once(("write", str(folder)), lambda: _writing(folder)) or read_rate
    key = "product", dtype, device or torch.get_num_threads()
    product_s = _once(key, lambda: _products(dtype, device or torch.device("cpu")))
    bus_rate = None if device is None else _once(("bus", device), lambda: _copying(device))
    return Machine(read_rate, write_rate, product_s, bus_rate)


def _once(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    if key not in _found:
        with torch.inference_mode():
            _found[key] = find()
    return _found[key]


def _reading(tensors: Sequence[Stored]) -> float:
    """Return bytes/s of reads ahead in the order of the files, which a disk may be faster at."""
    files, trace = OpenFiles(), Trace()
    ring = Ring("weights", READERS, trace)
    # Each is given back at once, so that all of them have the same memory to go round.
    chunks = [chunk._replace(at=0) for chunk in lay_out(tensors).chunks]
    uses = [Use("chunk", chunk.nbytes, [partial(chunk.read, files)]) for chunk in chunks]
    if not uses:
        return NOMINAL.read_rate
    try:
        # Room for many more of a small file's chunks would take long to fill.
        ring.reserve(_RING * max(use.nbytes for use in uses))
        start = perf_counter()
        ring.follow(uses, repeat=False)
        for use in uses:
            ring.take(use)
            ring.give_back()
            if perf_counter() - start > _READ_S:
                break
        return READERS * trace.nbytes("read weights") / trace.seconds("read weights")
    finally:
        ring.close()
        files.close()


def _writing(folder: Path) -> float | None:
    """Return bytes/s; None if the folder has no room for the trial, which does not rule out smaller uses."""
    scratch = Scratch(folder, None)
    try:
        data = torch.ones(_WRITTEN // 4, dtype=torch.uint8)
        begin = perf_counter()
        for _ in range(4):
            scratch.write_from([bytes_of(data)], scratch.reserve(data.nbytes))
        os.fdatasync(scratch._fd)
        return _WRITTEN / (perf_counter() - begin)
    except TierFailed:
        return None
    finally:
        scratch.close()


def _copying(device: torch.device) -> float:
    """Return bytes/s of copies to a device, from memory as it is staged in."""
    lane = Lane(device)
    source, target = staging(_WRITTEN, device).fill_(0), lane.memory(_WRITTEN)

    def copy() -> None:
        with lane.behind(lane.mark()):
            target.copy_(source, non_blocking=True)

    copy()
    return _WRITTEN / median(repeat(copy, number=1, repeat=3))


def _products(dtype: torch.dtype, device: torch.device) -> tuple[tuple[int, float], ...]:
    depth, width = 2048, 2048
    count = max(1, _WEIGHTS // (depth * width * dtype.itemsize))
    size: Any = dict(dtype=dtype, device=device)
    weights = [torch.full((width, depth), 0.01, **size) for _ in range(count)]
    found = []
    for rows in ROWS:
        x = torch.full((rows, depth), 0.5, **size)

        def multiply(x: torch.Tensor = x) -> None:
            for weight in weights:
                linear(x, weight)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        multiply()  # a probe, where torch's products are made invariant
        seconds = median(repeat(multiply, number=1, repeat=3))  # with the machine's other load
        found.append((rows, seconds / (count * depth * width)))
    return tuple(found)
