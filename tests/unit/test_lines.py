"""Weights of a file begin at cache lines once they are loaded, and are what they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from support.toys import make_toy
from verbatim import LLM, SamplingParams
from verbatim.model import lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose file has a header that leaves no weight at a line."""
    make_toy("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for note in ("", "x", "x" * 8, "x" * 16):
        save_file(weights, file, metadata={"format": "pt", "note": note})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % lines._LINE:
            return tmp_path
    raise AssertionError("headers are padded to lines: nothing is left to test")


def test_weights_begin_at_lines_and_say_what_the_file_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[list[int]] = []
    begin = lines.begin_at_lines

    def noted(module: nn.Module) -> None:
        mapped.append([p.data_ptr() % 64 for p in module.parameters()])
        begin(module)

    monkeypatch.setattr("verbatim.model.loader.begin_at_lines", noted)
    monkeypatch.setattr(lines, "_SMALL", 0)
    stored = load_file(folder / "model.safetensors")
    with LLM(folder) as llm:
        for _ in range(2):
            held = dict(llm.engine.runner.decoder.held.named_parameters())
            assert all(p.data_ptr() % 64 == 0 for p in held.values())
            assert all(torch.equal(held[name], stored[name]) for name in held)
            llm.sleep(weights=True)
            llm.wake()
    assert len(mapped) == 3 and all(any(offsets) for offsets in mapped)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama4_text"])
def test_matrices_stored_by_columns_are_held_by_rows_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_toy(name)
    module.save_pretrained(tmp_path)
    columns = {id(p) for p in lines._by_columns(module)}
    expected = [name for name, p in module.named_parameters() if id(p) in columns]
    assert expected
    prompts = [[3, 7, 11 + i] * (i + 1) for i in range(5)]
    params = SamplingParams(max_tokens=6, logprobs=3, seed=1)
    with LLM(module, max_length=64) as llm:
        live = llm.generate(prompts, params)
        how = llm.engine.info()["experts"]
    monkeypatch.setattr(lines, "_SMALL", 0)
    with LLM(tmp_path, max_length=64) as llm:
        for _ in range(2):
            held = dict(llm.engine.runner.decoder.held.named_parameters())
            by_rows = [name for name, p in held.items() if p.ndim > 1 and p.mT.is_contiguous()]
            assert by_rows == expected
            assert all(torch.equal(held[name], p) for name, p in module.named_parameters())
            assert [r.outputs for r in llm.generate(prompts, params)] == [r.outputs for r in live]
            assert llm.engine.info()["experts"] == how
            llm.sleep(weights=True)
            llm.wake()


def test_without_room_for_copies_they_stay_where_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_SMALL", 0)
    monkeypatch.setattr(lines, "available_memory", lambda: 1000)
    with LLM(folder) as llm:
        held = llm.engine.runner.decoder.held
        assert any(p.data_ptr() % 64 for p in held.parameters())


def test_only_pages_of_files_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[tuple[int, int]] = []

    def madvise(begin: int, length: int, advice: int) -> int:
        assert advice == lines._DONTNEED
        let_go.append((begin, length))
        return 0

    pages: Callable[[int], int] = lambda n: n * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(lines, "_madvise", lambda: madvise)
    file = tmp_path / "weights"
    file.write_bytes(bytes(pages(8)))
    mapped = torch.from_file(str(file), size=pages(8), dtype=torch.uint8)
    plain = torch.zeros(pages(8), dtype=torch.uint8)
    files = lines._mapped_files()
    lines._release_pages(plain, files)
    lines._release_pages(mapped[8:4000], files)  # not a whole page
    assert let_go == []
    lines._release_pages(mapped[8 : pages(3) + 100], files)
    assert let_go == [(mapped.data_ptr() + pages(1), pages(2))]


def test_what_was_let_go_is_read_again_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 256)
    mapped = torch.from_file(str(file), size=65536, dtype=torch.uint8)
    before = mapped.clone()
    lines._release_pages(mapped, lines._mapped_files())
    assert torch.equal(mapped, before)
