"""Background reads and writes: reader threads, ring buffers, and copies to a device with its own memory."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from verbatim.common.shield import Shield
from verbatim.errors import OutOfBlocks
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import CHUNK, PAGE, OpenFiles, bytes_of, pages, round_to_pages
from verbatim.weights.lazy import Stored


class Lane:
    """A stream of copies to a device.

    Args:
        device: a GPU; or the CPU, for tests, in which case copies are ordinary ones.

    Attributes:
        buffer: the memory that `staging_buffer` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: list[Tensor] = []  # pinned while they are referenced
        self.buffer = pages(0)

    def mark(self) -> Any:
        """Record and return an event after everything that this thread has launched."""
        stream = self._stream
        return None if stream is None else torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Run the block's copies after the event `mark`, and wait for them at the end."""
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

    def keep(self, data: Tensor, *, on_device: bool) -> Tensor:
        """Return a copy of a tensor on the device if `on_device`, else in RAM, pinned until `release`."""
        flat = data.contiguous().view(-1).view(torch.uint8)
        if on_device:
            memory = self.memory(flat.nbytes)
        else:
            memory = staging(flat.nbytes, self.device)
            self._pinned.append(memory)
        return memory.copy_(flat).view(data.dtype).view(data.shape)

    def staging_buffer(self, nbytes: int) -> Tensor:
        """Return a buffer in RAM, always the same memory, for copies by one thread at a time."""
        if self.buffer.nbytes < nbytes:
            self.buffer = pages(0)  # freed before more is allocated
            self.buffer = staging(round_to_pages(nbytes + nbytes // 8), self.device)
        return self.buffer[:nbytes]

    def release(self) -> None:
        """Unpin the tensors kept in RAM, and free the buffer."""
        self._pinned.clear()
        self.buffer = pages(0)

    def memory(self, nbytes: int) -> Tensor:
        """Return `nbytes` of the device's memory, uint8."""
        with torch.inference_mode(False):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                raise OutOfBlocks(
                    f"{nbytes} bytes can't be allocated on {self.device}: lower gpu="
                ) from None


def staging(nbytes: int, device: torch.device | None) -> Tensor:
    """Return page-aligned zeros in RAM; for a GPU they are pinned while this tensor exists.

    Args:
        device: device to which the memory is copied; None: none.
    """
    memory = pages(nbytes)
    if device is not None and device.type == "cuda" and nbytes:
        cuda: Any = torch.cuda.cudart()
        # torch would round pinned memory up to powers of two. If the system refuses to pin more, copies are
        # slower.
        with torch.cuda.device(device):
            if int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, 0)) == 0:
                weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
            else:
                with suppress(RuntimeError):  # clears the error, which the next launch would raise
                    torch.ones(1, device=device)
    return memory


READERS = 2  # threads that read weights, or experts
_T = TypeVar("_T")


class Readers:
    """Threads that run jobs from one queue in the order of submission, started by the first job.

    Not a ThreadPoolExecutor: that accepts no jobs after the main thread has ended, although other threads and
    `atexit` functions may still generate, and a finalizer that closes another model could deadlock on its
    lock, held by the same thread. Callers that wait for a job defer Ctrl-C (`Shield`), which could leave
    locks locked.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., _T], *args: Any) -> Future[_T]:
        """Queue `work(*args)`, and return its future."""
        while len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=[self._jobs], name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        job = Future[_T]()
        self._jobs.put((job, partial(work, *args)))
        return job

    def shutdown(self) -> None:
        """End the threads after the submitted jobs. May be called again."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # a finalizer may run in one of them
                thread.join()


def _work(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, work = entry
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except BaseException as error:  # raised again in the thread that waits
                job.set_exception(error)
        del entry, job, work  # an idle thread keeps nothing alive


@dataclass(slots=True, eq=False)
class Use:
    """Data that is read into memory, used there, and perhaps written back.

    Attributes:
        name: name in the trace.
        nbytes: size in memory.
        reads: functions that fill the memory, uint8 in whole pages, and return the bytes read. Each runs as
            a separate job.
        after: uses that must be written back before this one is read.
        places: offset in memory of each tensor that is read from a file.
    """

    name: str
    nbytes: int
    reads: Sequence[Callable[[Tensor], int]]
    after: list[Use] = field(default_factory=list)
    places: dict[Stored, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Region:
    """The part of the ring for the data of a use."""

    use: Use
    at: int  # offset in the ring
    jobs: list[Future[int]] = field(default_factory=list)  # each returns the bytes read


class Ring:
    """A buffer that other threads fill ahead of use, in a given order of uses.

    The first region is in use, the others come next. The computing thread submits reads as far as there is
    room. If a use is taken out of order, the ring is emptied, and reading continues from there.

    Args:
        what: name of the data in the trace, such as "weights".
        num_threads: number of reader threads; 1 if data is written back, so that no read overtakes an
            earlier write.
        ahead: whether to read ahead; False: read each use when it is taken, and wait for each write.
        device: the device to which the data is copied from RAM; None: no GPU.
        lane: copies to the device that has the ring in its memory; None: the ring is in RAM.
    """

    def __init__(
        self,
        what: str,
        num_threads: int,
        trace: Trace,
        *,
        ahead: bool = True,
        device: torch.device | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._what, self._num_threads, self._trace = what, num_threads, trace
        self._ahead, self._device, self._lane = ahead, device, lane
        self._readers: Readers | None = None  # None: not started
        self._regions: deque[_Region] = deque()  # the first is in use, or is used next
        self._order: deque[Use] = deque()  # uses to read, the next one first
        self._repeats = False
        self._finished: set[Use] = set()  # released uses
        self._writes: list[Future[int]] = []
        self._shield = Shield()  # Ctrl-C could leave regions without their reads
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of the ring in bytes."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self, nbytes: int, *, spare: int = 0) -> Tensor:
        """Return the ring's memory, at least `nbytes` of uint8, page-aligned; nothing may be in use.

        Args:
            spare: further bytes to allocate if memory must be allocated.
        """
        assert not self._regions
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # freed before the new memory is allocated
            size = round_to_pages(nbytes + spare)
            # Filled, since page faults would slow down the first reads.
            self._memory = (
                staging(size, self._device).fill_(0)
                if self._lane is None
                else self._lane.memory(size)
            )
        return self._memory

    def follow(self, uses: Iterable[Use], *, repeat: bool) -> None:
        """Start to read `uses` ahead in this order; with `repeat`, over and over."""
        with self._shield.up():
            self.drop()
            self._order, self._repeats = deque(uses), repeat
            self._finished, self._writes = set(), []
            if self._readers is None:
                self._readers = Readers(self._num_threads, f"verbatim-{self._what}")
            self._fill()

    def take(self, use: Use) -> Tensor:
        """Wait until a use is read, deferring Ctrl-C; return its memory (uint8), valid until `release`.

        Raises:
            TierFailed: a read or an earlier write failed.
        """
        begin = perf_counter()
        with self._shield.up():
            if not self._regions or self._regions[0].use is not use:
                self.drop()
                self._check_writes()
                self._skip_to(use)
                self._submit(0)
                self._fill()
            region = self._regions[0]
            try:
                nbytes = sum(job.result() for job in region.jobs)
            except BaseException:
                self.drop()
                raise
        self._trace.add("wait", self._what, use.name, begin, nbytes)
        assert self._memory is not None
        return self._memory[region.at : region.at + use.nbytes]

    def release(self, write: Callable[[Tensor], int] | None = None) -> None:
        """End the use that was taken.

        Args:
            write: writes the data back, in the reader thread, and returns the bytes written.

        Raises:
            TierFailed: the write is known to have failed.
        """
        begin = perf_counter()
        with self._shield.up():
            region = self._regions.popleft()
            if write is not None:
                assert self._readers is not None
                job = self._readers.submit(self._move, "write", region, write, self._mark())
                self._writes.append(job)
                if self._writes[-1].done() or not self._ahead:
                    self._writes[-1].result()
            self._finished.add(region.use)
            self._fill()
        if write is not None:
            self._trace.add("store", self._what, region.use.name, begin)

    def finish(self) -> None:
        """Wait until everything is written; raise TierFailed if a write failed."""
        begin = perf_counter()
        with self._shield.up():
            wait(self._writes)
        self._trace.add("flush", self._what, self._what, begin)
        self._check_writes()

    def drop(self) -> None:
        """Empty the ring: cancel or await its reads, and await all writes. May be called again."""
        with self._shield.up():
            wait([*self._cancel_reads(), *self._writes])

    def close(self) -> None:
        """End the threads and free the memory, until the next use. May be called again."""
        with self._shield.up():
            self._cancel_reads()
            if self._readers is not None:
                self._readers.shutdown()
            self._readers, self._memory, self._writes = None, None, []

    def _cancel_reads(self) -> list[Future[int]]:
        """Put all regions back in the order, and cancel reads that have not begun; return all reads."""
        jobs = [job for region in self._regions for job in region.jobs]
        for job in jobs:
            job.cancel()
        while self._regions:
            if self._repeats:
                self._order.pop()
            self._order.appendleft(self._regions.pop().use)
        return jobs

    def _check_writes(self) -> None:
        for write in self._writes:
            write.result()

    def _skip_to(self, use: Use) -> None:
        """Continue the order with a use, which may not be in it."""
        if use not in self._order:
            self._order.appendleft(use)
        while self._order[0] is not use:
            skipped = self._order.popleft()
            if self._repeats:
                self._order.append(skipped)

    def _fill(self) -> None:
        """Submit the next reads, while the ring has room and the uses in `after` were released."""
        while self._ahead and self._order:
            use = self._order[0]
            at = self._room(round_to_pages(use.nbytes))
            if at is None or not self._finished.issuperset(use.after):
                return
            self._submit(at)

    def _submit(self, at: int) -> None:
        use = self._order.popleft()
        if self._repeats:
            self._order.append(use)
        assert at + use.nbytes <= self.nbytes and self._readers is not None
        region = _Region(use, at)
        self._regions.append(region)
        self._finished.discard(use)  # if it repeats, uses after it must wait again
        mark = self._mark()  # the device may have used this memory until now
        for read in use.reads:
            region.jobs.append(self._readers.submit(self._move, "read", region, read, mark))

    def _mark(self) -> Any:
        return None if self._lane is None else self._lane.mark()

    def _room(self, nbytes: int) -> int | None:
        """Return the offset of `nbytes` free bytes, in whole pages; None if there is no room.

        The end of the memory opposite to the last region is tried first, so two regions with a total size of
        at most the memory always fit.
        """
        if not self._regions:
            return 0
        occupied = [
            (region.at, region.at + round_to_pages(region.use.nbytes)) for region in self._regions
        ]
        (begin, end), top = occupied[-1], self.nbytes - nbytes
        near_bottom = begin < self.nbytes - end
        for at in (*((top, 0) if near_bottom else (0, top)), *(end for _, end in occupied)):
            if 0 <= at <= top and all(at + nbytes <= b or e <= at for b, e in occupied):
                return at
        return None

    def _move(self, kind: str, region: _Region, move: Callable[[Tensor], int], mark: Any) -> int:
        """Run one read or write of a region, in a reader thread; return the bytes moved."""
        assert self._memory is not None
        begin = perf_counter()
        memory = self._memory[region.at : region.at + round_to_pages(region.use.nbytes)]
        with nullcontext() if self._lane is None else self._lane.after(mark):
            nbytes = move(memory)
        self._trace.add(kind, self._what, region.use.name, begin, nbytes)
        return nbytes


class Pages(NamedTuple):
    """A run of whole pages of a file, read at once."""

    path: Path
    offset: int  # in the file
    nbytes: int
    at: int  # offset in the region

    def read(self, files: OpenFiles, region: Tensor) -> int:
        """Read the pages into a region; return the bytes read."""
        view = bytes_of(region[self.at : self.at + self.nbytes])
        return files.of(self.path).read([view], self.offset)


def use_of(name: str, tensors: Iterable[Stored], files: OpenFiles) -> Use:
    """Return a use that reads tensors; their files are opened, or checked, here.

    Raises:
        TierFailed: a file can't be opened, or has changed.
    """
    chunks, places = lay_out(tensors)
    for stored in places:
        files.of(stored.path, stored.stamp)
    reads = [partial(chunk.read, files) for chunk in chunks]
    return Use(name, sum(chunk.nbytes for chunk in chunks), reads, places=places)


def lay_out(tensors: Iterable[Stored]) -> tuple[list[Pages], dict[Stored, int]]:
    """Return the runs of pages to read, in pieces, and the offset of each tensor in memory.

    Neighbours in a file are read together; most layers are one run of pages.
    """
    runs, places, nbytes = list[Pages](), dict[Stored, int](), 0
    for stored in sorted(dict.fromkeys(tensors), key=lambda t: (str(t.path), t.offset)):
        begin, end = stored.offset // PAGE * PAGE, round_to_pages(stored.offset + stored.nbytes)
        run = runs[-1] if runs else None
        if run is None or run.path != stored.path or begin > run.offset + run.nbytes:
            runs.append(run := Pages(stored.path, begin, 0, nbytes))
        more = max(0, end - run.offset - run.nbytes)
        runs[-1] = run._replace(nbytes=run.nbytes + more)
        nbytes += more
        places[stored] = run.at + stored.offset - run.offset
    chunks = [
        Pages(run.path, run.offset + begin, min(CHUNK, run.nbytes - begin), run.at + begin)
        for run in runs
        for begin in range(0, run.nbytes, CHUNK)
    ]
    return chunks, places
