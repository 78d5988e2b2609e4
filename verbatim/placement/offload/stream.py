"""Threads that read ahead and write behind, and memory into which weights, K and V are read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from verbatim.placement.offload.lane import Lane, staging
from verbatim.placement.offload.trace import Trace
from verbatim.shield import Shield
from verbatim.weights.files import CHUNK, PAGE, OpenFiles, bytes_of, up
from verbatim.weights.lazy import Stored

READERS = 2  # threads that read weights, or experts
_T = TypeVar("_T")


class Readers:
    """Threads that take jobs from one queue, in the order of submission, and begin with the first.

    They are not a ThreadPoolExecutor's, which take no jobs once the main thread has ended, although other
    threads and functions of `atexit` may still generate, and whose lock a finalizer that closes another model
    would wait for while this thread holds it. Waiting for a job takes locks, which Ctrl-C could leave locked:
    it is deferred meanwhile (`Shield`).
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., _T], *args: Any) -> Future[_T]:
        """Queue a job."""
        while len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=[self._jobs], name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        job = Future[_T]()
        self._jobs.put((job, partial(work, *args)))
        return job

    def shutdown(self) -> None:
        """End the threads after the submitted jobs; a second call does nothing."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may run in it
                thread.join()


def _work(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (entry := jobs.get()) is not None:
        job, work = entry
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except BaseException as error:  # raised by the thread that waits
                job.set_exception(error)
        del entry, job, work  # what they refer to is freed while nothing is to do


@dataclass(slots=True, eq=False)
class Use:
    """Data that is read into memory, used there, and perhaps written back.

    Attributes:
        name: shown in the trace.
        nbytes: of memory.
        reads: fill it, each in a job of its own; each returns the bytes that it read. Memory of a device is
            passed as a tensor.
        after: uses whose data must be written before this one's is read.
    """

    name: str
    nbytes: int
    reads: list[Callable[[Any], int]]
    after: list[Use] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Region:
    """Data in the ring, read or about to be."""

    use: Use
    place: int  # in the order of uses
    at: int  # in the ring
    jobs: list[Future[int]] = field(default_factory=list)  # return the bytes that they read


class Ring:
    """Memory that is filled ahead, in a given order of uses, by other threads.

    The first region of the ring is in use, the others come next. The computing thread submits all reads: as
    many as the ring has room for. Where something else is used than what comes next, the ring is emptied,
    and reading goes on from there.

    Args:
        what: "weights" or "K and V", for the trace.
        num_threads: if data is written back, there is one, which reads nothing before what was submitted
            earlier is written.
        trace: records reads, writes and waits.
        ahead: False reads each use when it is taken, and waits until it is written.
        device: on which the data is used; None: the CPU.
        lane: makes the copies to the device, whose memory this is; None: it is RAM.
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
        self._readers: Readers | None = None  # until the first use
        self._regions: deque[_Region] = deque()  # the first is the next to be used, or in use
        self._uses: list[Use] = []
        self._repeats = False
        self._next: int | None = None  # place of the next region; None: unknown
        self._last = -1  # place of the use that was taken last
        self._over: set[Use] = set()  # uses that ended
        self._writes: list[Future[int]] = []
        self._shield = Shield()  # Ctrl-C could leave regions without their reads
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return 0 if self._memory is None else self._memory.nbytes

    def reserve(self, nbytes: int, *, spare: int = 0) -> Tensor:
        """Return at least `nbytes`, uint8, aligned to a page; nothing may be in use.

        Args:
            spare: further bytes, where memory must be allocated.
        """
        assert not self._regions
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # before more is allocated
            size = up(nbytes + spare)
            # Page faults would slow the first reads down.
            self._memory = (
                staging(size, self._device).fill_(0)
                if self._lane is None
                else self._lane.memory(size)
            )
        return self._memory

    def follow(self, uses: Iterable[Use], *, repeat: bool) -> None:
        """Read ahead in this order, which `repeat` begins anew at its end."""
        with self._shield.up():
            self.drop()
            self._uses, self._repeats = list(uses), repeat
            self._next, self._last = 0, -1
            self._over, self._writes = set(), []
            if self._readers is None:
                self._readers = Readers(self._num_threads, f"verbatim-{self._what}")
            self._fill()

    def take(self, use: Use) -> Tensor:
        """Return its memory, uint8, once it is read; in use until `give_back`.

        Ctrl-C is deferred until then.

        Raises:
            TierFailed: it could not be read, or something before it could not be written.
        """
        begin = perf_counter()
        with self._shield.up():
            if not self._regions or self._regions[0].use is not use:
                self.drop()
                self._check_writes()
                self._submit(self._place_of(use), 0)
                self._fill()
            region = self._regions[0]
            self._last = region.place
            try:
                nbytes = sum(job.result() for job in region.jobs)
            except BaseException:
                self.drop()
                raise
        self._trace.add("wait", self._what, use.name, begin, nbytes)
        assert self._memory is not None
        return self._memory[region.at : region.at + use.nbytes]

    def give_back(self, write: Callable[[memoryview], int] | None = None) -> None:
        """End the use of what was taken.

        Args:
            write: writes it back, in the thread that reads, and returns the bytes written.

        Raises:
            TierFailed: it could not be written, as far as that is known already.
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
            self._over.add(region.use)
            self._fill()
        if write is not None:
            self._trace.add("store", self._what, region.use.name, begin)

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            TierFailed: something can't be.
        """
        begin = perf_counter()
        with self._shield.up():
            wait(self._writes)
        self._trace.add("flush", self._what, self._what, begin)
        self._check_writes()

    def drop(self) -> None:
        """Empty the ring, and wait for what is read or written; a second call is harmless."""
        with self._shield.up():
            wait([*self._forget(), *self._writes])

    def close(self) -> None:
        """End the threads and free the memory, until it is used again; a second call does nothing."""
        with self._shield.up():
            self._forget()
            if self._readers is not None:
                self._readers.shutdown()
            self._readers, self._memory, self._writes = None, None, []

    def _forget(self) -> list[Future[int]]:
        """Forget all regions; return their reads, of which those that have not begun are canceled."""
        jobs = [job for region in self._regions for job in region.jobs]
        for job in jobs:
            job.cancel()
        self._regions.clear()
        self._next = None
        return jobs

    def _check_writes(self) -> None:
        for write in self._writes:
            write.result()

    def _place_of(self, use: Use) -> int:
        """Return the next position of a use in the order; a new one is appended."""
        count = len(self._uses)
        for step in range(1, count + 1):
            place = (self._last + step) % count
            if self._uses[place] is use:
                return place
        self._uses.append(use)
        return count

    def _fill(self) -> None:
        """Submit the next reads, as far as the ring has room and what they read was written."""
        while self._ahead and self._next is not None:
            if self._next == len(self._uses):
                return
            use = self._uses[self._next]
            at = self._room(up(use.nbytes))
            if at is None or not self._over.issuperset(use.after):
                return
            self._submit(self._next, at)

    def _submit(self, place: int, at: int) -> None:
        use = self._uses[place]
        assert at + use.nbytes <= self.nbytes and self._readers is not None
        region = _Region(use, place, at)
        self._regions.append(region)
        self._over.discard(use)  # if it is used once more, what reads its data waits once more
        self._next = (place + 1) % len(self._uses) if self._repeats else place + 1
        mark = self._mark()  # the region may have been used until now
        for read in use.reads:
            region.jobs.append(self._readers.submit(self._move, "read", region, read, mark))

    def _mark(self) -> Any:
        return None if self._lane is None else self._lane.mark()

    def _room(self, nbytes: int) -> int | None:
        """Return an offset, in whole pages, for a region beside those in use; None if there is no room.

        The end of the memory opposite to the last region comes first: so two regions that together are no
        larger than the memory always fit.
        """
        if not self._regions:
            return 0
        taken = [(region.at, region.at + up(region.use.nbytes)) for region in self._regions]
        (begin, end), top = taken[-1], self.nbytes - nbytes
        near_bottom = begin < self.nbytes - end
        for at in (*((top, 0) if near_bottom else (0, top)), *(end for _, end in taken)):
            if 0 <= at <= top and all(at + nbytes <= b or e <= at for b, e in taken):
                return at
        return None

    def _move(
        self, kind: str, region: _Region, move: Callable[[Any], int], mark: Any = None
    ) -> int:
        """Read or write a region, or a part of it, in a thread; return the bytes moved."""
        assert self._memory is not None
        begin = perf_counter()
        memory = self._memory[region.at : region.at + up(region.use.nbytes)]
        if self._lane is None:
            nbytes = move(bytes_of(memory))
        else:
            with self._lane.behind(mark):
                nbytes = move(memory)
        self._trace.add(kind, self._what, region.use.name, begin, nbytes)
        return nbytes


class Pages(NamedTuple):
    """Whole pages of one file that are read at once."""

    path: Path
    offset: int  # in the file
    nbytes: int
    at: int  # in the region

    def read(self, files: OpenFiles, region: memoryview) -> int:
        """Read it into a region; return the bytes read."""
        view = region[self.at : self.at + self.nbytes]
        return files.of(self.path).read([view], self.offset)


@dataclass(slots=True)
class Layout:
    """The layout of several tensors in a region of memory."""

    chunks: list[Pages] = field(default_factory=list)
    places: dict[Stored, int] = field(default_factory=dict)  # of its first byte
    nbytes: int = 0

    def use(self, name: str, files: OpenFiles) -> Use:
        """Return the use that reads them, from open files, which are checked here.

        Raises:
            TierFailed: a file can't be opened, or has changed.
        """
        for stored in self.places:
            files.of(stored.path, stored.stamp)
        return Use(name, self.nbytes, [partial(chunk.read, files) for chunk in self.chunks])


def lay_out(tensors: Iterable[Stored]) -> Layout:
    """Lay tensors out so that neighbours in a file are read together; most layers are one run of pages."""
    layout, runs = Layout(), list[Pages]()
    for stored in sorted(dict.fromkeys(tensors), key=lambda t: (str(t.path), t.offset)):
        begin, end = stored.offset // PAGE * PAGE, up(stored.offset + stored.nbytes)
        run = runs[-1] if runs else None
        if run is None or run.path != stored.path or begin > run.offset + run.nbytes:
            runs.append(run := Pages(stored.path, begin, 0, layout.nbytes))
        more = max(0, end - run.offset - run.nbytes)
        runs[-1] = run._replace(nbytes=run.nbytes + more)
        layout.nbytes += more
        layout.places[stored] = run.at + stored.offset - run.offset
    layout.chunks = [
        Pages(run.path, run.offset + begin, min(CHUNK, run.nbytes - begin), run.at + begin)
        for run in runs
        for begin in range(0, run.nbytes, CHUNK)
    ]
    return layout
