"""Quantized checkpoints in the formats of other tools: same scores as dequantized, in every placement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from support import checkpoints, sweep, toy_tokenizers
from support.checkpoints import check_other_placements, hub_snapshot, opening_fails, save
from support.lora import merge, save_adapter
from support.pairwise import slow_but
from support.requests_mixed import all_facts, generated, mixed_requests
from support.toys import make_toy, random_ids, scores_of
from verbatim import (
    LLM,
    Cluster,
    ModelError,
    NotSupported,
    Offload,
    PipelineParallel,
    TensorParallel,
)
from verbatim.kernels.packing import Encoding, Packing, WeightPacking
from verbatim.model.stored import read_stored
from verbatim.quantization.matrix import rounded
from verbatim.weights.formats import decode
from verbatim.weights.lazy import materialize
from verbatim.weights.skeleton import tensors_of

SHAPE: dict[str, Any] = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2)
WHOLE: dict[str, Any] = dict(SHAPE, hidden_size=256, intermediate_size=256, head_dim=64)
EXPERTS: dict[str, Any] = dict(SHAPE, head_dim=32, num_experts=4, moe_intermediate_size=64)
GPT_OSS: dict[str, Any] = dict(SHAPE, head_dim=32, intermediate_size=64)
LLAMA4: dict[str, Any] = dict(SHAPE, num_hidden_layers=3, head_dim=32, intermediate_size=128)
PROMPTS = [random_ids(20, 1), random_ids(9, 2)]
ACT_ORDER = "gptq-act-order"
ROUNDED = {ACT_ORDER: 0.3, "hqq": 0.1}  # formats that are rounded when read: tolerance of log-probs


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
_ROWS = dict(num_bits=8, type="int", strategy="channel")
_FP8 = dict(num_bits=8, type="float", symmetric=True)
_BLOCKS = dict(_FP8, strategy="block", block_structure=[128, 128])
_FP4 = dict(num_bits=4, type="float", symmetric=True, group_size=16)
_AWQ: dict[str, Any] = dict(quant_method="awq", bits=4, group_size=32, version="gemm")
_GPTQ: dict[str, Any] = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False)
_MODELOPT: dict[str, Any] = dict(quant_method="modelopt", producer={"name": "modelopt"})
_AUTO_ROUND: dict[str, Any] = dict(quant_method="auto-round", bits=4, group_size=32, sym=False)
_HQQ = dict(
    quant_method="hqq",
    quant_config={
        "weight_quant_params": dict(nbits=4, group_size=64, axis=1),
        "scale_quant_params": None,
        "offload_meta": False,
    },
    skip_modules=["lm_head"],
)
_BNB = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
_BNB8 = dict(quant_method="bitsandbytes", load_in_8bit=True)
_FP8_BLOCKS = dict(quant_method="fp8", weight_block_size=[128, 128])
_MXFP8 = dict(quant_method="mxfp8", weight_block_size=[1, 32], scale_fmt="ue8m0")
_ROWS_OF_128 = SHAPE | dict(intermediate_size=128)
_NVFP4_EXPERTS = WHOLE | dict(head_dim=32, num_experts=4, moe_intermediate_size=256)
_NVFP4 = _compressed("nvfp4-pack-quantized", **_FP4)
_SYMMETRIC = _compressed("pack-quantized", symmetric=True, **_INT4)
_WITH_ZEROS = _compressed("pack-quantized", symmetric=False, **_INT4)
_MX = _compressed("mxfp4-pack-quantized", **_FP4)
_FP8_ROWS = _compressed("float-quantized", strategy="channel", **_FP8)
_FP8_TENSOR = _compressed("naive-quantized", strategy="tensor", **_FP8)


def _modelopt(kind: str) -> dict[str, Any]:
    return _MODELOPT | dict(quant_algo=kind)


def _auto_round(kind: str) -> dict[str, Any]:
    return _AUTO_ROUND | dict(packing_format=kind)


w, row, tensor = checkpoints, ("row", "weight_scale"), ("tensor", "weight_scale")
blocks = (128, 128), "weight_scale"  # 192 rows are no multiple of a block
# Name: toy model, settings, writer, quantization_config, format in memory.
FORMATS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any], str]] = {
    "awq": ("llama", SHAPE, w.awq(), _AWQ, "int4-g32"),
    "awq-experts": ("qwen3_moe", EXPERTS, w.awq(64), _AWQ | dict(group_size=64), "int4-g64"),
    "gptq": ("llama", SHAPE, w.gptq(), _GPTQ, "int4-g32"),
    "gptq-rows": (
        *("llama", _ROWS_OF_128, w.gptq(8, 128, symmetric=True)),
        *(_GPTQ | dict(bits=8, group_size=-1, sym=True), "int8-g128"),
    ),
    "gptq-v2": (
        *("llama", SHAPE, w.gptq(4, 64, v2=True)),
        *(_GPTQ | dict(bits=4.0, group_size=64, checkpoint_format="gptq_v2"), "int4-g64"),
    ),
    ACT_ORDER: ("llama", SHAPE, w.gptq(order=True), _GPTQ | dict(desc_act=True), "int8-g32"),
    "compressed-int4": ("qwen2", SHAPE, w.packed(), _SYMMETRIC, "int4-g32"),
    "compressed-int4-zeros": (
        *("qwen2", SHAPE, w.packed(symmetric=False), _WITH_ZEROS, "int4-g32"),
    ),
    "compressed-int8": (
        "qwen2",
        SHAPE,
        w.int8_rows,
        _compressed("int-quantized", **_ROWS),
        "int8-g128",
    ),
    "compressed-fp8": ("qwen2", SHAPE, w.fp8(*row), _FP8_ROWS, "fp8-g128"),
    "compressed-fp8-tensor": ("qwen2", SHAPE, w.fp8(*tensor), _FP8_TENSOR, "fp8-g128"),
    "compressed-fp8-blocks": (
        *("qwen2", SHAPE, w.fp8(*blocks), _compressed("float-quantized", **_BLOCKS), "fp8-g128"),
    ),
    "fp8": (
        *("qwen3_moe", EXPERTS, w.fp8((48, 32))),
        *(dict(quant_method="fp8", weight_block_size=[48, 32]), "fp8-g32"),
    ),
    # The scales of a stack fit its rows as well as its columns.
    "fbgemm": ("llama4_text", LLAMA4, w.fbgemm, dict(quant_method="fbgemm_fp8"), "fp8-g128"),
    "mxfp8": ("qwen3_moe", EXPERTS, w.mxfp8, _MXFP8, "fp8-g32"),
    "mxfp4": ("gpt_oss", GPT_OSS, w.mxfp4, dict(quant_method="mxfp4"), "mxfp4-g32"),
    "nvfp4": ("qwen2", WHOLE, w.fp4("nvfp4"), _NVFP4, "nvfp4"),
    # 128 elements do not fill a block.
    "nvfp4-decoded": (
        *("qwen2", SHAPE | dict(intermediate_size=256), w.fp4("nvfp4"), _NVFP4, "nvfp4"),
    ),
    "compressed-mxfp4": ("qwen2", SHAPE, w.fp4("mxfp4"), _MX, "mxfp4-g32"),
    "modelopt-nvfp4": (
        *("qwen3_moe", _NVFP4_EXPERTS, w.fp4("modelopt"), _modelopt("NVFP4"), "nvfp4"),
    ),
    "fp8-mistral": ("llama", SHAPE, w.fp8((128, 128), "qscale_weight"), _FP8_BLOCKS, "fp8-g128"),
    "fp8-deepseek-v4": ("llama", SHAPE, w.fp8((128, 128), "scale"), _FP8_BLOCKS, "fp8-g128"),
    "modelopt-fp8": ("llama", SHAPE, w.fp8(*tensor), _modelopt("FP8"), "fp8-g128"),
    "modelopt-fp8-blocks": ("llama", SHAPE, w.fp8(*blocks), _modelopt("FP8_PB_WO"), "fp8-g128"),
    "modelopt-fp8-inverse": ("llama", SHAPE, w.fp8((128, 128)), _modelopt("FP8_PB_WO"), "fp8-g128"),
    "auto-round": ("llama", SHAPE, w.gptq(), _auto_round("auto_round:auto_gptq"), "int4-g32"),
    "auto-round-v2": ("llama", SHAPE, w.gptq(v2=True), _auto_round("auto_round"), "int4-g32"),
    "auto-round-awq": ("llama", SHAPE, w.awq(), _auto_round("auto_round:auto_awq"), "int4-g32"),
    "hqq": ("llama", SHAPE, w.hqq(), _HQQ, "int4-g64"),
    "nf4": ("llama", SHAPE, w.nf4(), _BNB, "nf4-g64"),
    "nf4-nested": ("llama", SHAPE, w.nf4(nested=True), _BNB, "nf4-g64"),
    "bnb-int8": ("llama", SHAPE, w.bnb_int8, _BNB8, "int8-g128"),
}


if find_spec("torchao") is not None:
    FORMATS |= {
        f"torchao {kind}": ("llama", SHAPE, kind, {}, held)
        for kind, held in {
            "int8 rows": "int8-g128",
            "int8 groups": "int8-g64",
            "float8 rows": "fp8-g128",
            "float8 tensor": "fp8-g128",
            "int4": "int4-g64",
        }.items()
    }
needs_torchao = pytest.mark.skipif("torchao int4" not in FORMATS, reason="torchao is not installed")


def written(name: str, folder: Path) -> Any:
    """Write a checkpoint in a format; return the module with its dequantized weights."""
    toy, settings, writer, quantization, _ = FORMATS[name]
    module = make_toy(toy, **settings)
    if isinstance(writer, str):
        checkpoints.save_torchao(folder, module, writer)
        return module
    save(folder, module, writer, quantization, "experts" if name == "mxfp4" else ".")
    return module


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Let `change` edit the tensors of a folder's file in place."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Let `change` edit the fields of config.json in place; return what it returns."""
    fields = json.loads((path := folder / "config.json").read_text())
    found = change(fields)
    path.write_text(json.dumps(fields))
    return found


def check_scores(llm: LLM, module: Any, ids: list[int] = PROMPTS[0], **tolerance: float) -> None:
    found = torch.tensor(llm.score(ids)[1:])
    settings = dict(atol=2e-4, rtol=0.0) | tolerance
    torch.testing.assert_close(found, scores_of(module, ids), **settings)


@pytest.mark.parametrize("name", slow_but([*FORMATS][::8], FORMATS))
def test_scores_match_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    kind, exact = FORMATS[name][-1], name not in ROUNDED
    module = written(name, tmp_path / "quantized")
    module.save_pretrained(tmp_path / "plain")
    requests = mixed_requests(4)
    with LLM(tmp_path / "quantized") as llm:
        info = llm.info()["quantization"]
        for ids in PROMPTS:
            check_scores(llm, module, ids, atol=ROUNDED.get(name, 2e-4))
        outputs = all_facts(llm.generate(*requests))
    assert info["format"].startswith(kind)
    assert (generated(LLM(tmp_path / "plain"), *requests) == outputs) is exact
    with LLM(tmp_path / "quantized", placement=Offload(weights=(0, 0, 100))) as llm:
        assert all_facts(llm.generate(*requests)) == outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_other_placements_give_same_tokens(name: str, tmp_path: Path) -> None:
    """Ranks hold their shards in the stored format. They take seconds, so only three formats use them."""
    written(name, tmp_path)
    ranks = (TensorParallel(2), PipelineParallel(2)) if name in ("awq", "fp8", "nvfp4") else ()
    check_other_placements(tmp_path, *ranks)


_MIXED: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "bits": (w.packed(), _INT4, w.packed(8, 64), _INT4 | dict(num_bits=8, group_size=64)),
    "int4-fp8": (w.packed(), _INT4, w.fp8(*row), _FP8 | dict(strategy="channel")),
    "groups-rows": (w.packed(), _INT4, w.packed(4, 128), _INT4 | dict(strategy="channel")),
    "blocks-rows": (w.fp8(*blocks), _BLOCKS, w.fp8(*row), _FP8 | dict(strategy="channel")),
    "activations": (w.packed(), _INT4, w.packed(), {}),
}


@pytest.mark.parametrize("name", _MIXED)
def test_groups_of_compressed_tensors_may_differ(name: str, tmp_path: Path) -> None:
    first, settings, second, others = _MIXED[name]
    config = _compressed("float-quantized", **settings)
    config["config_groups"]["group_1"] = {"targets": ["re:.*attn.*"], "weights": others or None}
    module = make_toy("qwen2", **_ROWS_OF_128)

    def write(weight: torch.Tensor) -> Any:
        return (first if weight.shape == (128, 128) else second)(weight)

    save(tmp_path, module, write, config)
    with LLM(tmp_path) as llm:
        check_scores(llm, module)


@pytest.mark.parametrize("name", ["gptq", ACT_ORDER, "auto-round"])
def test_bits_and_group_sizes_of_gptq_may_differ(name: str, tmp_path: Path) -> None:
    (_, _, usual, config, _), other = FORMATS[name], dict(bits=8, group_size=64)
    rule = r".*\.([qo]_proj|mlp\..*)"  # the matrices of 128 rows
    if name == "auto-round":
        config = config | dict(extra_config={rule: other, "lm_head": {"bits": 16}})
    else:
        others = {"+:.*k_proj": None, "+:.*nothing": {"group_size": 96}, "-:.*lm_head": {}}
        config = config | dict(dynamic={**others, f"+:{rule}": other})
    module, mixed = make_toy("qwen2", **_ROWS_OF_128), w.gptq(8, 64, order=name == ACT_ORDER)
    save(tmp_path, module, lambda x: (mixed if x.shape == (128, 128) else usual)(x), config)
    with LLM(tmp_path) as llm:
        check_scores(llm, module, atol=ROUNDED.get(name, 2e-4))
    if name == "gptq":
        check_other_placements(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("inkling2_text" not in sweep.names(), reason="transformers has no Inkling 2")
def test_experts_that_are_stored_in_another_order_stay_quantized(tmp_path: Path) -> None:
    """In Inkling's files, the rows of an expert's gate and up projections alternate."""
    sweep.build("inkling2_text").bfloat16().save_pretrained(tmp_path)
    plain = shutil.copytree(tmp_path, tmp_path / "plain")

    def quantize(folder: Path, stored: bool) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name in [n for n in tensors if n.endswith(("w13_weight", "attn.wq_du.weight"))]:
                made, values = checkpoints.mxfp8(tensors[name])
                tensors[name] = made["weight"] if stored else values.bfloat16()
                if stored:
                    tensors[f"{name}_scale"] = made["weight_scale_inv"]

        edit_tensors(folder, change)

    quantize(plain, False)
    quantize(tmp_path, True)
    edit_config(tmp_path, lambda fields: fields.update(quantization_config=_MXFP8))
    requests = mixed_requests(4)
    expected = generated(LLM(plain), *requests)
    for options in ({}, {"placement": Offload(gpu="300MB", weights=(0, 0, 100))}):
        with LLM(tmp_path, **options) as llm:
            assert all_facts(llm.generate(*requests)) == expected
            packed = llm.info()["quantization"]["packed"]
        assert {"gate_up_proj", "linear.weight"} == {name.split(".", 5)[-1] for name in packed}


ATTENTION = r"self_attn\.[qkvo]_proj"


@pytest.mark.slow
def test_adapter_folder_opens_with_its_base_model(tmp_path: Path) -> None:
    module = make_toy("llama", **SHAPE)
    module.save_pretrained(tmp_path / "base")
    base = dict(base_model_name_or_path=str(tmp_path / "base"), layers=ATTENTION)
    merge(module, save_adapter(adapter := tmp_path / "adapter", module, **base))
    requests = mixed_requests(4)
    with LLM(adapter) as llm:
        outputs = all_facts(llm.generate(*requests))
        for ids in PROMPTS:
            check_scores(llm, module, ids)
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(*requests)) == outputs
    for placement in (Offload(cpu="64MB"), Cluster(stages=2)):
        assert generated(LLM(adapter, placement=placement), *requests) == outputs
    with LLM(adapter, quantization="int8") as llm:
        llm.score(PROMPTS)


@pytest.mark.parametrize("kind", ["tied head", "tied embedding", "square Conv1D", "DoRA"])
def test_adapter_changes_only_layers_it_names(kind: str, tmp_path: Path) -> None:
    """Tied tensors of other layers are unchanged; the class, not the config, gives the weight's layout."""
    name, layer = "gpt2" if kind == "square Conv1D" else "qwen2", "model.layers.1.mlp.up_proj"
    layer = {"square Conv1D": "transformer.h.1.attn.c_proj", "tied head": "lm_head"}.get(
        kind, layer
    )
    module = make_toy(name, tie_word_embeddings=True)
    module.save_pretrained(base := tmp_path / "base")
    module = make_toy(name, tie_word_embeddings=False)
    module.load_state_dict(type(module).from_pretrained(base).state_dict())
    weight = module.get_submodule(layer).weight
    tall = weight.t() if name == "gpt2" else weight
    a, b, magnitude = torch.randn(2, tall.shape[1]), torch.randn(tall.shape[0], 2) / 8, None
    tensors = {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    with torch.no_grad():
        tall += 2 * b @ a
        if kind == "DoRA":
            tensors[f"{layer}.lora_magnitude_vector"] = magnitude = torch.rand(len(tall)) + 1
            tall *= (magnitude / tall.norm(dim=1))[:, None]
        if kind == "tied embedding":
            embedding = torch.randn(module.model.embed_tokens.weight.shape)
            tensors["model.embed_tokens.weight"] = embedding
            module.model.embed_tokens.weight.copy_(embedding)
    fields = dict(peft_type="LORA", base_model_name_or_path=str(base), r=2, lora_alpha=4)
    fields |= dict(use_dora=kind == "DoRA", fan_in_fan_out=kind == "tied head")
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    save_file(
        {f"base_model.model.{key}": tensor for key, tensor in tensors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with LLM(tmp_path) as llm:
        check_scores(llm, module)


def test_unsupported_adapters_are_rejected(tmp_path: Path) -> None:
    module = make_toy("llama", **SHAPE)
    module.save_pretrained(tmp_path / "base")

    def save(name: str, base: str, **config: Any) -> None:
        config |= dict(base_model_name_or_path=str(tmp_path / base), layers=ATTENTION)
        save_adapter(tmp_path / name, module, **config)

    save("olora", "base", init_lora_weights="olora")
    opening_fails(NotSupported, "init_lora_weights='olora'", tmp_path / "olora")
    make_toy("llama").save_pretrained(tmp_path / "other")
    save("adapter", "other")
    opening_fails(ModelError, "does not fit the base model", tmp_path / "adapter")
    save("lost", "nowhere/at/all")
    opening_fails(ModelError, "neither a folder nor a hub id", tmp_path / "lost")


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written("fp8", folder := tmp_path_factory.mktemp("checkpoints") / "fp8")
    return folder


def test_requantization_applies_only_if_it_takes_fewer_bits(fp8_folder: Path) -> None:
    def info_with(kind: str, **settings: Any) -> dict[str, Any]:
        with LLM(fp8_folder, quantization=kind, **settings) as llm:
            llm.score(PROMPTS)
            found: dict[str, Any] = llm.info()["quantization"]
            return found

    for settings in ({}, {"placement": Offload(cpu="64MB")}):
        int8, int4 = (info_with(kind, **settings) for kind in ("int8", "int4"))
        assert int8["bits_per_weight"] > 8 and int4["bits_per_weight"] < 5.5
        assert "fp8" in int8["format"] and int4["format"] == int4["requested"]
        # Weights as stored have no error; requantized weights have one.
        assert "relative_error" in info_with("int4", **settings)
    assert info_with("w8a8")["activation_bits"] == 8


def test_updated_weights_are_rounded_to_format_of_checkpoint(tmp_path: Path) -> None:
    written("compressed-fp8", tmp_path)
    module, rows = make_toy("qwen2", **SHAPE, seed=5), Packing(8, 128, Encoding.FP8)
    with LLM(tmp_path) as llm:
        before = llm.info()["weight_bytes"]
        llm.update_weights(module.state_dict())
        assert llm.info()["weight_bytes"] == before
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if name.endswith("proj.weight"):
                    shape = tuple(weight.shape)
                    packing = WeightPacking(shape, weight.dtype, rows)
                    weight.copy_(rounded(weight, packing))
        for ids in PROMPTS:
            check_scores(llm, module, ids)


def negative_shape(state: torch.Tensor) -> torch.Tensor:
    text = bytes(state.tolist()).replace(b"[128, 128]", b"[-128, -128]")
    return torch.tensor(list(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "key", "damage"),
    [
        ("awq", "scales", lambda x: x * torch.inf),
        ("awq", "scales", lambda x: x.view(torch.int16)),
        ("awq", "scales", lambda x: x.to(torch.float8_e4m3fn)),
        ("awq", "qweight", lambda x: x.long()),
        ("gptq", "g_idx", lambda x: x.flip(0)),
        ("gptq", "g_idx", lambda x: x.float()),
        ("gptq", "scales", None),
        ("compressed-int4", "weight_packed", lambda x: x.flatten()),
        ("compressed-int4", "weight_shape", lambda x: x + 1),
        ("compressed-int4-zeros", "weight_zero_point", lambda x: x[:1]),
        ("compressed-int4-zeros", "weight_zero_point", None),
        ("compressed-int8", "weight_scale", lambda x: x.view(1, -1)),
        ("compressed-int8", "weight_scale", lambda x: x[:64]),
        ("compressed-int8", "weight", None),
        ("compressed-fp8", "weight", lambda x: torch.full_like(x, torch.nan)),
        ("compressed-fp8", "weight_scale", lambda x: x.int()),
        ("compressed-fp8-blocks", "weight_scale", lambda x: x[:, :0]),
        ("fp8", "weight_scale_inv", lambda x: x[:1, :1]),
        ("nvfp4", "weight_packed", lambda x: x.view(torch.int8)),
        ("nvfp4", "weight_scale", lambda x: x[:, 1:]),
        ("nvfp4", "weight_scale", lambda x: torch.full_like(x, torch.nan)),
        ("nvfp4", "weight_global_scale", lambda x: x * 0),
        ("nvfp4", "weight_global_scale", lambda x: x.repeat(2)),
        ("nvfp4-decoded", "weight_global_scale", lambda x: x * torch.nan),
        ("modelopt-nvfp4", "weight_scale_2", lambda x: -x),
        ("compressed-mxfp4", "weight_scale", lambda x: x.float()),
        ("hqq", "scale", lambda x: x[:1]),
        ("hqq", "zero", None),
        ("bnb-int8", "SCB", lambda x: x.int()),
        ("bnb-int8", "SCB", lambda x: x[:1]),
        ("nf4", "weight.quant_map", lambda x: x[:3]),
        ("nf4", "weight.absmax", lambda x: x.to(torch.uint8)),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", negative_shape),
        ("nf4-nested", "weight.nested_quant_map", lambda x: x[:3]),
        ("nf4-nested", "weight.nested_absmax", lambda x: x.repeat(2)),
        *(
            pytest.param(f"torchao {kind}", f"_weight_{key}", damage, marks=needs_torchao)
            for kind, key, damage in (
                ("int8 rows", "scale", lambda x: x[:64]),
                ("float8 rows", "scale", lambda x: x[:1, 0]),
                ("int8 rows", "qdata", lambda x: x.int()),
                ("int8 groups", "zero_point", lambda x: x.float()),
                ("float8 rows", "scale", None),
                ("int4", "zero_point", lambda x: x * torch.nan),
                ("int4", "scale", lambda x: x.t()),
                ("int4", "zero_point", lambda x: x.view(torch.int16)),
            )
        ),
    ],
)
def test_damaged_tensors_are_rejected(
    kind: str, key: str, damage: Callable[[torch.Tensor], torch.Tensor] | None, tmp_path: Path
) -> None:
    written(kind, tmp_path)
    name = f"model.layers.0.self_attn.q_proj.{key}"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(name)
        if damage is not None:
            tensors[name] = damage(tensor)

    edit_tensors(tmp_path, change)
    opening_fails(ModelError, r"q_proj|g_idx", tmp_path)


def test_quantized_checkpoint_without_safetensors_is_rejected(fp8_folder: Path) -> None:
    (folder := fp8_folder.parent / "bin").mkdir()
    (folder / "config.json").write_text((fp8_folder / "config.json").read_text())
    torch.save({}, folder / "pytorch_model.bin")
    opening_fails(NotSupported, r"a quantized checkpoint needs model\.safetensors", folder)


def config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: edit_config(folder, lambda c: c["quantization_config"].update(changes))


def tensors(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Any]:
    """Change tensors of a matrix, or add tensors to it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key, new in changes.items():
            tensors[f"{_MATRIX}.{key}"] = new(tensors.get(f"{_MATRIX}.{key}", torch.tensor(0)))

    return lambda folder: edit_tensors(folder, change)


def hqq_of_a_matrix(**changes: int) -> Callable[[Path], Any]:
    params = dict(nbits=4, group_size=64, axis=1) | changes
    return config(quant_config={"self_attn.q_proj": {"weight_quant_params": params}})


_MATRIX = "model.layers.0.self_attn.q_proj"
_ONLY_4_BITS = r"q_proj\.W_q is .*: HQQ must have nbits=4"


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("gptq", config(bits=3), "bits='3'"),
        ("gptq", config(quant_method="quanto"), "quant_method='quanto'"),
        ("gptq", config(quant_method=["gptq"]), "quant_method="),
        ("awq", config(version="gemv"), "version='gemv'"),
        ("compressed-int4", config(format="mxfp6-pack-quantized"), "mxfp6-pack-quantized"),
        ("auto-round", config(packing_format="auto_round:mlx"), "packing_format='auto_round:mlx'"),
        ("auto-round", config(extra_config={".*": {"bits": 3}}), r"extra_config: \.\* has bits=3"),
        ("awq", config(dynamic={"m": {"bits": 8}}), r"dynamic: m has bits=8: must be one of \[4\]"),
        ("fp8", config(weight_block_size=None), "no block size"),
        # Two scales for 192 rows could also be of 96 rows each.
        ("compressed-fp8-blocks", config(config_groups={"all": {}}), "no block size"),
        ("hqq", tensors(W_q=lambda x: x.int()), _ONLY_4_BITS),  # of 3 bits
        ("hqq", tensors(W_q=lambda x: torch.cat([x, x])), _ONLY_4_BITS),  # of 8 bits
        ("hqq", tensors(shape=lambda x: -x), _ONLY_4_BITS),
        ("hqq", tensors(nbits=lambda _: torch.tensor(8)), "q_proj: nbits=8 of HQQ"),
        ("hqq", tensors(axis=lambda _: torch.tensor(0)), "q_proj: axis=0 of HQQ"),
        ("hqq", hqq_of_a_matrix(nbits=8), r"config\.json: nbits=8 of HQQ"),
        ("hqq", hqq_of_a_matrix(axis=0), r"config\.json: axis=0 of HQQ"),
        (
            *("modelopt-fp8", tensors(pre_quant_scale=lambda _: torch.ones(128))),
            r"quant_algo='FP8' of modelopt.* without pre_quant_scale",
        ),
    ],
)
def test_unsupported_format_variants_are_rejected(
    name: str, edit: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    written(name, tmp_path)
    edit(tmp_path)
    opening_fails(NotSupported, words, tmp_path)


def test_hqq_rounding_error_is_at_most_a_16th_of_a_step(tmp_path: Path) -> None:
    tensors, values = w.hqq()(torch.randn(96, 128))
    save_file({f"x.{key}": tensor for key, tensor in tensors.items()}, path := tmp_path / "x")
    (lazy,) = decode(tmp_path, tensors_of([path]), _HQQ, torch.float32).values()
    step = tensors["scale"].float().expand(-1, 64).reshape(96, 128)
    assert bool(((materialize(lazy, read_stored) - values).abs() <= step / 16).all())


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("config.json", "quantization_config", value) for value in (3, "gptq", [1])]
    + [("hf_quant_config.json", "quantization", value) for value in ("FP8", [1], None)],
)
def test_quantization_that_is_no_object_is_rejected(
    file: str, key: str, value: Any, tmp_path: Path
) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps(fields | {key: value}))
    opening_fails(ModelError, rf"{file}: {key}=.* must be an object", tmp_path)


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_modelopt_format_is_read_from_hf_quant_config_json(
    on_the_hub: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = hub_snapshot(tmp_path, monkeypatch) if on_the_hub else tmp_path
    module = written("modelopt-fp8", folder)
    fields = {"quantization": edit_config(folder, lambda c: c.pop("quantization_config"))}
    (folder / "hf_quant_config.json").write_text(json.dumps(fields))
    model = "some/model" if on_the_hub else folder
    with LLM(model, tokenizer=toy_tokenizers.byte_level().hf) as llm:
        check_scores(llm, module)


def test_quant_method_in_hf_quant_config_is_ignored(tmp_path: Path) -> None:
    make_toy("llama").save_pretrained(tmp_path)
    fields = json.dumps({"quantization": {"quant_method": "odd"}})
    (tmp_path / "hf_quant_config.json").write_text(fields)
    LLM(tmp_path).close()


def test_modelopt_block_scales_may_have_four_dimensions(tmp_path: Path) -> None:
    written("modelopt-fp8-blocks", tmp_path)
    with LLM(tmp_path) as llm:
        expected = llm.score(PROMPTS[0])

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(".weight_scale"):
                tensors[name] = tensors[name][:, None, :, None]

    edit_tensors(tmp_path, widen)
    with LLM(tmp_path) as llm:
        assert llm.score(PROMPTS[0]) == expected


def test_zero_points_of_few_rows_are_read(tmp_path: Path) -> None:
    """The rows of their words, such as those of Qwen's `shared_expert_gate`, fill a single word."""
    stored, values = w.packed(symmetric=False)(torch.randn(1, 96))
    check_decoded(tmp_path, stored, values, _WITH_ZEROS)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_0_borrow_from_next_in_gptq(bits: int, tmp_path: Path) -> None:
    weight = torch.rand(64, 96) - torch.arange(64)[:, None] % 2  # every other row has no negatives
    stored, values = w.gptq(bits)(weight)
    check_decoded(tmp_path, stored, values, _GPTQ | dict(bits=bits))


def test_last_block_of_nf4_may_be_short(tmp_path: Path) -> None:
    stored, values = w.nf4()(torch.randn(2, 96))
    state = json.loads(bytes(stored.pop(key := "weight.quant_state.bitsandbytes__nf4").tolist()))
    text = json.dumps(state | dict(shape=[1, 160])).encode()
    stored["weight"] = stored["weight"][:80]
    check_decoded(
        *(tmp_path, stored | {key: torch.tensor(list(text), dtype=torch.uint8)}),
        *(values.view(1, -1)[:, :160], _BNB),
    )


def check_decoded(
    folder: Path, stored: dict[str, torch.Tensor], values: torch.Tensor, config: dict[str, Any]
) -> None:
    """Check the values of a single matrix that is stored in a quantized format."""
    path = folder / "model.safetensors"
    save_file({f"gate.{name}": tensor.contiguous() for name, tensor in stored.items()}, path)
    decoded = decode(folder, tensors_of([path]), config, torch.float32)
    assert torch.equal(materialize(decoded["gate.weight"], read_stored), values)


@pytest.mark.parametrize("name", ["kv_scale", "k_proj.output_scale", "prob_scale", "v_scale"])
def test_scales_of_a_quantized_kv_cache_are_ignored(name: str, fp8_folder: Path) -> None:
    folder = shutil.copytree(fp8_folder, fp8_folder.parent / name)
    full_name = f"model.layers.1.self_attn.{name}"
    edit_tensors(folder, lambda tensors: tensors.update({full_name: torch.tensor(2.0)}))
    LLM(folder).close()


def test_zero_matrix_with_zero_scales_is_read(tmp_path: Path) -> None:
    module = written("modelopt-nvfp4", tmp_path)

    def clear(tensors: dict[str, torch.Tensor]) -> None:
        for key in (key for key in tensors if key.startswith(f"{_MATRIX}.weight")):
            tensors[key] = torch.zeros(tensors[key].shape).to(tensors[key].dtype)

    edit_tensors(tmp_path, clear)
    with torch.no_grad():
        module.get_submodule(_MATRIX).weight.zero_()
    with LLM(tmp_path) as llm:
        check_scores(llm, module)


def test_torchao_scale_shape_must_match_block_size(tmp_path: Path) -> None:
    """Written by hand, as torchao saves it: a single scale is per tensor, and not per row."""
    module, name = make_toy("llama", **SHAPE), "model.layers.0.self_attn.q_proj"
    tensors = dict(module.state_dict())
    weight = tensors.pop(f"{name}.weight")
    tensors[f"{name}._weight_qdata"] = weight.to(torch.float8_e4m3fn)
    tensors[f"{name}._weight_scale"] = torch.ones(1)

    def write(*block: int) -> None:
        fields = {"_type": "Float8Tensor", "_data": {"block_size": block}}
        metadata = {f"{name}.weight": json.dumps(fields)}
        checkpoints._write(tmp_path, module, tensors, {"quant_method": "torchao"}, metadata)

    write(*weight.shape)
    LLM(tmp_path).close()
    write(1, weight.shape[1])
    opening_fails(ModelError, r"q_proj\._weight_scale is torch\.float32 \[1\]", tmp_path)


@needs_torchao
def test_unknown_torchao_tensor_class_is_rejected(tmp_path: Path) -> None:
    written("torchao int8 rows", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"Int8Tensor", b"OddTensor!"))
    opening_fails(NotSupported, "OddTensor! of torchao", tmp_path)


def test_missing_quantization_config_is_reported(tmp_path: Path) -> None:
    written("awq", tmp_path)
    edit_config(tmp_path, lambda config: config.pop("quantization_config"))
    opening_fails(ModelError, r"qweight .*does config\.json lack its quantization_c", tmp_path)
