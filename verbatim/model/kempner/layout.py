"""Converts KempnerForge's models to equivalent transformers architectures.

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

The last three support both routers. Other combinations are refused.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verbatim.errors import ModelError, UnsupportedModel
from verbatim.model.kempner.config import ModelConfig

_QK_NORM_EPS = 1e-5  # of q_norm and k_norm, independent of norm_eps
FIRST = "token_embedding.embedding.weight"  # a tensor of every checkpoint

# Replacements in the parameter names of a transformers module, applied in this order.
_NAMES = {
    "model.embed_tokens.weight": FIRST,
    "lm_head.": "output_head.proj.",
    "model.": "",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn": "attention",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
    "mlp.gate.": "mlp.router.gate.",
    "shared_experts": "shared_expert",
}
_EXPERTS = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)$")


def transformers_config(model: ModelConfig) -> Any:
    """Return the transformers config of the equivalent architecture.

    Raises:
        UnsupportedModel: there is no equivalent architecture; the message names the fields.
    """
    import transformers

    if model.is_moe and model.moe_capacity_factor > 0:
        warnings.warn(
            f"moe_capacity_factor={model.moe_capacity_factor}: in training, tokens beyond an expert's "
            "capacity were dropped; here none are, because that would depend on the batch",
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
    """Return the name of the config class, and its additional fields."""
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


def renamed(
    folder: Path, empty: Any, model: ModelConfig, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the names of the transformers module.

    Args:
        empty: the module on the meta device.
        tensors: the tensors by KempnerForge's names; the used ones are removed.

    Raises:
        ModelError: a tensor is missing, or has another size than the module's.
    """
    missing: list[str] = []
    num_requested = 0

    def take(key: str, *size: int) -> Tensor:
        nonlocal num_requested
        num_requested += 1
        if key not in tensors:
            missing.append(key)
            return torch.empty(size, device="meta")
        tensor = tensors.pop(key)
        if tuple(tensor.shape) != size:
            raise ModelError(
                f"{folder}: {key} is {list(tensor.shape)}, but {list(size)} by the config"
            )
        return tensor

    def stacked(layer: str, part: str, *size: int) -> Tensor:
        """Return a matrix of all experts, `[E, N, K]`."""
        if model.moe_packed_experts:
            experts, rows, columns = size
            return take(f"{layer}.{part}_w", experts, columns, rows).transpose(1, 2).contiguous()
        names = (f"{layer}.experts.{expert}.{part}_proj.weight" for expert in range(size[0]))
        return torch.stack([take(name, *size[1:]) for name in names])

    named: dict[str, Tensor] = {}
    tied = {**empty.all_tied_weights_keys}
    tied |= {source: copy for copy, source in tied.items()}
    for name, like in empty.state_dict().items():
        size = tuple(like.shape)
        if experts := _EXPERTS.match(name):
            layer = f"layers.{experts[1]}.mlp"
            if experts[2] == "down_proj":
                named[name] = stacked(layer, "down", *size)
            else:
                half = size[0], size[1] // 2, size[2]
                named[name] = torch.cat([stacked(layer, part, *half) for part in ("gate", "up")], 1)
        elif name.endswith(".moe_statics.e_score_correction_bias"):
            named[name] = torch.zeros(size)  # KempnerForge has none
        elif (
            (key := key_of(name)) in tensors
            or name not in tied
            or key_of(tied[name]) not in tensors
        ):
            named[name] = _reordered(empty, model, name, take(key, *size))
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {num_requested} tensors, such as "
            f"{', '.join(sorted(missing)[:3])}"
        )
    return named


def key_of(name: str) -> str:
    """Return KempnerForge's name for a parameter of a transformers module."""
    for part, key in _NAMES.items():
        name = name.replace(part, key)
    return name


def _reordered(module: Any, model: ModelConfig, name: str, rows: Tensor) -> Tensor:
    """Return `rows`, reordered if they are ERNIE's q or k `[heads * head_dim, H]`.

    ERNIE's rotary embedding pairs neighboring dimensions instead of halves.
    """
    rotated = name.endswith((".q_proj.weight", ".k_proj.weight"))
    if module.config.model_type != "ernie4_5_moe" or not rotated:
        return rows
    halves = rows.view(-1, 2, model.head_dim // 2, rows.shape[1])
    return halves.transpose(1, 2).reshape(rows.shape)


def adjust(module: Any, model: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Apply settings that the transformers config can't express to a module.

    Args:
        tensors: the tensors left by `renamed`; those used here or only in training are removed.

    Raises:
        ModelError: the bias of a router is missing, or has another size.
    """
    for i, layer in enumerate(module.model.layers):
        if model.qk_norm:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.variance_epsilon = _QK_NORM_EPS
        if model.has_experts(i):
            tensors.pop(f"layers.{i}.mlp.router.expert_ema", None)  # running counts
            if model.moe_router == "sigmoid_topk":
                name = f"layers.{i}.mlp.router.expert_bias"
                if name not in tensors:
                    raise ModelError(f"the checkpoint lacks {name}")
                expert_bias = tensors.pop(name)
                if expert_bias.shape != (model.num_experts,):
                    raise ModelError(
                        f"{name} is {list(expert_bias.shape)}, but {[model.num_experts]} by the "
                        "config"
                    )
                weight, bias = (x.to(module.dtype) for x in (layer.mlp.gate.weight, expert_bias))
                layer.mlp.gate = SigmoidRouter(weight, bias, model.moe_top_k)


class SigmoidRouter(nn.Module):
    """KempnerForge's `sigmoid_topk` router, in which the bias of an expert also affects its weight.

    It has the interface of the gate of an MoE layer, which it replaces.
    """

    def __init__(self, weight: Tensor, expert_bias: Tensor, top_k: int) -> None:
        """Create a router from `weight` `[E, H]` and `expert_bias` `[E]`."""
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.expert_bias = nn.Parameter(expert_bias, requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose `k` experts for each of T tokens, `[..., H]`.

        Returns:
            The logits `[T, E]`, the weights of the chosen experts `[T, k]`, which sum to 1, and their indices
            `[T, k]`.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(hidden, self.weight)
        scores = torch.sigmoid(logits.float() + self.expert_bias.float())
        weights, experts = torch.topk(scores, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts
