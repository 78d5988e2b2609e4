"""GGUF files: toy models written as llama.cpp stores them give the tokens of their dequantized weights."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoints import check_other_placements, opening_fails
from support.gguf_files import gguf_name, gguf_writer, save_gguf
from support.pairwise import slow_but
from support.requests_mixed import all_facts, generated, mixed_requests
from support.toys import make_toy, random_ids, scores_of
from verbatim import (
    LLM,
    Cluster,
    ModelError,
    NotSupported,
    Offload,
    SamplingParams,
    TensorParallel,
)
from verbatim.errors import ModelChanged
from verbatim.kernels.packing import Encoding
from verbatim.weights.formats import gguf as formats
from verbatim.weights.formats.gguf import HALVES

gguf = pytest.importorskip("gguf")

# transformers assumes head_dim=128, whatever the file says.
SHAPE: dict[str, Any] = dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
SHAPE |= dict(rms_norm_eps=2.0**-20)  # exact in the float32 of a file


def blocks(shape: tuple[int, ...], how: Any) -> Any:
    """Return random blocks, with small scales, of a type that the gguf package can read but not write."""
    size, nbytes = gguf.GGML_QUANT_SIZES[how]
    generator = np.random.default_rng(sum(shape))
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    halves = data[..., HALVES[Encoding[how.name]] if how.name.endswith("K") else slice(0, 2)]
    scales = generator.uniform(1e-4, 3e-4, (*halves.shape[:-1], halves.shape[-1] // 2))
    halves[:] = scales.astype(np.float16).view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def write(
    path: Path,
    module: Any,
    kind: str,
    family: str = "qwen3",
    rope: str | None = None,
    factor: float = 4.0,
    factors: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Write a module as a GGUF file with its matrices as `kind`.

    Args:
        kind: quantization type; after a "+", the type of one of the matrices.
        rope: type of RoPE scaling; "": a factor without a type.
        factor: of that scaling.
        factors: what each rotary frequency is divided by.

    Returns:
        The dequantized tensors of the file, by transformers' names.
    """
    usual, *other = (gguf.GGMLQuantizationType[name] for name in kind.split("+"))
    config = module.config
    writer = gguf_writer(path, config, family)
    if rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope))
    if rope is not None:
        writer.add_rope_scaling_factor(factor)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    if family == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    held = {}

    def add(name: str, tensor: torch.Tensor, how: Any) -> torch.Tensor:
        numbers = tensor.float().contiguous().numpy()
        if how.name in ("IQ4_NL", "IQ4_XS", *Encoding.__members__):
            data = blocks(numbers.shape, how)
        else:
            data = gguf.quantize(numbers, how)
        writer.add_tensor(name, data, raw_dtype=how)
        return torch.from_numpy(gguf.dequantize(data, how).copy())

    for name, tensor in module.state_dict().items():
        short = gguf_name(name)
        how = other[0] if other and "layers.0.mlp.down" in name else usual
        if tensor.ndim < 2 or "mlp.gate.weight" in name:
            short = short.replace("mlp.gate.", "ffn_gate_inp.")
            held[name] = add(short, tensor, gguf.GGMLQuantizationType.F32)
        elif "gate_up_proj" in name and tensor.ndim == 3:
            parts = zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
            layer = short.split(".mlp")[0]
            stacks = [add(f"{layer}.ffn_{part}_exps.weight", x, how) for part, x in parts]
            held[name] = torch.cat(stacks, 1)
        elif "down_proj" in name and tensor.ndim == 3:
            held[name] = add(f"{short.split('.mlp')[0]}.ffn_down_exps.weight", tensor, how)
        elif family == "llama" and re.search(r"attn_[qk]\.", short):  # rotary pairs are adjacent
            pairs = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2)
            rows = add(short, pairs.flatten(0, 2), how).unflatten(0, (-1, config.head_dim // 2, 2))
            held[name] = rows.transpose(1, 2).flatten(0, 2)
        else:
            held[name] = add(short, tensor, how)
    save_gguf(writer)
    return held


@pytest.fixture(scope="module")
def module() -> Any:
    return make_toy("qwen3", **SHAPE)


WIDE: dict[str, Any] = SHAPE | dict(hidden_size=256, intermediate_size=256)
# What transformers assumes of files of this family.
EXPERTS: dict[str, Any] = WIDE | dict(num_experts=4, moe_intermediate_size=768, norm_topk_prob=True)
# Type of the matrices, dtype, toy model, settings, family, format in memory.
FILES: dict[str, tuple[str, str, str, dict[str, Any], str, str | None]] = {
    "float32": ("F32", "auto", "qwen3", SHAPE, "qwen3", None),
    "Q8_0": ("Q8_0", "auto", "qwen3", SHAPE, "qwen3", "int8-g32"),
    "Q4_0": ("Q4_0", "float32", "qwen3", SHAPE, "qwen3", "int4-g32"),
    "Q4_0, reordered": ("Q4_0", "auto", "llama", WIDE, "llama", "int4-g32"),
    "Q4_K": ("Q4_K", "auto", "qwen3", WIDE, "qwen3", "q4_k"),
    "Q4_K, float32": ("Q4_K", "float32", "qwen3", WIDE, "qwen3", "q4_k"),
    "Q4_K, experts": ("Q4_K", "auto", "qwen3_moe", EXPERTS, "qwen3moe", "q4_k"),
    "Q6_K": ("Q6_K", "auto", "llama", WIDE, "llama", "q6_k"),
    "Q6_K, experts": ("Q6_K", "float32", "qwen3_moe", EXPERTS, "qwen3moe", "q6_k"),
    "Q4_K and Q6_K": ("Q4_K+Q6_K", "auto", "qwen3", WIDE, "qwen3", "q4_k+q6_k"),
    "Q5_K": ("Q5_K", "auto", "qwen3", WIDE, "qwen3", "q5_k"),
    "Q3_K": ("Q3_K", "auto", "qwen3", WIDE, "qwen3", "q3_k"),
    "Q2_K": ("Q2_K", "auto", "qwen3", WIDE, "qwen3", "q2_k"),
    "Q5_0": ("Q5_0", "auto", "qwen3", SHAPE, "qwen3", "int8-g32"),
    "IQ4_NL": ("IQ4_NL", "auto", "qwen3", SHAPE, "qwen3", "int8-g32"),
    "IQ4_XS": ("IQ4_XS", "auto", "qwen3", WIDE, "qwen3", "int8-g32"),
    "Q4_1": ("Q4_1", "auto", "qwen3", SHAPE, "qwen3", None),
}


def written(name: str, folder: Path) -> tuple[Any, str]:
    """Write a file into `folder`; return a module with its dequantized weights, and the dtype to use."""
    kind, dtype, toy, settings, family, _ = FILES[name]
    folder.mkdir(exist_ok=True)
    held = write(folder / "toy.gguf", make_toy(toy, **settings), kind, family)
    expected = make_toy(toy, **settings)
    expected.load_state_dict(held)
    expected.config.eos_token_id = expected.generation_config.eos_token_id = None  # as in the file
    exact = kind == "F32" or dtype == "float32"
    return expected if exact else expected.bfloat16(), dtype


@pytest.mark.parametrize(
    "name",
    slow_but(("Q8_0", "Q4_0, reordered", "Q4_K"), FILES),
)
def test_tokens_match_dequantized_gguf_weights(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected, dtype = written(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="toy.gguf", dtype=expected.dtype
    ).state_dict()
    assert all(torch.equal(theirs[n], tensor) for n, tensor in expected.state_dict().items())
    requests = mixed_requests(5)
    expected.save_pretrained(tmp_path / "folder")
    tokens = generated(LLM(tmp_path / "folder"), *requests)
    with LLM(tmp_path / "toy.gguf", dtype=dtype) as llm:
        assert llm.info()["dtype"] == str(expected.dtype).removeprefix("torch.")
        held = llm.info().get(
            "quantization", {"format": None, "packed": "model.embed_tokens.weight"}
        )
        assert held["format"] == FILES[name][-1] and "model.embed_tokens.weight" in held["packed"]
        assert all_facts(llm.generate(*requests)) == tokens
    with LLM(tmp_path, dtype=dtype, placement=Offload(weights=(0, 0, 100))) as llm:
        assert all_facts(llm.generate(*requests)) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "Q8_0", "Q4_0, reordered", "Q4_K", "IQ4_XS"])
def test_other_placements_give_same_tokens(name: str, tmp_path: Path) -> None:
    _, dtype = written(name, tmp_path)
    check_other_placements(tmp_path, TensorParallel(2), dtype=dtype)


_LLAMA3: dict[str, Any] = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0)
_LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize("rope", [_LLAMA3, dict(rope_type="linear", factor=4.0)])
def test_rope_scaling_is_read(rope: dict[str, Any], tmp_path: Path) -> None:
    module = make_toy("llama", rope_parameters=dict(rope, rope_theta=1e4), **WIDE)
    plain = 1e4 ** -(torch.arange(0, 128, 2) / 128)
    factors = plain / module.model.rotary_emb.inv_freq
    ids = random_ids(40, 1)
    expected = scores_of(module, ids)

    def scores(**settings: Any) -> torch.Tensor:
        write(tmp_path / "toy.gguf", module, "F32", "llama", **settings)
        with LLM(tmp_path) as llm:
            assert llm.info()["max_length"] == module.config.max_position_embeddings
            return torch.tensor(llm.score([ids])[0][1:])

    settings: dict[str, Any] = dict(rope="linear")
    if rope is _LLAMA3:
        settings = dict(factors=factors)
    torch.testing.assert_close(scores(**settings), expected, atol=2e-4, rtol=0)
    if rope is not _LLAMA3:  # the default of llama.cpp
        torch.testing.assert_close(scores(rope=""), expected, atol=2e-4, rtol=0)
    assert (scores() - expected).abs().max() > 0.01
    for kind, factor in (("yarn", 4.0), ("linear", float("nan"))):
        with pytest.raises(NotSupported, match=f"type='{kind}' with factor={factor} is not read"):
            scores(rope=kind, factor=factor)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight must be 64 positive numbers"):
        scores(factors=-factors)


@pytest.mark.parametrize("name", slow_but(["Q8_0"], ["float32", "Q8_0"]))
def test_gguf_weights_can_sleep_and_be_requantized(name: str, tmp_path: Path) -> None:
    expected, dtype = written(name, tmp_path)
    requests = mixed_requests(5)
    with LLM(tmp_path, dtype=dtype) as llm:
        tokens = all_facts(llm.generate(*requests))
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(*requests)) == tokens
    expected.save_pretrained(tmp_path / "folder")
    settings: dict[str, Any] = dict(quantization="int4")
    quantized = generated(LLM(tmp_path / "folder", **settings), *requests)
    with LLM(tmp_path / "toy.gguf", dtype=dtype, **settings) as llm:
        # The head of Q8_0 stays as it is stored, and that of the folder is rounded to 8 bits.
        tokens = all_facts(llm.generate(*requests))
        assert (tokens == quantized) is (name == "float32")
        assert llm.info()["quantization"]["bits_per_weight"] < 6.6
    offload = Offload(weights=(0, 100, 0))
    with LLM(tmp_path / "toy.gguf", dtype=dtype, placement=offload, **settings) as llm:
        assert all_facts(llm.generate(*requests)) == tokens


def test_completions_stop_at_ends_of_turns_and_messages(module: Any, tmp_path: Path) -> None:
    writer = gguf_writer(path := tmp_path / "toy.gguf", module.config, "qwen3")
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_eom_token_id(6)
    for name, tensor in module.state_dict().items():
        writer.add_tensor(gguf_name(name), tensor.float().numpy())
    save_gguf(writer)
    with LLM(path) as llm:
        for token in (2, 5, 6):
            params = SamplingParams(allowed_token_ids=[token], max_tokens=2)
            assert llm.generate([3, 4], params)[0].outputs[0].finish_reason == "stop"


def test_wake_ignores_added_gguf_file_and_detects_changed_one(tmp_path: Path) -> None:
    written("Q8_0", tmp_path)
    (tmp_path / "blob").write_bytes((tmp_path / "toy.gguf").read_bytes())
    (tmp_path / "toy.gguf").unlink()
    (tmp_path / "toy.gguf").symlink_to("blob")  # as in the hub's cache
    with LLM(tmp_path / "toy.gguf") as llm:
        expected = llm.score(random_ids(20, 1))
        llm.sleep(weights=True)
        (tmp_path / "another.gguf").write_bytes(b"GGUF")
        llm.wake()
        assert llm.score(random_ids(20, 1)) == expected
        llm.sleep(weights=True)
        (tmp_path / "toy.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelChanged, match="blob changed"):
            llm.wake()


def test_damaged_scales_and_unused_tensors_are_rejected(tmp_path: Path) -> None:
    written("Q4_K", tmp_path)
    for tensor in gguf.GGUFReader(tmp_path / "toy.gguf", "r+").tensors:  # mapped
        if tensor.name == "blk.1.ffn_up.weight":
            tensor.data[3, :2] = 255
    opening_fails(ModelError, r"blk\.1\.ffn_up\.weight has scales that are NaN", tmp_path)
    odd = make_toy("qwen3", **SHAPE)
    odd.bogus = torch.nn.Linear(32, 32)
    write(tmp_path / "toy.gguf", odd, "F32")
    opening_fails(ModelError, r"tensors are not used .*bogus", tmp_path)
    LLM(tmp_path, unused_weights="ignore").close()


def test_float64_is_read_and_types_without_decoder_are_rejected(
    module: Any, tmp_path: Path
) -> None:
    path = tmp_path / "toy.gguf"
    for last in (None, "Q8_1"):
        writer = gguf_writer(path, module.config, "qwen3")
        for name, tensor in module.state_dict().items():
            data, kind = tensor.double().numpy(), None
            if name.endswith("1.mlp.up_proj.weight") and last is not None:
                data, kind = np.zeros((len(data), 80), np.uint8), gguf.GGMLQuantizationType[last]
            writer.add_tensor(gguf_name(name), data, raw_shape=data.shape, raw_dtype=kind)
        save_gguf(writer)
        if last is None:
            with LLM(path, dtype="float32") as llm, LLM(module) as expected:
                assert llm.score([[3, 4, 5]]) == expected.score([[3, 4, 5]])
    with pytest.raises(NotSupported, match=r"ffn_up\.weight: the gguf package can't decode Q8_1"):
        LLM(path)


def test_integer_weights_and_out_of_range_sizes_are_rejected(tmp_path: Path) -> None:
    odd = make_toy("qwen3", **SHAPE)
    write(path := tmp_path / "toy.gguf", odd, "F32")
    odd.config.num_hidden_layers = 10**9
    write(tmp_path / "deep.gguf", odd, "F32")
    with pytest.raises(ModelError, match="num_hidden_layers=1000000000: must be from 0 to 4096"):
        LLM(tmp_path / "deep.gguf")
    for tensor in gguf.GGUFReader(path, "r+").tensors:  # memory-mapped: assignments change the file
        if tensor.name == "output_norm.weight":
            tensor.field.parts[4][0] = gguf.GGMLQuantizationType.I32
    opening_fails(ModelError, r"output_norm\.weight is I32: weights must be", path)


def test_unreadable_gguf_files_are_rejected(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.gguf"
    opening_fails(ModelError, r"no file .*toy\.gguf", path)
    write(path, module, "Q8_0")
    with monkeypatch.context() as patch:
        patch.setattr(formats, "_PROCESSORS", ())
        opening_fails(NotSupported, "qwen3 in GGUF is decoded", path, placement=Cluster(stages=2))
        with LLM(path) as llm:
            assert "quantization" not in llm.info()
    path.rename(part := tmp_path / "toy-00001-of-00003.gguf")
    opening_fails(NotSupported, "one of 3 parts", part)
    part.rename(path)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes()[:1000])
    opening_fails(ModelError, r"2 GGUF files .*other", tmp_path)
    opening_fails(ModelError, r"other\.gguf is damaged", tmp_path / "other.gguf")
    plain = importlib.util.find_spec
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "gguf" else plain(name))
    opening_fails(NotSupported, r"needs gguf: pip install '\.\[gguf\]'", path)
