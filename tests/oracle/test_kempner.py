"""KempnerForge's architectures: the same logits as a plain reference, or rejected."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from support import kempner_reference
from verbatim import LLM, ModelError, SamplingParams, UnsupportedModel
from verbatim.api.tensors import engine_of
from verbatim.compat.kempnerforge import generate
from verbatim.errors import ModelChanged
from verbatim.model.kempner.config import KempnerConfig, ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IDS = [3, 7, 1, 44, 9, 9, 0, 21, 30, 12, 5]


def save(module: torch.nn.Module, folder: Path) -> Path:
    """Save a checkpoint as KempnerForge does, without an optimizer."""
    dcp.save({"model": module.state_dict()}, checkpoint_id=str(folder))
    return folder


def opened(tmp_path: Path, extra: str = "", seed: int = 0, **fields: Any) -> LLM:
    folder = save(kempner_reference.make(seed, **fields), tmp_path / "step_1")
    return LLM(folder, config=kempner_reference.write_toml(tmp_path / "x.toml", extra, **fields))


def check_logits(llm: LLM, module: torch.nn.Module) -> None:
    """Compare the log-probs of every vocabulary id in a prompt, from flat batches, with a module's own."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=kempner_reference.VOCAB)
    (result,) = llm.generate(IDS, params)
    rows = [dict(entries) for entries in result.prompt_top_logprobs[1:]]
    found = torch.tensor([[row[i] for i in range(kempner_reference.VOCAB)] for row in rows])
    expected = module(torch.tensor([IDS]))[0].log_softmax(-1)
    torch.testing.assert_close(found, expected[:-1], atol=1e-5, rtol=1e-5)


MOE = dict(num_experts=4, moe_top_k=2)
ARCHITECTURES = {
    "llama": {},
    "llama-tied-mha": dict(tie_embeddings=True, n_kv_heads=None, norm_eps=1e-3, rope_theta=500.0),
    "qwen3": dict(qk_norm=True, norm_eps=0.1),
    "arcee-gelu": dict(activation="gelu"),
    "arcee-relu": dict(activation="relu", norm_eps=0.1),
    "stablelm": dict(norm_type="layernorm", norm_eps=0.1),
    "starcoder2-gelu": dict(norm_type="layernorm", activation="gelu", norm_eps=0.1),
    "starcoder2-relu-tied": dict(norm_type="layernorm", activation="relu", tie_embeddings=True),
    "mixtral": MOE,
    "mixtral-packed": dict(**MOE, moe_packed_experts=True),
    "mixtral-sigmoid": dict(**MOE, moe_router="sigmoid_topk"),
    "mixtral-fine": dict(**MOE, moe_expert_ffn_multiplier=0.5, expert_width=32),
    "qwen3_moe": dict(**MOE, qk_norm=True, n_layers=3, moe_frequency=2, norm_eps=0.1),
    "qwen3_moe-sigmoid-packed": dict(
        **MOE, qk_norm=True, moe_router="sigmoid_topk", moe_packed_experts=True
    ),
    "ernie": dict(**MOE, n_layers=3, moe_frequency=2, norm_eps=0.1, rope_theta=300.0),
    "ernie-shared-tied": dict(**MOE, moe_shared_experts=2, tie_embeddings=True),
    "ernie-shared-sigmoid": dict(
        **MOE, moe_shared_experts=1, moe_router="sigmoid_topk", moe_packed_experts=True
    ),
    "experts-in-no-layer": dict(**MOE, moe_frequency=3),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_match_plain_reference(tmp_path: Path, name: str) -> None:
    fields = {k: v for k, v in ARCHITECTURES[name].items() if v is not None}
    if "n_kv_heads" in ARCHITECTURES[name]:
        fields["n_kv_heads"] = kempner_reference.FIELDS["n_heads"]
    with opened(tmp_path, **fields) as llm:
        check_logits(llm, kempner_reference.make(**fields))


@pytest.mark.parametrize("name", ["mixtral-sigmoid", "ernie-shared-sigmoid"])
def test_sigmoid_router_gives_same_bits_alone_and_batched(tmp_path: Path, name: str) -> None:
    prompts = [IDS, IDS[:3], IDS[4:], IDS[::-1]]
    params = SamplingParams(max_tokens=6, seed=3, logprobs=0)
    with opened(tmp_path, **ARCHITECTURES[name]) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs


def test_sigmoid_router_is_recorded(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, seed=3, record_routing=True)
    with opened(tmp_path, **MOE, moe_router="sigmoid_topk") as llm:
        (first,) = llm.generate(IDS, params)
        routing = first.outputs[0].routing
        assert routing.shape[1:] == (2, 2)
        assert len({tuple(row) for row in routing[:, 0].tolist()}) > 1


def test_dtype_follows_checkpoint_unless_given(tmp_path: Path) -> None:
    folder = save(kempner_reference.make().bfloat16(), tmp_path / "step_1")
    toml = kempner_reference.write_toml(tmp_path / "x.toml")
    with LLM(folder, config=toml) as llm:
        assert llm.info()["dtype"] == "bfloat16"
    with LLM(folder, config=toml, dtype="float32") as llm:
        assert llm.info()["dtype"] == "float32"
    save(kempner_reference.make().half(), tmp_path / "step_2")
    with LLM(tmp_path / "step_2", config=toml) as llm:
        assert llm.info()["dtype"] == "bfloat16"  # float16 is not computed on a CPU


def test_moe_capacity_factor_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"moe_capacity_factor=1\.25.*none are"):
        opened(tmp_path, **MOE, moe_capacity_factor=1.25).close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(qk_norm=True, norm_type="layernorm"), "qk_norm=True, norm_type='layernorm'"),
        (dict(qk_norm=True, activation="gelu"), "activation='gelu'"),
        (dict(MOE, norm_type="layernorm"), "num_experts=4, norm_type='layernorm'"),
        (dict(MOE, activation="relu"), "activation='relu'"),
        (dict(MOE, qk_norm=True, moe_shared_experts=1), "moe_shared_experts=1"),
        (dict(MOE, moe_router="hash"), "moe_router='hash'"),
        (dict(model_type="vlm"), "model_type='vlm'"),
        (dict(activation="tanh"), "activation='tanh'"),
    ],
)
def test_unsupported_field_combinations_are_rejected(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    toml = kempner_reference.write_toml(tmp_path / "x.toml", **fields)
    folder = save(kempner_reference.make(), tmp_path / "step_1")
    with pytest.raises(UnsupportedModel) as refused:
        LLM(folder, config=toml)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[model]\ndimm = 5", "[model] has no field 'dimm'"),
        ("[model]\ndim = 30\nn_heads = 4", "dim=30: must be n_heads=4 times an even number"),
        ("[model]\ndim = 12\nn_heads = 4", "dim=12"),
        ("[model]\nn_heads = 8\nn_kv_heads = 3", "n_heads=8: must be a multiple of n_kv_heads=3"),
        ("[model]\nn_layers = 0", "n_layers=0: must be above 0"),
        ("[model]\nn_layers = 2.5", "n_layers=2.5: must be an integer"),
        ("[model]\nnorm_eps = nan", "norm_eps=nan: must be a number"),
        ("[model]\nqk_norm = 1", "qk_norm=1: must be true or false"),
        ("[model]\nnum_experts = 2\nmoe_top_k = 3", "moe_top_k=3: at most num_experts=2"),
        ("[model]\nnum_experts = -2", "num_experts=-2: must be 0 or more"),
        ("model = 5", "model=5: must be a section"),
        ("[vlm]\narch = 'mot'", "[vlm] is for models of images"),
        ("[adapter]\n", "[adapter]"),
        ("[data]\ntokenizer_path = 5", "tokenizer_path=5: must be a string"),
        ("[model", "is not TOML"),
        ("a = " + "[" * 50_000, "is not TOML"),
        ("a = " + "{a = " * 5_000, "is not TOML"),
        (
            "[model]\ndim = 1" + "0" * 400,
            "dim=an integer of 1329 bits: must be an integer of 64 bits",
        ),
        ("[model]\nrope_theta = 0x" + "f" * 9_000, "rope_theta=an integer of 36000 bits: must be"),
        ("[model]\ndim = " + "[" * 200 + "]" * 200, "must be an integer"),
        (
            "[data]\ntokenizer_path = [0x" + "f" * 9_000 + "]",
            "[an integer of 36000 bits]: must be a",
        ),
        ("model = 0x" + "f" * 9_000, "model=an integer of 36000 bits: must be a section"),
        (
            "[model]\nffn_dim_multiplier = 1e30",
            "ffn_dim_multiplier=1e+30: must be a number below 2**63",
        ),
        (
            "[model]\nffn_dim_multiplier = 1e15",
            "=1000000000000000.0: must be above 0 and below 2**40",
        ),
        ("[model]\nmoe_shared_experts = 1_000_000_000_000_000", "0 or more and below 2**40"),
    ],
)
def test_invalid_config_is_rejected_with_field_and_file(
    tmp_path: Path, line: str, named: str
) -> None:
    toml = tmp_path / "bad.toml"
    toml.write_text(line)
    with pytest.raises(ModelError) as refused:
        KempnerConfig.read(toml)
    assert named in str(refused.value)
    assert str(toml) in str(refused.value)


def test_missing_or_non_utf8_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't read .*nowhere\.toml: No such file"):
        KempnerConfig.read(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ModelError, match="is not UTF-8 text"):
        KempnerConfig.read(tmp_path / "latin.toml")


def test_training_fields_and_sections_are_ignored(tmp_path: Path) -> None:
    toml = tmp_path / "x.toml"
    toml.write_text(
        "[model]\nn_heads = 16\ninit_std = 0.1\nsdpa_backend = 'math'\nmoe_gradient_scale = true\n"
        "[train]\nanything = 1\n[data]\ntokenizer_path = 'tok'\n[checkpoint]\nload_path = 'ck'\n"
    )
    config = KempnerConfig.read(toml, {"model": {"dim": 64}})
    assert config == KempnerConfig(ModelConfig(n_heads=16, dim=64), "tok", "ck")
    assert config.model.kv_heads == 16  # n_heads of this file, not the default of 32


def test_config_without_sections_is_read_as_model_section(tmp_path: Path) -> None:
    toml = tmp_path / "moe_small.toml"
    toml.write_text("dim = 2048\nn_layers = 24\nn_heads = 16\nnum_experts = 8\n")
    assert KempnerConfig.read(toml).model.num_experts == 8


@pytest.mark.parametrize(
    ("fields", "ffn", "expert"),
    [
        (dict(dim=4096), 11008, 11008),
        (dict(dim=4096, ffn_dim_multiplier=1.3), 14336, 14336),
        (dict(dim=256, moe_expert_ffn_multiplier=0.5), 768, 384),
        (dict(dim=64, ffn_hidden_dim=100, moe_expert_ffn_multiplier=0.25), 100, 32),
        (dict(dim=64, ffn_hidden_dim=100, moe_expert_ffn_multiplier=0.01), 100, 16),
    ],
)
def test_ffn_and_expert_widths_follow_multipliers(
    fields: dict[str, Any], ffn: int, expert: int
) -> None:
    config = ModelConfig(num_experts=4, **fields)
    assert (config.ffn_width, config.expert_width) == (ffn, expert)


# ---- live modules


DENSE = [name for name, fields in ARCHITECTURES.items() if "num_experts" not in fields]


def live(name: str, seed: int = 0) -> kempner_reference.Transformer:
    return kempner_reference.make(seed, **{k: v for k, v in ARCHITECTURES[name].items() if v})


@pytest.mark.parametrize("name", DENSE)
def test_live_module_runs_as_its_architecture(name: str) -> None:
    module = live(name)
    with LLM(module, kv_memory="1MB") as llm:
        info = llm.info()
        assert (info["rows"], info["placement"]) == ("together", "kv_caches")
        assert (info["architecture"], info["max_length_from"]) == ("Transformer", "max_seq_len")
        assert info["weight_bytes"] == sum(p.nbytes for p in module.parameters())
        check_logits(llm, module)
        prompts = [IDS, IDS[:3], IDS[4:]]
        params = SamplingParams(max_tokens=6, seed=3, logprobs=0)
        together = llm.generate(prompts, params)
        for prompt, result in zip(prompts, together, strict=True):
            alone = llm.generate(prompt, params)[0].outputs[0]
            assert result.outputs[0].logprobs == alone.logprobs
    with LLM(module, kv_memory="1MB", kv_dtype="int8") as llm:
        (result,) = llm.generate(IDS, SamplingParams(max_tokens=1, hidden_states=True))
        assert result.outputs[0].hidden_states.shape == (1, 32)


def test_live_module_is_used_in_place() -> None:
    """In-place edits, replaced parameters and `update_weights` take effect."""
    module, other = live("llama"), live("llama", seed=1)
    with LLM(module, kv_memory="1MB") as llm:
        with torch.no_grad():
            module.norm.weight.mul_(0.5)
        check_logits(llm, module)
        module.output_head["proj"].weight = torch.nn.Parameter(
            torch.randn(kempner_reference.VOCAB, 32)
        )
        check_logits(llm, module)
        llm.update_weights(other.state_dict())
        assert torch.equal(module.norm.weight, other.norm.weight)
        check_logits(llm, module)
        module.train()
        check_logits(llm, module)
        assert module.training
        module.config.max_seq_len = 32
        with pytest.raises(ModelChanged, match="max_seq_len"):
            llm.generate(IDS, SamplingParams(max_tokens=1))


def test_cached_engine_does_not_keep_live_module_alive() -> None:
    module = live("llama")
    generate(module, torch.tensor([IDS]), 2)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_closed_engine_holds_no_weights_of_live_module() -> None:
    module = live("llama")
    llm = LLM(module, kv_memory="1MB")
    assert llm.info()["rows"] == "together"
    llm.close()
    gone = weakref.ref(module.norm.weight)
    del module
    gc.collect()
    assert gone() is None


def test_edited_live_module_runs_by_its_own_forward() -> None:
    module = live("llama")
    assert engine_of(module).info()["rows"] == "together"
    handle = module.norm.register_forward_hook(lambda _m, _x, out: 2 * out)
    assert engine_of(module).info()["rows"] == "one at a time"
    check_logits(engine_of(module), module)
    handle.remove()
    with LLM(module, kv_memory="1MB") as llm:
        module.norm = torch.nn.LayerNorm(32)
        with pytest.raises(ModelChanged, match="open it again"):
            llm.generate(IDS, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("change", ["number", "code"])
def test_edit_inside_live_module_raises_model_changed(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = live("llama")
    with LLM(module, kv_memory="1MB") as llm:
        assert llm.info()["rows"] == "together"
        generated = llm.generate(IDS, SamplingParams(max_tokens=1))
        assert len(generated[0].outputs[0].token_ids) == 1
        if change == "number":
            monkeypatch.setattr(module.norm, "eps", 3.0)
        else:
            monkeypatch.setattr(type(module.norm), "forward", lambda _self, x: 2 * x)
        with pytest.raises(ModelChanged, match="open it again"):
            llm.generate(IDS, SamplingParams(max_tokens=1))


def test_module_with_activation_checkpointing_runs_as_its_architecture() -> None:
    module = live("llama")
    apply_activation_checkpointing(
        module, check_fn=lambda layer: isinstance(layer, kempner_reference.Block)
    )
    with LLM(module, kv_memory="1MB") as llm:
        assert llm.info()["rows"] == "together"
        check_logits(llm, module)
        llm.update_weights(module.state_dict())


@pytest.mark.parametrize("change", ["experts", "forward", "config", "subclass"])
def test_live_module_with_modified_code_runs_by_its_own_forward(change: str) -> None:
    module = live("mixtral" if change == "experts" else "llama")
    if change == "forward":
        module.norm.forward = lambda x: x
    elif change == "config":
        module.config.norm_eps = 0.5  # its layers were built with another value
    elif change == "subclass":
        module.__class__ = type("Transformer", (kempner_reference.Transformer,), {})
    with LLM(module, kv_memory="1MB") as llm:
        assert llm.info()["rows"] == "one at a time"
        check_logits(llm, module)
