"""Measurement of this machine's speeds, in a second or two."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from verbatim.batch import AttentionBatch, SamplePlan, SampleRow
from verbatim.errors import TierFailed
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.products import linear
from verbatim.params import SamplingParams
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import Stream, lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.sampling.sampler import sample_rows
from verbatim.weights.files import CHUNK, PAGE, DirectFile, bytes_of, pages
from verbatim.weights.lazy import Stored

ROWS = (1, 8, 64, 512)  # for which products are measured
_MOST_READ = 256_000_000  # bytes
_READ_S = 0.3
_PARTS = 3  # in which reading is measured
_RING = 4  # chunks
_WRITTEN = 64_000_000  # bytes
_WEIGHTS = 64_000_000  # bytes; more than a cache holds


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates, in bytes and seconds.

    Attributes:
        read_rate: bytes/s from the disk, with the reads that stream weights.
        write_rate: bytes/s to the disk tier's folder.
        row_s: to look one row of an embedding up on the disk.
        copy_rate: bytes/s that are copied in RAM.
        product_s: for each number of rows, ascending: seconds for each element of a matrix that these
            rows are multiplied with.
        kv_rate: bytes/s of K and V that a decode step attends to.
        attention_s: for each query and key of a prompt, and each element of both: seconds.
        sample_s: for each logit of which a token is drawn.
        unit_s: for each layer and micro-batch, whatever their size.
        read_cpu_s: for each byte from the disk: seconds that a processor is busy with it.
        threads: which computed.
    """

    read_rate: float
    write_rate: float
    row_s: float
    copy_rate: float
    product_s: tuple[tuple[int, float], ...]
    kv_rate: float
    attention_s: float
    sample_s: float
    unit_s: float
    read_cpu_s: float = 0.0
    threads: int = 0

    def product(self, rows: float) -> float:
        """Return seconds per element of a matrix, for a number of rows that was not measured."""
        if rows <= 0:
            return 0.0
        (first, least), last = self.product_s[0], self.product_s[-1]
        if rows <= first:
            return least
        for (below, low), (above, high) in zip(self.product_s, self.product_s[1:], strict=False):
            if rows <= above:
                return low + (high - low) * (rows - below) / (above - below)
        return last[1] * rows / last[0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


# One core's share of a machine of 2025, in round numbers, and a disk that is neither fast nor slow.
NOMINAL = Machine(
    read_rate=1.5e9,
    write_rate=0.8e9,
    row_s=1.5e-4,
    copy_rate=6e9,
    product_s=((1, 8e-11), (8, 9e-11), (64, 3e-10), (512, 2e-9)),
    kv_rate=2e10,
    attention_s=2e-11,
    sample_s=2e-9,
    unit_s=5e-4,
)

_found: dict[tuple[Any, ...], Any] = {}


def measure(
    tensors: Sequence[Stored],
    folder: Path | None,
    dtype: torch.dtype,
    disk_limit: int | None = None,
) -> Machine:
    """Measure what a plan for a model needs; results are cached in this process.

    Args:
        tensors: of the checkpoint, which are read.
        folder: the disk tier's, to which 64 MB are written; None: not written to, and as slow as reading.
        dtype: in which the model computes.
        disk_limit: bytes that may be written to the folder at a time.

    Raises:
        TierFailed: the checkpoint can't be read, or there is no such folder.
    """
    threads = torch.get_num_threads()
    device = os.stat(tensors[0].path).st_dev if tensors else 0
    size = min(_MOST_READ, sum(stored.nbytes for stored in tensors)) // CHUNK
    read_rate, read_cpu_s, row_s = _once(("read", device, size), lambda: _reading(tensors))
    write_rate = read_rate
    if folder is not None and (disk_limit is None or disk_limit >= _WRITTEN):
        write_rate = _once(("write", str(folder)), lambda: _writing(folder)) or read_rate
    kv_rate, attention_s = _once(("attend", dtype, threads), lambda: _attending(dtype))
    return Machine(
        read_rate=read_rate,
        write_rate=write_rate,
        row_s=row_s,
        copy_rate=_once(("copy",), _copying),
        product_s=_once(("product", dtype, threads), lambda: _products(dtype)),
        kv_rate=kv_rate,
        attention_s=attention_s,
        sample_s=_once(("sample", threads), _sampling),
        unit_s=_once(("unit",), _calling),
        read_cpu_s=read_cpu_s,
        threads=threads,
    )


def _once(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    if key not in _found:
        with torch.inference_mode():
            _found[key] = find()
    return _found[key]


def _usual(function: Callable[[], object], times: int = 3) -> float:
    """Return the seconds of a call: the median of some, including the machine's other load."""
    found = []
    for _ in range(times):
        begin = perf_counter()
        function()
        found.append(perf_counter() - begin)
    return sorted(found)[len(found) // 2]


def _reading(tensors: Sequence[Stored]) -> tuple[float, float, float]:
    """Return bytes/s of the prefetcher's reads, their processor time per byte, and seconds to read a page."""
    chunks: list[Stored] = []
    for path in sorted({stored.path for stored in tensors}):
        own = [stored for stored in tensors if stored.path == path]
        begin = min(stored.offset for stored in own) // PAGE * PAGE
        end = max(stored.offset + stored.nbytes for stored in own)
        for at in range(begin, end, CHUNK):
            nbytes = min(CHUNK, end - at)
            chunks.append(Stored("chunk", path, at, nbytes, torch.uint8, (nbytes,)))
    chunks = chunks[: _MOST_READ // CHUNK]
    if not chunks:
        return NOMINAL.read_rate, 0.0, NOMINAL.row_s
    # Interference only slows reading down, so the fastest part is closest to the disk's rate.
    rate, cpu_s = max(_read_ahead(chunks[i::_PARTS]) for i in range(_PARTS) if chunks[i::_PARTS])
    some = [chunks[i * (len(chunks) - 1) // 7] for i in range(8)]
    view = bytes_of(pages(PAGE).fill_(1))
    with ExitStack() as files:
        opened = {path: DirectFile(path) for path in {chunk.path for chunk in some}}
        for file in opened.values():
            files.callback(file.close)

        def read_pages() -> None:
            for chunk in some:
                opened[chunk.path].read(view, chunk.offset, min(PAGE, chunk.nbytes))

        row_s = _usual(read_pages, 2) / len(some)
    return rate, cpu_s, row_s + 2e-5


def _read_ahead(chunks: list[Stored]) -> tuple[float, float]:
    """Return bytes/s of a stream of these chunks, and processor time per byte."""
    layouts = [lay_out(chunk.name, [chunk]) for chunk in chunks]
    # Room for many more of a small file's chunks would take long to fill.
    stream = Stream(layouts, _RING * max(layout.nbytes for layout in layouts), 2, Trace())
    try:
        start, cpu = perf_counter(), process_time()
        for index in range(len(layouts)):
            stream.take(index)
            stream.give_back()
            if perf_counter() - start > _READ_S / _PARTS:
                break
        seconds = perf_counter() - start
        return stream.bytes_read / seconds, (process_time() - cpu) / max(1, stream.bytes_read)
    finally:
        stream.close()


def _writing(folder: Path) -> float | None:
    """Return bytes/s; None if the folder has no room for the trial, which does not rule out smaller uses."""
    scratch = Scratch(folder, None)
    try:
        data = torch.ones(_WRITTEN // 4, dtype=torch.uint8)
        begin = perf_counter()
        for _ in range(4):
            scratch.write(data, scratch.reserve(data.nbytes))
        os.fdatasync(scratch._fd)
        return _WRITTEN / (perf_counter() - begin)
    except TierFailed:
        return None
    finally:
        scratch.close()


def _copying() -> float:
    a = torch.ones(_WEIGHTS // 4)
    b = torch.ones_like(a)
    return a.nbytes / _usual(lambda: b.copy_(a))


def _products(dtype: torch.dtype) -> tuple[tuple[int, float], ...]:
    depth, width = 2048, 2048
    count = max(1, _WEIGHTS // (depth * width * dtype.itemsize))
    weights = [torch.full((width, depth), 0.01, dtype=dtype) for _ in range(count)]
    found = []
    for rows in ROWS:
        x = torch.full((rows, depth), 0.5, dtype=dtype)
        some = weights if rows < 64 else weights[: max(1, count // (rows // 32))]

        def multiply(x: torch.Tensor = x, some: list[torch.Tensor] = some) -> None:
            for weight in some:
                linear(x, weight)

        multiply()  # a probe, where torch's products are made invariant
        found.append((rows, _usual(multiply) / (len(some) * depth * width)))
    return tuple(found)


def _attending(dtype: torch.dtype) -> tuple[float, float]:
    """Return bytes/s in a decode step, and seconds per pair of query and key in a prompt."""
    sequences, blocks, tokens, heads, width = 8, 32, 16, 4, 128
    store = KVStore(
        [LayerShape(heads, width, width)],
        1 + sequences * blocks,
        tokens,
        dtype,
        torch.device("cpu"),
    )
    for k, v in store.layers:
        k.fill_(0.01)
        v.fill_(0.01)
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks) + 1
    options = AttentionOptions(scale=0.1)
    context = blocks * tokens
    lens = torch.full((sequences,), context, dtype=torch.int32)

    def attend(queries: int, count: int) -> float:
        q = torch.full((queries * count, heads * 2, width), 0.1, dtype=dtype)
        starts = torch.arange(0, queries * count + 1, queries, dtype=torch.int32)
        batch = AttentionBatch(starts, lens[:count], tables[:count])
        return _usual(lambda: store.attend(0, q, batch, options))

    read = sequences * context * heads * 2 * width * dtype.itemsize
    pairs = context * context / 2 * heads * 2 * 2 * width
    return read / attend(1, sequences), attend(context, 1) / pairs


def _sampling() -> float:
    rows, vocab = 8, 32_768
    logits = torch.linspace(-3, 3, rows * vocab).view(rows, vocab)
    plan = SamplePlan(
        [
            SampleRow(params=SamplingParams(), seed=1, sample_index=i, position=5)
            for i in range(rows)
        ]
    )
    return _usual(lambda: sample_rows(logits, plan)) / (rows * vocab)


def _calling() -> float:
    """Measure the seconds that the calls of one layer take, whatever its size.

    Here some forty, which is a fifth of a layer of transformers with its modules and views (measured).
    """
    x, weight = torch.ones(2, 64), torch.ones(64, 64)

    def layer() -> None:
        for _ in range(8):
            linear(x, weight)
        for _ in range(32):
            x * x

    layer()
    return 5 * _usual(layer)
