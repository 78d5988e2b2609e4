"""Draw some steps of an offload trace: the layers that are read, and those that compute meanwhile.

    python benchmarks/offload_picture.py trace.json picture.png [--from 1.5] [--seconds 1.0]

The trace is that of `Offload(trace=...)` or `verbatim generate --trace`. Chrome's own viewers (chrome://tracing,
ui.perfetto.dev) open it, too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KINDS = ("read", "write", "wait", "compute")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("picture")
    parser.add_argument("--from", type=float, dest="begin", help="second to begin at")
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    events = json.loads(Path(args.trace).read_text())["traceEvents"]
    draw([e for e in events if e["ph"] == "X"], args.begin, args.seconds, Path(args.picture))


def draw(spans: list[dict[str, Any]], begin: float | None, seconds: float, path: Path) -> None:
    """Draw a row for each kind of work; neighbouring layers alternate in shade."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if begin is None:  # some steps before the end
        begin = max(0.0, max(s["ts"] for s in spans) / 1e6 - 2 * seconds)
    end = begin + seconds
    shown = [s for s in spans if begin <= s["ts"] / 1e6 <= end]
    rows = [kind for kind in KINDS if any(s["cat"] == kind for s in shown)]
    names = {name: i for i, name in enumerate(dict.fromkeys(_layer(s) for s in shown))}
    colours = plt.get_cmap("tab20").colors
    figure, axes = plt.subplots(figsize=(10, 0.7 + 0.7 * len(rows)), layout="constrained")
    for span in shown:
        axes.broken_barh(
            [(span["ts"] / 1e3 - 1e3 * begin, span["dur"] / 1e3)],
            (rows.index(span["cat"]) - 0.4, 0.8),
            color=colours[names[_layer(span)] % len(colours)],
        )
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(0, 1e3 * seconds), xlabel="milliseconds; one colour a layer")
    figure.savefig(path, dpi=110)


def _layer(span: dict[str, Any]) -> str:
    return str(span["name"]).split(" #")[0]


if __name__ == "__main__":
    main()
