"""Toys of multimodal models: a language model with an image or audio encoder."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from support import toys
from support.sweep_settings import DEFAULT, SETTINGS, SMALL

PLACEHOLDER = 7  # the id of an image, or of a piece of one

# The base of encoders: each setting applies to the configs that have a field of that name.
_ENCODER: dict[str, Any] = dict(
    hidden_size=32, d_model=32, embed_dim=32, hidden_dim=32, attention_dim=32, n_embed=32,
    intermediate_size=48, encoder_ffn_dim=48, encoder_intermediate_size=48, linear_fc_size=48,
    num_hidden_layers=1, depth=1, encoder_layers=1, num_layers=1, n_layers=1,
    num_attention_heads=2, num_heads=2, encoder_attention_heads=2, num_key_value_heads=2,
    head_dim=16, image_size=32, patch_size=16, spatial_merge_size=2, num_position_embeddings=16,
    out_hidden_size=64, text_hidden_size=64, projection_dim=64, deepstack_visual_indexes=[0],
    base_channels=32, num_res_blocks=1, channel_multiplier=[1],
)  # fmt: skip
# The name of layers with an indexer, which changed.
_INDEXED = "indexed_attention"
if _INDEXED not in ALLOWED_ATTN_LAYER_TYPES:
    _INDEXED = "deepseek_sparse_attention"
_ROPE = dict(rope_type="default", rope_theta=10000.0)


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    """Return a text config with sections of rotary angles for time, height and width."""
    return dict(text_config=dict(rope_parameters=dict(_ROPE, mrope_section=[*sections], **others)))


# What the base lacks, by wrapper; parts of a config are merged. DEFAULT omits a setting of the base.
_OWN: dict[str, dict[str, Any]] = {
    "apertus1p5": dict(
        image_token_offset=64, vision_config=dict(codebook_size=32), audio_token_offset=96,
        audio_config=dict(codebook_size=32, codebook_dim=32)),
    "chameleon": dict(vocabulary_map={"<image>": PLACEHOLDER}),
    "cosmos3_edge": _mrope(2, 3, 3),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", *["sparse"] * 3])),
    "ernie4_5_vl_moe": dict(text_config=dict(
        rope_parameters=dict(_ROPE, mrope_section=[3, 3, 2]), moe_intermediate_size=[24, 16])),
    "fun_asr_nano": dict(adaptor_config=dict(hidden_size=64, intermediate_size=16)),
    "glm46v": _mrope(2, 3, 3),
    "glm4v": _mrope(2, 3, 3),
    "glm4v_moe": _mrope(1, 2, 1, partial_rotary_factor=0.5),
    "glm5_next": dict(text_config=dict(
        num_hidden_layers=5, num_key_value_heads=4, index_kpool=4, qk_rope_head_dim=0,
        linear_head_dim=8, linear_num_heads=4, swiglu_limit=0.5,
        layer_types=["linear_attention", _INDEXED] * 2 + [_INDEXED],
        indexer_types=[*["full"] * 4, "shared"], mlp_layer_types=["dense", *["sparse"] * 4])),
    "glm_ocr": _mrope(2, 3, 3),
    "glmga": _mrope(2, 3, 3),
    "granite4_vision": dict(
        deepstack_layer_map=[[0, 1]], downsample_rate="1/2", vision_config=dict(hidden_size=64)),
    "hunyuan_vl": _mrope(2, 2, 2, 2),
    "hy_v4_vl": _mrope(2, 1, 1),
    "mistral_large4": dict(text_config=dict(
        num_key_value_heads=4, no_rope_layers=[1, 1, 0, 0], kv_source_layers=[0, 0, 2, 2],
        indexer_types=["full", "shared", "full", "full"],
        mlp_layer_types=["dense", *["sparse"] * 3])),
    "mistral4": dict(num_key_value_heads=4),
    "molmo2": dict(
        vision_config=dict(image_size=[32, 32]), adapter_config=dict(vision_feature_layer=[0])),
    "muse_glimmer": dict(projector_hidden_size=32, out_hidden_size=32),
    "muse_spark": dict(
        text_config=dict(moe_hidden_size=32), projector_hidden_size=32, out_hidden_size=32,
        audio_config=dict(patch_sizes=[16], hidden_sizes=[32], depths=[1])),
    "nemotron_h_omni": dict(
        projector_hidden_size=32, vision_config=dict(video_temporal_patch_size=2)),
    "paddleocr_vl": _mrope(2, 3, 3),
    "qwen2_5_omni_thinker": _mrope(2, 3, 3),
    "qwen2_5_vl": _mrope(2, 3, 3),
    "qwen2_vl": _mrope(2, 3, 3),
    "unlimited_ocr": dict(text_config=dict(num_key_value_heads=4)),
}  # fmt: skip
_NAMES = """
    apertus1p5 aria aya_vision chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
    deepseek_ocr2 deepseek_vl deepseek_vl_hybrid ernie4_5_vl_moe exaone4_5 fun_asr_nano gemma3
    glm46v glm4v glm4v_moe glm5_next glm_ocr glmasr glmga granite4_vision granite_docling
    granite_speech granite_speech_plus hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3
    inkling2 inkling2_loop inkling_mm_model internvl janus kimi_k25 kosmos-2.5 lfm2_vl lfm3_vl
    lighton_ocr llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax_m3_vl mistral3 mistral4 mistral_large4 molmo2 muse_glimmer muse_spark
    nemotron_h_omni omniasr ovis2 paddleocr_vl pp_chart2table qianfan_ocr qwen2_5_omni_thinker
    qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl
    qwen3_vl_moe smolvlm step3p7 unlimited_ocr video_llama_3 video_llava vipllava voxtral
"""

# Wrappers that are refused: a part of the message, and the reason in the docs.
_NO_TEXT = "no forward of text alone"
REFUSED = {
    "idefics": ("pixel_values", _NO_TEXT),
    "kosmos-2": ("pixel_values", _NO_TEXT),
    "paligemma": ("later tokens", "later tokens"),
    "voxtral_realtime": ("input_features", _NO_TEXT),
}
SUPPORTED = [name for name in _NAMES.split() if name in CONFIG_MAPPING_NAMES]


def _small(cls: Any, base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config class and of its parts."""
    fields = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    settings = {k: v for k, v in base.items() if k in fields}
    if base is SMALL:
        name = cls.model_type
        settings |= SETTINGS.get(name) or SETTINGS.get(name.removesuffix("_text")) or {}
    parts = cls.sub_configs or {}
    default = cls() if parts else None
    for name in parts:
        part = type(getattr(default, name))
        if dataclasses.is_dataclass(part):
            part_base = SMALL if "text" in name or "thinker" in name else _ENCODER
            settings[name] = _small(part, part_base, own.get(name, {}))
            settings[name]["model_type"] = part.model_type
    settings |= {k: v for k, v in own.items() if k not in parts}
    return {k: v for k, v in settings.items() if v != DEFAULT}


def settings_of(name: str, **text: Any) -> tuple[Any, dict[str, Any]]:
    """Return the config class of a wrapper, and its toy's settings; `text` changes its text config."""
    cls = CONFIG_MAPPING[name]
    base = {} if any("text" in part for part in cls.sub_configs or ()) else SMALL
    own = _OWN.get(name, {})
    if text:
        own = own | dict(text_config=own.get("text_config", {}) | text)
    return cls, copy.deepcopy(_small(cls, base, own))


def class_of(name: str) -> Any:
    """Return the model class of a wrapper."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name])


def make_wrapper(name: str, **text: Any) -> Any:
    """Return the toy of a wrapper, by `model_type`, with `PLACEHOLDER` as the image token id.

    Args:
        text: changes of its text config.
    """
    cls, settings = settings_of(name, **text)
    config = cls(**settings)
    if hasattr(config, "image_token_id"):
        config.image_token_id = PLACEHOLDER
    config._attn_implementation = "eager"
    return toys.build(class_of(name), config)
