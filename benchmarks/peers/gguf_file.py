"""Write a checkpoint as GGUF, for llama.cpp: BF16, Q8_0 or Q4_0, no vocabulary.

Norms, biases, sinks and routers are in float32, as llama.cpp's own conversion keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from benchmarks.peers.checkpoint import Checkpoint

TYPES = {"bf16": Type.BF16, "int8": Type.Q8_0, "int4": Type.Q4_0}
_VOCABULARY = ("token_embd.weight", "output.weight")
_FLOATS = ("norm.weight", ".bias", "attn_sinks.weight", "ffn_gate_inp.weight", "ssm_a")
_FLOATS += ("conv1d.weight", "shortconv.conv.weight", "ssm_d")
_ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_text": "qwen35",
    "lfm2": "lfm2",
    "granitemoehybrid": "granitehybrid",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_VECTORS = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d"}  # of a mixer
_LAYERS = {
    "gpt_oss": {**_LAYER, "post_attention_layernorm": "post_attention_norm"},
    "qwen3_5_text": {
        **_LAYER,
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
    "lfm2": {
        **_LAYER,
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
        "conv.conv": "shortconv.conv",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
    "granitemoehybrid": {
        **_LAYER,
        "mamba.in_proj": "ssm_in",
        "mamba.conv1d": "ssm_conv1d",
        "mamba.norm": "ssm_norm",
        "mamba.out_proj": "ssm_out",
        "shared_mlp.gate": "ffn_gate",
        "shared_mlp.up": "ffn_up",
        "shared_mlp.output_linear": "ffn_down",
    },
}


def write_gguf(checkpoint: Checkpoint, fmt: str, head_bits: int, file: Path) -> None:
    """Write `file`; the embedding and head of a 4-bit model, which may be tied, may have 8 bits."""
    shape = checkpoint.shape
    architecture = _ARCHITECTURES[checkpoint.model_type]
    writer = gguf.GGUFWriter(str(file), architecture, use_temp_file=True)  # not all in memory
    writer.add_block_count(shape.layers)
    writer.add_context_length(checkpoint.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(_kv_heads(checkpoint))
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.experts > 1:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.intermediate)
    if shape.sliding:  # llama.cpp assumes every second layer of gpt-oss, from the first
        writer.add_sliding_window(shape.window)
    _add_recurrence(writer, checkpoint.config)
    for name, parts in gguf_tensors(checkpoint):
        kind = Type.F32 if name.endswith(_FLOATS) else TYPES[fmt]
        if name in _VOCABULARY and fmt == "int4" and head_bits == 8:
            kind = Type.Q8_0
        packed = [_quantized(part, kind) for part in parts]
        tensor = np.stack(packed) if "_exps." in name else packed[0]
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kv_heads(checkpoint: Checkpoint) -> int | list[int]:
    """Return the number of KV heads, by layer for LFM2 and Granite: recurrent layers have none."""
    heads, config = checkpoint.shape.kv_heads, checkpoint.config
    if config["model_type"] not in ("lfm2", "granitemoehybrid"):
        return heads
    return [heads if kind == "full_attention" else 0 for kind in config["layer_types"]]


def _add_recurrence(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add llama.cpp's metadata of recurrent layers."""
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] == "granitemoehybrid":
        heads = config["mamba_n_heads"]
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["mamba_d_head"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_rope_scaling_finetuned(False)  # no positions
    if config["model_type"] == "qwen3_5_text":
        heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
        if heads != config["linear_num_key_heads"]:
            raise ValueError("value heads in another order than llama.cpp's are not supported")
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(heads)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * width)
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        rope = config["rope_parameters"]
        writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def gguf_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
    """Yield each tensor's name in llama.cpp and its values in float32: one array, or one per expert."""
    model_type, count = checkpoint.model_type, checkpoint.shape.experts
    for name in checkpoint:
        if name == "lm_head.weight" and checkpoint.tied:
            continue
        layer, _, rest = name.partition(".mlp.experts.")
        if name.endswith("shared_mlp.input_linear.weight"):  # gate and up in one
            halves = np.split(checkpoint.floats(name), 2)
            for part, values in zip(("gate", "up"), halves, strict=True):
                yield gguf_name(name.replace("input_linear", part), model_type), [values]
        elif not rest:
            yield gguf_name(name, model_type), [_values(checkpoint, name)]
        elif model_type == "qwen3_moe":  # one tensor per matrix of an expert
            number, rest = rest.split(".", 1)
            if number == "0":
                names = [f"{layer}.mlp.experts.{expert}.{rest}" for expert in range(count)]
                yield (
                    gguf_name(f"{layer}.mlp.experts.{rest}", model_type),
                    map(checkpoint.floats, names),
                )
        else:  # stacked and transposed; the columns of gate and up alternate
            matrix = rest.removesuffix("_bias")
            ends = ".bias" if matrix != rest else ".weight"
            parts = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else [matrix]
            for first, part in enumerate(parts):
                target = gguf_name(f"{layer}.mlp.experts.{part}{ends}", model_type)
                yield target, _of_experts(checkpoint, name, first, len(parts))


def _values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return a tensor in float32, in llama.cpp's form."""
    values = checkpoint.floats(name)
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if name.endswith((".mamba.A_log", ".mamba.D")):
        return values[:, None]
    if name.endswith(".mamba.norm.weight"):
        return values.reshape(checkpoint.config["mamba_n_groups"], -1)
    if values.ndim == 3:  # a convolution: the taps of each channel
        return values[:, 0]
    if checkpoint.model_type == "qwen3_5_text" and name.endswith("norm.weight"):
        return values if name.endswith("linear_attn.norm.weight") else 1 + values
    return values


def gguf_name(name: str, model_type: str = "qwen3") -> str:
    """Return llama.cpp's name of a parameter; that of an expert's matrix has no expert number."""
    name = name.removeprefix("model.")
    if name == "embedding_norm.weight":  # after the last layer
        return "token_embd_norm.weight"
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, layer, rest = name.split(".", 2)
    if (vector := _VECTORS.get(rest.partition(".")[2])) is not None:
        return f"blk.{layer}.{vector}"
    ends = ".bias" if rest.endswith(".bias") else ".weight"
    names = _LAYERS.get(model_type, _LAYER)
    return f"blk.{layer}.{names[rest.removesuffix(ends)]}{ends}"


def _of_experts(checkpoint: Checkpoint, name: str, first: int, step: int) -> Iterator[np.ndarray]:
    """Yield each expert's rows `first`, `first + step`, ... of a tensor that holds them as columns."""
    for expert in range(checkpoint.shape.experts):
        yield np.ascontiguousarray(checkpoint.floats(name, expert).T[first::step])


def _quantized(values: np.ndarray, kind: Type, rows: int = 8192) -> np.ndarray:
    """Quantize some rows at a time, since the package makes several float32 copies."""
    parts = [
        gguf.quants.quantize(values[start : start + rows], kind)
        for start in range(0, len(values), rows)
    ]
    return np.concatenate(parts)
