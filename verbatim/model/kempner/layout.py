"""KempnerForge's models as equivalent transformers architectures.

| norm, activation | q/k norm | experts | becomes |
| --- | --- | --- | --- |
| rmsnorm, silu | | | Llama |
| rmsnorm, silu | yes | | Qwen3 |
| rmsnorm, gelu or relu | | | Arcee |
| layernorm, silu | | | StableLM |
| layernorm, gelu or relu | | | Starcoder2 |
| rmsnorm, silu | | in every layer | Mixtral |
| rmsnorm, silu | yes | in every n-th layer | Qwen3-MoE |
| rmsnorm, silu | | in every n-th layer, or a shared one | ERNIE 4.5 MoE |

Both routers work with each of the last three. Other combinations are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from verbatim.errors import UnsupportedModel
from verbatim.model.dcp.filling import Destination, tensors_of
from verbatim.model.kempner.config import ModelConfig
from verbatim.model.kempner.router import SigmoidRouter

_QK_NORM_EPS = 1e-5  # of q_norm and k_norm, independent of norm_eps
# Tensors that are only used in training: the router's running counts.
LEFT_OVER = (r"\.mlp\.router\.expert_ema$",)

# From parameters of a transformers module to KempnerForge's tensors.
_NAMES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.embed_tokens\.weight$", "token_embedding.embedding.weight"),
        (r"^lm_head\.weight$", "output_head.proj.weight"),
        (r"^model\.norm\.(\w+)$", r"norm.\1"),
        (r"^model\.layers\.(\d+)\.input_layernorm\.(\w+)$", r"layers.\1.attention_norm.\2"),
        (r"^model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)$", r"layers.\1.mlp_norm.\2"),
        (r"^model\.layers\.(\d+)\.self_attn\.(\w+)\.weight$", r"layers.\1.attention.\2.weight"),
        (r"^model\.layers\.(\d+)\.mlp\.c_fc\.weight$", r"layers.\1.mlp.up_proj.weight"),
        (r"^model\.layers\.(\d+)\.mlp\.c_proj\.weight$", r"layers.\1.mlp.down_proj.weight"),
        (r"^model\.layers\.(\d+)\.mlp\.gate\.weight$", r"layers.\1.mlp.router.gate.weight"),
        (r"^model\.layers\.(\d+)\.mlp\.gate\.expert_bias$", r"layers.\1.mlp.router.expert_bias"),
        (
            r"^model\.layers\.(\d+)\.mlp\.shared_experts\.(\w+)\.weight$",
            r"layers.\1.mlp.shared_expert.\2.weight",
        ),
        (r"^model\.layers\.(\d+)\.mlp\.(\w+_proj)\.weight$", r"layers.\1.mlp.\2.weight"),
    )
]
_EXPERTS = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)$")


def transformers_config(model: ModelConfig) -> Any:
    """Return the transformers config of the equivalent architecture.

    Raises:
        UnsupportedModel: there is none; the message names the fields.
    """
    import transformers

    if model.is_moe and model.moe_capacity_factor > 0:
        warnings.warn(
            f"moe_capacity_factor={model.moe_capacity_factor}: in training, tokens beyond an expert's "
            "capacity were dropped; here none is, because it would depend on the batch",
            UserWarning,
            stacklevel=2,
        )
    name, fields = _moe(model) if model.is_moe else _dense(model)
    config: Any = getattr(transformers, name)(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}
        | fields.pop("rope", {}),
        tie_word_embeddings=model.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **({"intermediate_size": model.ffn_width} | fields),
    )
    return config


def _dense(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return the config class, and its additional fields."""
    gated = model.activation == "silu"
    rms = {"rms_norm_eps": model.norm_eps}
    if model.qk_norm:
        if not gated or model.norm_type != "rmsnorm":
            raise _unsupported(model, "qk_norm", "norm_type", "activation")
        return "Qwen3Config", {"head_dim": model.head_dim, **rms}
    if model.norm_type == "rmsnorm":
        if gated:
            return "LlamaConfig", rms
        return "ArceeConfig", {"hidden_act": model.activation, **rms}
    if gated:
        rope = {"partial_rotary_factor": 1.0}
        return "StableLmConfig", {"layer_norm_eps": model.norm_eps, "rope": rope}
    return "Starcoder2Config", {
        "hidden_act": model.activation,
        "norm_epsilon": model.norm_eps,
        "use_bias": False,
    }


def _moe(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    rms = {"rms_norm_eps": model.norm_eps}
    if model.norm_type != "rmsnorm" or model.activation != "silu":
        raise _unsupported(model, "num_experts", "norm_type", "activation")
    if model.qk_norm and model.moe_shared_experts:
        raise _unsupported(model, "num_experts", "qk_norm", "moe_shared_experts")
    if model.qk_norm:
        return "Qwen3MoeConfig", {
            "head_dim": model.head_dim,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.moe_top_k,
            "moe_intermediate_size": model.expert_width,
            "decoder_sparse_step": model.moe_frequency,
            "norm_topk_prob": True,
            **rms,
        }
    if model.moe_frequency == 1 and not model.moe_shared_experts:
        return "MixtralConfig", {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.moe_top_k,
            "intermediate_size": model.expert_width,
            **rms,
        }
    return "Ernie4_5_MoeConfig", {
        "moe_num_experts": model.num_experts,
        "moe_k": model.moe_top_k,
        "moe_intermediate_size": model.expert_width,
        "moe_num_shared_experts": min(1, model.moe_shared_experts),
        "moe_layer_start_index": 0,
        "moe_layer_interval": model.moe_frequency,
        "use_bias": False,
        **rms,
    }


def _unsupported(model: ModelConfig, *fields: str) -> UnsupportedModel:
    named = ", ".join(f"{name}={getattr(model, name)!r}" for name in fields)
    return UnsupportedModel(f"no architecture of transformers computes [model] {named} together")


def adjust(module: Any, model: ModelConfig) -> None:
    """Apply settings to a new module that its config can't express."""
    for i, layer in enumerate(module.model.layers):
        if model.qk_norm:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.variance_epsilon = _QK_NORM_EPS
        if model.has_experts(i) and model.moe_router == "sigmoid_topk":
            layer.mlp.gate = SigmoidRouter(
                model.num_experts, model.dim, model.moe_top_k, module.dtype
            )


def pieces(module: Any, model: ModelConfig) -> list[Destination]:
    """Return the target of each tensor of the checkpoint.

    `adjust` must have been called on the module. ERNIE's correction bias, which KempnerForge does not have,
    is set to zero.
    """
    found: list[Destination] = []
    for name, tensor in tensors_of(module).items():
        experts = _EXPERTS.match(name)
        if experts is not None:
            found += _expert_pieces(model, f"layers.{experts[1]}.mlp", experts[2], tensor)
        elif name.endswith(".moe_statics.e_score_correction_bias"):
            tensor.zero_()
        else:
            found.append(Destination(key_of(name), tensor, _arrangement(module, model, name)))
    return found


def key_of(name: str) -> str:
    """Return KempnerForge's name of a parameter of a transformers module."""
    for pattern, key in _NAMES:
        if pattern.match(name):
            return pattern.sub(key, name)
    raise UnsupportedModel(f"KempnerForge has nothing like {name}")


def _arrangement(module: Any, model: ModelConfig, name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the permutation of q's and k's rows for ERNIE, which rotates neighbours instead of halves."""
    rotated = name.endswith((".q_proj.weight", ".k_proj.weight"))
    if module.config.model_type != "ernie4_5_moe" or not rotated:
        return None

    def interleave(rows: Tensor) -> Tensor:  # [heads * head_dim, H]
        halves = rows.view(-1, 2, model.head_dim // 2, rows.shape[1])
        return halves.transpose(1, 2).reshape(rows.shape)

    return interleave


def _expert_pieces(
    model: ModelConfig, layer: str, name: str, stacked: Tensor
) -> Iterator[Destination]:
    """Yield the experts of a layer, separate or packed.

    Args:
        stacked: `[E, 2I, H]`, gate above up, or `[E, H, I]`.
    """
    width = model.expert_width
    parts = {"down": stacked}
    if name == "gate_up_proj":
        parts = {"gate": stacked[:, :width], "up": stacked[:, width:]}
    for part, weights in parts.items():
        if model.moe_packed_experts:  # [E, in, out]
            yield Destination(f"{layer}.{part}_w", weights.transpose(1, 2))
        else:
            for expert in range(model.num_experts):
                yield Destination(f"{layer}.experts.{expert}.{part}_proj.weight", weights[expert])
