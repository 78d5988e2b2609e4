"""Models that multiply activations in 8 bits: another model than without, with the same words everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.programs import run_without_kernels
from support.requests_mixed import all_facts, generated, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import (
    LLM,
    NotSupported,
    SamplingParams,
    kernels,
)
from verbatim.model.packed import PackedEmbedding, PackedLinear, packed_buffers
from verbatim.model.quantization import Quantization
from verbatim.model.quantize import unpack
from verbatim.weights import packed_cache
from verbatim.weights.lazy import Held
from verbatim.weights.load import load_weights

TIED = dict(tie_word_embeddings=True)
ODD = dict(hidden_size=60, intermediate_size=100, num_attention_heads=6)  # rows end in short groups
KIND = Quantization(8, 64, 8, 8)


def saved(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    make_toy(name, dtype=dtype, **changes).save_pretrained(folder)
    return folder


def filled(name: str, kind: Quantization, **changes: Any) -> Any:
    """A toy, packed, without an engine."""
    packed = make_toy(name, **changes)
    load_weights(packed, {p: Held(p.data) for p in packed.parameters()}, kind)
    return packed


# ---- The same words ----

CASES: list[tuple[str, torch.dtype, Any, dict[str, Any]]] = [
    ("llama", torch.bfloat16, "w8a8", ODD),
    ("llama", torch.float32, "w4a8", TIED),
    ("qwen3_moe", torch.bfloat16, "w4a8", {}),
    ("gemma3", torch.bfloat16, Quantization(4, 32, 4, 8), {}),
    ("phi3", torch.float32, Quantization(8, 128, None, 8), {}),
    ("gpt2", torch.bfloat16, "w8a8", {}),
    ("deepseek_v3", torch.bfloat16, "w4a8", {}),
]


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "changes"),
    [
        pytest.param(*case, id=f"{case[0]}-{i}", marks=() if i < 3 else pytest.mark.slow)
        for i, case in enumerate(CASES)
    ],
)
def test_the_words_do_not_depend_on_the_schedule(
    name: str, dtype: torch.dtype, quantization: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved(name, tmp_path, dtype, **changes)
    prompts, params = mixed_requests(8)
    options: dict[str, Any] = dict(quantization=quantization, prefix_cache=False)
    with LLM(folder, **options) as llm:
        expected = all_facts(llm.generate(prompts, params))
        alone = [llm.generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
        assert all_facts(alone) == expected
        assert "-a8/" in llm.info()["numerics_key"]
    with LLM(folder, max_batch_tokens=7, max_sequences=3, num_threads=1, **options) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
    with LLM(folder, fused=False, num_threads=3, **options) as llm:
        assert llm.info()["fused"] is None
        assert all_facts(llm.generate(prompts, params)) == expected


@pytest.mark.skipif(kernels.library() is None, reason="layers fuse by compiled kernels")
def test_fused_layers_take_them(folders: Callable[[str], Path]) -> None:
    with LLM(folders("llama"), quantization="w8a8") as llm:
        fused = llm.info()["fused"]
        assert fused["layers"] == len(llm.engine.runner.module.model.layers) and not fused["plain"]


def test_it_is_another_model_than_without(folders: Callable[[str], Path]) -> None:
    requests = [random_ids(9, 1)], SamplingParams(max_tokens=4, logprobs=0, seed=1)
    found, keys = [], set()
    for quantization in ("int8", "w8a8", "int4", "w4a8"):
        with LLM(folders("llama"), quantization=quantization) as llm:
            found.append(llm.generate(*requests)[0].outputs[0].logprobs)
            keys.add(llm.info()["numerics_key"])
    assert len(keys) == 4 and found[0] != found[1] and found[2] != found[3]


@pytest.mark.slow
def test_without_kernels_the_schedule_does_not_show_either(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from invariance.test_integer_models import CASES, test_the_words_do_not_depend_on_the_schedule as same
for i in (0, 2):
    Path(sys.argv[1], str(i)).mkdir()
    same(*CASES[i], Path(sys.argv[1], str(i)))
"""
    run_without_kernels(script, tmp_path)


# ---- Layers ----


def test_layers_keep_their_weights() -> None:
    """The numbers that weights are read back as are those without rounded activations."""
    for changes in ({}, TIED):
        packed, plain = (filled("llama", k, **changes) for k in (KIND, KIND.of_weights))
        for ours, theirs in zip(packed.modules(), plain.modules(), strict=True):
            if isinstance(ours, PackedLinear | PackedEmbedding):
                assert torch.equal(ours.weight, theirs.weight)
        embedding, ids = packed.get_input_embeddings(), torch.tensor([[5, 0], [127, 5]])
        assert torch.equal(embedding(ids), plain.get_input_embeddings()(ids))
        tied = packed.lm_head.packed is embedding.packed
        assert tied == bool(changes) == embedding.packing.interleaved
        assert packed.lm_head.packing.interleaved


def test_a_layer_multiplies_codes() -> None:
    layer = filled("llama", KIND).model.layers[0].mlp.up_proj
    x = torch.randn(3, 64)
    exact = x @ unpack(layer.packed, layer.packing).t()
    assert not torch.equal(layer(x), exact)
    assert torch.allclose(layer(x), exact, atol=0.02 * float(exact.abs().max()))


def test_info_tells_what_multiplies_codes(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    with LLM(folder, quantization="w4a8") as llm:
        info, told = llm.info(), llm.info()["quantization"]
        exact = sum(p.nbytes for p in llm.engine.runner.module.parameters())
        module = llm.engine.runner.module
        bits = {name: packing.interleaved for name, _, packing in packed_buffers(module)}
    assert told["format"] == "int4-g64-head8-a8" and told["activation_bits"] == 8
    assert "model.layers.*.self_attn.q_proj.weight" in told["activations_packed"]
    assert "lm_head.weight" in told["activations_packed"]
    assert not any("embed" in n for n in told["activations_packed"])
    assert "model.layers.*.mlp.experts.down_proj" in told["activations_packed"]
    assert "model.layers.*.mlp.experts.gate_up_proj" in told["packed"]
    assert bits["lm_head.weight"] and bits["model.layers.0.mlp.experts.gate_up_proj"]
    assert info["weight_bytes"] == told["bytes_after"] + exact
    with LLM(folder, quantization="int4") as llm:
        assert "activation_bits" not in llm.info()["quantization"]


# ---- Life ----


def test_the_cache_serves_both(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is what weights are packed as, whatever becomes of activations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packed_cache, "_MIN_BYTES", 0)
    requests = mixed_requests(3)
    expected = {}
    for _ in range(2):
        for quantization in ("w8a8", "int8"):
            facts = generated(LLM(folders("llama"), quantization=quantization), *requests)
            assert expected.setdefault(quantization, facts) == facts
    assert len(list((tmp_path / "verbatim").glob("*.safetensors"))) == 1


def test_where_it_does_not_serve_it_is_refused_by_name(folders: Callable[[str], Path]) -> None:
    with pytest.raises(NotSupported, match=r"int8-g64-a8.*live module"):
        LLM(make_toy("llama"), quantization="w8a8")
    with pytest.raises(NotSupported, match=r"nothing that the model multiplies is an nn\.Linear"):
        # GPT-2's own layers are Conv1D, and its head stays exact
        LLM(folders("gpt2"), quantization=Quantization(8, 64, None, 8))
