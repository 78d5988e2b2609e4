"""Toys with multi-token-prediction (MTP) layers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from support import toys

HYBRID = dict(layer_types=["linear_attention", "linear_attention", "full_attention"])
GLM4_MOE: dict[str, Any] = dict(
    num_hidden_layers=2,
    head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
)


class Toy(NamedTuple):
    """A model and its MTP layers, with random weights."""

    main: Any
    mtp: Any


@cache
def toy(name: str, layers: int = 1, dtype: torch.dtype = torch.float32) -> Toy:
    if name in toys.RECURRENT_TOYS:
        assert layers == 1
        main = toys.make_toy(name, **HYBRID)
        main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    else:
        kinds = dict(mtp_layer_types=["full_attention"] * layers)
        changes = {"qwen3": kinds, "glm4_moe": GLM4_MOE}.get(name, {})
        main = toys.make_toy(name, num_mtp_layers=layers, **changes)
    mtp = random_mtp(main, layers)
    main.to(dtype)
    mtp.layers.to(dtype)
    return Toy(main.eval(), mtp.eval())


def random_mtp(main: Any, layers: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(layers)
        mtp = MtpModel(main, layers)
        for parameter in mtp.layers.parameters():  # routers and experts are created uninitialized
            noise = torch.randn(parameter.shape)
            parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else 0.15 * noise
        for name, buffer in mtp.layers.named_buffers():
            assert name.endswith("e_score_correction_bias")
            buffer.zero_()
    return mtp


def save_as_qwen(pair: Toy, folder: Path) -> None:
    """Write a checkpoint with Qwen3.5's names: its one MTP layer is under `mtp`."""
    pair.main.save_pretrained(folder)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    del config["num_mtp_layers"], config["mtp_layer_types"]
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    names = dict(eh_proj="fc", enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden")
    names |= dict(post_norm="norm", mtp_block="layers.0")
    tensors = load_file(path)
    for name, value in pair.mtp.layers[0].state_dict().items():
        part, rest = name.split(".", 1)
        tensors[f"mtp.{names[part]}.{rest}"] = value.clone()
    save_file(tensors, path, metadata={"format": "pt"})


def save_with_mtp(pair: Toy, folder: Path) -> None:
    """Write a checkpoint with DeepSeek's names: the MTP layers follow the other layers."""
    pair.main.save_pretrained(folder)
    path, last = folder / "model.safetensors", pair.main.config.num_hidden_layers
    tensors = load_file(path)
    for k, layer in enumerate(pair.mtp.layers):
        for name, value in layer.state_dict().items():
            theirs = name.replace("post_norm.", "shared_head.norm.").replace("mtp_block.", "")
            tensors[f"model.layers.{last + k}.{theirs}"] = value.clone()
    save_file(tensors, path, metadata={"format": "pt"})
