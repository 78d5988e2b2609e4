"""GGUF files: a toy written as llama.cpp stores it, and the words of its unpacked numbers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.requests_mixed import all_facts, mixed_requests
from support.toys import make_toy
from verbatim import LLM, Cluster, ModelError, NotSupported
from verbatim.model import gguf as reading

gguf = pytest.importorskip("gguf")

# transformers takes the width of a head to be 128, whatever the file says.
SHAPE: dict[str, Any] = dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
_NAMES = (
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"input_layernorm", "attn_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)


def write(path: Path, module: Any, kind: str) -> dict[str, torch.Tensor]:
    """A Qwen3 as a GGUF file with its matrices as `kind`; what the file holds, by transformers' names."""
    how, config = getattr(gguf.GGMLQuantizationType, kind), module.config
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    held = {}
    for name, tensor in module.state_dict().items():
        short = name
        for pattern, new in _NAMES:
            short = re.sub(pattern, new, short)
        numbers = tensor.float().numpy()
        if tensor.ndim < 2:
            writer.add_tensor(short, numbers)
            held[name] = tensor.float()
            continue
        data = gguf.quantize(numbers, how)
        writer.add_tensor(short, data, raw_dtype=how)
        held[name] = torch.from_numpy(gguf.dequantize(data, how).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.fixture(scope="module")
def module() -> Any:
    return make_toy("qwen3", **SHAPE)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Q8_0", "auto"), ("Q4_0", "float32"), ("F32", "auto")]
)
def test_the_words_are_those_of_the_numbers_in_the_file(
    kind: str, dtype: str, module: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    held = write(tmp_path / "toy.gguf", module, kind)
    exact = kind == "F32" or dtype == "float32"
    expected = make_toy("qwen3", **SHAPE)
    expected.load_state_dict(held)
    expected = expected if exact else expected.bfloat16()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="toy.gguf").state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in held.items())
    requests = mixed_requests(5)
    expected.save_pretrained(tmp_path / "folder")
    with LLM(tmp_path / "folder") as llm:
        words = all_facts(llm.generate(*requests))
    for named in (tmp_path, tmp_path / "toy.gguf", str(tmp_path / "toy.gguf")):
        with LLM(named, dtype=dtype) as llm:
            assert llm.info()["dtype"] == ("float32" if exact else "bfloat16")
            assert all_facts(llm.generate(*requests)) == words
    with LLM(tmp_path, dtype=dtype) as llm:
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(*requests)) == words
    with LLM(tmp_path / "folder", quantization="int8") as llm:
        packed = all_facts(llm.generate(*requests))
    with LLM(tmp_path / "toy.gguf", dtype=dtype, quantization="int8") as llm:
        assert all_facts(llm.generate(*requests)) == packed


def test_integers_and_sizes_beyond_the_file_are_refused(tmp_path: Path) -> None:
    odd = make_toy("qwen3", **SHAPE)
    write(path := tmp_path / "toy.gguf", odd, "F32")
    odd.config.num_hidden_layers = 10**9
    write(tmp_path / "deep.gguf", odd, "F32")
    with pytest.raises(ModelError, match="num_hidden_layers=1000000000: must be from 0 to 4096"):
        LLM(tmp_path / "deep.gguf")
    for tensor in gguf.GGUFReader(path, "r+").tensors:  # mapped: what is assigned is written
        if tensor.name == "output_norm.weight":
            tensor.field.parts[4][0] = gguf.GGMLQuantizationType.I32
    with pytest.raises(ModelError, match=r"output_norm\.weight is I32: weights must be"):
        LLM(path)


def test_what_can_not_be_read_is_refused_by_name(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "toy.gguf"
    with pytest.raises(ModelError, match=r"no file .*toy\.gguf"):
        LLM(path)
    write(path, module, "Q8_0")
    with pytest.raises(NotSupported, match="is a GGUF file"):
        LLM(path, placement=Cluster(stages=2))
    path.rename(part := tmp_path / "toy-00001-of-00003.gguf")
    with pytest.raises(NotSupported, match="one of 3 parts"):
        LLM(part)
    part.rename(path)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"2 GGUF files .*other"):
        LLM(tmp_path)
    with pytest.raises(ModelError, match=r"other\.gguf is damaged"):
        LLM(tmp_path / "other.gguf")
    plain = importlib.util.find_spec
    monkeypatch.setattr(reading, "find_spec", lambda name: None if name == "gguf" else plain(name))
    with pytest.raises(NotSupported, match=r"needs gguf: pip install 'verbatim\[gguf\]'"):
        LLM(path)
