"""A trace of reads and computation, in Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from pathlib import Path
from time import perf_counter

from verbatim.errors import InvalidRequest, TierFailed
from verbatim.files import replacing

_MOST = 200_000  # spans that are kept; older ones go
_WAITS = ("wait", "store", "flush")
_SHORT = 1e-4  # seconds of a wait that is not shown


class Trace:
    """Spans of time and bytes moved, recorded by any thread: their sums and, with a path, the spans.

    Each thread has sums of its own, so that no lock is needed, which Ctrl-C could leave locked.

    Args:
        path: the file that `write` writes.

    Raises:
        InvalidRequest: it can't be a file, or its folder isn't there or can't be written to.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Where the working directory is now: it may be another one when the trace is written.
        self.path = None if path is None else Path(path).absolute()
        self._sums: dict[int, tuple[dict[str, float], dict[str, int]]] = {}  # by thread
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_MOST)
        self._begin = perf_counter()
        if self.path is not None:
            folder = self.path.parent
            if self.path.is_dir():
                raise InvalidRequest(f"trace={str(path)!r}: it is a folder")
            if not folder.is_dir() or not os.access(folder, os.W_OK):
                raise InvalidRequest(f"trace={str(path)!r}: can't write to the folder {folder}")

    def add(self, kind: str, data: str, name: str, begin: float, nbytes: int = 0) -> None:
        """Add a span on this thread, which ends now.

        Args:
            kind: its track: "read", "write", "compute"; "wait" for reads, "store" and "flush" for writes.
            data: "weights", "rows" of embeddings, "experts", "K and V" or "hidden states".
            name: of the layer.
            begin: by `time.perf_counter`.
            nbytes: bytes that were moved.
        """
        end, key = perf_counter(), f"{kind} {data}"
        seconds, moved = self._sums.setdefault(threading.get_ident(), ({}, {}))
        seconds[key] = seconds.get(key, 0.0) + end - begin
        moved[key] = moved.get(key, 0) + nbytes
        if self.path is not None and not (kind in _WAITS and end - begin < _SHORT):
            track = f"{kind} {threading.current_thread().name}" if kind == "read" else kind
            self._spans.append((track, name, begin, end))

    def seconds(self, key: str) -> float:
        """Return the sum of the spans of a kind and data, such as "wait weights"."""
        return sum(seconds.get(key, 0.0) for seconds, _ in list(self._sums.values()))

    def nbytes(self, key: str) -> int:
        """Return the bytes that were moved in these spans."""
        return sum(moved.get(key, 0) for _, moved in list(self._sums.values()))

    def restart(self) -> None:
        """Begin the sums at 0."""
        self._sums = {}

    def events(self) -> list[dict[str, object]]:
        """Return Chrome's trace events, which https://ui.perfetto.dev displays."""
        spans = list(self._spans)
        tracks = {track: i for i, track in enumerate(dict.fromkeys(s[0] for s in spans))}
        named: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in tracks.items()
        ]
        return named + [
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[track],
                "name": name,
                "cat": track.split()[0],
                "ts": (begin - self._begin) * 1e6,
                "dur": (end - begin) * 1e6,
            }
            for track, name, begin, end in spans
        ]

    def write(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            TierFailed: it can't be written; the message names it.
        """
        if self.path is None:
            return
        text = json.dumps({"traceEvents": self.events()})
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe, a device
                self.path.write_text(text)
                return
            target = self.path.resolve()  # a link stays one
            with replacing(target, f".{target.name}.") as file:
                file.write(text.encode())
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(file.fileno(), 0o666 & ~mask)
        except OSError as error:
            raise TierFailed(f"trace: can't write {self.path}: {error.strerror}") from error
