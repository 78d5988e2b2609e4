"""Models run in one call: bit-identical to layers run one by one, also after edits of the module."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import sweep
from support.layer_batches import BATCHES, SEQUENCES, outputs, reclass, whole_runs, wrong
from support.odd_toys import DTYPES
from support.pairwise import parametrize_combinations
from support.programs import run_program
from support.requests_mixed import generated
from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.batch import Batch
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.flat import contents_of
from verbatim.model.whole import WholeModel
from verbatim.quantization.formats import resolve_quantization
from verbatim.weights.lazy import InMemory
from verbatim.weights.load import load_weights

WHOLE = """llama mistral qwen2 qwen3 phi3 olmo2 glm4 qwen3_5 qwen3_next olmo_hybrid kimi_linear lfm2
    granite_dense granite gemma2 gemma3 cohere gpt2 opt""".split()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return whole_runs(monkeypatch)


def whole(model: nn.Module, *, is_private: bool = False) -> Decoder:
    decoder = Decoder(model, is_private=is_private)
    assert decoder.fused is not None and decoder.fused["whole"] == "yes"
    return decoder


@parametrize_combinations(10, name=WHOLE, dtype=[*DTYPES])
def test_whole_model_and_fused_layers_match_plain_layers(
    name: str, dtype: str, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_toy(name, dtype=DTYPES[dtype])
    expected = outputs(Decoder(model, fused=False))
    assert not runs
    for is_private in (False, True):
        decoder = whole(model, is_private=is_private)
        assert outputs(decoder, 1 + is_private) == expected
        assert outputs(decoder, 3) == expected, "again"
    assert len(runs) == 4 * len(BATCHES) and all(runs)
    monkeypatch.setattr(WholeModel, "run", lambda *_, **__: None)
    for threads in (1, 3):
        assert outputs(decoder, threads) == expected, "layer by layer"


@pytest.mark.parametrize(
    ("place", "formula"),
    [
        ("model.norm", lambda out, x: out * 1.1),
        ("model.embed_tokens", lambda out, x: out * 1.1),
        ("lm_head", lambda out, x: out * 1.1),
        ("model.rotary_emb", lambda out, x: (out[0] * 1.01, out[1])),
    ],
    ids=["norm", "embedding", "head", "angles"],
)
def test_modified_norm_embedding_head_or_rotary_takes_effect(
    place: str, formula: Callable[[Any, Any], Any]
) -> None:
    """Whether the model then runs in one call or not."""
    model = make_toy("llama", dtype=torch.bfloat16)
    clean = outputs(Decoder(model))
    reclass([model.get_submodule(place)], lambda own, _, *a, **k: formula(own(*a, **k), None))
    assert outputs(Decoder(model)) == outputs(Decoder(model, fused=False)) != clean


def test_mixture_with_bias_for_the_choice_alone_runs_in_one_call(runs: list[Any]) -> None:
    """LFM2's router takes the bias as an argument, and its rotary embedding has a name of its own."""
    model = sweep.build("lfm2_moe")
    assert whole(model).spec.routed.replay_reason is None
    params = SamplingParams(max_tokens=4, seed=1, record_routing=True)
    expected = generated(LLM(model, fused=False), [[5, 6, 7]], params)
    assert generated(LLM(model), [[5, 6, 7]], params) == expected and any(runs)


def test_hook_between_layers_prevents_whole_model_call() -> None:
    model = wrong(make_toy("llama"), "model.layers.1", lambda out, x: out)
    assert Decoder(model).fused["whole"] == "yes"  # type: ignore[index]

    class Body(type(model.model)):  # type: ignore[misc]
        __module__ = type(model.model).__module__  # as if transformers had it

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            handle = self.layers[1].register_forward_hook(lambda m, a, out: out * 1.001)
            try:
                return super().forward(*args, **kwargs)
            finally:
                handle.remove()

    model.model.__class__ = Body
    decoder = Decoder(model)
    assert decoder.fused is not None and "before one of its layers" in decoder.fused["whole"]
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def double_body(module: Any, args: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 2
    return output


def replace_the_forward(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = forward


EDITS: dict[str, Callable[[Any], Any]] = {
    "moved head": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.flip(0)),
    "new head": lambda m: setattr(m, "lm_head", nn.Linear(64, 128)),
    "new norm": lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.randn(64))),
    "epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "embedding": lambda m: m.model.embed_tokens.weight.data.neg_(),
    "frequencies": lambda m: m.model.rotary_emb.inv_freq.data.mul_(1.5),
    "scale of angles": lambda m: setattr(m.model.rotary_emb, "attention_scaling", 0.5),
    "hook": lambda m: m.model.register_forward_hook(double_body),
    "forward": replace_the_forward,
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_outside_the_layers_take_effect(edit: str) -> None:
    model = make_toy("llama")
    decoder = whole(model)
    before = outputs(decoder)
    EDITS[edit](model)
    after = outputs(decoder)
    assert after == outputs(Decoder(model, fused=False)) != before
    assert outputs(decoder) == after, "again"


def test_longrope_for_one_layer_type_gives_same_bits() -> None:
    plain = dict(rope_type="default", rope_theta=10000.0)
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    long = plain | factors | dict(rope_type="longrope", original_max_position_embeddings=128)
    model = make_toy(
        "gemma3", rope_parameters=dict(sliding_attention=plain, full_attention=long | {"factor": 2})
    )
    decoder = Decoder(model)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))
    # transformers 5.17 has a defect of its own there, and the model runs layer by layer.
    assert decoder.fused is not None and re.match("yes|.*'long_inv_freq'", decoder.fused["whole"])


@pytest.mark.parametrize("in_place", [True, False])
def test_edited_layer_types_take_effect(in_place: bool) -> None:
    model = make_toy("gemma3")
    decoder, plain, types = whole(model), Decoder(model, fused=False), [*model.config.layer_types]
    before = outputs(decoder)
    model.model.layers[0].self_attn.sliding_window = None
    if in_place:
        model.config.layer_types[0] = types[1]
    else:
        model.config.layer_types = [types[1], *types[1:]]
    assert outputs(decoder) == outputs(plain) != before


def test_settings_without_effect_on_forward_do_not_slow_it_down(runs: list[bool]) -> None:
    model = make_toy("llama")
    decoder = whole(model)
    model.config.use_cache, model.config.pad_token_id = False, 7
    outputs(decoder)
    assert runs and all(runs)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("granite", "model.embed_tokens"),
        ("gemma2", "model.embed_tokens"),
        ("gpt2", "transformer.wpe"),
        ("granite", "lm_head"),
    ],
)
def test_zero_embedding_or_head_prevents_whole_model_call(name: str, place: str) -> None:
    """Factors of zero weights, and zero position embeddings, show only after the next training step."""
    model = make_toy(name, tie_word_embeddings=name != "granite")
    weight = model.get_submodule(place).weight
    nn.init.zeros_(weight)
    decoder = Decoder(model)
    assert decoder.fused is not None and "all 0" in decoder.fused["whole"]
    nn.init.normal_(weight)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_rotary_frequencies_equal_at_opening_are_kept_apart() -> None:
    rope = dict(rope_type="default", rope_theta=10000.0)
    model = make_toy(
        "gemma3", rope_parameters=dict.fromkeys(("sliding_attention", "full_attention"), rope)
    )
    decoder = whole(model)
    before = outputs(decoder)
    model.model.rotary_emb.full_attention_inv_freq.mul_(0.5)
    assert outputs(decoder) == outputs(Decoder(model, fused=False)) != before


def test_edits_take_effect_after_unseen_module_is_accessed() -> None:
    model = make_toy("llama")
    decoder = whole(model, is_private=True)
    before = outputs(decoder)
    for edit in ("frequencies", "new norm", "hook"):
        EDITS[edit](decoder.module)
        after = outputs(decoder)
        assert after == outputs(Decoder(model, fused=False)) != before
        before = after


def test_unseen_module_is_reread_after_weights_moved() -> None:
    model = make_toy("llama")
    decoder = whole(model, is_private=True)
    before = outputs(decoder)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).clone()
    decoder.weights_moved()
    assert outputs(decoder) == outputs(Decoder(model, fused=False)) != before


def test_global_module_hook_is_called(runs: list[Any]) -> None:
    model = make_toy("llama")
    decoder = whole(model, is_private=True)
    clean = outputs(decoder)

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 2 if module is model.lm_head else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert outputs(decoder) == outputs(Decoder(model, fused=False)) != clean
    finally:
        handle.remove()
    runs.clear()
    assert outputs(decoder) == clean
    assert runs and all(runs), "in one piece again"


def test_edits_of_modules_kept_by_removed_global_hook_take_effect() -> None:
    model, kept = make_toy("llama"), []
    decoder = whole(model, is_private=True)
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: kept.append(m))
    try:
        clean = outputs(decoder)
    finally:
        handle.remove()
    assert outputs(decoder) == clean
    for module in kept:
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 5.0
    assert outputs(decoder) == outputs(Decoder(model, fused=False)) != clean


@pytest.mark.parametrize("place", ["model.norm", "model.layers.1.post_attention_layernorm"])
def test_weight_viewed_as_another_dtype_takes_effect(place: str) -> None:
    model = make_toy("olmo2", dtype=torch.bfloat16)
    decoder = whole(model)
    before = outputs(decoder)
    weight = model.get_submodule(place).weight
    weight.data = weight.data.view(torch.float16)  # at the same address
    assert outputs(decoder) == outputs(Decoder(model, fused=False)) != before


@pytest.mark.parametrize("part", ["norm", "layers.1.input_layernorm"])
def test_patched_forward_of_norm_class_takes_effect(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_toy("llama")
    decoders = [whole(model), Decoder(model, fused=False)]
    before = outputs(decoders[0])
    norm = model.model.get_submodule(part)
    own = type(norm).forward
    with monkeypatch.context() as patched:
        patched.setattr(type(norm), "forward", lambda self, x: own(self, x) * 2)
        found = [outputs(decoder) for decoder in decoders]
    assert found[0] == found[1] != before
    assert [outputs(decoder) for decoder in decoders] == [before] * 2


@pytest.mark.parametrize("rows", [[], [32], [1, 21, 32], [30, 4]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_selected_rows_match_logits_of_all_rows(
    dtype: str, rows: list[int], runs: list[Any]
) -> None:
    model = make_toy("qwen3", dtype=DTYPES[dtype])
    decoders = Decoder(model, fused=False), whole(model)
    stores = [zeroed_store(decoder) for decoder in decoders]
    batch = replace(BATCHES[3], logit_rows=torch.tensor(rows, dtype=torch.int64))
    every, some = (
        d.run(b, s).logits for d, b, s in zip(decoders, (BATCHES[3], batch), stores, strict=True)
    )
    assert len(runs) == 1 and all(runs)
    assert torch.equal(some, every[rows])
    assert all(map(torch.equal, *map(contents_of, stores)))


def zeroed_store(decoder: Decoder) -> KVStore:
    store = SEQUENCES.store(decoder)
    for held in contents_of(store):
        held.zero_()
    return store


def logits_of(decoder: Decoder, batch: Batch) -> torch.Tensor:
    return decoder.run(batch, zeroed_store(decoder)).logits


@pytest.mark.parametrize("kind", [None, "int4"], ids=str)
def test_quantized_weights_do_not_raise_row_limit_of_whole_model_call(
    kind: str | None, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_toy("llama", tie_word_embeddings=False)
    numbers = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    if kind is not None:
        lazy_weights = {p: InMemory(p.data) for p in model.parameters()}
        load_weights(model, lazy_weights, resolve_quantization(kind))
    rows = len(BATCHES[3].token_ids)
    monkeypatch.setattr("verbatim.model.whole._MAX_MULTIPLICATIONS", numbers * rows // 2)
    decoder = whole(model)
    assert torch.equal(
        logits_of(decoder, BATCHES[3]), logits_of(Decoder(model, fused=False), BATCHES[3])
    )
    assert runs == [None]


_THREADS = """
import os
from pathlib import Path
import torch
from invariance.test_whole import BATCHES, logits_of, make_toy, whole
from verbatim.quantization.formats import resolve_kv_dtype
from verbatim.kv.store import KVStore, LayerShape

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

decoder = whole(make_toy("llama"))
store = KVStore([LayerShape(8, 64, 64)], 40, 16, resolve_kv_dtype("int8"), torch.device("cpu"))
rows = torch.randn(600, 8, 64)

def both():
    store.write(0, rows, rows, torch.arange(600))
    return [logits_of(decoder, batch) for batch in BATCHES]

expected, before = both(), threads()
processors = len(os.sched_getaffinity(0))
asked = []
# Torch itself is not told: it would have them.
torch.get_num_threads = lambda: asked.append(1) or processors + 40
assert all(map(torch.equal, both(), expected))
assert len(asked) > len(BATCHES)
assert threads() < before + processors + 8, (before, threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_whole_model_uses_no_more_threads_than_processors() -> None:
    # In a new process: where other tests have run, torch may have started threads of its own.
    run_program("-c", _THREADS)


def test_dynamic_rope_is_recomputed_in_each_forward() -> None:
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    settings: dict[str, Any] = dict(rope_parameters=rope, max_position_embeddings=16)
    model = make_toy("llama", **settings)
    decoder = Decoder(model, is_private=True)
    assert outputs(decoder) == outputs(Decoder(model, fused=False))


def test_hidden_states_match_plain_layers() -> None:
    model = make_toy("qwen3", dtype=torch.bfloat16)
    batch = replace(BATCHES[3], logit_rows=torch.tensor([0, 3, 30]), wants_hidden=True)
    decoders = (whole(model), Decoder(model, fused=False))
    ours, theirs = (decoder.run(batch, zeroed_store(decoder)) for decoder in decoders)
    assert ours.hidden is not None and theirs.hidden is not None
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.hidden, theirs.hidden)


HOOKED = """
from transformers import LlamaForCausalLM
class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head.register_forward_hook(lambda m, a, out: out.roll(5, -1))
"""
MASKED = """
from transformers import LlamaForCausalLM, LlamaModel
class Body(LlamaModel):
    def forward(self, input_ids=None, inputs_embeds=None, **rest):
        rows = self.embed_tokens(input_ids) * (input_ids != 100)[..., None]  # an image's place, say
        return super().forward(inputs_embeds=rows, **rest)
class Own(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Body(config)
        self.post_init()
"""


@pytest.mark.parametrize("code", [HOOKED, MASKED], ids=["callbacks", "masked"])
def test_remote_code_of_checkpoint_is_run(code: str, tmp_path: Path) -> None:
    folder = tmp_path / f"own_{'hook' if code is HOOKED else 'mask'}"
    make_toy("llama").save_pretrained(folder)
    (folder / "modeling_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "architectures": ["Own"]}
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for fused in (False, True):
        with LLM(folder, trust_remote_code=True, fused=fused) as llm:
            (result,) = llm.generate([[5, 100, 7]], SamplingParams(temperature=0.0, max_tokens=6))
            found.append((result.outputs[0].token_ids, result.outputs[0].logprobs))
    with LLM(make_toy("llama")) as llm:
        plain = llm.generate([[5, 100, 7]], SamplingParams(temperature=0.0, max_tokens=6))[0]
    assert found[0] == found[1]
    assert found[0][0] != plain.outputs[0].token_ids
