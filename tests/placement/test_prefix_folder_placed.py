"""The prefix folder with every placement: those with the same KV cache read each other's prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.pairwise import parametrize_combinations
from support.stages import at_batch, kill, serving, staged
from support.toys import Folders, random_ids
from verbatim import LLM, InvalidRequest, Offload, SamplingParams, TensorParallel

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
PROMPT = random_ids(70, seed=3)


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(folder, block_size=8, max_length=128, kv_memory="2MB", **options)


def result(llm: LLM, prompt: list[int] = PROMPT) -> tuple[Any, int]:
    """Return the completion with its log-probs and experts, and the number of cached prompt tokens."""
    routed = llm.engine.runner.choices["routing"].layers > 0
    (reply,) = llm.generate([prompt], GREEDY.replace(record_routing=routed))
    (out,) = reply.outputs
    experts = out.routing.tolist() if routed else None
    return (out.token_ids, out.logprobs, out.top_logprobs, experts), reply.num_cached_tokens


def on_disk() -> Offload:
    return Offload(gpu="100MB", weights=(0, 0, 100), kv=(30, 30, 40))


@parametrize_combinations(
    3,
    places=[(on_disk, None), (None, on_disk), (staged, None), (None, staged), (on_disk, staged)],
    name=["qwen3_5", "qwen3_moe", "llama", "deepseek_v3"],
)
def test_placements_read_each_others_prefixes(
    places: tuple[Callable[[], Any] | None, Callable[[], Any] | None],
    name: str,
    folders: Folders,
    tmp_path: Path,
) -> None:
    write, read = places
    where = {"prefix_folder": tmp_path / "kept"}
    with opened(folders(name), placement=write and write(), **where) as llm:
        first, _ = result(llm)
        assert result(llm)[1] > 0
    with opened(folders(name), placement=read and read(), **where) as llm:
        again, cached = result(llm)
        assert again == first and cached == 64


def test_stage_lost_after_prefix_was_read_gives_same_tokens(
    folders: Folders, tmp_path: Path
) -> None:
    where = {"prefix_folder": tmp_path / "kept"}
    with opened(folders("llama")) as llm:
        expected, _ = result(llm)
    with opened(folders("llama"), placement=staged(), **where) as llm:
        result(llm)
    for place in (0, 1):
        with opened(folders("llama"), placement=staged(), **where) as llm:
            host = serving(llm)[place]
            at_batch(host, 2, kill)
            completion, cached = result(llm)
            assert completion == expected and cached == 64 and host.killed
            assert result(llm)[0] == expected


def test_stage_lost_while_idle_gives_same_tokens(folders: Folders, tmp_path: Path) -> None:
    where = {"prefix_folder": tmp_path / "kept"}
    with opened(folders("llama"), placement=staged(), **where) as llm:
        expected, _ = result(llm)
    with opened(folders("llama"), placement=staged(), **where) as llm:
        serving(llm)[1].kill()
        assert result(llm)[0] == expected
        assert result(llm)[0] == expected
    with opened(folders("llama"), **where) as llm:
        assert result(llm) == (expected, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5"])
def test_tensor_parallel_ranks_read_only_their_own_prefixes(
    name: str, folders: Folders, tmp_path: Path
) -> None:
    where = {"prefix_folder": tmp_path / "kept"}
    with opened(folders(name)) as llm:
        expected, _ = result(llm)
    for cached in (0, 64):
        with opened(folders(name), placement=TensorParallel(2), **where) as llm:
            assert result(llm) == (expected, cached)
    with opened(folders(name), **where) as llm:  # a rank stores only its heads
        assert result(llm) == (expected, 0)


def test_negative_prefix_folder_budget_is_rejected(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="prefix_folder_bytes=-1"):
        opened(folders("llama"), prefix_folder=tmp_path / "kept", prefix_folder_bytes=-1)
