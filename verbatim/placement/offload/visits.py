"""The layers on the disk that one forward attends in: read ahead of each visit, written back behind it.

All is decided by the thread that computes. It hands out reads and writes in an order in which nothing is
read before it was written, and the two threads that do them know nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from verbatim.kv.store import KVStore
from verbatim.placement.offload.jobs import Job, Worker
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.windows import DiskLayer, View, Window

WINDOWS = 3  # one is attended in, the next is being read, the last is being written


@dataclass(slots=True)
class Traffic:
    """Bytes moved, and seconds that the computing thread waited.

    Attributes:
        load_s: seconds waiting for what is read.
        store_s: seconds waiting for what is written.
        between_s: those of them in which no layer was about to compute.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    between_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Visit:
    """A micro-batch attends in a layer."""

    layer: int
    part: int
    window: Window
    after: list[_Visit] = field(default_factory=list)  # those that must have been written back
    read: Job | None = None
    write: Job | None = None


class Visits:
    """The visits of one forward, one at a time: `take`, then `finish`.

    Where they come in another order than was said, each is read and written where it stands: slower,
    and no less right.

    Args:
        order: (layer, micro-batch) of each, as they will come.
        views: of the micro-batches.
        layers: on the disk, by number.
        windows: one without threads, else `WINDOWS`.
        reader, writer: do the work; both threaded, or none.
    """

    def __init__(
        self,
        order: Iterable[tuple[int, int]],
        views: list[View],
        layers: Mapping[int, DiskLayer],
        windows: list[Window],
        reader: Worker,
        writer: Worker,
        traffic: Traffic,
        trace: Trace,
    ) -> None:
        self._views, self._layers, self._windows = views, layers, windows
        self._reader, self._writer = reader, writer
        self._traffic, self._trace = traffic, trace
        self._next = 0  # to be taken
        self._issued = 0  # of them, reads were handed out
        self._astray = False  # another order than was said
        self._dropped = False
        self._visits: list[_Visit] = []
        found: dict[tuple[int, int], _Visit] = {}
        for layer, part in order:
            number = len(self._visits)
            visit = _Visit(layer, part, windows[number % len(windows)])
            if number >= len(windows):
                visit.after.append(self._visits[number - len(windows)])
            visit.after += [found[layer, i] for i in views[part].after]
            self._visits.append(visit)
            found[layer, part] = visit

    def begin(self) -> None:
        """Begin to read."""
        if self._reader.threaded:
            self._issue()

    def take(self, layer: int, part: int) -> KVStore:
        """A store of the blocks that the micro-batch sees, as its layer 0, until `finish`.

        Raises:
            TierFailed: they can't be read, or an earlier one could not be written.
        """
        begin = perf_counter()
        visit = self._visits[self._next] if self._next < len(self._visits) else None
        if not self._astray and (visit is None or (visit.layer, visit.part) != (layer, part)):
            self._go_astray()
        if self._astray or visit is None:
            visit = _Visit(layer, part, self._windows[0])
            self._load(visit)
        else:
            if visit.read is None:
                self._read(visit)
            assert visit.read is not None
            visit.read.wait()
            if visit.read.error is not None:  # or what had to be written before it
                raise visit.read.error
        waited = perf_counter() - begin
        self._traffic.load_s += waited
        if self._reader.threaded and waited > 1e-4:
            self._trace.add("wait", self._name(visit), begin, begin + waited)
        self._taken = visit
        return self._layers[layer].shape.look(visit.window, len(self._views[part].blocks))

    def finish(self) -> None:
        """End the current visit, whose new rows are written.

        Raises:
            TierFailed: they can't be written.
        """
        begin, visit = perf_counter(), self._taken
        self._layers[visit.layer].shape.look_away()
        if self._astray:
            self._save(visit)
        else:
            job = Job(partial(self._save, visit))
            self._writer.submit(job)
            visit.write = job
            self._next += 1
            if self._reader.threaded:
                self._issue()
            elif job.error is not None:
                raise job.error
        self._traffic.store_s += perf_counter() - begin

    def end(self) -> None:
        """Wait until everything is written.

        Raises:
            TierFailed: something can't be.
        """
        begin = perf_counter()
        self._writer.finish()
        waited = perf_counter() - begin
        self._traffic.store_s += waited
        self._traffic.between_s += waited
        if self._writer.threaded and waited > 1e-4:
            self._trace.add("wait", "K, V written", begin, begin + waited)
        self._check_writes()

    def drop(self) -> None:
        """Leave the rest, and wait until no thread is at it. Again is harmless."""
        self._dropped = True
        self._reader.finish()
        self._writer.finish()
        for layer in self._layers.values():
            layer.shape.look_away()

    def _go_astray(self) -> None:
        self._astray = True  # what is still to be read ahead is left
        self._reader.finish()
        self._writer.finish()
        self._check_writes()

    def _check_writes(self) -> None:
        for visit in self._visits:
            if visit.write is not None and visit.write.error is not None:
                raise visit.write.error

    def _issue(self) -> None:
        """Hand out the reads of all visits whose window and blocks will be there without our doing."""
        while self._issued < len(self._visits):
            visit = self._visits[self._issued]
            if any(earlier.write is None for earlier in visit.after):
                return
            self._read(visit)

    def _read(self, visit: _Visit) -> None:
        writes = [earlier.write for earlier in visit.after if earlier.write is not None]
        visit.read = Job(partial(self._read_ahead, visit), writes)
        self._reader.submit(visit.read)
        self._issued += 1
        visit.after = []

    def _read_ahead(self, visit: _Visit) -> None:
        if not self._astray:
            self._load(visit)

    def _load(self, visit: _Visit) -> None:
        if self._dropped:
            return
        begin, view = perf_counter(), self._views[visit.part]
        layer = self._layers[visit.layer]
        self._traffic.bytes_read += layer.load(visit.window, len(view.blocks), view.old)
        self._trace.add("read", self._name(visit), begin, perf_counter())

    def _save(self, visit: _Visit) -> None:
        if self._dropped:
            return
        begin, view = perf_counter(), self._views[visit.part]
        layer = self._layers[visit.layer]
        self._traffic.bytes_written += layer.save(visit.window, len(view.blocks), view.new)
        self._trace.add("write", self._name(visit), begin, perf_counter())

    @staticmethod
    def _name(visit: _Visit) -> str:
        return f"K, V {visit.layer} #{visit.part}"
