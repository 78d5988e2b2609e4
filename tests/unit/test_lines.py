"""Loaded weights are aligned to cache lines, and equal to those in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.model.quantizable import matrices_of
from verbatim.weights import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose file has a header of a length that leaves weights unaligned."""
    make_toy("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for note in ("", "x", "x" * 8, "x" * 16):
        save_file(weights, file, metadata={"format": "pt", "note": note})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64:
            return tmp_path
    raise AssertionError("headers are padded to lines: nothing is left to test")


def test_loaded_weights_are_cache_line_aligned_and_equal_the_file(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    with LLM(folder) as llm:
        for _ in range(2):
            held = dict(llm.engine.runner.decoder.raw_module.named_parameters())
            assert all(p.data_ptr() % 64 == 0 for p in held.values())
            assert all(torch.equal(held[name], stored[name]) for name in held)
            llm.sleep(weights=True)
            llm.wake()


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama4_text"])
def test_column_major_matrices_are_transposed_in_memory_with_same_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_toy(name)
    module.save_pretrained(tmp_path)
    columns = {id(p) for p, by_columns in matrices_of(module).items() if by_columns}
    expected = [name for name, p in module.named_parameters() if id(p) in columns]
    assert expected
    prompts = [[3, 7, 11 + i] * (i + 1) for i in range(5)]
    params = SamplingParams(max_tokens=6, logprobs=3, seed=1)
    with LLM(module, max_length=64) as llm:
        live = llm.generate(prompts, params)
        how = llm.engine.info()["experts"]
    monkeypatch.setattr(load, "_SMALL_BYTES", 0)
    with LLM(tmp_path, max_length=64) as llm:
        for _ in range(2):
            held = dict(llm.engine.runner.decoder.raw_module.named_parameters())
            by_rows = [name for name, p in held.items() if p.ndim > 1 and p.mT.is_contiguous()]
            assert by_rows == expected
            assert all(torch.equal(held[name], p) for name, p in module.named_parameters())
            assert [r.outputs for r in llm.generate(prompts, params)] == [r.outputs for r in live]
            assert llm.engine.info()["experts"] == how
            llm.sleep(weights=True)
            llm.wake()


def test_weights_stay_unaligned_without_memory_for_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder) as llm:
        right = llm.generate([[3, 7, 11]], SamplingParams(max_tokens=6, logprobs=3, seed=1))
    monkeypatch.setattr(load, "available_memory", lambda: 1000)
    with LLM(folder) as llm:
        held = llm.engine.runner.decoder.raw_module
        assert any(p.data_ptr() % 64 for p in held.parameters())
        found = llm.generate([[3, 7, 11]], SamplingParams(max_tokens=6, logprobs=3, seed=1))
        assert [r.outputs for r in found] == [r.outputs for r in right]
