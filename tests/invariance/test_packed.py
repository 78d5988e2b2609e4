"""Models with quantized weights: the tokens of the unpacked weights, in the memory of the packed ones."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support import sweep
from support.backends import by
from support.odd_toys import DTYPES
from support.programs import in_thread, run_program, run_without_kernels
from support.requests_mixed import all_facts, generated, mixed_requests
from support.sweep_forward import logits_of, sequences
from support.toys import Folders, make_toy, random_ids
from verbatim import LLM, ModelError, NotSupported, Offload, SamplingParams, kernels
from verbatim.errors import ModelChanged
from verbatim.model.decoder import Decoder
from verbatim.model.quantizable import choose_packings
from verbatim.model.quantized import QuantizedEmbedding, QuantizedLinear, quantized_weights
from verbatim.quantization.formats import Quantization, resolve_quantization
from verbatim.quantization.matrix import pack, rounded, unpack, unpack_selected
from verbatim.weights import load
from verbatim.weights.lazy import InMemory
from verbatim.weights.load import load_weights
from verbatim.weights.update import WeightWriter

TIED = dict(tie_word_embeddings=True)
ODD_HEADS = dict(hidden_size=60, intermediate_size=100, head_dim=20)
ODD_HEADS |= dict(num_attention_heads=3, num_key_value_heads=3)
ODD = dict(hidden_size=60, intermediate_size=100, num_attention_heads=6)  # rows end in short groups


def save_both(
    name: str, dtype: str, kind: Quantization, folder: Path, **changes: Any
) -> tuple[Path, Path]:
    """Save a toy, and the toy with its weights packed and unpacked again."""
    module = make_toy(name, dtype=DTYPES[dtype], **changes)
    module.save_pretrained(folder / "plain")
    with torch.no_grad():
        for weight, packing in choose_packings(module, kind).items():
            weight.copy_(by("none", unpack)(pack(weight, packing), packing))
    module.save_pretrained(folder / "unpacked")
    return folder / "plain", folder / "unpacked"


CASES: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("llama", "bfloat16", "int8", ODD),
    ("llama", "float32", "int4", TIED),
    ("qwen3_moe", "bfloat16", "int4", {}),
    ("gpt2", "bfloat16", "int8", {}),
    ("gpt_oss", "bfloat16", Quantization(4, 32, 4), {}),
    ("gemma3", "bfloat16", "int4", {}),
    ("llama", "bfloat16", Quantization(8, head_bits=None), {}),
    ("llama", "float32", Quantization(4, 32), ODD_HEADS | TIED),
]
SLOW = ["mixtral", "deepseek_v3", "opt", "bloom", "falcon", "phi3", "gemma2", "qwen2", "granite"]
CASES += [(name, "float32", Quantization(8, 128, None), {}) for name in SLOW]
CASES += [("llama", "bfloat16", Quantization(8, 32, 4), TIED), ("gpt2", "float32", "int4", {})]
CASES += [("qwen3_moe", "float32", "int8", {}), ("gemma2", "bfloat16", "int8", {})]
PLACEMENTS = (
    None,
    Offload("300MB", weights=(0, 0, 100), policy=None, batch_size=3, micro_batches=2),
)


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "changes"),
    [
        pytest.param(*case, id=f"{case[0]}-{i}", marks=() if i in (0, 4) else pytest.mark.slow)
        for i, case in enumerate(CASES)
    ],
)
def test_quantized_results_match_unpacked_weights(
    name: str, dtype: str, quantization: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    kind = resolve_quantization(quantization)
    assert kind is not None
    plain, unpacked = save_both(name, dtype, kind, tmp_path, **changes)
    requests = mixed_requests(12)
    with LLM(unpacked) as llm:
        expected, bytes_before = all_facts(llm.generate(*requests)), llm.info()["weight_bytes"]
    for placement in PLACEMENTS:
        with LLM(plain, quantization=quantization, placement=placement) as llm:
            assert all_facts(llm.generate(*requests)) == expected, placement
            if placement is None:
                assert llm.info()["weight_bytes"] < bytes_before
            assert f"/weights-{kind.name}/" in llm.info()["numerics_key"]


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep.supported())
def test_every_architecture_quantized_gives_logits_of_unpacked_weights(case: str) -> None:
    def logits(module: Any) -> Any:
        return torch.cat(logits_of(Decoder(module), [0, 1, 2], sequences().whole))

    kind, module = Quantization(4), sweep.build(case)
    packed = copy.deepcopy(module)
    with torch.no_grad():
        for weight, packing in choose_packings(module, kind).items():
            weight.copy_(rounded(weight, packing))
    load_weights(packed, {p: InMemory(p.data) for p in packed.parameters()}, kind)
    assert torch.equal(logits(module), logits(packed))


@pytest.mark.slow
def test_quantized_model_matches_unpacked_weights_without_kernels(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from invariance import test_packed
words = test_packed.test_quantized_results_match_unpacked_weights
schedules = test_packed.test_quantized_activations_give_same_results_in_every_schedule
cases = [(words, test_packed.CASES[i]) for i in (0, 2, 3, 5)]
cases += [(schedules, test_packed.CASES_IN_INTEGERS[i]) for i in (0, 2)]
for i, (same, case) in enumerate(cases):
    Path(sys.argv[1], str(i)).mkdir()
    same(*case, Path(sys.argv[1], str(i)))
"""
    run_without_kernels(script, tmp_path)


# ---- Layers ----


def filled(name: str, kind: Quantization, **changes: Any) -> Any:
    """A packed float32 toy, without an engine."""
    packed = make_toy(name, **changes)
    load_weights(packed, {p: InMemory(p.data) for p in packed.parameters()}, kind)
    return packed


def test_packed_layer_keeps_shape_and_dtype_of_weight() -> None:
    kind = Quantization(4)
    plain, packed = make_toy("llama"), filled("llama", kind)
    linear = packed.model.layers[0].mlp.down_proj
    assert type(linear) is QuantizedLinear
    assert (linear.in_features, linear.out_features) == (96, 64) and linear.bias is None
    expected = plain.model.layers[0].mlp.down_proj.weight
    again = rounded(expected.detach(), linear.matrix.packing)
    assert torch.equal(linear.weight, again) and linear.weight.dtype is torch.float32
    embedding, ids = packed.get_input_embeddings(), torch.tensor([[5, 0], [127, 5]])
    assert type(embedding) is QuantizedEmbedding and isinstance(embedding, nn.Embedding)
    assert torch.equal(embedding(ids), embedding.weight[ids]) and embedding(ids).shape == (2, 2, 64)
    table = embedding.matrix
    assert torch.equal(unpack_selected(table.data, table.packing, ids[0]), embedding(ids)[0])
    plain, packed = make_toy("gpt2"), filled("gpt2", kind)
    linear, expected = packed.transformer.h[0].mlp.c_fc, plain.transformer.h[0].mlp.c_fc.weight
    assert type(linear) is QuantizedLinear and linear.weight.shape == expected.shape
    plain, packed = make_toy("qwen3_moe"), filled("qwen3_moe", kind)
    experts = packed.model.layers[0].mlp.experts
    assert type(experts).__name__ == type(plain.model.layers[0].mlp.experts).__name__
    assert experts.gate_up_proj.shape == plain.model.layers[0].mlp.experts.gate_up_proj.shape


def test_failed_quantization_of_new_weights_holds_none() -> None:
    module, new = filled("llama", Quantization(4)), make_toy("llama", seed=1).state_dict()
    before = [packed.clone() for _, packed, _ in quantized_weights(module)]
    writer = WeightWriter(module)
    last = writer.packed[-1]
    with pytest.raises(ModelError, match=last):
        writer.prepare(new | {last: torch.full_like(new[last], torch.nan)})
    writer.write({})
    after = [packed for _, packed, _ in quantized_weights(module)]
    assert all(map(torch.equal, before, after))


# The weights that are packed besides embedding and head, and the matrices that stay exact.
_PROJECTIONS = r"model\.layers\.\d\.(self_attn|mlp)\.[a-z]+_proj\.weight"
_TABLES = r"model\.embed_tokens\.weight|lm_head\.weight|transformer\.wte\.weight"
PACKED = {
    "llama": (_PROJECTIONS, []),
    "qwen3_moe": (
        _PROJECTIONS + r"|model\.layers\.\d\.mlp\.experts\.(gate_up|down)_proj",
        ["model.layers.*.mlp.gate.weight"],
    ),
    "gpt2": (r"transformer\.h\.\d\.(attn|mlp)\.c_[a-z]+\.weight", ["transformer.wpe.weight"]),
    "gemma2": (_PROJECTIONS, []),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", PACKED)
def test_info_reports_packed_weights_their_size_and_error(
    name: str, placement: Any, folders: Folders
) -> None:
    module, (pattern, exact) = make_toy(name), PACKED[name]
    packings = choose_packings(module, Quantization())
    named = {n: p for n, p in module.named_parameters() if p in packings}
    matching = re.compile(f"{pattern}|{_TABLES}").fullmatch
    assert named.keys() == {n for n, _ in module.named_parameters() if matching(n)}
    with LLM(folders(name), quantization="int4", placement=placement) as llm:
        info = llm.info()
        units = None if placement is None else llm.engine.runner.weights.units
    report = info["quantization"]
    if placement is not None and not module.config.tie_word_embeddings:
        # Its rows are looked up in the file.
        assert report["rounded"] == ["model.embed_tokens.weight"]
        del named["model.embed_tokens.weight"]
    error = total = 0.0
    for parameter in named.values():
        weight = parameter.detach()
        error += float((rounded(weight, packings[parameter]) - weight).double().square().sum())
        total += float(weight.double().square().sum())
    assert report["relative_error"] == pytest.approx((error / total) ** 0.5, rel=1e-4)
    assert 0.05 < report["relative_error"] < 0.12
    count = sum(p.numel() for p in named.values())
    assert report["bits_per_weight"] == pytest.approx(8 * report["bytes_after"] / count, abs=1e-3)
    assert 4.4 < report["bits_per_weight"] < 5.2
    assert (
        report["format"] == "int4-g64-head8" and "/weights-int4-g64-head8/" in info["numerics_key"]
    )
    assert set(report["packed"]) == {re.sub(r"\.\d\.", ".*.", n) for n in named}
    assert report["exact"] == exact
    assert report["bytes_before"] == sum(p.nbytes for p in named.values())
    if units is None:
        left = sum(p.nbytes for n, p in module.named_parameters() if n not in named)
        assert info["parameters"] == sum(p.numel() for p in module.parameters())
        assert info["weight_bytes"] == report["bytes_after"] + left
    else:
        slots = [slot for slot in units.slots if slot.packing is not None]
        assert {slot.name for slot in slots} == named.keys()
        assert report["bytes_after"] == sum(slot.packing.nbytes for slot in slots)
        assert all(slot.tier == "disk" for slot in slots)


# ---- Activations in 8 bits: other results than without, the same in every schedule ----

INTEGERS = Quantization(8, 64, 8, 8)
CASES_IN_INTEGERS = [
    ("llama", "bfloat16", "w8a8", ODD),
    ("llama", "float32", "w4a8", TIED),
    ("qwen3_moe", "bfloat16", "w4a8", {}),
    ("gemma3", "bfloat16", Quantization(4, 32, 4, 8), {}),
    ("phi3", "float32", Quantization(8, 128, None, 8), {}),
    ("gpt2", "bfloat16", "w8a8", {}),
    ("deepseek_v3", "bfloat16", "w4a8", {}),
]


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "changes"),
    [
        pytest.param(*case, id=f"{case[0]}-{i}", marks=() if i == 2 else pytest.mark.slow)
        for i, case in enumerate(CASES_IN_INTEGERS)
    ],
)
def test_quantized_activations_give_same_results_in_every_schedule(
    name: str, dtype: str, quantization: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_toy(name, dtype=DTYPES[dtype], **changes).save_pretrained(folder := tmp_path)
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
def test_w8a8_layers_are_fused(folders: Folders) -> None:
    with LLM(folders("llama"), quantization="w8a8") as llm:
        fused = llm.info()["fused"]
        assert fused["layers"] == len(llm.engine.runner.module.model.layers) and not fused["plain"]


@pytest.mark.skipif("hy_v4" not in sweep.cases(), reason="a newer transformers has it")
def test_float32_indexer_of_bfloat16_model_gives_same_bits_fused(tmp_path: Path) -> None:
    sweep.build("hy_v4").save_pretrained(tmp_path)
    found = []
    for fused in (True, False):
        with LLM(tmp_path, dtype="bfloat16", quantization="int8", fused=fused) as llm:
            proj = llm.engine.runner.decoder.module.model.layers[0].self_attn.indexer.weights_proj
            assert proj.matrix.packing.dtype is torch.float32
            found.append(all_facts(llm.generate(*mixed_requests(4))))
    assert found[0] == found[1]


def test_activation_quantization_changes_logprobs_and_numerics_key(folders: Folders) -> None:
    requests = [random_ids(9, 1)], SamplingParams(max_tokens=4, logprobs=0, seed=1)
    found, keys = [], set()
    for quantization in ("int8", "w8a8", "int4", "w4a8"):
        with LLM(folders("llama"), quantization=quantization) as llm:
            found.append(llm.generate(*requests)[0].outputs[0].logprobs)
            keys.add(llm.info()["numerics_key"])
    assert len(keys) == 4 and found[0] != found[1] and found[2] != found[3]


def test_activation_quantization_does_not_change_weights() -> None:
    """Weights unpack to the same values with and without quantized activations."""
    for changes in ({}, TIED):
        packed, plain = (filled("llama", k, **changes) for k in (INTEGERS, INTEGERS.of_weights))
        for ours, theirs in zip(packed.modules(), plain.modules(), strict=True):
            if isinstance(ours, QuantizedLinear | QuantizedEmbedding):
                assert torch.equal(ours.weight, theirs.weight)
        embedding, ids = packed.get_input_embeddings(), torch.tensor([[5, 0], [127, 5]])
        assert torch.equal(embedding(ids), plain.get_input_embeddings()(ids))
        tied = packed.lm_head.matrix.data is embedding.matrix.data
        assert tied == bool(changes) == embedding.matrix.packing.interleaved
        assert packed.lm_head.matrix.packing.interleaved


def test_info_reports_layers_with_quantized_activations(tmp_path: Path) -> None:
    make_toy("qwen3_moe", dtype=torch.bfloat16).save_pretrained(folder := tmp_path)
    with LLM(folder, quantization="w4a8") as llm:
        info, report = llm.info(), llm.info()["quantization"]
        exact = sum(p.nbytes for p in llm.engine.runner.module.parameters())
        module = llm.engine.runner.module
        bits = {name: packing.interleaved for name, _, packing in quantized_weights(module)}
    assert report["format"] == "int4-g64-head8-a8" and report["activation_bits"] == 8
    assert "model.layers.*.self_attn.q_proj.weight" in report["activations_packed"]
    assert "lm_head.weight" in report["activations_packed"]
    assert not any("embed" in n for n in report["activations_packed"])
    assert "model.layers.*.mlp.experts.down_proj" in report["activations_packed"]
    assert "model.layers.*.mlp.experts.gate_up_proj" in report["packed"]
    assert bits["lm_head.weight"] and bits["model.layers.0.mlp.experts.gate_up_proj"]
    assert info["weight_bytes"] == report["bytes_after"] + exact
    with LLM(folder, quantization="int4") as llm:
        assert "activation_bits" not in llm.info()["quantization"]


# ---- Sleep, and rejected weights ----


@pytest.mark.parametrize(("quantization", "changes"), [("int4", {}), ("w4a8", TIED)])
def test_packed_weights_sleep_and_wake(
    quantization: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_toy("llama", dtype=torch.bfloat16, **changes).save_pretrained(tmp_path)
    requests = mixed_requests(4)
    with LLM(tmp_path, quantization=quantization) as llm:
        expected = all_facts(llm.generate(*requests))
        module = llm.engine.runner.module
        llm.sleep(weights=True)
        assert all(p.untyped_storage().nbytes() <= 8 for _, p, _ in quantized_weights(module))
        assert module.lm_head.weight.isnan().all()
        llm.wake()
        assert all_facts(llm.generate(*requests)) == expected
        llm.sleep(weights=True)
        make_toy("llama", dtype=torch.bfloat16, seed=1, **changes).save_pretrained(tmp_path)
        with pytest.raises(ModelChanged, match="changed since the model was opened"):
            llm.wake()


def test_models_and_weights_that_cannot_be_packed_are_rejected(folders: Folders) -> None:
    messages = dict(int8=r"int8-g64.*live module.*save_pretrained", w8a8="int8-g64-a8")
    for quantization, message in messages.items():
        with pytest.raises(NotSupported, match=message):
            LLM(make_toy("llama"), quantization=quantization)
    with pytest.raises(NotSupported, match=r"the model has no nn\.Linear layers") as refusal:
        # GPT-2's own layers are Conv1D, and its head stays exact
        LLM(folders("gpt2"), quantization=Quantization(8, 64, None, 8))
    assert str(refusal.value).endswith(repr(Quantization(8, 64, None)))
    name = "model.layers.0.mlp.up_proj.weight"
    weights = make_toy("llama").state_dict()
    with LLM(folders("llama"), quantization="int4") as llm:
        before = all_facts(llm.generate(*mixed_requests(3)))
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight has NaN, an inf"):
            llm.update_weights(weights | {name: weights[name] * torch.nan})
        assert all_facts(llm.generate(*mixed_requests(3))) == before


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 3e38], ids=str)
def test_nan_infinite_or_too_large_weight_is_rejected(
    wrong: float, placement: Any, tmp_path: Path
) -> None:
    module = make_toy("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 4] = wrong
    module.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN, an inf"):
        LLM(tmp_path, quantization="int8", placement=placement)


# ---- The cache of packed weights ----


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, which models of any size use."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_MIN_BYTES", 0)
    return tmp_path / "cache" / "verbatim"


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the weights that are packed from now on."""
    seen: list[str] = []
    plain = load.pack_and_measure

    def noted(weight: Any, how: Any, name: str) -> Any:
        seen.append(name)
        return plain(weight, how, name)

    monkeypatch.setattr(load, "pack_and_measure", noted)
    return seen


def facts_of(folder: Path, quantization: Any = "int4", **options: Any) -> tuple[Any, Any]:
    with LLM(folder, quantization=quantization, **options) as llm:
        return all_facts(llm.generate(*mixed_requests(3))), llm.info()["quantization"]


def test_packed_weights_are_cached(cached: Path, packings: list[str], folders: Folders) -> None:
    expected = facts_of(folders("llama"))
    assert len(packings) == 23
    packings.clear()
    assert facts_of(folders("llama")) == expected
    assert packings == []
    (file,) = cached.iterdir()
    assert "int4-g64-head8" in file.name and file.name.startswith(folders("llama").name)
    facts_of(folders("llama"), "int8")  # another format, another dtype: other files
    facts_of(folders("llama"), dtype="bfloat16")
    assert len(packings) == 46 and len(list(cached.iterdir())) == 3


@pytest.mark.parametrize(
    "harm", ["flip", "cut", "grow", "empty", "header", "sums", "zeros", "long", "longer"]
)
def test_damaged_packed_cache_is_rebuilt(
    harm: str, cached: Path, packings: list[str], folders: Folders
) -> None:
    expected = facts_of(folders("llama"))
    (file,) = cached.iterdir()
    whole = file.read_bytes()
    half = len(whole) // 2
    damaged = {
        "flip": whole[:half] + bytes([whole[half] ^ 16]) + whole[half + 1 :],
        "cut": whole[:-10],
        "grow": whole + b"more",
        "empty": b"",
        "header": whole[:20] + b"}" + whole[21:],
        "sums": re.sub(rb", [-.e\d]+\]", lambda m: b" " * (len(m[0]) - 1) + b"]", whole, count=1),
        "zeros": whole[:half] + bytes(len(whole) - half),
        "long": b"\xff" * 8 + whole[8:],  # the header's length
        "longer": (2**62).to_bytes(8, "little") + whole[8:],
    }[harm]
    file.write_bytes(damaged)
    packings.clear()
    assert facts_of(folders("llama")) == expected
    if harm != "grow":  # trailing bytes are ignored
        assert len(packings) == 23 and file.read_bytes() == whole


def test_changed_checkpoint_in_same_folder_is_packed_again(
    cached: Path, packings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_toy("llama").save_pretrained(folder)
    first = facts_of(folder)
    module = make_toy("llama")
    with torch.no_grad():
        # The first prompt's token; a sampled fingerprint would miss it.
        module.model.embed_tokens.weight[47] += 1
    module.save_pretrained(folder)
    packings.clear()
    second = facts_of(folder)
    assert second[0] != first[0] and len(packings) == 23 and len(list(cached.iterdir())) == 1


@pytest.mark.parametrize("problem", ["full disk", "read only", "a file in the way"])
def test_unwritable_packed_cache_warns_and_model_still_works(
    problem: str, cached: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = facts_of(folders("llama"))
    for file in cached.iterdir():
        file.unlink()

    def fail(*_: Any, **__: Any) -> Any:
        number = errno.ENOSPC if problem == "full disk" else errno.EROFS
        raise OSError(number, os.strerror(number))

    if problem == "full disk":
        monkeypatch.setattr(os, "replace", fail)
    elif problem == "read only":
        monkeypatch.setattr(tempfile, "mkstemp", fail)
    else:
        cached.rmdir()
        cached.write_text("")
    message = r"\([A-Z][A-Za-z -]+\), so they are packed again whenever the model is opened"
    with pytest.warns(RuntimeWarning, match=message):
        assert facts_of(folders("llama")) == expected
    assert cached.is_file() or list(cached.iterdir()) == []


def test_concurrent_opens_with_packed_cache_give_same_results(
    cached: Path, folders: Folders
) -> None:
    expected, found = facts_of(folders("qwen3_moe")), []

    def open_and_generate() -> None:
        for _ in range(2):
            for file in cached.glob("*.safetensors"):
                file.unlink(missing_ok=True)
            found.append(facts_of(folders("qwen3_moe")))

    for opening in [in_thread(open_and_generate) for _ in range(3)]:
        opening.result()
    assert len(found) == 6 and all(facts == expected for facts in found)
    assert [file.suffix for file in cached.iterdir()] == [".safetensors"]


def test_stale_partial_cache_file_is_deleted(cached: Path, folders: Folders) -> None:
    cached.mkdir(parents=True)
    stale, fresh = cached / "old.part", cached / "new.part"
    for path in (stale, fresh):
        path.write_bytes(b"half of it")
    os.utime(stale, (0, 0))
    facts_of(folders("llama"))
    assert sorted(path.suffix for path in cached.iterdir()) == [".part", ".safetensors"]
    assert fresh.exists()  # another process may be writing it


def test_small_models_are_not_cached(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts_of(folders("llama"))
    assert list(tmp_path.iterdir()) == []


def test_packed_cache_is_shared_with_and_without_quantized_activations(
    cached: Path, folders: Folders
) -> None:
    """The cache holds packed weights, which do not depend on how activations are quantized."""
    requests = mixed_requests(3)
    expected = {}
    for _ in range(2):
        for quantization in ("w8a8", "int8"):
            facts = generated(LLM(folders("llama"), quantization=quantization), *requests)
            assert expected.setdefault(quantization, facts) == facts
    assert len(list(cached.glob("*.safetensors"))) == 1


_PEAK = """
import json, sys
from verbatim import LLM
def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) * 1024
def now():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmRSS")).split()[1]) * 1024
with LLM(quantization="int8") as llm:  # everything is imported
    llm.generate([[5, 6, 7]])
open("/proc/self/clear_refs", "w").write("5")
before = now()
with LLM(sys.argv[1], quantization="int4", kv_memory="4MB") as llm:
    opened = peak() - before
    llm.generate([[5, 6, 7]])
    info = llm.info()
    print(json.dumps([opened, peak() - before, info["weight_bytes"], info["kv_bytes"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("open_count", [1, 2], ids=["packed", "cached"])
def test_peak_memory_is_close_to_packed_weights(open_count: int, tmp_path: Path) -> None:
    big = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, vocab_size=4096)
    make_toy("llama", dtype=torch.bfloat16, **big).save_pretrained(tmp_path / "model")
    for _ in range(open_count):
        output = run_program("-c", _PEAK, tmp_path / "model", XDG_CACHE_HOME=str(tmp_path))
    opened, peak, weight_bytes, kv_bytes = json.loads(output)
    unpacked_bytes = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert unpacked_bytes > 3 * weight_bytes > 300e6
    # Plus two of the largest matrices as read (8 MB each), and what the allocator keeps.
    assert opened < weight_bytes + kv_bytes + 128e6
    assert peak < weight_bytes + kv_bytes + 160e6


# ---- Other sources ----


def test_checkpoint_without_safetensors_is_packed(tmp_path: Path) -> None:
    module = make_toy("llama")
    module.save_pretrained(tmp_path / "safe")
    module.config.save_pretrained(tmp_path / "bin")
    torch.save(module.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    expected = facts_of(tmp_path / "safe")
    assert facts_of(tmp_path / "bin") == expected
    with LLM(tmp_path / "bin", quantization="int4") as llm:
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(*mixed_requests(3))) == expected[0]


def test_bundled_model_can_be_quantized() -> None:
    with LLM(quantization="int8") as llm:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        assert llm.generate("Once upon a time", params)[0].outputs[0].text
