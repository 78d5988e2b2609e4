"""Toy models of real architectures: transformers' classes with random weights, without downloads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 128
Folders = Callable[..., Path]  # from a toy's name and changes of its config to its saved folder

# Several names of one setting are on one line.
_BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_MLA: dict[str, Any] = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12
)
_DEEPSEEK: dict[str, Any] = dict(
    _MLA, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    n_group=4, topk_group=2, moe_intermediate_size=40, first_k_dense_replace=1,
)  # fmt: skip
_LOCAL_EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
_GEMMA: dict[str, Any] = dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=16)

# Settings on top of _BASE.
TOYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(sliding_window=7),
    "qwen2": {},
    "qwen3": dict(head_dim=20),
    "qwen3_moe": dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40),
    "mixtral": _LOCAL_EXPERTS,
    "gemma2": dict(
        _GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0,
        attn_implementation="eager",  # transformers' SDPA once ignored the soft cap
    ),
    "gemma3": dict(_GEMMA, sliding_window_pattern=2),
    "gpt_oss": dict(
        _LOCAL_EXPERTS, head_dim=16, sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "phi3": dict(sliding_window=None),
    "olmo2": {},
    "glm4": dict(head_dim=16),
    "llama4_text": dict(
        head_dim=16, intermediate_size_mlp=96, num_local_experts=4, interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 0], attention_chunk_size=7, floor_scale=8,
    ),
    "granite": dict(
        embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "deepseek_v3": _DEEPSEEK,
    # With few heads, or for a padding id (its embedding is 0), many scores are 0, and torch breaks ties
    # arbitrarily.
    "deepseek_v32": dict(
        _DEEPSEEK, index_topk=8, index_head_dim=16, index_n_heads=16, pad_token_id=None
    ),
    "minimax_m3": dict(
        head_dim=16, rotary_dim=8, dense_intermediate_size=96, shared_intermediate_size=40,
        num_local_experts=6, num_experts_per_tok=2, mlp_layer_types=["dense", "sparse", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
    ),
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4, n_positions=256, n_inner=96),
    "opt": dict(ffn_dim=96, init_std=0.15, word_embed_proj_dim=64, activation_function="relu"),
    "bloom": dict(n_layer=3, n_head=4),
    "falcon": dict(new_decoder_architecture=True),
    "falcon_alibi": dict(alibi=True, multi_query=False),
    "falcon_mqa": dict(multi_query=True),
}  # fmt: skip

_LINEAR: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"]
)
_DELTA: dict[str, Any] = dict(
    _LINEAR, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=12,
)  # fmt: skip
_DELTA_EXPERTS: dict[str, Any] = dict(
    _DELTA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
)  # fmt: skip
_MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=12, mamba_chunk_size=16
)
_GRANITE: dict[str, Any] = dict(
    _MAMBA2, shared_intermediate_size=32, layer_types=["mamba", "attention", "mamba"]
)

# Toys with recurrent layers.
RECURRENT_TOYS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_EXPERTS,
    "qwen3_5": dict(_DELTA, head_dim=16),
    "qwen4": dict(
        _DELTA_EXPERTS, eos_token_id=7, hc_count=2, hc_lowrank=8, indexer_n_heads=16,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
        ple_layer_ids=[1], ple_embed_dim=16, ngram_vocab_size_base=64, split_ngram_parts=2,
    ),
    "deepseek_v4": dict(
        num_hidden_layers=4, num_key_value_heads=1, head_dim=32, partial_rotary_factor=0.25,
        q_lora_rank=24, o_groups=2, o_lora_rank=16, moe_intermediate_size=24, n_routed_experts=4,
        num_experts_per_tok=2, num_hash_layers=1, swiglu_limit=1.0, sliding_window=7,
        compress_rate_csa=4, compress_rate_hca=16, index_n_heads=16, index_head_dim=16,
        index_topk=8,
        layer_types=[
            "heavily_compressed_attention", "compressed_sparse_attention",
            "sliding_attention", "compressed_sparse_attention",
        ],
    ),
    "olmo_hybrid": dict(_DELTA, linear_num_key_heads=4),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"], conv_L_cache=3, block_ff_dim=96),
    "bamba": dict(_MAMBA2, attn_layer_indices=[1]),
    "granite_hybrid": dict(_GRANITE, **_LOCAL_EXPERTS),
    "granite_dense": dict(_GRANITE, num_local_experts=0, num_experts_per_tok=0),
    "falcon_h1": dict(_MAMBA2, mamba_n_groups=1, mamba_d_ssm=128),
    "nemotron_h": dict(
        mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=12, chunk_size=16,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
    ),
    "kimi_linear": dict(
        _MLA, **_LINEAR, num_key_value_heads=4, linear_head_dim=16, linear_num_heads=4,
        moe_intermediate_size=24, num_experts=4, num_experts_per_token=2,
    ),
    "minimax": dict(_LOCAL_EXPERTS, **_LINEAR, block_size=16, head_dim=16),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, mamba_d_state=8),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=7),
    "zaya": dict(
        head_dim=16, attention_bias=True, num_experts=4, num_experts_per_tok=1,
        moe_intermediate_size=40, router_hidden_size=16, cca_time0=3, cca_time1=3,
        sliding_window=7, layer_types=["hybrid", "hybrid_sliding", "hybrid"],
    ),
    # Without attention.
    "rwkv": {},
    "xlstm": dict(num_heads=4, chunk_size=16, qk_dim_factor=1.0),
    "mamba": dict(state_size=8),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2, state_size=12, chunk_size=16),
}  # fmt: skip
# `model_type` of toys with another name.
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "minimax_m3": "minimax_m3_vl_text",
    "falcon_alibi": "falcon",
    "falcon_mqa": "falcon",
    "qwen3_5": "qwen3_5_text",
    "qwen4": "qwen4_exp_text",
    "granite_hybrid": "granitemoehybrid",
    "granite_dense": "granitemoehybrid",
}
# One toy for each kind of recurrence.
RECURRENT_FAMILIES = [
    "qwen3_5",  # gated delta net
    "granite_dense",  # Mamba-2
    "lfm2",  # short convolutions
    "jamba",  # Mamba
    "kimi_linear",  # Kimi's delta net
    "minimax",  # lightning attention
    "rwkv",  # weighted means
    "xlstm",  # matrix LSTM
    "zaya",  # convolutions in attention
    "recurrent_gemma",  # real-gated linear recurrent unit
]


def make_toy(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """Return a toy of architecture `name`, in eval mode; `changes` override its config.

    A name in neither table is a `model_type`.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    model_type, settings = _MODEL_TYPES.get(name, name), (TOYS | RECURRENT_TOYS).get(name, {})
    config = CONFIG_MAPPING[model_type](**{**_BASE, **settings, **changes})
    return build(getattr(transformers, CLASSES[model_type]), config, dtype=dtype, seed=seed)


def build(cls: Any, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model with random weights, biases and norms, without changing torch's global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
        for name, parameter in model.named_parameters():
            # These are initialized to 0 or 1, which would hide mistakes.
            zeros = ("gate_preact", "ple.conv1d", "compressor", "index_kpool")
            if parameter.ndim == 1 or any(part in name for part in zeros):
                parameter.data += 0.1 * torch.randn(parameter.shape)
            # It is initialized to -10, where few gates would exceed the running maximum.
            if "igate_preact.bias" in name:
                parameter.data += 8.0
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token id
                experts = torch.rand(len(table), config.n_routed_experts).argsort(1)
                table.copy_(experts[:, : table.shape[1]])
    return model.to(dtype).eval()


def random_ids(length: int, seed: int, low: int = 3, high: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (length,), generator=generator).tolist()


@torch.no_grad()
def scores_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' log-probs of the tokens of a row except the first, without a cache."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def saver(tmp_path_factory: Any, make: Callable[..., Any]) -> Folders:
    """Return a function that saves the model of `make` once per set of arguments, and returns its folder."""

    @cache
    def folder(name: str, **changes: Any) -> Path:
        path: Path = tmp_path_factory.mktemp(name.replace(":", "-"))
        make(name, **changes).save_pretrained(path)
        return path

    return folder
