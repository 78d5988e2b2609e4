"""GGUF files of toy models: their metadata, and llama.cpp's tensor names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"input_layernorm", "attn_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    for pattern, new in _NAMES:
        name = re.sub(pattern, new, name)
    return name


def gguf_writer(path: Path, config: Any, family: str) -> Any:
    """Return a `gguf.GGUFWriter` with the metadata of `config`."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    return writer


def save_gguf(writer: Any) -> None:
    """Write the file with all added tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
