"""The benchmark run: interleaved measurements of all systems; medians, ratios, fractions of the limit."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verbatim.bench.machine import LimitMeter, Limits, Needs
from verbatim.bench.ours import Ours, random_ids
from verbatim.bench.peers import Peer
from verbatim.errors import VerbatimError


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements of a run.

    Attributes:
        rows: batch sizes of the decode cells.
        contexts: context lengths of the decode cells.
        prefills: lengths of the prefill cells.
        rounds: measurements of every system in each cell.
        steps: decode steps per measurement.
        mixed: requests of a mixed workload, for Verbatim only; 0 for none.
    """

    rows: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    prefills: tuple[int, ...] = (512,)
    rounds: int = 3
    steps: int = 8
    mixed: int = 32

    def fitting(self, max_length: int) -> tuple[BenchPlan, list[str]]:
        """Return the plan without lengths over the model's limit, and remarks on what was left out."""
        room = max_length - max(self.rows, default=0) - self.steps - 4
        contexts = tuple(n for n in self.contexts if n <= room)
        prefills = tuple(n for n in self.prefills if n < max_length)
        dropped = [f"a context of {n}" for n in self.contexts if n not in contexts]
        dropped += [f"a prompt of {n}" for n in self.prefills if n not in prefills]
        plan = BenchPlan(self.rows, contexts, prefills, self.rounds, self.steps, self.mixed)
        return plan, [f"{item} is left out: at most {max_length} tokens fit" for item in dropped]


@dataclass(slots=True)
class Cell:
    """One measured workload; `rows` 0 is the prefill of one prompt.

    Attributes:
        seconds: seconds of each step or prompt, by system.
        limits_s: minimum time by the machine's limits, one per round.
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
        """Return tokens/s, by the median time."""
        times = self.seconds.get(system)
        return (self.rows or self.context) / statistics.median(times) if times else None

    def fraction(self, system: str) -> float | None:
        """Return the fraction of the machine's limit."""
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
        mixed: requests, new tokens and seconds of the mixed workload.
        remarks: what was left out, with the reason.
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
            count, tokens, spent = self.mixed
            mixed = {"requests": count, "new_tokens": tokens, "seconds": spent}
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
    *,
    vocab: int,
    max_length: int,
    say: Callable[[str], None],
) -> BenchReport:
    """Measure all cells, `plan.rounds` times with all systems in turn; drop a peer when it fails."""
    plan, remarks = plan.fitting(max_length)
    report = BenchReport([ours.name, *(p.name for p in peers)], [], [], None, remarks)
    systems: list[Peer] = [ours, *peers]
    for prompt in plan.prefills:
        report.cells.append(Cell(0, prompt))
    for context in plan.contexts:
        report.cells += [Cell(rows, context) for rows in plan.rows]
    for cell in report.cells:
        say(cell.name)
        for turn in range(plan.rounds):
            limits = machine.measure()
            report.limits.append(limits)
            limit_s = (
                needs.decode_s(limits, cell.rows, cell.context)
                if cell.rows
                else needs.prefill_s(limits, cell.context)
            )
            cell.limits_s.append(limit_s)
            for system in list(systems):
                try:
                    times = _turn(system, cell, plan, first=turn == 0)
                except (VerbatimError, RuntimeError, ValueError, MemoryError) as error:
                    if system is ours:
                        raise
                    systems.remove(system)
                    report.remarks.append(f"{system.name} left off at {cell.name}: {error}")
                    continue
                cell.seconds.setdefault(system.name, []).extend(times)
    if plan.mixed:
        say("a mixed workload")
        requests = _mixed(plan.mixed, vocab, max_length)
        tokens, spent = ours.mixed(requests)
        report.mixed = len(requests), tokens, spent
    return report


def _turn(system: Peer, cell: Cell, plan: BenchPlan, *, first: bool) -> list[float]:
    if cell.rows:
        return system.decode(cell.rows, cell.context, plan.steps)
    if first:  # warm up: some systems compile for a new length
        system.prefill(cell.context)
    return [system.prefill(cell.context)]


def _mixed(count: int, vocab: int, max_length: int) -> list[tuple[list[int], int]]:
    """Return (prompt, number of new tokens), 16 to 512 and 8 to 256 tokens if they fit, with a fixed seed."""
    rng = random.Random(7)
    longest, most = min(512, max_length // 2), min(256, max_length // 4)
    return [
        (
            random_ids(rng.randint(min(16, longest), longest), vocab),
            rng.randint(min(8, most), most),
        )
        for _ in range(count)
    ]
