"""Fused layers: the same bits as layers that run module by module, or none at all."""

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
from support.layer_batches import BATCHES, outputs, wrong
from support.odd_toys import DTYPES
from support.requests_mixed import all_facts, mixed_requests
from support.toys import build, make_toy
from verbatim import LLM, NotSupported
from verbatim.model.decoder import Decoder
from verbatim.model.packed import PackedLinear
from verbatim.model.quantization import resolve_quantization
from verbatim.model.quantize import pack
from verbatim.model.weight_packing import WeightPacking

# `test_whole.py` has those that run in one call.
FUSED = "qwen3_moe mixtral gemma2 gemma3 gpt_oss granite".split()
# Of those that transformers lists, the ones whose layers must all be fused.
ALL_FUSED = frozenset(
    """arcee aria_text dots1 ernie4_5 ernie4_5_moe exaone4 gemma gemma2 gemma3_text glm glm4 glm4_moe
    gpt_oss granite granitemoe helium lfm2 lfm2_moe llama llama:dynamic ministral mistral mixtral
    olmo2 olmo3 olmo_hybrid olmoe phi3 phi3:longrope qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open""".split()
)


def fused_and_plain(model: nn.Module) -> tuple[Decoder, Decoder]:
    fused = Decoder(model)
    report = fused.fused
    assert report is not None and (report["layers"], report["reasons"]) == (3, {})
    return fused, Decoder(model, fused=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_give_the_bits_of_plain_ones(name: str, dtype: str) -> None:
    fused, plain = fused_and_plain(make_toy(name, dtype=DTYPES[dtype]))
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
    ],
    ids=["biases", "odd", "wide-heads", "partial rotation"],
)
def test_fused_layers_of_other_settings(name: str, changes: dict[str, Any], dtype: str) -> None:
    fused, plain = fused_and_plain(make_toy(name, dtype=DTYPES[dtype], **changes))
    assert outputs(fused) == outputs(plain)


def test_layers_without_rotation_are_fused() -> None:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    config = SmolLM3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1],
        max_position_embeddings=256,
        pad_token_id=0,
    )
    fused, plain = fused_and_plain(build(SmolLM3ForCausalLM, config, dtype=torch.bfloat16))
    assert outputs(fused) == outputs(plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_layers_of_packed_weights_are_fused(name: str, kind: str, dtype: str) -> None:
    model = make_toy(name, dtype=DTYPES[dtype], attention_bias=True)
    quantization = resolve_quantization(kind)
    assert quantization is not None
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)][:-1]:  # but the head
        packing = WeightPacking(tuple(layer.weight.shape), layer.weight.dtype, quantization)
        packed = PackedLinear(pack(layer.weight.detach(), packing), packing, layer.bias)
        owner = next(m for m in model.modules() if layer in m._modules.values())
        name = next(n for n, child in owner._modules.items() if child is layer)
        setattr(owner, name, packed)
    fused, plain = fused_and_plain(model)
    assert outputs(fused) == outputs(plain)
    for layer in model.model.layers:  # as when weights come back from sleep
        held = layer.mlp.up_proj
        held.weight_packed = held.packed.flip(0).roll(5).clone().clamp(max=120)
    assert outputs(fused) == outputs(plain)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "deepseek_v3", "opt"])
def test_layers_of_other_shapes_stay_plain_and_say_why(name: str) -> None:
    report = Decoder(make_toy(name)).fused
    assert report is not None and report["layers"] == 0 and report["plain"] == 3
    assert sum(report["reasons"].values()) == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_next"])
def test_the_whole_engine_says_the_same(name: str, dtype: str) -> None:
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
def test_stores_of_other_dtypes_hold_the_same(kv_dtype: str) -> None:
    prompts, params = mixed_requests(6)
    found = []
    for fused in (False, True):
        with LLM(make_toy("gemma2", dtype=torch.bfloat16), kv_dtype=kv_dtype, fused=fused) as llm:
            found.append(all_facts(llm.generate(prompts, params)))
    assert found[0] == found[1]


def test_a_pipeline_does_not_take_the_switch() -> None:
    from verbatim import PipelineParallel

    with pytest.raises(NotSupported, match="fused=False"):
        LLM(make_toy("llama"), placement=PipelineParallel(size=2), fused=False)


# ---- a live module between and during forwards ----


def train(model: Any) -> None:
    """One step of an optimizer, with the module's own forward and gradients."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def update_in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


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


def lay_out_by_columns(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()


def turn_square_around(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.data = weight.data.t()  # the same memory


def turn_rows_into_columns(model: Any) -> None:
    """A matrix of another shape in the same memory, and whole again by a layer in between."""
    for layer in model.model.layers:
        up = layer.mlp.up_proj.weight
        up.data = up.data.view(64, 96).t()


def change_epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def change_formula(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: mlp.down_proj(torch.tanh(mlp.gate_proj(x)))


def add_bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.randn(32))


EDITS = (
    train,
    update_in_place,
    replace_storage,
    replace_parameters,
    replace_layers,
    swap_layers,
    lay_out_by_columns,
    turn_square_around,
    turn_rows_into_columns,
    change_epsilon,
    change_formula,
    add_bias,
)


def update_decay(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.mul_(0.5)


def replace_decay(model: Any) -> None:
    mixer = model.model.layers[0].linear_attn
    mixer.dt_bias = nn.Parameter(mixer.dt_bias.detach().flip(0).double())


def replace_taps(model: Any) -> None:
    conv = model.model.layers[2].linear_attn.conv1d
    conv.weight = nn.Parameter(conv.weight.detach().flip(0).contiguous())


def add_taps_bias(model: Any) -> None:
    conv = model.model.layers[0].linear_attn.conv1d
    conv.bias = nn.Parameter(torch.randn(len(conv.weight)))


def change_gated_norm(model: Any) -> None:
    model.model.layers[2].linear_attn.norm.variance_epsilon = 0.5


DELTA_EDITS = (
    *(train, update_in_place, replace_storage),
    *(update_decay, replace_decay, replace_taps, add_taps_bias, change_gated_norm),
)


@pytest.mark.parametrize(
    ("name", "edit"),
    [*(("llama", edit) for edit in EDITS), *(("qwen3_5", edit) for edit in DELTA_EDITS)],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
def test_edits_of_a_live_module_are_seen(name: str, edit: Callable[[Any], None]) -> None:
    model = make_toy(name)
    fused, plain = fused_and_plain(model)
    before = outputs(fused)
    edit(model)
    after = outputs(fused)
    assert after == outputs(plain)
    assert after != before or edit is lay_out_by_columns
    assert outputs(fused) == after, "again"


@pytest.mark.parametrize("before", [None, 6])
def test_an_edited_config_is_seen(before: int | None) -> None:
    model = make_toy("mistral", sliding_window=before)
    fused, plain = fused_and_plain(model)
    wide = outputs(fused)
    model.config.sliding_window = 2
    assert outputs(fused) == outputs(plain) != wide
    model.config.sliding_window = before
    assert outputs(fused) == wide


def test_a_field_that_was_none_is_seen() -> None:
    model = make_toy("gemma2", attn_logit_softcapping=None)
    fused, plain = fused_and_plain(model)
    uncapped = outputs(fused)
    model.model.layers[1].self_attn.attn_logit_softcapping = 0.01
    assert outputs(fused) == outputs(plain) != uncapped


def test_a_weight_that_is_one_row_expanded_runs_plain() -> None:
    model = make_toy("llama")
    fused, plain = fused_and_plain(model)
    gate = model.model.layers[0].mlp.gate_proj
    gate.weight.data = gate.weight.data[:1].expand(gate.weight.shape)
    assert outputs(fused) == outputs(plain)


def test_hooks_anywhere_are_called_and_heeded() -> None:
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


def test_a_hook_that_replaces_weights_of_a_later_layer_is_heeded() -> None:
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


def test_a_fused_layer_is_the_owners_again_after_a_forward() -> None:
    model = make_toy("llama")
    ids = torch.arange(5, 15)[None]
    expected = model(input_ids=ids).logits
    outputs(Decoder(model))
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_a_closed_decoder_keeps_no_module_alive() -> None:
    model = make_toy("llama")
    decoder = Decoder(model, weak=True)
    outputs(decoder)
    alive = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    decoder.close()
    del model
    gc.collect()
    assert alive() is None


# ---- what looks like a layer of the common shape and is none ----


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
def test_a_layer_with_another_formula_is_not_fused(place: str) -> None:
    recurrent = "linear_attn" in PLACES[place][0]
    model = wrong(make_toy("qwen3_5" if recurrent else "llama"), *PLACES[place])
    decoder = Decoder(model)
    report = decoder.fused
    assert report is not None and (report["layers"], report["plain"]) == (2, 1)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_weights_of_zero_hide_no_formula() -> None:
    """A factor behind a matrix of zeros shows only after the next training step."""
    model = make_toy("llama")
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    nn.init.ones_(model.model.layers[1].input_layernorm.weight)
    wrong(model, "model.layers.0.mlp", lambda out, x: out * 1.5)
    wrong(model, "model.layers.1.input_layernorm", lambda out, x: out.to(torch.float64).to(x.dtype))
    decoder = Decoder(model)
    assert decoder.fused is not None and decoder.fused["layers"] in (1, 2)
    nn.init.normal_(model.model.layers[0].mlp.down_proj.weight)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_what_shows_only_far_into_the_context_shows_in_the_trial() -> None:
    model = make_toy("llama")
    attention = model.model.layers[0].self_attn
    base = type(attention)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        far = (kwargs["position_ids"] > 200).to(hidden_states.dtype)
        return base.forward(self, hidden_states * (1 + far[..., None]), *args, **kwargs)

    attention.__class__ = type(base.__name__, (base,), {"forward": forward})
    report = Decoder(model).fused
    assert report is not None and (report["layers"], report["plain"]) == (2, 1)


# ---- every architecture ----


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), list(zip(sweep.cases(), itertools.cycle(DTYPES))))
def test_whatever_is_fused_has_the_bits_of_plain_layers(case: str, dtype: str) -> None:
    if case in sweep.UNBUILDABLE or sweep.refusal(case) is not None:
        pytest.skip("it can't be run on flat batches")
    model = sweep.build(case).to(DTYPES[dtype])
    fused = Decoder(model)
    assert fused.fused is not None
    # The forward of these two models runs the parts of their layers itself.
    assert bool(fused.fused["layers"] or fused.fused["plain"]) is (case not in ("rwkv", "xlstm"))
    if case in ALL_FUSED:
        assert fused.fused["plain"] == 0, fused.fused["reasons"]
    assert outputs(fused) == outputs(Decoder(model, fused=False))
