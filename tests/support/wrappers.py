"""Toys of multimodal models: a language model with an image or audio encoder."""

from __future__ import annotations

import copy
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from support import toys
from support.sweep_settings import TEXT, VISION

_HEADS = dict(TEXT, head_dim=16)
_MROPE = dict(
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
)
_DELTA = dict(
    TEXT, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=12, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
)  # fmt: skip
_QWEN = dict(
    depth=1, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=16, out_hidden_size=64,
    spatial_merge_size=2,
)  # fmt: skip
_QWEN3 = dict(_QWEN, num_position_embeddings=16)
_DEEP = dict(_QWEN3, deepstack_visual_indexes=[0])
_CLIP = dict(VISION, model_type="clip_vision_model")
_SIGLIP = dict(VISION, model_type="siglip_vision_model")
_INKLING = dict(
    TEXT, head_dim=16, num_hidden_layers=3, local_layer_ids=[0, 2], swa_num_attention_heads=4,
    swa_num_key_value_heads=2, swa_head_dim=16, d_rel=8, sliding_window_size=7, rel_extent=16,
    log_scaling_n_floor=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
)  # fmt: skip
_LLAMA, _QWEN2, _COHERE2 = (dict(TEXT, model_type=x) for x in ("llama", "qwen2", "cohere2"))

PLACEHOLDER = 7  # the id of an image, or of a piece of one
SETTINGS: dict[str, dict[str, Any]] = {
    "aya_vision": dict(text_config=_COHERE2, vision_config=_SIGLIP),
    "cohere2_vision": dict(text_config=_COHERE2, vision_config=_SIGLIP),
    "gemma3": dict(text_config=dict(_HEADS, sliding_window=7), vision_config=VISION,
                   mm_tokens_per_image=4),
    "glm4v": dict(text_config=TEXT | _MROPE, vision_config=dict(
        depth=1, hidden_size=32, num_heads=2, image_size=32, patch_size=16, out_hidden_size=64,
        intermediate_size=48)),
    "idefics3": dict(text_config=dict(_LLAMA, pad_token_id=0), vision_config=VISION, scale_factor=1),
    "inkling2": dict(
        text_config=dict(
            _INKLING, unpadded_vocab_size=128, log_scaling_n_floor=4, n_layers_per_attn_res_block=2,
            layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"]),
        vision_config=dict(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, projection_hidden_dim=48,
            text_hidden_size=64)),
    "inkling_mm_model": dict(
        text_config=_INKLING, vision_config=dict(patch_size=4, num_hidden_layers=4),
        audio_config=dict(n_mel_bins=4, mel_vocab_size=8)),
    "internvl": dict(text_config=_QWEN2,
                     vision_config=dict(VISION, image_size=[32, 32], patch_size=[16, 16])),
    "lfm2_vl": dict(
        text_config=dict(TEXT, model_type="lfm2", layer_types=["conv", "full_attention"]),
        vision_config=dict(VISION, model_type="siglip2_vision_model", num_patches=16)),
    "llava": dict(text_config=_LLAMA, vision_config=_CLIP),
    "llava_next": dict(text_config=_LLAMA, vision_config=_CLIP),
    "llava_onevision": dict(text_config=_QWEN2, vision_config=_SIGLIP),
    "mistral3": dict(text_config=dict(_HEADS, model_type="mistral"),
                     vision_config=dict(VISION, model_type="pixtral")),
    "paligemma": dict(text_config=dict(_HEADS, model_type="gemma"), projection_dim=64,
                      vision_config=dict(_SIGLIP, projection_dim=64)),
    "qwen2_5_vl": dict(text_config=TEXT | _MROPE, vision_config=_QWEN),
    "qwen2_audio": dict(text_config=_QWEN2, audio_config=dict(
        d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=48)),
    "qwen2_vl": dict(text_config=TEXT | _MROPE, vision_config=dict(
        depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=16)),
    "qwen3_5": dict(text_config=_DELTA, vision_config=_QWEN3),
    "qwen3_5_moe": dict(text_config=_DELTA | _EXPERTS, vision_config=_QWEN3),
    "qwen3_vl": dict(text_config=_HEADS | _MROPE, vision_config=_DEEP),
    "qwen3_vl_moe": dict(text_config=_HEADS | _MROPE | _EXPERTS, vision_config=_DEEP),
    "smolvlm": dict(text_config=dict(_LLAMA, pad_token_id=0), vision_config=VISION, scale_factor=1),
    "voxtral": dict(text_config=_LLAMA, audio_config=dict(
        hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)),
}  # fmt: skip


# Part of the message with which a wrapper is refused.
REFUSED = {"paligemma": "later tokens"}
SUPPORTED = [name for name in SETTINGS if name not in REFUSED and name in CONFIG_MAPPING_NAMES]


def make_wrapper(name: str) -> Any:
    """Return the toy of a wrapper, by `model_type`, with `PLACEHOLDER` as the image token id."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[name](**copy.deepcopy(SETTINGS[name]))
    if hasattr(config, "image_token_id"):
        config.image_token_id = PLACEHOLDER
    config._attn_implementation = "eager"
    return toys.build(getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name]), config)
