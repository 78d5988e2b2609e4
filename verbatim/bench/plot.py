"""The benchmark's bar chart."""

from __future__ import annotations

from pathlib import Path

from verbatim.bench.run import BenchReport


def plot(report: BenchReport, path: Path) -> None:
    """Plot tokens/s of each system by cell, with the fraction of the limit above Verbatim's bars.

    Raises:
        ImportError: matplotlib is not installed (`pip install '.[bench]'`).
        OSError, ValueError: the file can't be written, or its format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = report.cells
    figure = Figure(figsize=(max(6.0, 1.4 * len(cells)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(report.systems)
    for number, system in enumerate(report.systems):
        at = [i + (number - (len(report.systems) - 1) / 2) * width for i in range(len(cells))]
        speeds = [cell.speed(system) or 0.0 for cell in cells]
        bars = axes.bar(at, speeds, width, label=system)
        if number == 0:
            shares = [cell.fraction(system) for cell in cells]
            texts = ["" if share is None else f"{share:.0%}" for share in shares]
            axes.bar_label(bars, texts, fontsize=8, padding=2)
    axes.set_yscale("log")
    axes.set_ylabel("tokens a second")
    axes.set_xticks(
        range(len(cells)), [cell.name.replace(", ", "\n") for cell in cells], fontsize=8
    )
    axes.set_title(
        f"share of the limit above the bars: {report.bandwidth / 1e9:.0f} GB/s, "
        f"{report.flops / 1e12:.2f} TFLOP/s",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
