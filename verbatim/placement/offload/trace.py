"""What happened when, for a look at I/O under compute: Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from pathlib import Path
from time import perf_counter

_MOST = 200_000  # spans that are kept; older ones go


class Trace:
    """Spans of time, noted by any thread. Without a path, nothing is kept.

    Args:
        path: the file that `write` writes.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=_MOST)
        self._begin = perf_counter()

    def add(self, kind: str, name: str, begin: float, end: float) -> None:
        """A span on this thread.

        Args:
            kind: "read", "write", "compute", "wait", ... : its track.
            name: of the layer.
            begin, end: by `time.perf_counter`.
        """
        if self.path is not None:
            track = f"{kind} {threading.current_thread().name}" if kind == "read" else kind
            self._spans.append((track, name, begin, end))

    def events(self) -> list[dict[str, object]]:
        """Chrome's: https://ui.perfetto.dev shows them."""
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
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        new = self.path.with_name(self.path.name + ".new")
        try:
            new.write_text(json.dumps({"traceEvents": self.events()}))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)
