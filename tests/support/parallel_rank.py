"""One of several ranks, started by test_parallel.py with a folder of models."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.requests_mixed import all_facts, mixed_requests
from verbatim import (
    LLM,
    ExpertParallel,
    NotSupported,
    PipelineParallel,
    SamplingParams,
    TensorParallel,
    VerbatimError,
    generate,
    rl,
)

QUANTIZED = ("int4", "w8a8")
ROLLOUT = SamplingParams(max_tokens=6, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)


def fingerprint(results: Any) -> str:
    """Return a hash of the facts of all results."""
    return hashlib.sha256(repr(all_facts(results)).encode()).hexdigest()


def share_columns(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Run tensor-parallel models: all ranks make the same calls."""
    told: dict[str, Any] = {}
    prompts, params = mixed_requests(12)
    for name, dtype in json.loads((folder / "models.json").read_text()):
        placement = TensorParallel(world)
        draft = {"llama": "ngram", "qwen3": "early-exit"}.get(name)
        with LLM(
            folder / name, placement=placement, dtype=dtype, max_batch_tokens=32, draft=draft
        ) as llm:
            told[f"{name} {dtype}"] = fingerprint(llm.generate(prompts, params))
            llm.sleep()
            llm.wake()
            assert fingerprint(llm.generate(prompts, params)) == told[f"{name} {dtype}"], name
            if name == "llama":
                told["scores"] = llm.score([[5, 6, 7], [8, 9]])
                try:
                    next(llm.stream([5, 6]))
                except NotSupported as error:
                    told["stream"] = str(error)
                try:
                    llm.generate([[10**6]])
                except ValueError as error:
                    told["refused"] = str(error)
                told["after"] = ids_of(llm)
                llm.load_adapter("a", folder / "llama-adapter")
                told["adapted"] = ids_of(llm, adapter="a")
                llm.unload_adapter("a")
                llm.sleep(weights=True)
                llm.wake()
                told["awake"] = ids_of(llm)
                with pytest.raises(VerbatimError):
                    llm.update_weights({"none": torch.ones(1)})
                assert llm.update_weights(folder / "new-llama") == 1
                with pytest.raises(VerbatimError):  # sleeping would lose the new weights
                    llm.sleep(weights=True)
                told["updated"] = ids_of(llm)
    return told


def ids_of(llm: LLM, **changes: Any) -> list[int]:
    (result,) = llm.generate([[5, 6]], replace(GREEDY, **changes))
    return result.outputs[0].token_ids


def share_layers(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Run pipeline-parallel models: each rank has some layers, and all ranks make the same calls."""
    told: dict[str, Any] = {}
    prompts, params = mixed_requests(12)
    placement = PipelineParallel(world)
    with LLM(
        folder / "deep-gemma2", placement=placement, max_batch_tokens=32, dtype="bfloat16"
    ) as llm:
        told["gemma2"] = fingerprint(llm.generate(prompts, params))
    with LLM(folder / "deep-qwen3_moe", placement=placement) as llm:
        params = [replace(p, record_routing=p.num_beams == 1) for p in params]
        told["qwen3_moe"] = fingerprint(llm.generate(prompts, params))
        stages = llm.info()["stages"]
        told["layers"] = [stage["layers"] for stage in stages]
        told["last_pid"] = stages[-1]["pid"] == os.getpid()
    return told


def share_experts(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Run expert-parallel models with different requests on each rank; rank 0 has none at first."""
    told: dict[str, Any] = {}
    prompts, params = mixed_requests(12)
    own = slice(0, 0) if rank == 0 else slice(rank - 1, None, world - 1)
    with LLM(folder / "qwen3_moe", placement=ExpertParallel(), max_batch_tokens=32) as llm:
        told["mixed"] = fingerprint(llm.generate(prompts[own], params[own]))
        told["forwards"] = llm.stats()["forwards"]
        found = rl.rollout(llm, [[5 + rank, 6, 7]] * (rank + 1), ROLLOUT, seed=3)
        told["rows"], told["routing"] = found.sequences.tolist(), found.routing.tolist()
        told["weight_bytes"] = llm.info()["weight_bytes"]
        some, good = prompts[own] or prompts[:1], torch.tensor([[5, 6, 7]])
        bad = torch.tensor([[10**6]])
        calls = {  # rank 0's is invalid, and fails on the other ranks at once
            "generate": lambda: llm.generate([[10**6]] if rank == 0 else some),
            "chat": lambda: llm.chat([{}]) if rank == 0 else llm.generate(some),  # has no tokenizer
            "score": lambda: rl.score(llm, bad if rank == 0 else good),
            "rollout": lambda: rl.rollout(llm, bad if rank == 0 else good, ROLLOUT),
            "tensors": lambda: generate(llm, good.float() if rank == 0 else good, None, 2),
        }
        told["refused"] = {}
        for name, call in calls.items():
            try:
                call()
            except VerbatimError as error:
                told["refused"][name] = f"{type(error).__name__}: {error}"
        none = rl.rollout(llm, [] if rank == 0 else good, ROLLOUT)
        told["none"] = len(none.sequences)
        told["scores"] = llm.score([] if rank == 0 else prompts[:1])
    adapters = {"a": folder / "adapter"} if rank else {}
    params = [replace(p, adapter="a") for p in params]
    with LLM(folder / "qwen3_moe", placement=ExpertParallel(), adapters=adapters) as llm:
        told["adapter"] = fingerprint(llm.generate(prompts[own], params[own]))
    params = [replace(p, adapter=None) for p in params]
    for kind in QUANTIZED:
        with LLM(folder / "qwen3_moe", placement=ExpertParallel(), quantization=kind) as llm:
            told[kind] = fingerprint(llm.generate(prompts[own], params[own]))
            llm.sleep(weights=True)
            llm.wake()
            told[f"{kind} awake"] = fingerprint(llm.generate(prompts[own], params[own]))
            told[f"{kind} bytes"] = llm.info()["quantization"]["bytes_after"]
            llm.update_weights(folder / "new-qwen3_moe")
            told[f"{kind} updated"] = fingerprint(llm.generate(prompts[own], params[own]))
    mtp = dict(draft="mtp", num_draft_tokens=2)
    with LLM(folder / "mtp", placement=ExpertParallel(), **mtp) as llm:
        results = llm.generate(prompts[own], params[own])
        told["mtp"] = fingerprint(results)
        told["drafted"] = sum(sum(r.metrics.draft.num_drafted) for r in results)
        told["mtp forwards"] = llm.stats()["forwards"]
    return told


def main(rank: int, world: int, folder: str) -> dict[str, Any]:
    told = (share_columns, share_layers, share_experts)
    return {do.__name__: do(rank, world, Path(folder)) for do in told}


def ended() -> None:
    """Check that gloo's threads have ended: they would free tensors at interpreter exit, and abort it."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" not in threads
