"""A trace of reads and computation, in Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from time import perf_counter

from verbatim.common.files import atomic_write
from verbatim.errors import InvalidRequest, TierFailed

_MAX_SPANS = 200_000  # older ones are dropped
_WAITS = ("wait", "store", "flush")
_MIN_WAIT_S = 1e-4  # seconds; shorter waits are not shown


class Trace:
    """Records spans of time and bytes moved, in any thread: their sums and, with a path, the spans.

    Sums are per thread, which needs no lock: Ctrl-C could leave it locked.

    Args:
        path: the file that `write` writes; None: spans are not stored.

    Raises:
        InvalidRequest: the path is a folder, or its folder does not exist or can't be written to.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Resolved now, since the working directory may change before the trace is written.
        self.path = None if path is None else Path(path).absolute()
        self._sums: dict[int, tuple[dict[str, float], dict[str, int]]] = {}  # by thread
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_MAX_SPANS)
        self._begin = perf_counter()
        if self.path is not None:
            folder = self.path.parent
            if self.path.is_dir():
                raise InvalidRequest(f"trace={str(path)!r}: it is a folder")
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise InvalidRequest(f"trace={str(path)!r}: can't write to the folder {folder}")

    def add(self, kind: str, data: str, name: str, begin: float, nbytes: int = 0) -> None:
        """Add a span of this thread that ends now.

        Args:
            kind: its track: "read", "write", "compute"; "wait" for reads, "store" and "flush" for writes.
            data: such as "weights", "rows" of embeddings, "experts", "K and V" or "hidden states".
            begin: start of the span, by `time.perf_counter`.
            nbytes: bytes moved.
        """
        end, key = perf_counter(), f"{kind} {data}"
        seconds, moved = self._sums.setdefault(threading.get_ident(), ({}, {}))
        seconds[key] = seconds.get(key, 0.0) + end - begin
        moved[key] = moved.get(key, 0) + nbytes
        if self.path is not None and not (kind in _WAITS and end - begin < _MIN_WAIT_S):
            track = f"{kind} {threading.current_thread().name}" if kind == "read" else kind
            self._spans.append((track, name, begin, end))

    def seconds(self, key: str) -> float:
        """Return the total time of spans with this kind and data, such as "wait weights"."""
        return sum(seconds.get(key, 0.0) for seconds, _ in list(self._sums.values()))

    def nbytes(self, key: str) -> int:
        """Return the bytes moved in spans with this kind and data."""
        return sum(moved.get(key, 0) for _, moved in list(self._sums.values()))

    def restart(self) -> None:
        """Reset the sums to 0."""
        self._sums = {}

    def _events(self) -> Iterator[dict[str, object]]:
        """Yield Chrome's trace events, which https://ui.perfetto.dev displays."""
        tracks: dict[str, int] = {}
        for track, name, begin, end in list(self._spans):
            tid = tracks.setdefault(track, len(tracks))
            times = {"ts": (begin - self._begin) * 1e6, "dur": (end - begin) * 1e6}
            kind = track.split()[0]
            yield {"ph": "X", "pid": 1, "tid": tid, "name": name, "cat": kind, **times}
        for track, tid in tracks.items():
            names = {"name": "thread_name", "args": {"name": track}}
            yield {"ph": "M", "pid": 1, "tid": tid, **names}

    def write(self) -> None:
        """Write the file, completely or not at all; raise TierFailed if that fails."""
        if self.path is None:
            return
        text = json.dumps({"traceEvents": [*self._events()]})
        try:
            with atomic_write(self.path, f".{self.path.name}.") as file:
                file.write(text.encode())
                if S_ISREG(os.fstat(file.fileno()).st_mode):
                    mask = os.umask(0)
                    os.umask(mask)
                    os.fchmod(file.fileno(), 0o666 & ~mask)
        except OSError as error:
            raise TierFailed(f"trace: can't write {self.path}: {error.strerror}") from error
