"""The benchmark: interleaved measurements of all systems; medians, ratios, fractions of the limit."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.bench.machine import LimitMeter, Limits, Needs
from verbatim.bench.peers import Ours, Peer
from verbatim.bench.plan import BenchPlan, random_ids
from verbatim.errors import VerbatimError


@dataclass(slots=True)
class Cell:
    """One measured workload: decoding, or the prefill of one prompt if `rows` is 0.

    Attributes:
        seconds: seconds of each step or prompt, by system.
        limits_s: minimum seconds by the machine's limits, one entry per round.
    """

    rows: int
    context: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    limits_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return (
            f"decode, {self.rows} x {self.context:,}" if self.rows else f"prefill, {self.context:,}"
        )

    def speed(self, system: str) -> float | None:
        """Return tokens/s at the median time; None if the system was not measured."""
        times = self.seconds.get(system)
        return (self.rows or self.context) / statistics.median(times) if times else None

    def fraction(self, system: str) -> float | None:
        """Return the speed as a fraction of the machine's limit; None if the system was not measured."""
        times = self.seconds.get(system)
        return statistics.median(self.limits_s) / statistics.median(times) if times else None

    def ratio(self, peer: str) -> float | None:
        """Return the ratio of Verbatim's speed to a peer's."""
        ours, other = self.speed(Ours.name), self.speed(peer)
        return None if ours is None or other is None else ours / other

    def as_json(self) -> dict[str, Any]:
        return {
            "what": "decode" if self.rows else "prefill",
            "rows": self.rows or None,
            "context": self.context,
            "tokens_per_s": {name: self.speed(name) for name in self.seconds},
            "ratio": {name: self.ratio(name) for name in self.seconds if name != Ours.name},
            "of_limit": {name: self.fraction(name) for name in self.seconds},
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class BenchReport:
    """The results of a run.

    Attributes:
        systems: names in table order, Verbatim first.
        limits: the machine's limits, one per round of each cell.
        mixed: numbers of requests and new tokens, and seconds, of the mixed workload.
        remarks: omitted measurements, with reasons.
    """

    systems: list[str]
    cells: list[Cell]
    limits: list[Limits]
    mixed: tuple[int, int, float] | None
    remarks: list[str]

    @property
    def bandwidth(self) -> float:
        """Median memory bandwidth, in bytes/s."""
        return statistics.median(limit.bandwidth for limit in self.limits)

    @property
    def flops(self) -> float:
        return statistics.median(limit.flops for limit in self.limits)

    def as_json(self) -> dict[str, Any]:
        mixed = None
        if self.mixed is not None:
            count, tokens, duration_s = self.mixed
            mixed = {"requests": count, "new_tokens": tokens, "seconds": duration_s}
        return {
            "systems": self.systems,
            "bandwidth_bytes_per_s": self.bandwidth if self.limits else None,
            "flops": self.flops if self.limits else None,
            "cells": [cell.as_json() for cell in self.cells],
            "mixed": mixed,
            "remarks": self.remarks,
        }


def measure(
    plan: BenchPlan,
    ours: Ours,
    peers: list[Peer],
    machine: LimitMeter,
    needs: Needs,
    log: Callable[[str], None],
) -> BenchReport:
    """Measure all cells in `plan.rounds` rounds over all systems; a peer that fails is dropped."""
    plan, remarks = plan.fitting(ours.max_length)
    report = BenchReport([ours.name, *(p.name for p in peers)], [], [], None, remarks)
    systems: list[Peer] = [ours, *peers]
    report.cells += [Cell(0, length) for length in plan.prefills]
    report.cells += [Cell(rows, context) for context in plan.contexts for rows in plan.rows]
    for cell in report.cells:
        log(cell.name)
        for turn in range(plan.rounds):
            limits = machine.measure()
            report.limits.append(limits)
            cell.limits_s.append(needs.seconds(limits, cell.rows, cell.context))
            for system in list(systems):
                prompts = [random_ids(cell.context, ours.vocab) for _ in range(cell.rows or 1)]
                try:
                    if not cell.rows and not turn:  # some systems compile for a new length
                        system.prefill(prompts[0][::-1])
                    times = (
                        system.decode(prompts, plan.steps)
                        if cell.rows
                        else [system.prefill(prompts[0])]
                    )
                except (VerbatimError, RuntimeError, ValueError, MemoryError) as error:
                    if system is ours:
                        raise
                    systems.remove(system)
                    report.remarks.append(f"{system.name} stopped at {cell.name}: {error}")
                    continue
                cell.seconds.setdefault(system.name, []).extend(times)
    if plan.mixed:
        log("a mixed workload")
        requests = _mixed_requests(plan.mixed, ours.vocab, ours.max_length)
        report.mixed = len(requests), *ours.mixed(requests)
    return report


def _mixed_requests(count: int, vocab: int, max_length: int) -> list[tuple[list[int], int]]:
    """Return pairs of a prompt (16 to 512 ids) and a number of new tokens (8 to 256), from a fixed seed."""
    rng = random.Random(7)
    max_prompt, max_new = min(512, max_length // 2), min(256, max_length // 4)
    return [
        (
            random_ids(rng.randint(min(16, max_prompt), max_prompt), vocab),
            rng.randint(min(8, max_new), max_new),
        )
        for _ in range(count)
    ]


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
