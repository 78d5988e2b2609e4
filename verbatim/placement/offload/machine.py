"""Measurement of this machine's speeds, in a few seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from timeit import repeat, timeit
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.kernels.packing import WeightPacking
from verbatim.model.products import linear
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import READERS, Lane, Pages, Readers, lay_out, staging
from verbatim.quantization.matrix import QuantizedMatrix
from verbatim.weights.files import CHUNK, OpenFiles, bytes_of, pages
from verbatim.weights.lazy import Stored

ROWS = (1, 8, 64, 512)  # row counts for which products are measured
_MAX_READ_BYTES = 256_000_000  # larger checkpoints share one measurement
_MAX_READ_S = 0.5  # maximum duration of the measurement
_WRITE_BYTES = 64_000_000  # data of the write and copy measurements
_WEIGHT_BYTES = 64_000_000  # larger than the CPU's cache
_MATRIX = (2048, 2048)
_LONG_S = 1.0  # products that take longer are measured once
_COMPUTE_BOUND_ROWS = 64  # from here on, products don't depend on whether matrices are cached


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of a machine. Other costs of memory and processor are derived from product speeds.

    Attributes:
        read_rate: bytes/s from the disk, with the reads that stream weights.
        write_rate: bytes/s to the disk tier's folder.
        product_s: pairs (rows, seconds per element of a matrix multiplied with this many rows), rows
            ascending.
        packed_s: the same for a quantized matrix; empty: as `product_s`.
        bus_rate: bytes/s of copies from RAM to the GPU; None: no GPU.
    """

    read_rate: float
    write_rate: float
    product_s: tuple[tuple[int, float], ...]
    packed_s: tuple[tuple[int, float], ...] = ()
    bus_rate: float | None = None

    def product(self, rows: float) -> float:
        """Return the seconds per element of a matrix, interpolated for `rows` rows."""
        return _between(self.product_s, rows)

    def packed(self, rows: float) -> float:
        """Return the result of `product` for a quantized matrix."""
        return _between(self.packed_s or self.product_s, rows)

    def memory_rate(self, itemsize: int) -> float:
        """Return the memory bandwidth in bytes/s, which limits the product of a single row.

        Args:
            itemsize: bytes per element of the measured matrices.
        """
        return itemsize / self.product(1)


@lru_cache
def _between(measured: tuple[tuple[int, float], ...], rows: float) -> float:
    counts, seconds = zip(*measured, strict=True)
    beyond = max(1.0, rows / counts[-1])
    return float(np.interp(rows, counts, seconds)) * beyond if rows > 0 else 0.0


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

_measured: dict[tuple[Any, ...], Any] = {}


def measure(
    tensors: Sequence[Stored],
    folder: Path | None,
    dtype: torch.dtype,
    disk_limit: int | None = None,
    device: torch.device | None = None,
    packing: WeightPacking | None = None,
) -> Machine:
    """Measure the speeds that a plan for a model depends on; results are cached in this process.

    Args:
        tensors: the tensors of the checkpoint; some are read.
        folder: folder of the disk tier, to which 64 MB are written; None: writes are as fast as reads.
        dtype: dtype in which the model computes.
        disk_limit: maximum bytes in the folder; None: no limit.
        device: the device that computes, if its memory is not RAM.
        packing: format of the quantized matrices, with any shape; None: there are none.

    Raises:
        TierFailed: the checkpoint can't be read, or the folder can't be written to.
    """
    disk = os.stat(tensors[0].path).st_dev if tensors else 0
    # Small checkpoints are read in less time than a whole chunk.
    size = min(_MAX_READ_BYTES, sum(stored.nbytes for stored in tensors)) // CHUNK
    write_rate = read_rate = _cached(("read", disk, size), lambda: _reading(tensors))
    if folder is not None and (disk_limit is None or disk_limit >= _WRITE_BYTES):
        write_rate = _cached(("write", str(folder)), lambda: _writing(folder)) or read_rate
    where = device or torch.device("cpu")
    key = "product", dtype, device or torch.get_num_threads()
    product_s, packed_s = _cached(key, lambda: _products(dtype, where, None)), ()
    if packing is not None:
        packing = replace(packing, shape=_MATRIX)
        packed_s = _cached((*key, packing), lambda: _products(dtype, where, packing))
    bus_rate = None if device is None else _cached(("bus", device), lambda: _copying(device))
    return Machine(read_rate, write_rate, product_s, packed_s, bus_rate)


def _cached(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    if key not in _measured:
        with torch.inference_mode():
            _measured[key] = find()
    return _measured[key]


def _reading(tensors: Sequence[Stored]) -> float:
    """Return bytes/s of the threads that stream weights, in file order."""
    chunks = [chunk._replace(at=0) for chunk in lay_out(tensors)[0]]
    if not chunks:
        return NOMINAL.read_rate
    files, readers = OpenFiles(), Readers(READERS, "verbatim-measure")
    # Filled, since page faults would slow down the first reads.
    buffers = [pages(max(chunk.nbytes for chunk in chunks)).fill_(0) for _ in range(READERS)]
    begin = perf_counter()

    def read(chunk: Pages) -> tuple[int, float]:
        """Return the bytes and the seconds of a read."""
        start = perf_counter()
        if start - begin > _MAX_READ_S:
            return 0, 0.0
        buffer = buffers.pop()  # one per thread
        nbytes = chunk.read(files, buffer)
        buffers.append(buffer)
        return nbytes, perf_counter() - start

    try:
        jobs = [readers.submit(read, chunk) for chunk in chunks]
        sizes, seconds = zip(*(job.result() for job in jobs), strict=True)
        return float(READERS * sum(sizes) / sum(seconds))
    finally:
        readers.shutdown()
        files.close()


def _writing(folder: Path) -> float | None:
    """Return bytes/s of writes; None if the folder has no room for the measurement, or a write failed."""
    scratch = Scratch(folder, None)
    try:
        data = torch.ones(_WRITE_BYTES // 4, dtype=torch.uint8)
        begin = perf_counter()
        for _ in range(4):
            scratch.write_from([bytes_of(data)], scratch.reserve(data.nbytes))
        scratch.flush()
        return _WRITE_BYTES / (perf_counter() - begin)
    except TierFailed:
        return None
    finally:
        scratch.close()


def _copying(device: torch.device) -> float:
    """Return bytes/s of copies to a device, from staging memory."""
    lane = Lane(device)
    source, target = staging(_WRITE_BYTES, device).fill_(0), lane.memory(_WRITE_BYTES)

    def copy() -> None:
        with lane.after(lane.mark()):
            target.copy_(source, non_blocking=True)

    copy()
    return _WRITE_BYTES / median(repeat(copy, number=1, repeat=3))


def _products(
    dtype: torch.dtype, device: torch.device, packing: WeightPacking | None
) -> tuple[tuple[int, float], ...]:
    size: Any = dict(dtype=dtype, device=device)
    weights: list[Tensor | QuantizedMatrix]
    if packing is None:
        count = max(1, _WEIGHT_BYTES // (prod(_MATRIX) * dtype.itemsize))
        weights = [torch.full(_MATRIX, 0.01, **size) for _ in range(count)]
    else:  # any bytes are valid in every format; zeros are written so that pages are allocated
        data = torch.empty(
            max(1, _WEIGHT_BYTES // packing.nbytes), packing.nbytes, dtype=torch.uint8
        )
        weights = [QuantizedMatrix(matrix, packing) for matrix in data.zero_().to(device)]
    rates = []
    for rows in ROWS:
        x = torch.full((rows, _MATRIX[1]), 0.5, **size)
        matrices = weights if rows < _COMPUTE_BOUND_ROWS else weights[:4]

        def multiply(x: Tensor = x, matrices: list[Tensor | QuantizedMatrix] = matrices) -> None:
            for weight in matrices:
                linear(x, weight)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        # The first call also probes torch's products if they are made batch-invariant.
        seconds = timeit(multiply, number=1)
        if seconds < _LONG_S:  # then another load of the machine may have a part in it
            seconds = median(repeat(multiply, number=1, repeat=3))
        rates.append((rows, seconds / (len(matrices) * prod(_MATRIX))))
    return tuple(rates)
