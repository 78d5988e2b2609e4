"""Stages and ranks on GPUs (a single GPU is shared): the same bits as a model in one process."""

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
# Ranks with KV heads of their own, and ranks that share one; experts.
TENSOR: dict[str, dict[str, int]] = {
    "qwen3": {},
    "llama": dict(num_key_value_heads=1),
    "qwen3_moe": {},
}
TURN = SamplingParams(max_tokens=6, ignore_eos=True)


def opened(folder: Path, placement: Any = None, **options: Any) -> LLM:
    options |= dict(kv_memory="64MB", max_batch_tokens=32, max_length=200, dtype="bfloat16")
    return LLM(folder, placement=placement, device="cuda", deterministic=True, **options)


def generated(llm: LLM, count: int = 8) -> list[Any]:
    return all_facts(llm.generate(*mixed_requests(count)))


def changed(folder: Path) -> dict[str, torch.Tensor]:
    """Return other weights for the model in a folder."""
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {name: 1.5 * tensor for name, tensor in weights.items()}


def test_stages_give_same_bits_after_kill_move_sleep_and_update(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_RECORDED_STEPS", "0")  # recording would take longer than the steps
    folder = folders("qwen3_moe", num_hidden_layers=4)
    weights, turns = changed(folder), ([7, 8, 9], [10, 11])
    with opened(folder) as llm:
        expected, key = generated(llm), llm.info()["numerics_key"]
        with llm.session(seed=5) as session:
            replies = [session.generate(turn, TURN).outputs[0].token_ids for turn in turns]
        llm.update_weights(weights)
        updated = generated(llm)
    with opened(folder, Cluster(stages=2, patience_s=PATIENCE_S), draft="ngram") as llm:
        info, runner = llm.info(), llm.engine.runner
        assert info["numerics_key"] == key
        count = torch.cuda.device_count()
        assert [s["device"] for s in info["stages"]] == [f"cuda:{i % count}" for i in (0, 1)]
        plain, pid = runner.forward, info["stages"][1]["pid"]

        def kill_stage_once(batch: Any) -> Any:
            remote = plain(batch)
            if llm.stats()["cluster"]["restarts"] == 0 and runner.num_forwards == 7:
                os.kill(pid, signal.SIGKILL)
            return remote

        runner.forward = kill_stage_once
        assert generated(llm) == expected, "a stage was killed"
        del runner.forward
        assert llm.stats()["cluster"]["restarts"] == 1
        with llm.session(seed=5) as session:
            assert session.generate(turns[0], TURN).outputs[0].token_ids == replies[0]
            runner.group.move([(0, 3), (3, 4)])
            assert session.generate(turns[1], TURN).outputs[0].token_ids == replies[1]
        llm.sleep(weights=True)
        llm.wake()
        assert generated(llm) == expected, "asleep"
        llm.update_weights(weights)
        assert generated(llm) == updated != expected


def test_recorded_steps_of_stages_give_same_bits_as_one_process(folders: Folders) -> None:
    folder = folders("qwen3_5")  # attention and recurrent layers
    with opened(folder) as llm:
        expected = generated(llm, 12)
    with opened(folder, PipelineParallel(2)) as llm:
        assert generated(llm, 12) == expected
        for stage in llm.engine.runner.group.call("status"):
            steps = stage["recorded_steps"]
            assert isinstance(steps, int) and steps > 0, steps


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel_ranks_give_same_bits_as_one_process(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBATIM_RECORDED_STEPS", "0")
    folder = folders(name, **TENSOR[name])
    weights = changed(folder)
    with opened(folder) as llm:
        expected, key = generated(llm), llm.info()["numerics_key"]
        llm.update_weights(weights)
        updated = generated(llm, 2)
    with opened(folder, TensorParallel(2)) as llm:
        assert generated(llm) == expected
        info = llm.info()
        assert info["numerics_key"] == key and info["split_linears"] > 0
        llm.sleep(weights=True)
        llm.wake()
        llm.update_weights(weights)
        assert generated(llm, 2) == updated != expected[:2]


def test_expert_parallel_ranks_give_same_bits_as_one_process(tmp_path: Path) -> None:
    make_toy("qwen3_moe").save_pretrained(tmp_path / "model")
    reports = run_ranks(2, tmp_path, "gpu_rank", tmp_path / "model")
    with opened(tmp_path / "model") as llm:
        expected, key = generated(llm), llm.info()["numerics_key"]
    for rank, ours in enumerate(reports):
        assert ours["facts"] == repr(expected[rank::2])
        assert ours["numerics_key"] == key
