"""Regions of memory that are filled from files ahead of their use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from verbatim.placement.offload.trace import Trace
from verbatim.shield import Shield
from verbatim.weights.files import CHUNK, PAGE, File, bytes_of, pages, up
from verbatim.weights.lazy import Stored


class Run(NamedTuple):
    """Whole pages of one file that are read together, or in several chunks."""

    path: Path
    offset: int  # in the file
    nbytes: int  # whole pages
    needed: int  # without what may lie behind the end of the file
    at: int  # in the region


@dataclass(slots=True)
class Layout:
    """The layout of several tensors in a region of memory."""

    name: str
    runs: list[Run] = field(default_factory=list)
    places: dict[Stored, int] = field(default_factory=dict)  # of its first byte
    nbytes: int = 0

    @property
    def needed(self) -> int:
        """Bytes of weights among them."""
        return sum(stored.nbytes for stored in self.places)


def lay_out(name: str, tensors: list[Stored]) -> Layout:
    """Neighbours in a file are read together, so that most layers are one run."""
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
    """A layout on its way into memory."""

    index: int
    place: int  # in the order of use
    at: int  # in the ring
    nbytes: int
    chunks: deque[tuple[Run, int, int]]  # not yet handed to a reader: run, begin, bytes
    unread: int  # chunks
    error: BaseException | None = None


class Stream:
    """Memory in which layouts are read ahead, in the order of their use, around and around.

    One layout is in use at a time, the others of the ring are those that come next. Readers are threads;
    with none of them, a layout is read when it is taken.

    Args:
        layouts: in the order of use.
        capacity: bytes of the ring; at least the largest layout's.
        num_threads: readers; 0 reads nothing ahead.
        trace: takes note of what is read when.
        files: those that can't be opened by their paths; closed with the stream.
    """

    def __init__(
        self,
        layouts: list[Layout],
        capacity: int,
        num_threads: int,
        trace: Trace,
        files: Mapping[Path, File] | None = None,
    ) -> None:
        assert all(layout.nbytes <= capacity for layout in layouts)
        self.layouts = layouts
        self.capacity = up(capacity)
        self.bytes_read = 0
        self.wait_s = 0.0
        self._trace = trace
        self._files: dict[Path, File] = dict(files or {})
        self._threads: list[threading.Thread] = []
        self._regions: deque[_Region] = deque()  # the first is the next to be used, or in use
        self._order = list(range(len(layouts)))
        self._next = 0  # the place in that order of what gets the next region; -1: nobody knows
        self._last = -1  # the place of what was taken last
        self._reading = 0
        self._changed = threading.Condition()
        self._shield = Shield()  # Ctrl-C could leave a condition half taken
        self._closed = False
        self._ring: Tensor | None = None
        try:
            self._ring = pages(self.capacity)
            self._view = bytes_of(self._ring)
            for layout in layouts:
                for stored in layout.places:
                    if stored.path not in self._files:
                        self._files[stored.path] = File(stored.path, stamp=stored.stamp)
            for i in range(num_threads):
                thread = threading.Thread(
                    target=self._read_ahead, name=f"verbatim-reader-{i}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def check_files(self) -> None:
        """Check that the files are unchanged since the model was opened.

        Raises:
            TierFailed: one was written to; the message names it.
        """
        for file in self._files.values():
            file.check()

    def follow(self, order: list[int]) -> None:
        """Read ahead in this order of layouts, around and around, from the next one that is taken on."""
        with self._shield.up(), self._changed:
            self._forget()
            self._order = order
            self._last = -1

    def take(self, index: int) -> Tensor:
        """The memory of a layout with everything read, until `give_back`: uint8.

        Ctrl-C is held back until it is there.

        Raises:
            TierFailed: it could not be read.
        """
        begin = perf_counter()
        with self._shield.up(), self._changed:
            while not self._regions or self._regions[0].index != index:
                self._forget()
                if self._reading:  # into memory that is about to be used for something else
                    self._changed.wait()
                else:
                    self._next = self._place_of(index)
                    self._place()
            region = self._regions[0]
            self._last = region.place
            self._changed.notify_all()
            if not self._threads:
                self._read_now(region)
            while region.unread and region.error is None:
                self._changed.wait()
            if region.error is not None:
                self._forget()
                raise region.error
        waited = perf_counter() - begin
        self.wait_s += waited
        if waited > 1e-4:
            self._trace.add("wait", self.layouts[index].name, begin, begin + waited)
        assert self._ring is not None
        return self._ring[region.at : region.at + region.nbytes]

    def give_back(self) -> None:
        """The layout that was taken is not used any more."""
        with self._shield.up(), self._changed:
            self._regions.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """End the readers and free the ring. Again does nothing."""
        with self._shield.up(), self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if (
                thread is not threading.current_thread()
            ):  # whoever collects garbage may be one of them
                thread.join()
        self._regions.clear()
        self._view = memoryview(b"")
        self._ring = None
        for file in self._files.values():
            file.close()

    def _place_of(self, index: int) -> int:
        """Return the next position of a layout in the order; a new one is appended. The lock is held."""
        count = len(self._order)
        for step in range(1, count + 1):
            place = (self._last + step) % count
            if self._order[place] == index:
                return place
        self._order.append(index)
        return count

    def _forget(self) -> None:
        """Drop what was read ahead, and read nothing more for now. The lock is held."""
        for region in self._regions:
            region.chunks.clear()
        self._regions.clear()
        self._next = -1

    def _place(self) -> _Region | None:
        """A region for the next layout, if the ring has room. The lock is held."""
        if self._next < 0:
            return None
        index = self._order[self._next]
        layout = self.layouts[index]
        at = self._room(layout.nbytes)
        if at is None:
            return None
        chunks = deque(
            (run, begin, min(CHUNK, run.nbytes - begin))
            for run in layout.runs
            for begin in range(0, run.nbytes, CHUNK)
        )
        region = _Region(index, self._next, at, layout.nbytes, chunks, len(chunks))
        self._regions.append(region)
        self._next = (self._next + 1) % len(self._order)
        return region

    def _room(self, nbytes: int) -> int | None:
        """Return an offset, in whole pages, of room for a region beside those in use; None if there is none.

        The other end of the memory than that of the last region comes first: so two layouts always fit
        that together are no larger than the memory, whatever their sizes.
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

    def _read_now(self, region: _Region) -> None:
        try:
            while region.chunks:
                self.bytes_read += self._read(region, *region.chunks.popleft())
                region.unread -= 1
        except BaseException:  # Ctrl-C, too: the chunk would be missing the next time
            self._forget()
            raise

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                while (job := self._job()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                region, chunk = job
                self._reading += 1
            done, error = 0, None
            try:
                done = self._read(region, *chunk)
            except BaseException as caught:
                error = caught
            with self._changed:
                self.bytes_read += done
                self._reading -= 1
                region.unread -= 1
                region.error = region.error or error
                self._changed.notify_all()

    def _job(self) -> tuple[_Region, tuple[Run, int, int]] | None:
        """The next chunk to read, of the first region that has one left."""
        if self._closed:
            return None
        for region in self._regions:
            if region.chunks:
                return region, region.chunks.popleft()
            if region.error is not None:
                return None  # whoever takes it finds out first
        region_or_none = self._place()
        if region_or_none is None or not region_or_none.chunks:
            return None
        return region_or_none, region_or_none.chunks.popleft()

    def _read(self, region: _Region, run: Run, begin: int, nbytes: int) -> int:
        start = perf_counter()
        at = region.at + run.at + begin
        needed = min(nbytes, run.needed - begin)
        done = self._files[run.path].read(self._view[at : at + nbytes], run.offset + begin, needed)
        self._trace.add("read", self.layouts[region.index].name, start, perf_counter())
        return done
