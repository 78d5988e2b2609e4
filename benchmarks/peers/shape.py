"""The minimum that a step must read and multiply, and the time that it takes on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FORMATS = ("bf16", "int8", "int4")
# Bytes per weight: 8 or 4 bits, and four bytes for each group of 64, as in Verbatim. llama.cpp's Q8_0 and
# Q4_0 (two bytes for each 32) have the same size.
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0625, "int4": 0.5625}
KV_BYTES = {"16bit": 2.0, "int8": 1.0625}


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a model that determine its speed.

    A dense model has one expert, which every token chooses. `sliding` layers read no more than `window`
    tokens of K and V. `recurrent` layers have matrices of `mixer_weights` elements in place of attention, and
    together a state of `state_bytes` per sequence.
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
    recurrent: int = 0
    mixer_weights: int = 0
    state_bytes: int = 0
    gated: bool = False  # queries have gates

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Return the shape of a model from its config.json."""
        rope = config.get("rope_parameters") or config
        kinds = config.get("layer_types") or []
        recurrent = sum(kind in ("linear_attention", "conv") for kind in kinds)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=_intermediate(config),
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            vocab=config["vocab_size"],
            eps=config.get("rms_norm_eps") or config["norm_eps"],
            rope_theta=rope["rope_theta"],
            experts=config.get("num_local_experts") or 1,
            experts_per_token=config.get("num_experts_per_tok") or 1,
            sliding=kinds.count("sliding_attention"),
            window=config.get("sliding_window") or 0,
            gated=config["model_type"] == "qwen3_5_text",
            recurrent=recurrent,
            **(_mixer(config, recurrent) if recurrent else {}),
        )

    @property
    def layer_weights(self) -> int:
        """Elements of all matrices except the head that one token is multiplied by."""
        return int(self._layer_weights(self.experts_per_token))

    def _layer_weights(self, experts: float) -> float:
        """Return the elements of all matrices except the head, with `experts` experts in each layer."""
        heads = (2 + self.gated) * self.heads + 2 * self.kv_heads
        attention = self.hidden * self.head_dim * heads
        router = self.hidden * self.experts if self.experts > 1 else 0
        mlp = router + experts * 3 * self.hidden * self.intermediate
        attending = self.layers - self.recurrent
        return attending * attention + self.recurrent * self.mixer_weights + self.layers * mlp

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def distinct_experts(self, rows: int) -> float:
        """Return the expected number of a layer's experts that `rows` tokens choose at random."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)

    def weight_bytes(self, fmt: str, head_bits: int, rows: int = 1) -> float:
        """Return the bytes of weights that a step of `rows` tokens reads; an int4 head may have 8 bits."""
        head = "int8" if fmt == "int4" and head_bits == 8 else fmt
        layers = self._layer_weights(self.distinct_experts(rows))
        return layers * WEIGHT_BYTES[fmt] + self.head_weights * WEIGHT_BYTES[head]

    def visible(self, tokens: int) -> int:
        """Return the number of keys that the last of `tokens` tokens attends to, over all layers."""
        everything = self.layers - self.sliding - self.recurrent
        return everything * tokens + self.sliding * min(tokens, self.window)

    def kv_bytes(self, kv: str, tokens: int = 1) -> float:
        """Return the bytes of K and V that the last of `tokens` tokens attends to."""
        return self.visible(tokens) * 2 * self.kv_heads * self.head_dim * KV_BYTES[kv]


def _intermediate(config: dict[str, Any]) -> int:
    """Return the width of an MLP, or of an expert."""
    if config["model_type"] == "granitemoehybrid":
        return int(config["shared_intermediate_size"])
    width: int = config.get("moe_intermediate_size") or config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):  # LFM2
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return width


def _mixer(config: dict[str, Any], layers: int) -> dict[str, int]:
    """Return `mixer_weights` and `state_bytes`; convolution states are bf16, recurrent ones float32."""
    hidden = config["hidden_size"]
    if config["model_type"] == "lfm2":
        nbytes = 2 * (config["conv_L_cache"] - 1) * hidden
        return dict(mixer_weights=4 * hidden * hidden, state_bytes=layers * nbytes)
    if config["model_type"] == "granitemoehybrid":
        heads, width = config["mamba_n_heads"], config["mamba_d_head"]
        key, taps = config["mamba_d_state"], config["mamba_d_conv"]
        value = heads * width
        channels = value + 2 * config["mamba_n_groups"] * key
        columns = channels + value + heads
    else:
        key_heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
        heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
        taps, value = config["linear_conv_kernel_dim"], heads * width
        channels = 2 * key_heads * key + value
        columns = channels + value + 2 * heads
    nbytes = 2 * (taps - 1) * channels + 4 * heads * key * width
    return dict(mixer_weights=hidden * (columns + value), state_bytes=layers * nbytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's limits in the same run: bytes read per second, and FLOP/s (2 per multiply-add)."""

    bandwidth: float
    flops: float

    def decode_limit_s(
        self, shape: Shape, fmt: str, kv: str, head_bits: int, rows: int, context: int
    ) -> float:
        """Return the minimum seconds of a step: memory traffic (states are also written) or products."""
        nbytes = shape.weight_bytes(fmt, head_bits, rows) + rows * shape.kv_bytes(kv, context)
        nbytes += rows * 2 * shape.state_bytes
        pairs = rows * shape.visible(context)
        return max(nbytes / self.bandwidth, self._multiply_s(shape, rows, rows, pairs))

    def prefill_limit_s(self, shape: Shape, fmt: str, head_bits: int, length: int) -> float:
        """Return the minimum seconds of a prompt, with logits only for its last token."""
        pairs = sum(shape.visible(tokens) for tokens in range(1, length + 1))
        read = shape.weight_bytes(fmt, head_bits, length) / self.bandwidth
        return max(read, self._multiply_s(shape, length, 1, pairs))

    def _multiply_s(self, shape: Shape, rows: int, head_rows: int, pairs: int) -> float:
        """Return the seconds of products, for rows, rows with logits, and pairs of query and key."""
        products = rows * shape.layer_weights + head_rows * shape.head_weights
        attention = 2 * pairs * shape.heads * shape.head_dim
        return 2 * (products + attention) / self.flops
