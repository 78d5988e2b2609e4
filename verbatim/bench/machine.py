"""The machine's limits: memory bandwidth and compute throughput."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from verbatim.bench.plan import seconds

_READ_BYTES = 1 << 29  # far larger than any CPU cache
_ROWS, _DEPTH, _COLS = 512, 1024, 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory bandwidth in bytes/s, and floating-point operations/s in the model's dtype."""

    bandwidth: float
    flops: float


class LimitMeter:
    """Measures the machine's limits, as the best of several runs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._data = torch.ones(_READ_BYTES // 4)
        self._rows = torch.randn(_ROWS, _DEPTH).to(dtype)
        self._weight = torch.randn(_COLS, _DEPTH).to(dtype)

    def measure(self) -> Limits:
        with torch.inference_mode():
            read_s = min(seconds(self._data.sum) for _ in range(4))
            multiply_s = min(seconds(lambda: F.linear(self._rows, self._weight)) for _ in range(15))
        return Limits(_READ_BYTES / read_s, 2 * _ROWS * self._weight.numel() / multiply_s)


@dataclass(frozen=True, slots=True)
class Needs:
    """The minimum bytes and operations of a step.

    Attributes:
        weight_bytes: bytes of all weights, except an untied embedding.
        weights: number of these weights.
        kv_bytes: bytes of K and V per token.
    """

    weight_bytes: int
    weights: int
    kv_bytes: int

    @classmethod
    def of(cls, config: Any, info: dict[str, Any]) -> Needs:
        """Return the needs of an open model, from its config and `LLM.info()`."""
        total, elements = info["weight_bytes"], info["parameters"]
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if not getattr(text, "tie_word_embeddings", True):
            table = info["vocab_size"] * int(getattr(text, "hidden_size", 0))
            total -= total * table // elements
            elements -= table
        return cls(total, elements, info["kv_bytes_per_token"])

    def seconds(self, limits: Limits, rows: int, context: int) -> float:
        """Return the minimum seconds of a decode step or, with 0 rows, of a prompt without its attention.

        That is the longer of the time to read weights and KV, and the time to compute.
        """
        nbytes = self.weight_bytes + rows * context * self.kv_bytes
        return max(nbytes / limits.bandwidth, 2 * (rows or context) * self.weights / limits.flops)
