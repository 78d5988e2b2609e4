"""Write a checkpoint as GGUF, for llama.cpp: BF16, Q8_0 or Q4_0, norms in float32, no vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from benchmarks.peers.checkpoint import Checkpoint

TYPES = {"bf16": Type.BF16, "int8": Type.Q8_0, "int4": Type.Q4_0}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Checkpoint, fmt: str, head_bits: int, file: Path) -> None:
    """Write `file`; a 4-bit model's embedding, which is its head too, may have 8 bits."""
    shape = checkpoint.shape
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_block_count(shape.layers)
    writer.add_context_length(checkpoint.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    for name in checkpoint:
        if name == "lm_head.weight":
            continue  # tied
        values, target = checkpoint.floats(name), gguf_name(name)
        if values.ndim == 1:
            writer.add_tensor(target, values)
            continue
        kind = TYPES[fmt]
        if target == "token_embd.weight" and fmt == "int4" and head_bits == 8:
            kind = Type.Q8_0
        packed = _quantized(values, kind)
        writer.add_tensor(target, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """What llama.cpp calls a parameter of a Qwen3 model."""
    name = name.removeprefix("model.")
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _quantized(values: np.ndarray, kind: Type, rows: int = 8192) -> np.ndarray:
    """Some rows at a time, since the package makes several float32 copies."""
    parts = [
        gguf.quants.quantize(values[start : start + rows], kind)
        for start in range(0, len(values), rows)
    ]
    return np.concatenate(parts)
