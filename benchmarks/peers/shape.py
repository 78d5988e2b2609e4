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
    """The numbers of a model that its speed depends on.

    A dense model has one expert, which every token chooses. `sliding` layers read no more than `window`
    tokens of K and V.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-6
    rope_theta: float = 1e6
    experts: int = 1
    experts_per_token: int = 1
    sliding: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a folder's config.json."""
        rope = config.get("rope_parameters") or config
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            experts=config.get("num_local_experts", 1),
            experts_per_token=config.get("num_experts_per_tok", 1),
            sliding=(config.get("layer_types") or []).count("sliding_attention"),
            window=config.get("sliding_window") or 0,
        )

    @property
    def layer_weights(self) -> int:
        """Elements of all matrices but the head that one token is multiplied by."""
        return int(self._layer_weights(self.experts_per_token))

    def _layer_weights(self, experts: float) -> float:
        """Elements of all matrices but the head, with so many experts in each layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + experts * 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def distinct_experts(self, rows: int) -> float:
        """Expected number of a layer's experts that so many tokens choose, each at random on its own."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)

    def weight_bytes(self, fmt: str, head_bits: int, rows: int = 1) -> float:
        """What a step of so many tokens reads of the weights; in int4 the head may have 8 bits."""
        head = "int8" if fmt == "int4" and head_bits == 8 else fmt
        layers = self._layer_weights(self.distinct_experts(rows))
        return layers * WEIGHT_BYTES[fmt] + self.head_weights * WEIGHT_BYTES[head]

    def visible(self, tokens: int) -> int:
        """Keys that the last of so many tokens attends to, summed over the layers."""
        return (self.layers - self.sliding) * tokens + self.sliding * min(tokens, self.window)

    def kv_bytes(self, kv: str, tokens: int = 1) -> float:
        """K and V that the last of so many tokens attends to; by default those of one token."""
        return self.visible(tokens) * 2 * self.kv_heads * self.head_dim * KV_BYTES[kv]


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured in the same run: bytes read and multiply-adds, times two, a second."""

    bandwidth: float
    flops: float

    def decode_limit_s(
        self, shape: Shape, fmt: str, kv: str, head_bits: int, rows: int, context: int
    ) -> float:
        """The least seconds of a step: reading weights and KV, or multiplying, whichever is longer."""
        nbytes = shape.weight_bytes(fmt, head_bits, rows) + rows * shape.kv_bytes(kv, context)
        pairs = rows * shape.visible(context)
        return max(nbytes / self.bandwidth, self._multiply_s(shape, rows, rows, pairs))

    def prefill_limit_s(self, shape: Shape, fmt: str, head_bits: int, length: int) -> float:
        """The least seconds of a prompt, with logits of its last token alone."""
        pairs = sum(shape.visible(tokens) for tokens in range(1, length + 1))
        read = shape.weight_bytes(fmt, head_bits, length) / self.bandwidth
        return max(read, self._multiply_s(shape, length, 1, pairs))

    def _multiply_s(self, shape: Shape, rows: int, head_rows: int, pairs: int) -> float:
        """For so many rows, rows with logits, and pairs of a query and a key in all layers."""
        products = rows * shape.layer_weights + head_rows * shape.head_weights
        attention = 2 * pairs * shape.heads * shape.head_dim
        return 2 * (products + attention) / self.flops
