"""A ring of staging buffers for weights, filled from files ahead of their use."""

from __future__ import annotations

from collections import deque
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

    name: str
    runs: list[Run] = field(default_factory=list)
    places: dict[Stored, int] = field(default_factory=dict)  # of its first byte
    nbytes: int = 0


def lay_out(name: str, tensors: list[Stored]) -> Layout:
    """Lay tensors out so that neighbours in a file are read together; most layers are one run."""
    layout = Layout(name)
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


@dataclass(slots=True, eq=False)
class _Region:
    """A layout in the ring, read or about to be."""

    index: int
    place: int  # in the order of use
    at: int  # in the ring
    nbytes: int
    jobs: list[Job] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # bytes of each read
    dropped: bool = False


class Stream:
    """A ring of memory into which layouts are read ahead, in a cyclic order.

    The first layout of the ring is in use, the others come next. The computing thread submits all reads: as
    many layouts as the ring has room for.

    Args:
        layouts: in the order of use.
        capacity: bytes of the ring; at least the largest layout's.
        num_threads: readers; 0 reads a layout when it is taken.
        trace: records reads and waits.
        files: of all layouts, closed by their owner; None: opened and closed here.
    """

    def __init__(
        self,
        layouts: list[Layout],
        capacity: int,
        num_threads: int,
        trace: Trace,
        files: OpenFiles | None = None,
    ) -> None:
        assert all(layout.nbytes <= capacity for layout in layouts)
        self.layouts = layouts
        self.capacity = up(capacity)
        self._trace = trace
        self._files, self._is_shared = files or OpenFiles(), files is not None
        self._readers = Prefetcher("verbatim-reader", num_threads)
        self._regions: deque[_Region] = deque()  # the first is the next to be used, or in use
        self._order = list(range(len(layouts)))
        self._next = 0 if layouts else -1  # place in the order of the next region; -1: unknown
        self._last = -1  # place of the layout that was taken last
        self._shield = Shield()  # Ctrl-C could leave regions without their reads
        self._ring: Tensor | None = None
        try:
            # Page faults would slow the first reads down.
            self._ring = pages(self.capacity).fill_(0)
            self._view = bytes_of(self._ring)
            for layout in layouts:
                for stored in layout.places:
                    self._files.of(stored.path, stored.stamp)
            self._readers.start()
            if num_threads:
                self._fill()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes of the layouts that were taken."""
        return self._trace.nbytes("wait weights")

    def follow(self, order: list[int]) -> None:
        """Read ahead in this cyclic order of layouts, from the next one that is taken on."""
        with self._shield.up():
            self._drop()
            self._order = order
            self._last = -1

    def take(self, index: int) -> Tensor:
        """Return the memory of a layout, uint8, once it is read; in use until `give_back`.

        Ctrl-C is deferred until then.

        Raises:
            TierFailed: it could not be read.
        """
        begin = perf_counter()
        with self._shield.up():
            if not self._regions or self._regions[0].index != index:
                self._drop()
                self._next = self._place_of(index)
                self._fill()
            region = self._regions[0]
            self._last = region.place
            for job in region.jobs:
                job.wait()
                if job.error is not None:
                    self._drop()
                    raise job.error
        nbytes = sum(region.done)
        self._trace.add("wait", "weights", self.layouts[index].name, begin, nbytes)
        assert self._ring is not None
        return self._ring[region.at : region.at + region.nbytes]

    def give_back(self) -> None:
        """End the use of the layout that was taken."""
        with self._shield.up():
            self._regions.popleft()
            if self._readers.num_threads:
                self._fill()

    def close(self) -> None:
        """End the readers and free the ring; a second call does nothing."""
        with self._shield.up():
            for region in self._regions:
                region.dropped = True
            self._readers.stop()
        self._regions.clear()
        self._view = memoryview(b"")
        self._ring = None
        if not self._is_shared:
            self._files.close()

    def _place_of(self, index: int) -> int:
        """Return the next position of a layout in the order; a new one is appended."""
        count = len(self._order)
        for step in range(1, count + 1):
            place = (self._last + step) % count
            if self._order[place] == index:
                return place
        self._order.append(index)
        return count

    def _drop(self) -> None:
        """Empty the ring, and wait for reads into it."""
        for region in self._regions:
            region.dropped = True
        self._readers.finish()
        self._regions.clear()
        self._next = -1

    def _fill(self) -> None:
        """Submit the reads of the next layouts, as far as the ring has room; without threads, of one."""
        while self._next >= 0:
            index = self._order[self._next]
            layout = self.layouts[index]
            at = self._room(layout.nbytes)
            if at is None:
                return
            region = _Region(index, self._next, at, layout.nbytes)
            self._regions.append(region)
            self._next = (self._next + 1) % len(self._order)
            for run in layout.runs:
                for begin in range(0, run.nbytes, CHUNK):
                    nbytes = min(CHUNK, run.nbytes - begin)
                    region.jobs.append(Job(partial(self._read, region, run, begin, nbytes)))
                    self._readers.submit(region.jobs[-1])
            if not self._readers.num_threads:
                return

    def _room(self, nbytes: int) -> int | None:
        """Return an offset, in whole pages, for a region beside those in use; None if there is no room.

        The end of the memory opposite to the last region comes first: so two layouts that together are no
        larger than the memory always fit.
        """
        if not self._regions:
            return 0
        last, top = self._regions[-1], self.capacity - nbytes
        near_bottom = last.at < self.capacity - last.at - last.nbytes
        ends = [region.at + region.nbytes for region in self._regions]
        for at in (*((top, 0) if near_bottom else (0, top)), *ends):
            if 0 <= at <= top and all(
                at + nbytes <= region.at or region.at + region.nbytes <= at
                for region in self._regions
            ):
                return at
        return None

    def _read(self, region: _Region, run: Run, begin: int, nbytes: int) -> None:
        if region.dropped:
            return
        start = perf_counter()
        at = region.at + run.at + begin
        needed = min(nbytes, run.needed - begin)
        view = self._view[at : at + nbytes]
        region.done.append(self._files.of(run.path).read(view, run.offset + begin, needed))
        self._trace.add("read", "weights", self.layouts[region.index].name, start)
