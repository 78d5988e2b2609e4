"""What a step must at least read and multiply, and how long that takes on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FORMATS = ("bf16", "int8", "int4")
# A number of 8 or 4 bits, and four bytes for each 64 of them: what Verbatim holds. llama.cpp's Q8_0 and
# Q4_0 (two bytes for each 32) come to the same.
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0625, "int4": 0.5625}
KV_BYTES = {"16bit": 2.0, "int8": 1.0625}


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a Qwen3 model that its speed depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-6
    rope_theta: float = 1e6

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a folder's config.json."""
        rope = config.get("rope_parameters") or config
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
        )

    @property
    def layer_weights(self) -> int:
        """Elements of all matrices but the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def weight_bytes(self, fmt: str, head_bits: int) -> float:
        """What a step reads of the weights; in int4 the head may have 8 bits."""
        head = "int8" if fmt == "int4" and head_bits == 8 else fmt
        return self.layer_weights * WEIGHT_BYTES[fmt] + self.head_weights * WEIGHT_BYTES[head]

    def kv_bytes(self, kv: str) -> float:
        """K and V of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * KV_BYTES[kv]


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured in the same run: bytes read and multiply-adds, times two, a second."""

    bandwidth: float
    flops: float

    def decode_limit_s(
        self, shape: Shape, fmt: str, kv: str, head_bits: int, rows: int, context: int
    ) -> float:
        """The least seconds of a step: reading weights and KV, or multiplying, whichever is longer."""
        nbytes = shape.weight_bytes(fmt, head_bits) + rows * context * shape.kv_bytes(kv)
        return max(nbytes / self.bandwidth, self._multiply_s(shape, rows, rows, rows * context))

    def prefill_limit_s(self, shape: Shape, fmt: str, head_bits: int, length: int) -> float:
        """The least seconds of a prompt, with logits of its last token alone."""
        pairs = length * (length + 1) // 2
        read = shape.weight_bytes(fmt, head_bits) / self.bandwidth
        return max(read, self._multiply_s(shape, length, 1, pairs))

    def _multiply_s(self, shape: Shape, rows: int, head_rows: int, pairs: int) -> float:
        """For so many rows, rows with logits, and pairs of a query and a key."""
        products = rows * shape.layer_weights + head_rows * shape.head_weights
        attention = 2 * pairs * shape.layers * shape.heads * shape.head_dim
        return 2 * (products + attention) / self.flops
