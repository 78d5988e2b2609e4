"""Write the random weights that every system reads: `python -m benchmarks.peers.weights FOLDER`."""

from __future__ import annotations

import argparse
from typing import Any

TOY = dict(
    vocab_size=1024,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
MOE = dict(model_type="qwen3_moe", norm_topk_prob=True, tie_word_embeddings=True)
GPT_OSS = dict(
    model_type="gpt_oss",
    # The real model's YaRN costs the same; llama.cpp and transformers round its bounds differently.
    rope_parameters=dict(rope_type="default", rope_theta=150000.0),
)
QWEN35 = dict(
    model_type="qwen3_5_text",
    tie_word_embeddings=True,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)
LFM2 = dict(
    model_type="lfm2",
    tie_word_embeddings=True,
    block_auto_adjust_ff_dim=True,
    block_ffn_dim_multiplier=1.0,
    block_multiple_of=256,
    conv_L_cache=3,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
GRANITE = dict(
    model_type="granitemoehybrid",
    tie_word_embeddings=True,
    num_local_experts=0,
    num_experts_per_tok=0,
    position_embedding_type="nope",
    embedding_multiplier=12.0,
    residual_multiplier=0.246,
    logits_scaling=3.0,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_d_state=128,
)
_THREE_AND_ONE = ["linear_attention"] * 3 + ["full_attention"]
# Layers with attention.
_LFM2_350M = {2, 5, 8, 10, 12, 14}
_GRANITE_350M = {10, 13, 17, 27}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {},
    "toy": dict(**TOY, intermediate_size=512),
    "moe": dict(
        **MOE,
        vocab_size=151936,
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
    ),
    # Qwen3.5-0.8B's text part.
    "qwen3.5": dict(
        **QWEN35,
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=_THREE_AND_ONE * 6,
    ),
    "qwen3.5-toy": dict(
        **QWEN35,
        **(TOY | dict(num_hidden_layers=4, head_dim=256)),
        intermediate_size=512,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=_THREE_AND_ONE,
    ),
    "lfm2": dict(
        **LFM2,
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if i in _LFM2_350M else "conv" for i in range(16)],
    ),
    "lfm2-toy": dict(
        **LFM2,
        **{name: value for name, value in TOY.items() if name != "head_dim"},
        intermediate_size=768,
        layer_types=["conv", "full_attention"],
    ),
    # Granite 4.0 H 350M: Mamba-2 in 28 of 32 layers.
    "granite": dict(
        **GRANITE,
        vocab_size=100352,
        hidden_size=768,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_hidden_layers=32,
        num_attention_heads=12,
        num_key_value_heads=4,
        attention_multiplier=0.015625,
        mamba_n_heads=48,
        mamba_d_head=32,
        layer_types=["attention" if i in _GRANITE_350M else "mamba" for i in range(32)],
    ),
    "granite-toy": dict(
        **GRANITE,
        **{name: value for name, value in TOY.items() if name != "head_dim"},
        intermediate_size=512,
        shared_intermediate_size=512,
        attention_multiplier=0.015625,
        mamba_n_heads=16,
        mamba_d_head=32,
        layer_types=["mamba", "attention"],
    ),
    "moe-toy": dict(**MOE, **TOY, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128),
    # gpt-oss-20b's layers, 4 of 24, and a sixth of its vocabulary: the head's share of a step is the same.
    "gpt-oss": dict(
        **GPT_OSS,
        vocab_size=32768,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
    "gpt-oss-toy": dict(
        **GPT_OSS,
        **TOY,
        intermediate_size=128,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=16,
    ),
}
# Standard deviations. The last of a token's experts has little weight, so that another choice due to rounding
# changes little. Attention has a fifth of its usual weight: with copies of one row's K and V, the rows would
# become alike and choose the same experts. So 8 and 32 rows choose 41.5 and 62.9 of `moe`'s 64 experts (42.0
# and 63.1 if they were independent), and 20 to 21 and 31.3 of `gpt-oss`'s 32 (21.0 and 31.6).
EMBEDDING, BIAS, SINK, ROUTER_LOGIT, ATTENTION = 1.0, 0.1, 1.0, 3.0, 0.2


def make_random(model_type: str, **numbers: Any) -> Any:
    """Return a model in bf16, with random weights that keep the tokens' hidden states distinct."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    unit = numbers["hidden_size"] ** -0.5  # preserves the deviation of its input
    config = AutoConfig.for_model(
        model_type, max_position_embeddings=8192, initializer_range=unit, **numbers
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    deviations = {
        "embed_tokens.weight": EMBEDDING,
        "o_proj.weight": ATTENTION * unit,
        "mlp.gate.weight": ROUTER_LOGIT * unit,
        "mlp.router.weight": ROUTER_LOGIT * unit,
        "bias": BIAS,
        "sinks": SINK,
    }
    for name, parameter in model.named_parameters():
        for end, deviation in deviations.items():
            if name.endswith(end):
                torch.nn.init.normal_(parameter, std=deviation)
    return model


def main() -> None:
    import torch

    from benchmarks.decode import make_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    changes = dict(SHAPES[options.shape])
    if options.layers is not None:
        changes["num_hidden_layers"] = options.layers
        if "layer_types" in changes:
            changes["layer_types"] = changes["layer_types"][: options.layers]
    model = (
        make_random(**changes) if "model_type" in changes else make_model(torch.bfloat16, **changes)
    )
    model.save_pretrained(options.folder, max_shard_size="100GB")  # one file


if __name__ == "__main__":
    main()
