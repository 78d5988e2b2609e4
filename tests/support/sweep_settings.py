"""The settings of the toys that the sweep builds, one entry per architecture.

`SMALL` is the base: each setting applies to the configs that have a field of that name. `SETTINGS` adds
what an architecture needs to be small or to exercise its features: windows shorter than the sequences,
more than one kind of layer, soft caps, thresholds that are crossed.
"""

from __future__ import annotations

from typing import Any

from support.toys import VOCAB

# Several names of one setting are on one line.
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64, d_model=64, n_embd=64,
    intermediate_size=96, ffn_dim=96, decoder_ffn_dim=96, encoder_ffn_dim=96, n_inner=96,
    num_hidden_layers=4, n_layer=4, decoder_layers=4, encoder_layers=1,
    num_attention_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256, n_positions=256, max_seq_len=256,
    initializer_range=0.12, init_std=0.12,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    sliding_window=7,
    # mixtures of experts
    num_experts=8, num_local_experts=8, n_routed_experts=8, moe_num_experts=8,
    num_experts_per_tok=2, moe_topk=2, moe_k=2, top_k_experts=2,
    n_shared_experts=1, num_shared_experts=1,
    moe_intermediate_size=40, shared_expert_intermediate_size=24, expert_ffn_hidden_size=40,
    shared_intermediate_size=24,
    n_group=4, topk_group=2,
    first_k_dense_replace=1,
    # latent attention
    q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
    # sparse indexers; with few heads, all scores of many keys are 0, and topk breaks ties arbitrarily
    index_topk=8, index_head_dim=16, index_n_heads=16,
    # recurrent and convolutional layers
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8,
    # encoders, such as BERT, are built as decoders
    is_decoder=True,
)  # fmt: skip

_LATENT = dict(num_key_value_heads=4)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    **_ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_ROPE_BY_KIND = {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 1e6}}
_GEMMA = dict(
    num_hidden_layers=4, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, sliding_window=7, layer_types=_MIXED,
    max_position_embeddings=256, initializer_range=0.12, rope_parameters=_ROPE_BY_KIND,
)  # fmt: skip
_INKLING = dict(
    swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, d_rel=8,
    sliding_window_size=7, rel_extent=16,
)  # fmt: skip
_INKLING2 = dict(
    _INKLING, unpadded_vocab_size=VOCAB, layer_types=["hybrid_sliding", "hybrid"] * 2,
    n_layers_per_attn_res_block=2, log_scaling_n_floor=4, qk_l2_clip_threshold=3.0,
    rel_l2_clip_threshold=1.0, mlp_gate_softcap=0.5, mlp_up_softcap=0.7,
)  # fmt: skip
_GEMMA4_UNIFIED = dict(_GEMMA, global_head_dim=24, num_kv_shared_layers=2)
_GEMMA4 = dict(_GEMMA4_UNIFIED, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)
_DOTS = dict(
    _LATENT, swa_num_attention_heads=4, swa_num_key_value_heads=4, swa_q_lora_rank=24,
    swa_kv_lora_rank=16, swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=12,
    shared_experts_intermediate_size=24,
)  # fmt: skip
TEXT = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCAB, initializer_range=0.12, max_position_embeddings=256,
)  # fmt: skip
_BYTES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=32,
    patch_size=16,
)  # fmt: skip

# Settings on top of SMALL, by architecture. DEFAULT omits a setting of SMALL.
DEFAULT = "(default)"
SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": dict(rope_parameters=_ROPE),
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": dict(_LATENT, layer_types=["linear_attention", "full_attention"] * 2),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "blt": dict(
        encoder_hash_byte_group_vocab=64, encoder_config=dict(_BYTES, hidden_size_global=64),
        decoder_config=dict(_BYTES, hidden_size_global=64), global_config=_BYTES,
        patcher_config=_BYTES, encoder_hash_byte_group_size=[3, 4],
    ),
    "cohere_compass_text": dict(rope_parameters={
        kind: dict(rope, mrope_section=[3, 3, 2]) for kind, rope in _ROPE_BY_KIND.items()
    }),
    "cpmant": dict(dim_head=16, dim_ff=96),
    "ctrl": dict(dff=96),
    "dbrx": dict(
        rope_parameters=_ROPE,
        attn_config=dict(kv_n_heads=2, clip_qkv=1.5, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=40, moe_num_experts=6, moe_top_k=2),
    ),
    "deepseek_v2": dict(_LATENT, topk_method="group_limited_greedy"),
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": dict(
        o_groups=2, o_lora_rank=16, num_key_value_heads=1, head_dim=32, num_hash_layers=1,
        partial_rotary_factor=0.25, compress_rate_csa=2, compress_rate_hca=5, index_topk=4,
        layer_types=[
            "heavily_compressed_attention", "compressed_sparse_attention",
            "sliding_attention", "compressed_sparse_attention",
        ],
    ),
    "dots1": dict(layer_types=_MIXED),
    "dots3_note": _DOTS,
    "dots3_note_text": _DOTS,
    "falcon_h1": dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8),
    "flint": dict(layer_types=_MIXED),
    "fuyu": dict(text_config=dict(model_type="persimmon", **TEXT)),
    "gemma2": dict(attn_logit_softcapping=1.0, final_logit_softcapping=10.0),
    "gemma3": dict(text_config=_GEMMA, vision_config=VISION, mm_tokens_per_image=4),
    "gemma3_text": dict(layer_types=_MIXED),
    "gemma3n_text": dict(
        _GEMMA4, global_head_dim=DEFAULT, laurel_rank=8, num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.5, 0.0],
    ),
    "gemma4": dict(text_config=_GEMMA4, vision_config=VISION, audio_config=None),
    "gemma4_assistant": dict(
        text_config=dict(_GEMMA4_UNIFIED, hidden_size_per_layer_input=0, num_kv_shared_layers=4,
                         vocab_size_per_layer_input=0, model_type="gemma4_text"),
        backbone_hidden_size=64, num_centroids=16,
    ),
    "gemma4_unified_assistant": dict(
        text_config=dict(_GEMMA4_UNIFIED, model_type="gemma4_unified_text", num_kv_shared_layers=2),
        backbone_hidden_size=64, num_centroids=16,
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "gemma4_unified": dict(
        text_config=_GEMMA4_UNIFIED, audio_config=None,
        vision_config=dict(mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32),
    ),
    "git": dict(vision_config=VISION),
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "got_ocr2": dict(text_config=dict(model_type="qwen2", **TEXT), vision_config=dict(
        hidden_size=32, output_channels=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=64, mlp_dim=48, global_attn_indexes=[0])),
    "gpt_neo": dict(num_layers=4, num_heads=4, hidden_size=64, window_size=7,
                    attention_types=[[["global", "local"], 2]]),
    "gpt_oss": dict(rope_parameters=dict(_YARN, truncate=False)),
    "gptj": dict(rotary_dim=8),
    "codegen": dict(rotary_dim=8),
    "granitemoehybrid": dict(layer_types=["full_attention"] * 4),
    "granite": dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3,
                    logits_scaling=2.0),
    "hy_v4": _LATENT,
    "sarvam_mla": _LATENT,
    "inkling_text": dict(
        _INKLING, local_layer_ids=[0, 2], mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": dict(
        _INKLING2, num_hidden_layers=6, layer_types=["hybrid_sliding", "hybrid"] * 3,
        loop_layer_index_start=2, loop_layer_index_end=4, loop_num_passes=2, loop_gate_rank=8,
    ),
    "kimi_linear": dict(
        _LATENT, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "laguna": dict(layer_types=_MIXED, num_attention_heads_per_layer=[4, 8, 4, 8]),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv", "full_attention"]),
    "llama4_text": dict(intermediate_size_mlp=96, attention_chunk_size=8, floor_scale=8,
                        attn_scale=0.5),
    "longcat_flash": dict(_LATENT, num_layers=2, ffn_hidden_size=96, zero_expert_num=4, head_dim=8),
    "mamba2": dict(num_heads=8, head_dim=16, state_size=8, n_groups=2),
    "mellum": dict(layer_types=_MIXED),
    "minicpm3": _LATENT,
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "minimax_m3_sparse"] * 2, index_block_size=4,
        index_topk_blocks=2, index_n_heads=2, rotary_dim=8, dense_intermediate_size=96,
    ),
    "ministral3": dict(
        rope_parameters=dict(_YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5)
    ),
    "modernbert-decoder": dict(local_attention=14),
    "moss_transcribe_diarize": dict(
        text_config=dict(model_type="qwen3", head_dim=16, **TEXT),
        audio_config=dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                          hidden_size=32),
    ),
    "mpt": dict(n_heads=4, n_layers=4),
    "nemotron_h": dict(
        layers_block_type=["mamba", "attention", "mamba", "attention"], num_hidden_layers=DEFAULT,
        mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2,
        moe_shared_expert_intermediate_size=24,
    ),
    "phi4_multimodal": dict(
        vision_config=dict(VISION, num_hidden_layers=2, crop_size=32),
        audio_config=dict(hidden_size=32, intermediate_size=48, num_blocks=2, num_attention_heads=2,
                          ext_pw_out_channel=32, depthwise_separable_out_channel=32,
                          nemo_conv_channels=8),
    ),
    "phimoe": dict(sliding_window=None),
    "prophetnet": dict(num_hidden_layers=DEFAULT, num_decoder_layers=2, num_encoder_layers=1,
                       num_decoder_attention_heads=4, num_encoder_attention_heads=4),
    "qwen2": dict(use_sliding_window=True, max_window_layers=2),
    "qwen3": dict(use_sliding_window=True, max_window_layers=2),
    "qwen4_exp": dict(
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
        indexer_compress_ratio=2, ngram_vocab_size_base=64, ple_embed_dim=16, ple_layer_ids=[1],
        split_ngram_parts=2, hc_lowrank=8,
    ),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "reformer": dict(
        axial_pos_embds_dim=(16, 48), axial_pos_shape=(16, 16), attention_head_size=16,
        feed_forward_size=96, attn_layers=["local", "lsh"] * 2,
    ),
    "roc_bert": dict(pronunciation_embed_dim=8, shape_embed_dim=8, pronunciation_vocab_size=32,
                     shape_vocab_size=32),
    "smollm3": dict(use_sliding_window=True, no_rope_layers=[1, 0, 1, 0], layer_types=_MIXED),
    "vaultgemma": dict(attn_logit_softcapping=1.0, final_logit_softcapping=10.0),
    "xglm": dict(attention_heads=4, num_layers=4),
    "xlstm": dict(chunk_size=8),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "xlnet": dict(d_head=16, d_inner=96, max_position_embeddings=DEFAULT),
    "youtu": _LATENT,
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"] * 2, mamba_ngroups=1, n_mamba_heads=8,
        mamba_d_state=8, adapter_rank=8,
    ),
    "zamba": dict(
        num_hidden_layers=5, attn_layer_period=2, attn_layer_offset=0, mamba_d_state=8,
        mamba_dt_rank=4, n_mamba_heads=2,
    ),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16,
                 layer_types=["hybrid", "hybrid_sliding"] * 2),
}  # fmt: skip

# Other configs of the same classes, on top of their settings; the architecture stands before the colon.
VARIANTS: dict[str, dict[str, Any]] = {
    "bert:encoder": dict(is_decoder=False),
    "bloom:odd": dict(hidden_size=60, n_head=6, apply_residual_connection_post_layernorm=True),
    "bloom:sliced": dict(slow_but_exact=True, pretraining_tp=2),
    "cohere:norms": dict(use_qk_norm=True),
    "deepseek_v2:plain": dict(q_lora_rank=None, topk_method="greedy"),
    "deepseek_v3:groups": dict(topk_group=3, num_experts_per_tok=1),
    "deepseek_v3:plain": dict(q_lora_rank=None, rope_interleave=False),
    "falcon:alibi": dict(alibi=True, multi_query=False, hidden_size=96, num_attention_heads=12),
    "falcon:heads": dict(multi_query=False, parallel_attn=False),
    "falcon:new": dict(new_decoder_architecture=True),
    "gemma3_text:bidirectional": dict(use_bidirectional_attention=True),
    "gemma4_text:dense": dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0,
                              vocab_size_per_layer_input=0, attention_k_eq_v=True),
    "gemma4_text:moe": dict(enable_moe_block=True, num_experts=8, top_k_experts=2,
                            moe_intermediate_size=40, attention_k_eq_v=True),
    "gpt2:scaled": dict(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    "gpt_bigcode:heads": dict(multi_query=False),
    "gpt_neox:serial": dict(use_parallel_residual=False, attention_bias=False),
    "granitemoehybrid:mamba": dict(layer_types=["mamba", "attention"] * 2),
    "inkling_text:scaled": dict(log_scaling_n_floor=4, log_scaling_alpha=0.7),
    "lfm2:full": dict(layer_types=["full_attention"] * 4),
    "lfm2_moe:plain": dict(use_expert_bias=False),
    "llama4_text:full": dict(layer_types=["full_attention"] * 4, no_rope_layers=[0, 1, 0, 1]),
    "llama:dynamic": dict(rope_parameters={**_ROPE, "rope_type": "dynamic", "factor": 2.0}),
    "llama:tied": dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "megatron-bert:encoder": dict(is_decoder=False),
    "minimax:full": dict(layer_types=["full_attention"] * 4),
    "mixtral:full": dict(sliding_window=None),
    "mpt:odd": dict(d_model=60, n_heads=6),
    "olmo:clip": dict(clip_qkv=0.5),
    "opt:post": dict(do_layer_norm_before=False, word_embed_proj_dim=32),
    "phi3:longrope": dict(
        sliding_window=None, original_max_position_embeddings=32,
        rope_parameters={
            **_ROPE, "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 32,
        },
    ),
    "phi:norms": dict(qk_layernorm=True),
    "phimoe:window": dict(sliding_window=7),
    "qwen2:full": dict(use_sliding_window=False),
    "qwen3_moe:window": dict(use_sliding_window=True),
    "roformer:encoder": dict(is_decoder=False),
    "roformer:values": dict(rotary_value=True),
    "stablelm:norms": dict(qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=True),
}  # fmt: skip
