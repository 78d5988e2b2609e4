"""What the machine allows: bytes read and numbers multiplied a second, measured in turn with the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from verbatim.bench.timing import seconds

_READ_BYTES = 1 << 29  # far more than any cache holds
_ROWS, _DEPTH, _COLS = 512, 1024, 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second from memory, and floating-point operations a second in the model's dtype."""

    bandwidth: float
    flops: float


class Machine:
    """Measures both; the best of several, since whatever else runs can only lessen them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._data = torch.ones(_READ_BYTES // 4)
        self._rows = torch.randn(_ROWS, _DEPTH).to(dtype)
        self._weight = torch.randn(_COLS, _DEPTH).to(dtype)

    def measure(self) -> Limits:
        with torch.inference_mode():
            read = min(seconds(self._data.sum) for _ in range(4))
            multiply = min(seconds(lambda: F.linear(self._rows, self._weight)) for _ in range(15))
        return Limits(_READ_BYTES / read, 2 * _ROWS * self._weight.numel() / multiply)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step must read and multiply at least.

    Attributes:
        weight_bytes: of all weights but an embedding that is no head as well.
        weights: elements of those.
        kv_bytes: of one token.
    """

    weight_bytes: int
    weights: int
    kv_bytes: int

    @classmethod
    def of(cls, config: Any, info: dict[str, Any]) -> Needs:
        """Of an opened model, by its config and what `LLM.info()` tells of it."""
        total, elements = info["weight_bytes"], info["parameters"]
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if not getattr(text, "tie_word_embeddings", True):
            table = info["vocab_size"] * int(getattr(text, "hidden_size", 0))
            total -= total * table // elements
            elements -= table
        return cls(total, elements, info["kv_bytes_per_token"])

    def decode_s(self, limits: Limits, rows: int, context: int) -> float:
        """The least seconds of a step: reading weights and KV, or the products, whichever is longer."""
        nbytes = self.weight_bytes + rows * context * self.kv_bytes
        return max(nbytes / limits.bandwidth, 2 * rows * self.weights / limits.flops)

    def prefill_s(self, limits: Limits, length: int) -> float:
        """The least seconds of a prompt, without its attention."""
        return max(self.weight_bytes / limits.bandwidth, 2 * length * self.weights / limits.flops)
