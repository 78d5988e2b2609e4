"""No system, but the machine's own limits: memory read and bf16 matrices multiplied, by torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.peers.protocol import serve


class Machine:
    """Answers `measure` alone. It takes turns like the systems: a shared machine's limits change."""

    def about(self) -> dict[str, Any]:
        return {"version": torch.__version__, "settings": ""}

    def load(self, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.data = torch.ones(2**27)  # 512 MB: far more than any cache
        self.rows = torch.randn(512, 1024, dtype=torch.bfloat16)
        self.weight = torch.randn(4096, 1024, dtype=torch.bfloat16)
        self.measure()
        return {}

    def measure(self) -> dict[str, float]:
        """The best of several, since whatever else runs can only lessen them."""
        with torch.inference_mode():
            read = min(seconds(self.data.sum) for _ in range(4))
            multiply = min(seconds(lambda: F.linear(self.rows, self.weight)) for _ in range(15))
        pairs = self.rows.shape[0] * self.weight.numel()
        return {"bandwidth": self.data.nbytes / read, "flops": 2 * pairs / multiply}


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(Machine())
