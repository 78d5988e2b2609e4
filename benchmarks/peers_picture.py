"""Draw the decode speeds of a peers' run as bars.

    python benchmarks/peers_picture.py benchmarks/results/peers-2026-11-22.json docs/images/peers.svg

The JSON is what `python -m benchmarks.peers` writes. Every decode cell of the run is drawn: one panel for
each number of sequences and prompt length. In int8 and int4, llama.cpp and OpenVINO round activations to
8 bits, so Verbatim's bars are those of w8a8 and w4a8. The label over a group is Verbatim's speed divided by
the fastest peer's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PEERS = {"llama.cpp": "#e0a458", "OpenVINO": "#8fa3b8", "transformers": "#c9c4bb"}
OURS = "#1f5fa8"
FORMATS = {"bf16": "bf16", "int8": "8-bit", "int4": "4-bit"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results")
    parser.add_argument("picture")
    args = parser.parse_args()
    draw(json.loads(Path(args.results).read_text()), Path(args.picture))


def draw(run: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "verbatim", "font.size": 9})
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    plan = run["plan"]
    rows, prompts = plan["rows"], plan["prompts"]
    figure, grid = plt.subplots(
        len(prompts), len(rows), figsize=(9, 4.6), layout="constrained", squeeze=False
    )
    for prompt, line in zip(prompts, grid, strict=True):
        for count, axes in zip(rows, line, strict=True):
            _panel(axes, run["cells"], prompt, count)
            if prompt == prompts[0]:
                axes.set_title(f"{count} sequence{'s' * (count > 1)}", fontsize=10)
        line[0].set_ylabel(f"prompt of {prompt:,}\ntokens per second")
    bars = {"Verbatim": OURS, **PEERS}
    handles = [Patch(color=colour, label=name) for name, colour in bars.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(bars), frameon=False)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def _panel(axes: Any, cells: list[dict[str, Any]], prompt: int, count: int) -> None:
    """Draw a group of bars for each weight format."""
    for place, name in enumerate(FORMATS):
        key = (name, prompt, count)
        cell = next(c for c in cells if (c["format"], c["prompt"], c["rows"]) == key)
        speeds = cell["tokens_per_s"]
        ours = speeds.get("Verbatim a8", speeds["Verbatim"])
        peers = {peer: speeds[peer] for peer in PEERS if peer in speeds}
        bars = [(ours, OURS), *((speed, PEERS[peer]) for peer, speed in peers.items())]
        left = place - 0.1 * (len(bars) - 1)
        for i, (speed, colour) in enumerate(bars):
            axes.bar(left + 0.2 * i, speed, width=0.18, color=colour)
        ratio = ours / max(peers.values())
        axes.text(left, ours, f"{ratio:.1f}x", ha="center", va="bottom", fontsize=8, color=OURS)
    axes.set_xticks(range(len(FORMATS)), list(FORMATS.values()))
    axes.margins(y=0.12)
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
