"""The docs' table of unsupported combinations: each row is tested here, and is rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.toys import make_toy
from verbatim import (
    LLM,
    Cluster,
    ExpertParallel,
    NotSupported,
    Offload,
    SamplingParams,
    UnsupportedModel,
)
from verbatim.model.device import Device

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def rows() -> list[tuple[str, str]]:
    """The first two cells of each row of the table, without backticks."""
    section = PAGE.read_text().split("## Unsupported combinations")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [(this.replace("`", ""), other.replace("`", "")) for this, other, _ in cells[2:]]


def folder(tmp_path: Path, name: str) -> Path:
    make_toy(name).save_pretrained(tmp_path / name)
    return tmp_path / name


def opened(name: str, *, live: bool = False, **options: Any) -> Callable[[Path], None]:
    def attempt(tmp_path: Path) -> None:
        with LLM(make_toy(name) if live else folder(tmp_path, name), **options):
            pass

    return attempt


def generated(name: str, options: dict[str, Any], **params: Any) -> Callable[[Path], None]:
    def attempt(tmp_path: Path) -> None:
        with LLM(folder(tmp_path, name), **options) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, **params))

    return attempt


def traced(path: Path) -> None:
    Cluster(offload=Offload(trace=path / "trace.json"))


def attending_on_the_cpu(path: Path) -> None:
    gpu = Device(torch.device("cpu"), batch_invariant=True, is_separate=True)  # stands in for a GPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verbatim.api.llm.resolve_device", lambda *_: gpu)
        opened("llama", placement=Offload(cpu_cache_compute=True))(path)


def asleep(_: Path) -> None:
    with LLM(make_toy("llama")) as llm:
        llm.sleep(weights=True)


# For each row, a call that must fail, and a pattern of its message.
CALLS: dict[tuple[str, str], tuple[Callable[[Path], None], str]] = {
    ('draft="mtp"', "a model without MTP layers"): (
        opened("llama", draft="mtp"),
        "mtp.*MTP layers",
    ),
    ('draft="early-exit"', "ExpertParallel"): (
        opened("qwen3_moe", draft="early-exit", placement=ExpertParallel()),
        "EarlyExit.*ExpertParallel",
    ),
    ("num_beams", "drafts"): (
        generated("llama", dict(draft="ngram"), num_beams=2, temperature=0.0),
        "num_beams=2.*drafts",
    ),
    ("record_routing", "num_beams"): (
        generated("qwen3_moe", {}, num_beams=2, temperature=0.0, record_routing=True),
        "record_routing.*num_beams",
    ),
    ("record_indices", "num_beams"): (
        generated("deepseek_v32", {}, num_beams=2, temperature=0.0, record_indices=True),
        "record_indices.*num_beams",
    ),
    ("sleep(weights=True)", "a live module"): (asleep, "weights=True.*live module"),
    ("quantization", "a live module"): (
        opened("llama", live=True, quantization="int8"),
        "quantization='int8.*live module",
    ),
    ("prefix_folder", "a live module, trust_remote_code"): (
        opened("llama", live=True, prefix_folder="prefixes"),
        "prefix_folder=.*live module",
    ),
    ("fused=False", "Cluster"): (
        opened("llama", fused=False, placement=Cluster(stages=2)),
        "fused=False.*placement=Cluster",
    ),
    ("Offload(cpu_cache_compute=True)", "a GPU"): (
        attending_on_the_cpu,
        "cpu_cache_compute=True: .* on the GPU",
    ),
    ("Offload(trace=...)", "Cluster"): (traced, r"Offload\(trace=.*stages of a Cluster"),
}


def test_docs_table_and_tested_combinations_match() -> None:
    assert set(rows()) == set(CALLS)


@pytest.mark.parametrize("row", [pytest.param(row, id="-".join(row)) for row in CALLS])
def test_unsupported_combination_is_rejected_and_named(
    row: tuple[str, str], tmp_path: Path
) -> None:
    attempt, names = CALLS[row]
    with pytest.raises((NotSupported, UnsupportedModel)) as refusal:
        attempt(tmp_path)
    assert re.search(names, str(refusal.value), re.DOTALL), str(refusal.value)
