"""Decode steps that are recorded: their sizes, their padding, and when they are not. Without a GPU, what
records a step just runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.requests_mixed import generated
from support.stages import staged
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams, drafters
from verbatim.placement.graphs import DecodeGraphs, rounded_rows
from verbatim.placement.resident import Resident
from verbatim.protocols import Forward


class Counting:
    """A recorder of steps that notes how often each was recorded and run."""

    def __init__(self) -> None:
        self.recorded = self.runs = 0

    def __call__(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.runs += 1
            return step()

        return replay


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Every forward of a `Resident` asks its graphs first, as it does on a GPU."""
    counting, plain = Counting(), Resident.forward

    def forward(self: Any, batch: Any) -> Any:
        if self.graphs is None:
            self.graphs = DecodeGraphs(self.decoder, self.store, counting)
        recorded = self.graphs.run(batch)
        if recorded is None:
            return plain(self, batch)
        self.num_forwards += 1
        return Forward(recorded)

    monkeypatch.setattr(Resident, "forward", forward)
    return counting


def test_rows_are_rounded_up_by_little() -> None:
    sizes = [rounded_rows(rows) for rows in range(1, 513)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and len(set(sizes)) == 25
    assert all(size <= 2 * rows for rows, size in enumerate(sizes, 1))


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "qwen3_5", "granite_dense", "lfm2", "mamba"]
)
def test_recorded_steps_give_the_same_bits(name: str, recording: Counting) -> None:
    prompts = [random_ids(3 + 2 * i, i) for i in range(11)]
    params = [SamplingParams(max_tokens=2 + 2 * i, seed=i, ignore_eos=True) for i in range(11)]
    module = make_toy(name, dtype=torch.bfloat16)
    found = generated(LLM(module), prompts, params)
    assert recording.runs == 21 and recording.recorded == 5  # of 16, 8, 4, 2 and 1 rows
    recorded = recording.runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeGraphs, "run", lambda self, batch: None)
        assert generated(LLM(module), prompts, params) == found
    assert recording.runs == recorded


def test_recorded_steps_of_stages_give_the_same_bits(
    recording: Counting, folders: Callable[..., Path]
) -> None:
    prompts = [random_ids(3 + 2 * i, i) for i in range(5)]
    params = [SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(5)]
    folder = folders("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeGraphs, "run", lambda self, batch: None)
        expected = generated(LLM(folder), prompts, params)
    for micro_batches in (1, 2):
        before = recording.runs
        placement = staged(micro_batches=micro_batches)
        assert generated(LLM(folder, placement=placement), prompts, params) == expected
        assert recording.runs - before >= 2 * 7


def test_hooks_experts_and_chunks_run_plainly(recording: Counting) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLM(make_toy("qwen3_moe")) as llm:
        llm.generate(random_ids(5, 1), params)
    module = make_toy("llama")
    handle = module.lm_head.register_forward_hook(lambda *_: None)
    with LLM(module) as llm:
        llm.generate(random_ids(5, 1), params)
        llm.generate(random_ids(5, 1), params.replace(hidden_states=True))
        assert recording.runs == 0
        handle.remove()
        llm.generate(random_ids(5, 1), params.replace(hidden_states=True))
        llm.score([random_ids(5, 1)])
        assert recording.runs == 0
        llm.generate(random_ids(5, 1), params)
        assert recording.runs == 2  # the prompt is a chunk


def test_another_weight_is_seen(recording: Counting) -> None:
    module, params = make_toy("llama"), SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    with LLM(module) as llm:
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 1
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 1
        module.lm_head.weight.data = module.lm_head.weight.data.flip(0)
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 2


def test_what_cannot_be_recorded_runs_plainly_and_says_why() -> None:
    def fails(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with LLM(make_toy("llama")) as llm:
        runner: Any = llm.engine.runner
        graphs = DecodeGraphs(runner.decoder, runner.store, fails)
        batches: list[Any] = []
        plain = runner.forward
        runner.forward = lambda batch: (batches.append(batch), plain(batch))[1]
        llm.generate(random_ids(5, 1), SamplingParams(max_tokens=2, ignore_eos=True))
        assert graphs.run(batches[0]) is None and graphs.reason is None  # a chunk
        assert graphs.run(batches[1]) is None
        assert graphs.reason is not None and "not permitted" in graphs.reason


def test_a_draft_model_replays_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, plain = Counting(), drafters.open_resident

    def recorded(*args: Any) -> Resident:
        runner = plain(*args)
        runner.graphs = DecodeGraphs(runner.decoder, runner.store, counting)
        return runner

    monkeypatch.setattr(drafters, "open_resident", recorded)
    prompts = [random_ids(5, i) for i in range(3)]
    # A bias keeps the draft model from drawing all tokens in one call, as it never does on a GPU.
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, logit_bias={7: 0.5})
    model = make_toy("llama")
    expected = generated(LLM(model), prompts, params)
    with LLM(model, draft=make_toy("llama"), num_draft_tokens=3) as llm:
        assert generated(llm, prompts, params) == expected
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 3
    assert counting.runs == 2 * 2  # all rows of a draft but the first have one token
