"""torchao checkpoints: tensors made by torchao, saved as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import check_other_placements
from support.requests_mixed import all_facts, generated, mixed_requests
from support.toys import make_toy
from verbatim import LLM, ModelError, NotSupported, Offload

pytest.importorskip("torchao")

SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2)
# How a matrix is quantized, and the format in memory.
KINDS = {
    "int8 rows": "int8-g128",
    "int8 groups": "int8-g64",
    "float8 rows": "fp8-g128",
    "float8 tensor": "fp8-g128",
    "int4": "int4-g64",
}


def quantized(weight: torch.Tensor, kind: str) -> tuple[Any, torch.Tensor]:
    """Return torchao's tensor of a matrix, and its numbers."""
    from torchao.quantization import (
        Float8Tensor,
        Int4Tensor,
        Int8Tensor,
        IntxUnpackedToInt8Tensor,
        PerRow,
        PerTensor,
    )

    if kind == "int4":  # torchao makes one on a GPU only
        groups = weight.unflatten(1, (-1, 64))
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + scale.float() * 8).bfloat16()
        wide, middle = scale.float()[..., None], zero.float()[..., None]
        code = ((groups - middle) / wide).round().clamp(-8, 7).flatten(1).to(torch.int8)
        both = (code[:, ::2] & 15) | (code[:, 1::2] << 4)
        held = Int4Tensor(
            both, scale.t().contiguous(), zero.t().contiguous(), [1, 64], weight.shape
        )
        return held, (code.float().unflatten(1, (-1, 64)) * wide + middle).flatten(1)
    if kind == "int8 groups":
        made = IntxUnpackedToInt8Tensor.from_hp(weight, (1, 64), torch.int4)
    elif kind == "int8 rows":
        made = Int8Tensor.from_hp(weight, PerRow())
    else:
        granularity = PerRow() if kind == "float8 rows" else PerTensor()
        made = Float8Tensor.from_hp(weight, granularity=granularity)
    return made, made.dequantize()


def write(folder: Path, kind: str) -> Any:
    """Write a checkpoint; the module with the numbers that it holds."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    module, state = make_toy("llama", **SHAPE), {}
    for name, tensor in module.state_dict().items():
        state[name] = tensor.data
        if name.endswith("proj.weight"):
            state[name], values = quantized(tensor.float(), kind)
            tensor.copy_(values)
    folder.mkdir(exist_ok=True)
    tensors, metadata = flatten_tensor_state_dict(state)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata)
    config = module.config.to_dict() | {"quantization_config": {"quant_method": "torchao"}}
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_torchao(kind: str, tmp_path: Path) -> None:
    module = write(tmp_path / "quantized", kind)
    module.save_pretrained(tmp_path / "plain")
    requests = mixed_requests(4)
    expected = generated(LLM(tmp_path / "plain"), *requests)
    with LLM(tmp_path / "quantized") as llm:
        assert llm.info()["quantization"]["format"] == KINDS[kind]
        assert all_facts(llm.generate(*requests)) == expected
    with LLM(tmp_path / "quantized", placement=Offload(weights=(0, 0, 100))) as llm:
        assert all_facts(llm.generate(*requests)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stages_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    check_other_placements(tmp_path)


@pytest.mark.parametrize(
    ("kind", "key", "damage"),
    [
        ("int8 rows", "scale", lambda x: x[:64]),
        ("int8 rows", "qdata", lambda x: x.int()),
        ("int8 groups", "zero_point", lambda x: x.float()),
        ("float8 rows", "scale", None),
        ("int4", "zero_point", lambda x: x * torch.nan),
        ("int4", "scale", lambda x: x.t()),
        ("int4", "zero_point", lambda x: x.view(torch.int16)),
    ],
)
def test_damaged_tensors_are_named(kind: str, key: str, damage: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    write(tmp_path, kind)
    path, name = tmp_path / "model.safetensors", f"model.layers.0.self_attn.q_proj._weight_{key}"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if damage is not None:
        tensors[name] = damage(tensor).contiguous()
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata)
    with pytest.raises(ModelError, match="q_proj"):
        LLM(tmp_path)


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "int8 rows")
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"Int8Tensor", b"OddTensor!"))
    with pytest.raises(NotSupported, match="OddTensor! of torchao"):
        LLM(tmp_path)
