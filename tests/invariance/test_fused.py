"""Fused layers: bit-identical to layers that run module by module, or not fused."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import sweep
from support.layer_batches import BATCHES, outputs, reclass, wrong
from support.odd_toys import DTYPES
from support.pairwise import parametrize_combinations
from support.requests_mixed import all_facts, mixed_requests
from support.toys import make_toy
from verbatim import LLM, NotSupported
from verbatim.model.decoder import Decoder
from verbatim.model.quantized import hold_quantized
from verbatim.quantization.formats import resolve_quantization
from verbatim.quantization.matrix import pack

# Numbers of fused layers, and of fused parts of other layers; models that run in one call: `test_whole.py`.
FUSED = dict.fromkeys(
    """bailing_hybrid bamba bart bert bloom deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text
    gemma4_text:dense gemma4_unified_text glm_moe_dsa gpt_neo gpt_oss minimax_m3_vl_text mixtral
    nanochat nemotron_h phi qwen3_moe roberta whisper""".split(),
    (4, 0),
) | {
    "axk2": (0, 11),
    "diffllama": (0, 4),
    "gemma3n_text": (0, 6),
    "gemma4_text": (0, 8),
    "granitemoehybrid": (0, 12),
    "hrm_text": (8, 0),
    "hy_v4": (0, 8),
    "llama4_text": (3, 1),
    "zamba": (0, 4),
}
# The architectures in transformers whose layers must all be fused.
ALL_FUSED = frozenset(
    """afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid bamba biogpt blenderbot bloom cohere
    cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v3 deepseek_v3:plain
    dots1 emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint fuyu gemma
    gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2
    gpt2:scaled gpt_bigcode gpt_bigcode:heads gpt_neo gpt_neox gpt_neox:serial gpt_oss
    granite granite_swa granitemoe helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 kimi_linear kolibri1 lfm2 lfm2:full lfm2_moe llama llama:dynamic
    llama:tied mbart mellum minimax_m2 ministral mistral mixtral mixtral:full mllama
    moss_transcribe_diarize mpt mpt:odd nemotron nemotron_h olmo olmo2 olmo3 olmo:clip
    olmo_hybrid olmoe opt pegasus persimmon phi phi3 phi3:longrope phi4_multimodal phi:norms
    phimoe qwen2 qwen2:full qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_moe:window qwen3_next sarvam_mla sarvam_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu""".split()
)


def fused_and_plain(model: nn.Module) -> tuple[Decoder, Decoder]:
    fused = Decoder(model)
    report = fused.fused
    assert report is not None and (report["layers"], report["reasons"]) == (3, {})
    return fused, Decoder(model, fused=False)


@parametrize_combinations(
    15, case=[case for case in FUSED if case in sweep.cases()], dtype=[*DTYPES]
)
def test_fused_layers_are_bit_identical_to_plain_layers(case: str, dtype: str) -> None:
    model = sweep.build(case).to(DTYPES[dtype])
    fused, plain = Decoder(model), Decoder(model, fused=False)
    report = fused.fused
    assert report is not None and (report["layers"], report["parts"]) == FUSED[case]
    assert plain.fused is None
    expected = outputs(plain)
    for threads in (1, 2, 3):
        assert outputs(fused, threads) == expected, f"{threads} threads"


HALF = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("llama", dict(hidden_size=60, intermediate_size=100, num_attention_heads=6, head_dim=10)),
        ("llama", dict(num_attention_heads=4, num_key_value_heads=1, head_dim=80)),
        ("glm4", dict(rope_parameters=HALF)),
        ("smollm3", dict(no_rope_layers=[1, 0, 1])),
        ("gpt_neox", dict(use_parallel_residual=False)),
        ("olmo", dict(clip_qkv=0.5)),
    ],
    ids=str,
)
def test_fused_layers_match_plain_layers_with_other_configs(
    name: str, changes: dict[str, Any], dtype: str
) -> None:
    fused, plain = fused_and_plain(make_toy(name, dtype=DTYPES[dtype], **changes))
    assert outputs(fused) == outputs(plain)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (name, changes)
        for name, changes in (
            ("qwen3_next", {}),
            ("kimi_linear", {}),
            ("bailing_hybrid", {}),
            ("bailing_hybrid", dict(safe_gate=False)),
            ("bailing_hybrid", dict(lower_bound=-0.3)),
        )
        if name in sweep.names()  # known to this version of transformers
    ],
    ids=str,
)
def test_recurrent_layers_with_some_float32_weights_are_fused(
    name: str, changes: dict[str, Any]
) -> None:
    """transformers keeps some weights in float32, whatever the model's dtype."""
    model = sweep.build(name).to(torch.bfloat16)
    for path, weight in model.named_parameters():
        if path.endswith(("A_log", "dt_bias", "conv1d.weight")):
            weight.data = weight.data.float() * 1.001
    for module in model.modules():
        if hasattr(module, "safe_gate"):
            module.__dict__.update(changes)
    decoder = Decoder(model)
    assert decoder.fused is not None and decoder.fused["plain"] == 0, decoder.fused["reasons"]
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "kimi_linear"])
def test_layers_with_quantized_weights_are_fused(name: str, kind: str, dtype: str) -> None:
    model = make_toy(name, dtype=DTYPES[dtype], attention_bias=True)
    quantization = resolve_quantization(kind)
    assert quantization is not None
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    for path, layer in [*linears.items()][:-1]:  # all but the head
        if path.endswith("kv_b_proj"):  # stays exact
            continue
        packing = quantization.packing(layer.weight.shape, layer.weight.dtype)
        hold_quantized(layer, "weight", pack(layer.weight.detach(), packing), packing)
    fused, plain = fused_and_plain(model)
    assert outputs(fused) == outputs(plain)
    for layer in model.model.layers:  # as after waking from sleep
        held: Any = next(m for name, m in layer.named_modules() if name.endswith("up_proj"))
        held.weight_packed = held.matrix.data.flip(0).roll(5).clone().clamp(max=120)
    assert outputs(fused) == outputs(plain)


@pytest.mark.parametrize("name", ["falcon", "mamba"])
def test_unsupported_layers_are_not_fused_and_report_reason(name: str) -> None:
    model = make_toy(name)
    decoder = Decoder(model)
    report = decoder.fused
    assert report is not None and report["layers"] == 0 and report["plain"] == 3
    assert sum(report["reasons"].values()) == 3 and "not all of its layers" in report["whole"]
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


@parametrize_combinations(name=["qwen3", "gpt_oss", "qwen3_next"], dtype=[*DTYPES])
def test_engine_gives_same_results_fused_and_unfused(name: str, dtype: str) -> None:
    prompts, params = mixed_requests(12)
    found = []
    for options in (dict(fused=False), {}, dict(max_batch_tokens=9, block_size=5)):
        with LLM(make_toy(name, dtype=DTYPES[dtype]), **options) as llm:  # type: ignore[arg-type]
            report = llm.info()["fused"]
            assert report is None if not options.get("fused", True) else report["layers"] == 3
            found.append(all_facts(llm.generate(prompts, params)))
    assert found[1] == found[0], "fused"
    assert found[2] == found[0], "fused and chunked"


@pytest.mark.parametrize("kv_dtype", ["int8", "float32"])
def test_fused_matches_unfused_with_other_kv_dtypes(kv_dtype: str) -> None:
    prompts, params = mixed_requests(6)
    found = []
    for fused in (False, True):
        with LLM(make_toy("gemma2", dtype=torch.bfloat16), kv_dtype=kv_dtype, fused=fused) as llm:
            found.append(all_facts(llm.generate(prompts, params)))
    assert found[0] == found[1]


def test_pipeline_placement_rejects_fused_false() -> None:
    from verbatim import PipelineParallel

    with pytest.raises(NotSupported, match="fused=False"):
        LLM(make_toy("llama"), placement=PipelineParallel(size=2), fused=False)


# ---- edits of a live module, between and during forwards ----


def train(model: Any) -> None:
    """One step of an optimizer, with the module's own forward and gradients."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def update_in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter.detach().mul_(1.25)


def replace_storage(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).clone()


def replace_parameters(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight.detach()
        layer.mlp.down_proj.weight = nn.Parameter(weight.roll(1, 0).contiguous())
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.detach() * 2)


def replace_layers(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=True)
    model.model.layers[2].self_attn.q_proj.weight.data.neg_()


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    layers[1].mlp, layers[2].mlp = layers[2].mlp, layers[1].mlp


def change_formula(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(torch.tanh(mlp.gate_proj(x)))


def layout(place: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """An edit that changes the memory layout of one weight in every layer."""

    def edit(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.get_submodule(place).weight
            weight.data = change(weight.data)

    return edit


def hold_by_rows(model: Any) -> None:
    """Use the memory layout in which a checkpoint's `[in, out]` matrices are held."""
    for parameter in model.transformer.h.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.mT.contiguous().mT


def mixer(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].linear_attn


ALWAYS = {"train": train, "update in place": update_in_place, "replace storage": replace_storage}
EDITS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "llama": ALWAYS
    | {
        "replace parameters": replace_parameters,
        "replace layers": replace_layers,
        "swap layers": swap_layers,
        "lay out by columns": layout("mlp.up_proj", lambda w: w.t().contiguous().t()),
        "turn square around": layout("self_attn.o_proj", Tensor.t),  # the same memory
        # The same shape and memory, but other strides.
        "turn rows into columns": layout("mlp.up_proj", lambda w: w.view(64, 96).t()),
        "expand one row": layout("mlp.gate_proj", lambda w: w[:1].expand(w.shape)),
        "epsilon": lambda m: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
        "formula": change_formula,
        "bias": lambda m: setattr(
            m.model.layers[0].self_attn.k_proj, "bias", nn.Parameter(torch.randn(32))
        ),
    },
    "qwen3_5": ALWAYS
    | {
        "update decay": lambda m: mixer(m).A_log.detach().mul_(0.5),
        "replace decay": lambda m: setattr(
            mixer(m), "dt_bias", nn.Parameter(mixer(m).dt_bias.detach().flip(0).double())
        ),
        "replace taps": lambda m: setattr(
            mixer(m, 2).conv1d, "weight", nn.Parameter(mixer(m, 2).conv1d.weight.detach().flip(0))
        ),
        "bias of taps": lambda m: setattr(
            mixer(m).conv1d, "bias", nn.Parameter(torch.randn(len(mixer(m).conv1d.weight)))
        ),
        "gated norm": lambda m: setattr(mixer(m, 2).norm, "variance_epsilon", 0.5),
    },
    "gpt2": ALWAYS | {"hold by rows": hold_by_rows},
    "granite_dense": {
        "limits": lambda m: setattr(m.model.layers[0].mamba, "time_step_limit", (0.01, 0.02))
    },
}


@pytest.mark.parametrize(("name", "edit"), [(name, edit) for name in EDITS for edit in EDITS[name]])
def test_edits_of_live_module_take_effect(name: str, edit: str) -> None:
    model = make_toy(name)
    fused, plain = fused_and_plain(model)
    before = outputs(fused)
    EDITS[name][edit](model)
    after = outputs(fused)
    assert after == outputs(plain)
    assert after != before or edit in ("lay out by columns", "hold by rows")
    assert outputs(fused) == after, "again"


def test_alias_of_an_attention_does_not_take_its_layer() -> None:
    model = make_toy("llama")
    model.tapped = model.model.layers[1].self_attn
    with LLM(model) as llm:
        assert llm.info()["fused"]["whole"] == "yes"


@pytest.mark.parametrize("before", [None, 6])
def test_edited_sliding_window_in_config_takes_effect(before: int | None) -> None:
    model = make_toy("mistral", sliding_window=before)
    fused, plain = fused_and_plain(model)
    wide = outputs(fused)
    model.config.sliding_window = 2
    assert outputs(fused) == outputs(plain) != wide
    model.config.sliding_window = before
    assert outputs(fused) == wide


def test_softcap_that_was_none_at_opening_takes_effect() -> None:
    model = make_toy("gemma2", attn_logit_softcapping=None)
    fused, plain = fused_and_plain(model)
    uncapped = outputs(fused)
    model.model.layers[1].self_attn.attn_logit_softcapping = 0.01
    assert outputs(fused) == outputs(plain) != uncapped


def test_forward_hooks_are_called_and_change_outputs() -> None:
    model = make_toy("llama")
    fused, plain = fused_and_plain(model)
    clean = outputs(fused)
    seen: list[str] = []

    def on(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            seen.append(name)
            return output * 1.5

        return hook

    layers = model.model.layers
    handles = [
        layers[0].mlp.act_fn.register_forward_hook(on("act")),
        layers[1].self_attn.v_proj.register_forward_hook(on("v")),
        layers[2].register_forward_hook(on("layer")),
    ]
    hooked = outputs(fused)
    assert seen == ["act", "v", "layer"] * len(BATCHES)
    assert hooked == outputs(plain) != clean
    for handle in handles:
        handle.remove()
    assert outputs(fused) == clean


def test_hook_that_replaces_weights_of_later_layer_takes_effect() -> None:
    model = make_toy("llama")
    fused, plain = fused_and_plain(model)
    kept = model.model.layers[2].mlp.down_proj.weight
    own, other = kept.data, kept.data * 2

    def swap(*_: Any) -> None:
        kept.data = own if kept.data is other else other.clone()

    handle = model.model.layers[0].register_forward_hook(swap)
    first = outputs(fused)
    kept.data = own
    assert first == outputs(plain)
    handle.remove()


@pytest.mark.skipif("gemma4_text" not in sweep.cases(), reason="a newer transformers has it")
def test_mlp_called_by_hook_rejects_rows_of_wrong_width() -> None:
    model = sweep.build("gemma4_text")
    layers, refused = model.model.layers, list[str]()

    def hook(*_: Any) -> None:
        with pytest.raises(ValueError, match="do not fit") as error:
            layers[1].mlp(torch.ones(1, 2, 32))
        refused.append(str(error.value))

    layers[0].register_forward_hook(hook)
    assert outputs(Decoder(model)) == outputs(Decoder(model, fused=False))
    assert len(refused) == 2 * len(BATCHES)


def test_module_forward_is_restored_after_fused_forward() -> None:
    model = make_toy("llama")
    ids = torch.arange(5, 15)[None]
    expected = model(input_ids=ids).logits
    outputs(Decoder(model))
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_closed_decoder_does_not_keep_module_alive() -> None:
    model = make_toy("llama")
    decoder = Decoder(model, weak=True)
    outputs(decoder)
    alive = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    decoder.close()
    del model
    gc.collect()
    assert alive() is None


# ---- layers that look standard but compute something else ----


PLACES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "mlp": ("model.layers.1.mlp", lambda out, x: out * 1.001),
    "attention": ("model.layers.1.self_attn", lambda out, x: (out[0] + 0.001 * x, out[1])),
    "layer": ("model.layers.1", lambda out, x: out + 0.001 * x),
    "norm": ("model.layers.1.input_layernorm", lambda out, x: out + 0.001 * x),
    "linear": ("model.layers.1.self_attn.q_proj", lambda out, x: out * 1.001),
    "mixer": ("model.layers.2.linear_attn", lambda out, x: out + 0.001 * x),
    "gated norm": ("model.layers.2.linear_attn.norm", lambda out, x: out * 1.001),
}


@pytest.mark.parametrize("place", PLACES)
def test_module_with_modified_forward_is_not_fused(place: str) -> None:
    recurrent = "linear_attn" in PLACES[place][0]
    model = wrong(make_toy("qwen3_5" if recurrent else "llama"), *PLACES[place])
    decoder = Decoder(model)
    report = decoder.fused
    assert report is not None and report["whole"] != "yes"
    if place != "mlp":  # the MLP runs unfused, between the kernels
        assert (report["layers"], report["plain"]) == (2, 1)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_modified_forward_behind_zero_weights_is_not_fused() -> None:
    """A factor applied to an output of zeros shows only after the next training step."""
    model = make_toy("llama")
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    nn.init.ones_(model.model.layers[1].input_layernorm.weight)
    wrong(model, "model.layers.0.mlp", lambda out, x: out * 1.5)
    wrong(model, "model.layers.1.input_layernorm", lambda out, x: out.to(torch.float64).to(x.dtype))
    decoder = Decoder(model)
    assert decoder.fused is not None and "parts of its layers" in decoder.fused["whole"]
    nn.init.normal_(model.model.layers[0].mlp.down_proj.weight)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_modified_forward_that_acts_only_at_far_positions_is_not_fused() -> None:
    model = make_toy("llama")

    def forward(own: Any, self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        far = (kwargs["position_ids"] > 200).to(hidden_states.dtype)
        return own(hidden_states * (1 + far[..., None]), *args, **kwargs)

    reclass([model.model.layers[0].self_attn], forward)
    report = Decoder(model).fused
    assert report is not None and (report["layers"], report["plain"]) == (2, 1)


class Clamped(nn.Module):
    """An MLP that clamps large values, as the dense MLPs of some mixture-of-experts models do."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Any:
        up = self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * up)


class ClampedReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(0.0, 7.0)


@pytest.mark.parametrize("name", ["llama", "olmo2", "opt", "deepseek_v3"])
def test_mlp_that_clamps_large_activations_is_not_fused(name: str) -> None:
    model = make_toy(name, initializer_range=0.02, init_std=0.02)
    layers = model.model.decoder.layers if name == "opt" else model.model.layers
    for layer in layers:
        if name == "opt":
            layer.activation_fn = ClampedReLU()
            layer.final_layer_norm.weight.data.fill_(40.0)
            continue
        if hasattr(layer.mlp, "shared_experts"):
            layer.mlp.shared_experts = Clamped(layer.mlp.shared_experts)
        else:
            layer.mlp = Clamped(layer.mlp)
        after = "post_feedforward_layernorm" if name == "olmo2" else "post_attention_layernorm"
        getattr(layer, after).weight.data.fill_(40.0)
    decoder = Decoder(model)
    report = decoder.fused
    assert report is not None and report["layers"] == (0 if name == "opt" else 3)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


class Merged(nn.Module):
    """A linear layer with a low-rank matrix, which counts as merged while `merged` is not empty."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.merged = base, ["an adapter"]
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))


def test_unmerged_lora_matrix_takes_effect() -> None:
    model = make_toy("llama")
    attention = model.model.layers[1].self_attn
    attention.q_proj = merged = Merged(attention.q_proj)
    decoder = Decoder(model)
    before = outputs(decoder)
    merged.merged.clear()
    assert outputs(decoder) == outputs(Decoder(model, fused=False)) != before


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_scalar_factor_that_was_one_at_opening_takes_effect(kind: str) -> None:
    model = make_toy("llama")
    attention, factor = model.model.layers[1].self_attn, torch.ones(())
    if kind == "buffer":
        attention.register_buffer("factor", factor)
    else:
        attention.factor = nn.Parameter(factor)

    def forward(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = own(*args, **kwargs)
        return out * self.factor, *rest

    reclass([attention], forward)
    decoder = Decoder(model)
    with torch.no_grad():
        attention.factor.fill_(0.5)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_unused_scalar_buffer_does_not_prevent_fusion(dtype: torch.dtype) -> None:
    model = make_toy("llama")
    for layer in model.model.layers:
        layer.register_buffer("steps", torch.zeros(1, dtype=dtype))
    fused, plain = fused_and_plain(model)
    assert outputs(fused) == outputs(plain)


class Builtin(nn.Module):
    """A module whose forward has no signature."""

    forward = torch.relu

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()


def test_submodule_without_forward_signature_does_not_prevent_fusion() -> None:
    model = make_toy("llama")
    model.model.layers[1].mlp.unused = Builtin()
    fused, plain = fused_and_plain(model)
    assert outputs(fused) == outputs(plain)


def test_attention_with_widened_o_proj_raises_instead_of_overflowing() -> None:
    """Kernels would write past the end of the output."""
    model = sweep.build("hy_v4")
    fused, plain = Decoder(model), Decoder(model, fused=False)
    assert fused.fused is not None and fused.fused["parts"] == 8
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.data = torch.cat([weight.data] * 2)
    for decoder in (plain, fused):
        with pytest.raises(RuntimeError, match=r"size of tensor a \(128\) must match"):
            outputs(decoder)


@pytest.mark.parametrize("last", [2, None])
def test_layer_that_checks_type_of_layer_idx_is_not_fused(last: int | None) -> None:
    model = make_toy("llama")

    def forward(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = own(*args, **kwargs)
        differs = (self.layer_idx == last) if isinstance(self.layer_idx, int) else last is None
        return out * (1 + differs), *rest

    reclass([layer.self_attn for layer in model.model.layers], forward)
    model.model.layers[2].self_attn.layer_idx = last
    decoder = Decoder(model)
    assert decoder.fused is not None and decoder.fused["plain"] == 1
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


@pytest.mark.parametrize("kind", ["place", "swallowed", "buffer", "attribute"])
def test_layer_that_differs_by_index_buffer_or_attribute_is_not_fused(kind: str) -> None:
    model = make_toy("llama", num_hidden_layers=4)

    def forward(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = own(*args, **kwargs)
        if kind in ("buffer", "attribute"):
            return out * (self.factors if kind == "buffer" else self.q_proj.weight.factor), *rest
        try:
            factor = 1 + (self.layer_idx % 4 == 2)
        except TypeError:
            if kind == "place":
                raise
            factor = 1
        return out * factor, *rest

    reclass([layer.self_attn for layer in model.model.layers], forward)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_buffer("factors", torch.full((64,), 1.0 + (number == 2)))
        layer.self_attn.q_proj.weight.factor = 1.0 + (number == 2)
    decoder = Decoder(model)
    report = decoder.fused
    assert report is not None and (report["layers"], report["plain"]) == (3, 1)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


@pytest.mark.skipif("gemma4_text" not in sweep.cases(), reason="a newer transformers has it")
def test_layer_that_shares_keys_under_two_names_gives_same_bits() -> None:
    model = sweep.build("gemma4_text")

    def forward(own: Any, self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        out, shared = own(hidden_states, **kwargs), kwargs["shared_kv_states"]
        if self.store_full_length_kv:
            shared["again"] = shared[self.layer_type]
        return out

    reclass([layer.self_attn for layer in model.model.layers], forward)
    assert outputs(Decoder(model)) == outputs(Decoder(model, fused=False))


def test_only_one_of_identical_layers_is_tried() -> None:
    def calls(num_layers: int) -> int:
        """Return how often the layers' own forwards run when a decoder is opened."""
        model, count = make_toy("gemma3", num_hidden_layers=num_layers), [0]

        def forward(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return own(*args, **kwargs)

        reclass(model.model.layers, forward)
        report = Decoder(model).fused
        assert report is not None and report["layers"] == num_layers
        return count[0]

    assert calls(8) - calls(4) == 4  # in the inspection


# ---- every architecture ----


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), list(zip(sweep.supported(), itertools.cycle(DTYPES))))
def test_every_architecture_is_bit_identical_fused_and_plain(case: str, dtype: str) -> None:
    model = sweep.cast(sweep.build(case), DTYPES[dtype])
    fused = Decoder(model)
    assert fused.fused is not None
    # The forward of these two models calls the submodules of their layers itself.
    assert bool(fused.fused["layers"] or fused.fused["plain"]) is (case not in ("rwkv", "xlstm"))
    if case in ALL_FUSED:
        assert fused.fused["plain"] == 0, fused.fused["reasons"]
    assert outputs(fused) == outputs(Decoder(model, fused=False))
