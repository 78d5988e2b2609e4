"""Not a system: the machine's limits, as `verbatim bench` measures them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.peers.protocol import serve
from verbatim.bench import machine


class Machine:
    """Measures the limits, in turns with the systems, since a shared machine's limits change."""

    def about(self) -> dict[str, Any]:
        return {"version": torch.__version__, "settings": ""}

    def load(self, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.meter = machine.LimitMeter(torch.bfloat16)
        self.measure()
        return {}

    def measure(self) -> dict[str, float]:
        return asdict(self.meter.measure())


if __name__ == "__main__":
    serve(Machine())
