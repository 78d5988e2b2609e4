"""Memory into which weights, K and V are read ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from verbatim.placement.offload.prefetch import Job, Prefetcher
from verbatim.placement.offload.trace import Trace
from verbatim.shield import Shield
from verbatim.weights.files import CHUNK, PAGE, OpenFiles, bytes_of, pages, up
from verbatim.weights.lazy import Stored


@dataclass(slots=True, eq=False)
class Use:
    """Data that is read into memory, used there, and perhaps written back.

    Attributes:
        name: shown in the trace.
        nbytes: of memory.
        reads: fill it, each in a job of its own; each returns the bytes that it read. At least one.
        after: uses whose data must be written before this one's is read.
    """

    name: str
    nbytes: int
    reads: list[Callable[[memoryview], int]]
    after: list[Use] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Region:
    """Data in the ring, read or about to be."""

    use: Use
    place: int  # in the order of uses
    at: int  # in the ring
    jobs: list[Job] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # bytes of each read
    dropped: bool = False


class Ring:
    """Memory that is filled ahead, in a given order of uses, by other threads.

    The first region of the ring is in use, the others come next. The computing thread submits all reads: as
    many as the ring has room for. Where something else is used than what comes next, the ring is emptied,
    and reading goes on from there.

    Args:
        what: "weights" or "K and V", for the trace.
        readers: not shared; without threads, each use is read when it is taken. If data is written back,
            there is at most one thread, which reads nothing before what was submitted earlier is written.
        trace: records reads, writes and waits.
    """

    def __init__(self, what: str, readers: Prefetcher, trace: Trace) -> None:
        self._what, self._readers, self._trace = what, readers, trace
        self._regions: deque[_Region] = deque()  # the first is the next to be used, or in use
        self._uses: list[Use] = []
        self._repeats = False
        self._next: int | None = None  # place of the next region; None: unknown
        self._last = -1  # place of the use that was taken last
        self._over: set[Use] = set()  # uses that ended
        self._writes: list[Job] = []
        self._shield = Shield()  # Ctrl-C could leave regions without their reads
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes of what was taken."""
        return self._trace.nbytes(f"wait {self._what}")

    def reserve(self, nbytes: int, *, spare: int = 0) -> Tensor:
        """Return at least `nbytes`, uint8, aligned to a page; nothing may be in use.

        Args:
            spare: further bytes, where memory must be allocated.
        """
        assert not self._regions
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # before more is allocated
            # Page faults would slow the first reads down.
            self._memory = pages(up(nbytes + spare)).fill_(0)
        return self._memory

    def follow(self, uses: Iterable[Use], *, repeat: bool) -> None:
        """Read ahead in this order, which `repeat` begins anew at its end."""
        with self._shield.up():
            self.drop()
            self._uses, self._repeats = list(uses), repeat
            self._next, self._last = 0, -1
            self._over, self._writes = set(), []
            self._readers.start()
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
            for job in region.jobs:
                job.wait()
                if job.error is not None:
                    self.drop()
                    raise job.error
        self._trace.add("wait", self._what, use.name, begin, sum(region.done))
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
                job = Job(partial(self._write, region, write))
                self._writes.append(job)
                self._readers.submit(job)
                if job.ended and job.error is not None:
                    raise job.error
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
        self._readers.finish()
        self._trace.add("flush", self._what, self._what, begin)
        self._check_writes()

    def drop(self) -> None:
        """Empty the ring, and wait for what is read or written; a second call is harmless."""
        self._empty(self._readers.finish)

    def close(self) -> None:
        """End the threads and free the memory, until it is used again; a second call does nothing."""
        self._empty(self._readers.stop)
        self._memory = None

    def _empty(self, end: Callable[[], object]) -> None:
        """Skip what is not read yet, let `end` wait for the rest, and forget all regions."""
        with self._shield.up():
            for region in self._regions:
                region.dropped = True
            end()
            self._regions.clear()
            self._next = None

    def _check_writes(self) -> None:
        for write in self._writes:
            if write.error is not None:
                raise write.error

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
        while self._readers.num_threads and self._next is not None:
            if self._next == len(self._uses):
                return
            use = self._uses[self._next]
            at = self._room(up(use.nbytes))
            if at is None or not self._over.issuperset(use.after):
                return
            self._submit(self._next, at)

    def _submit(self, place: int, at: int) -> None:
        use = self._uses[place]
        assert at + use.nbytes <= self.nbytes
        region = _Region(use, place, at)
        self._regions.append(region)
        self._over.discard(use)  # if it is used once more, what reads its data waits once more
        self._next = (place + 1) % len(self._uses) if self._repeats else place + 1
        for read in use.reads:
            region.jobs.append(Job(partial(self._read, region, read)))
            self._readers.submit(region.jobs[-1])

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

    def _view(self, region: _Region) -> memoryview:
        assert self._memory is not None
        return bytes_of(self._memory)[region.at : region.at + up(region.use.nbytes)]

    def _read(self, region: _Region, read: Callable[[memoryview], int]) -> None:
        if not region.dropped:
            begin = perf_counter()
            nbytes = read(self._view(region))
            region.done.append(nbytes)
            self._trace.add("read", self._what, region.use.name, begin, nbytes)

    def _write(self, region: _Region, write: Callable[[memoryview], int]) -> None:
        begin = perf_counter()
        nbytes = write(self._view(region))
        self._trace.add("write", self._what, region.use.name, begin, nbytes)


class Run(NamedTuple):
    """Whole pages of one file that are read together, or in several chunks."""

    path: Path
    offset: int  # in the file
    nbytes: int  # whole pages
    needed: int  # without bytes beyond the end of the file
    at: int  # in the region


@dataclass(slots=True)
class Layout:
    """The layout of several tensors in a region of memory."""

    runs: list[Run] = field(default_factory=list)
    places: dict[Stored, int] = field(default_factory=dict)  # of its first byte
    nbytes: int = 0

    def use(self, name: str, files: OpenFiles) -> Use:
        """Return the use that reads them, from open files, which are checked here.

        Raises:
            TierFailed: a file can't be opened, or has changed.
        """
        for stored in self.places:
            files.of(stored.path, stored.stamp)
        chunks = [(run, at) for run in self.runs for at in range(0, run.nbytes, CHUNK)]
        return Use(name, self.nbytes, [partial(_read_chunk, files, *chunk) for chunk in chunks])


def lay_out(tensors: Iterable[Stored]) -> Layout:
    """Lay tensors out so that neighbours in a file are read together; most layers are one run."""
    layout = Layout()
    for stored in sorted(dict.fromkeys(tensors), key=lambda t: (str(t.path), t.offset)):
        begin, end = stored.offset // PAGE * PAGE, up(stored.offset + stored.nbytes)
        last = layout.runs[-1] if layout.runs else None
        if last and last.path == stored.path and begin <= last.offset + last.nbytes:
            more = max(0, end - last.offset - last.nbytes)
            needed = max(last.needed, stored.offset + stored.nbytes - last.offset)
            run = last._replace(nbytes=last.nbytes + more, needed=needed)
            layout.runs[-1] = run
        else:
            more = end - begin
            needed = stored.offset + stored.nbytes - begin
            run = Run(stored.path, begin, more, needed, layout.nbytes)
            layout.runs.append(run)
        layout.nbytes += more
        layout.places[stored] = run.at + stored.offset - run.offset
    return layout


def _read_chunk(files: OpenFiles, run: Run, begin: int, memory: memoryview) -> int:
    nbytes = min(CHUNK, run.nbytes - begin)
    view = memory[run.at + begin : run.at + begin + nbytes]
    return files.of(run.path).read(view, run.offset + begin, min(nbytes, run.needed - begin))
