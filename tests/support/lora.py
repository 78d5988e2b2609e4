"""LoRA adapter folders for toy models, in peft's format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Linear layers that every token passes, in any toy.
EVERYWHERE = r"(self_attn\.(q|k|v|o|qkv)_proj|mlp\.(gate|up|down|gate_up)_proj)"


def save_adapter(
    folder: Path,
    module: Any,
    *,
    rank: int = 4,
    seed: int = 0,
    layers: str = EVERYWHERE,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write a LoRA adapter with random matrices for the layers that match `layers`; return its folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is None or weight.ndim != 2 or not re.search(f"{layers}$", name):
            continue
        out, depth = weight.shape
        if type(layer).__name__ == "Conv1D":
            out, depth = depth, out
        a = torch.randn(rank, depth, generator=generator) / depth**0.5
        b = torch.randn(out, rank, generator=generator) / rank
        prefix = f"base_model.model.{name}"
        tensors |= {f"{prefix}.lora_A.weight": a.to(dtype), f"{prefix}.lora_B.weight": b.to(dtype)}
    assert tensors
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(peft_type="LORA", base_model_name_or_path="base", r=rank, lora_alpha=2 * rank)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(module: Any, folder: Path) -> Any:
    """Merge an adapter into the weights of a module, and return the module."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    layers = dict(module.named_modules())
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            b = tensors[key.replace("lora_A", "lora_B")]
            layer = layers[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            delta = config["lora_alpha"] / config["r"] * (b.float() @ a.float())
            layer.weight.data += delta.t() if type(layer).__name__ == "Conv1D" else delta
    return module
