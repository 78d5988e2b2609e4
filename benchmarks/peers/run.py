"""`Run`: writes the weights, then measures each format cell by cell, with the systems in turns."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.client import ROOT, Peer, PeerFailed, environment
from benchmarks.peers.protocol import random_ids
from benchmarks.peers.setup import REQUIREMENTS, peers_python, pip_line
from benchmarks.peers.shape import Machine, Shape
from benchmarks.peers.table import OURS, OURS_A8, Cell, Measured

SYSTEMS = {
    OURS: "verbatim",
    OURS_A8: "verbatim_a8",
    "transformers": "transformers",
    "llama.cpp": "llama_cpp",
    "OpenVINO": "openvino",
}
BF16_ALONE = ("transformers",)  # its quantizers are other packages
FEW_BITS_ALONE = (OURS_A8,)
# Maximum relative error of logits against transformers' in bf16; other weights give about 1.4.
WORST_ERROR = {"bf16": 0.1, "int8": 0.15, "int4": 0.6}
CHECKED = (2, 40, 3)  # rows, ids of a prompt, decoded ids


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and for how long."""

    systems: list[str]
    formats: list[str]
    rows: list[int]
    prompts: list[int]
    prefills: list[int]
    rounds: int = 3
    steps: int = 12
    seconds: float = 3.0
    kv: str = "16bit"
    head_bits: int = 8
    threads: int = 2

    def cells(self, fmt: str) -> list[Cell]:
        decode = [Cell(fmt, prompt, rows) for prompt in self.prompts for rows in self.rows]
        return decode + [Cell(fmt, length, 0) for length in self.prefills]

    @property
    def most_rows(self) -> int:
        return max(self.rows, default=1)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max([*(prompt + self.steps + 2 for prompt in self.prompts), *self.prefills])

    @property
    def most_tokens(self) -> int:
        """Tokens of KV in the largest cell."""
        decode = max(self.prompts) + self.steps + 2 if self.rows else 0
        return max([self.most_rows * decode, *self.prefills, CHECKED[0] * 64])


class Run:
    """Measures a plan.

    Attributes:
        systems: names of the systems that could be started.
        measured: results, one per cell.
        machines: the machine's limits before each round of each cell.
        remarks: what was left out and why, and the errors of the logits.
    """

    def __init__(self, plan: Plan, folder: Path, environment: Path) -> None:
        self.plan, self.folder, self.environment = plan, folder, environment
        self.systems: list[str] = []
        self.measured: list[Measured] = []
        self.machines: list[Machine] = []
        self.remarks: list[str] = []
        self.about: dict[str, dict[str, Any]] = {}
        self.begun = time.time()

    def prepare(self, shape: str, layers: int | None) -> None:
        """Write the weights if they are missing, and find the systems that can be started.

        Raises:
            SystemExit: the folder holds other weights, or the model has too few positions.
        """
        expected, record = {"shape": shape, "layers": layers}, self.folder / "peers.json"
        if not (self.folder / "config.json").exists():
            self.say("writing the weights")
            command = [sys.executable, "-m", "benchmarks.peers.weights", str(self.folder)]
            command += ["--shape", shape] + (["--layers", str(layers)] if layers else [])
            subprocess.run(command, check=True, cwd=ROOT, env=environment())
            record.write_text(json.dumps(expected))
        written = (
            json.loads(record.read_text()) if record.exists() else {"shape": "0.6b", "layers": None}
        )
        if written != expected:
            sys.exit(f"{self.folder} holds weights of {written}, not of {expected}")
        config = json.loads((self.folder / "config.json").read_text())
        self.shape = Shape.of(config)
        if self.plan.longest > config["max_position_embeddings"]:
            sys.exit(
                f"{self.plan.longest} tokens in a row are more than the model's "
                f"{config['max_position_embeddings']} positions"
            )
        for name in self.plan.systems:
            try:
                with self.start(name) as peer:
                    self.about[name] = peer.call("about")
                self.systems.append(name)
                self.say(f"{name} {self.about[name]['version']}")
            except (PeerFailed, OSError) as error:
                self.remark(f"{name} is left out: {error}")
                if name in REQUIREMENTS:
                    self.remark(f"    to have it: {pip_line(name, self.environment)}")

    def start(self, name: str) -> Peer:
        """Start the process of a system, which has loaded nothing yet."""
        separate = name in REQUIREMENTS
        python = str(peers_python(self.environment)) if separate else sys.executable
        return Peer(name, module_command(SYSTEMS[name], python))

    def measure(self) -> None:
        """Measure all cells, format by format."""
        with Peer("machine", module_command("machine")) as self.probe:
            self.probe.call("load", threads=self.plan.threads)
            for fmt in self.plan.formats:
                self._measure_format(fmt)
        self.say(self.machine_line())

    def _measure_format(self, fmt: str) -> None:
        plan = self.plan
        with ExitStack() as stack:
            peers: dict[str, Peer] = {}
            for name in self.systems:
                if name in (FEW_BITS_ALONE if fmt == "bf16" else BF16_ALONE):
                    continue
                peer = stack.enter_context(self.start(name))
                try:
                    began = time.perf_counter()
                    loaded = peer.call(
                        "load",
                        folder=str(self.folder),
                        fmt=fmt,
                        kv=plan.kv,
                        head_bits=plan.head_bits,
                        threads=plan.threads,
                        rows=max(plan.most_rows, CHECKED[0]),
                        tokens=plan.most_tokens,
                    )
                except PeerFailed as error:
                    self.remark(f"{fmt}: {error}")
                    continue
                details = ", ".join(f"{key} {value}" for key, value in loaded.items())
                self.say(f"{fmt}: {name} loaded in {time.perf_counter() - began:.0f} s; {details}")
                peers[name] = peer
            self._check(fmt, peers)
            for cell in plan.cells(fmt):
                self._measure_cell(cell, peers)

    def _check(self, fmt: str, peers: dict[str, Peer]) -> None:
        """Compare each system's logits with transformers' in bf16, and drop those that are far off."""
        try:
            reference = self._reference(peers)
        except PeerFailed as failed:
            self.remark(f"{fmt}: no logits are compared with transformers': {failed}")
            return
        for name in [name for name in peers if name != "transformers"]:
            try:
                error = relative_error(peers[name].call("check", **self._checked()), reference)
            except PeerFailed as failed:
                self.remark(f"{fmt}: {failed}; it is not measured")
                del peers[name]
                continue
            self.remark(f"{fmt}: logits of {name} differ from transformers' bf16 by {error:.1%}")
            if not error <= WORST_ERROR[fmt]:
                self.remark(f"{fmt}: {name} runs another model, and is not measured")
                del peers[name]

    def _reference(self, peers: dict[str, Peer]) -> np.ndarray:
        file = self.folder / "reference.npy"
        if file.exists():
            return np.load(file)
        if "transformers" in peers:
            logits = peers["transformers"].call("check", **self._checked())
        else:
            with self.start("transformers") as peer:
                peer.call(
                    "load",
                    folder=str(self.folder),
                    fmt="bf16",
                    kv="16bit",
                    threads=self.plan.threads,
                )
                logits = peer.call("check", **self._checked())
        np.save(file, logits)
        return logits

    def _checked(self) -> dict[str, list[list[int]]]:
        rows, prompt, decoded = CHECKED
        ids = [random_ids(prompt + decoded, 100 + row, self.shape.vocab) for row in range(rows)]
        return {"prompts": [x[:prompt] for x in ids], "forced": [x[prompt:] for x in ids]}

    def _measure_cell(self, cell: Cell, peers: dict[str, Peer]) -> None:
        entry = Measured(cell, [])
        self.measured.append(entry)
        order = list(peers)
        for turn in range(self.plan.rounds):
            self.machines.append(Machine(**self.probe.call("measure")))
            entry.limits_s.append(self.limit_s(cell, self.machines[-1]))
            for name in order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]:
                if name not in peers:
                    continue
                try:
                    entry.seconds.setdefault(name, []).extend(self._turn(cell, peers[name]))
                except PeerFailed as error:
                    self.remark(f"{cell}: {error}")
                    entry.seconds.pop(name, None)
                    if not peers[name].alive:
                        del peers[name]
        speeds = {name: entry.tokens_per_s(name) for name in entry.seconds}
        self.say(f"{cell}: " + ", ".join(f"{n} {s:.1f}" for n, s in speeds.items() if s))

    def _turn(self, cell: Cell, peer: Peer) -> list[float]:
        if not cell.is_decode:
            return [peer.call("prefill", length=cell.prompt)]
        return peer.call(
            "decode",
            rows=cell.rows,
            length=cell.prompt,
            steps=self.plan.steps,
            seconds=self.plan.seconds,
        )

    def limit_s(self, cell: Cell, machine: Machine) -> float:
        """Return the minimum seconds that a cell can take."""
        plan, shape = self.plan, self.shape
        if not cell.is_decode:
            return machine.prefill_limit_s(shape, cell.fmt, plan.head_bits, cell.prompt)
        return machine.decode_limit_s(
            shape, cell.fmt, plan.kv, plan.head_bits, cell.rows, cell.prompt
        )

    def machine_line(self) -> str:
        """Describe the machine's limits in all rounds: median, minimum and maximum."""
        if not self.machines:
            return "nothing was measured"
        parts = []
        for what, name in (("memory reads", "bandwidth"), ("bf16 products", "flops")):
            rates = [getattr(machine, name) / 1e9 for machine in self.machines]
            unit = "GB/s" if name == "bandwidth" else "GFLOP/s"
            middle = statistics.median(rates)
            parts.append(f"{what} at {middle:.0f} {unit} ({min(rates):.0f} to {max(rates):.0f})")
        return ", ".join(parts)

    def remark(self, line: str) -> None:
        self.remarks.append(line)
        self.say(line)

    def say(self, line: str) -> None:
        print(f"[{time.time() - self.begun:5.0f} s] {line}", flush=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "date": datetime.date.fromtimestamp(self.begun).isoformat(),
            "device": device(),
            "seconds": time.time() - self.begun,
            "machine": [asdict(machine) for machine in self.machines],
            "shape": asdict(self.shape),
            "plan": asdict(self.plan),
            "systems": self.about,
            "remarks": self.remarks,
            "cells": [entry.as_json() for entry in self.measured],
        }


def module_command(module: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", f"benchmarks.peers.systems.{module}"]


def relative_error(logits: np.ndarray, reference: np.ndarray) -> float:
    """Return the relative error by norm; infinity if a logit is not finite."""
    if logits.shape != reference.shape or not np.isfinite(logits).all():
        return float("inf")
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


def device() -> str:
    """Return the processor's name, if Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
