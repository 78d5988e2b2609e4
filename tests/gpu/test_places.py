"""Stages and ranks on a GPU, which they share where there is only one: the bits of a model in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.programs import PATIENCE_S, run_ranks
from support.requests_mixed import all_facts, mixed_requests
from support.toys import make_toy
from verbatim import LLM, Cluster, PipelineParallel, SamplingParams, TensorParallel

Folders = Callable[..., Path]
# Ranks with KV heads of their own, and ranks that share one; experts; windows and caps; recurrent layers.
TENSOR = {
    "qwen3": {},
    "llama": dict(num_key_value_heads=1),
    "qwen3_moe": dict(hidden_size=64),
    "gemma2": dict(hidden_size=100),
    "qwen3_next": {},
}


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording a step takes longer than these tests run it; the bits are those of every other test here."""
    monkeypatch.setenv("VERBATIM_CUDA_GRAPHS", "0")


def opened(folder: Path, placement: Any = None, dtype: str = "bfloat16", **options: Any) -> LLM:
    options = dict(kv_memory="64MB", max_batch_tokens=32, max_length=200) | options
    return LLM(
        folder, placement=placement, device="cuda", deterministic=True, dtype=dtype, **options
    )


def generated(llm: LLM, count: int = 8) -> list[Any]:
    return all_facts(llm.generate(*mixed_requests(count)))


def resident(
    folder: Path, dtype: str = "bfloat16", count: int = 8
) -> tuple[list[Any], dict[str, Any]]:
    with opened(folder, dtype=dtype) as llm:
        return generated(llm, count), llm.info()


def changed(folder: Path) -> dict[str, torch.Tensor]:
    """Other weights for the model in a folder."""
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name: 1.5 * tensor for name, tensor in weights.items()}


def test_stages_lose_one_sleep_move_and_get_new_weights(folders: Folders) -> None:
    folder = folders("qwen3_moe", num_hidden_layers=4)
    expected, alone = resident(folder)
    placement = Cluster(stages=2, patience_s=PATIENCE_S)
    with opened(folder, placement, draft="ngram") as llm:
        assert generated(llm) == expected
        info = llm.info()
        assert info["numerics_key"] == alone["numerics_key"]
        assert info["gpu"]["name"] == torch.cuda.get_device_name(0)
        count = torch.cuda.device_count()
        assert [s["device"] for s in info["stages"]] == [f"cuda:{i % count}" for i in (0, 1)]
        runner = llm.engine.runner
        plain, pid = runner.forward, info["stages"][1]["pid"]

        def struck(batch: Any) -> Any:
            remote = plain(batch)
            if llm.stats()["cluster"]["restarts"] == 0 and runner.num_forwards % 7 == 6:
                os.kill(pid, signal.SIGKILL)
            return remote

        runner.forward = struck
        assert generated(llm) == expected, "a stage was killed"
        del runner.forward
        assert llm.stats()["cluster"]["restarts"] == 1
        with llm.session(seed=5) as session:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            turns = [session.generate([7, 8, 9], params).outputs[0].token_ids]
            runner.group.move([(0, 3), (3, 4)])
            turns.append(session.generate([10, 11], params).outputs[0].token_ids)
        assert generated(llm) == expected, "layers were moved"
        llm.sleep(weights=True)
        llm.wake()
        assert generated(llm) == expected, "asleep"
        weights = changed(folder)
        llm.update_weights(weights)
        updated = generated(llm)
    with opened(folder) as llm:
        with llm.session(seed=5) as session:
            for prompt, turn in zip(([7, 8, 9], [10, 11]), turns, strict=True):
                assert session.generate(prompt, params).outputs[0].token_ids == turn
        llm.update_weights(weights)
        assert generated(llm) == updated != expected


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_stages_have_the_bits_of_one_process(name: str, folders: Folders) -> None:
    folder = folders(name, **TENSOR[name])
    expected, _ = resident(folder, "float32", 12)
    with opened(folder, PipelineParallel(3), "float32") as llm:
        assert generated(llm, 12) == expected


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_ranks_have_the_bits_of_one_process(name: str, folders: Folders) -> None:
    folder = folders(name, **TENSOR[name])
    expected, alone = resident(folder)
    with opened(folder, TensorParallel(2)) as llm:
        assert generated(llm) == expected
        info = llm.info()
        assert info["numerics_key"] == alone["numerics_key"]
        assert info["split_linears"] + info["split_experts"] > 0
        if name != "qwen3":
            return
        llm.sleep(weights=True)
        llm.wake()
        assert generated(llm) == expected, "asleep"
        weights = changed(folder)
        llm.update_weights(weights)
        updated = generated(llm)
    with opened(folder) as llm:
        llm.update_weights(weights)
        assert generated(llm) == updated != expected


def test_expert_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    make_toy("qwen3_moe").save_pretrained(tmp_path / "model")
    told = run_ranks(2, tmp_path, "gpu_rank", tmp_path / "model")
    expected, alone = resident(tmp_path / "model", count=12)
    for rank, ours in enumerate(told):
        assert ours["facts"] == repr(expected[rank::2])
        assert ours["numerics_key"] == alone["numerics_key"]
