"""Recorded steps as on a GPU: their sizes, their padding, and which steps are not recorded. Here, a replay
just runs the step again.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.mtp_toys import toy
from support.requests_mixed import all_facts, generated
from support.stages import staged
from support.sweep import build
from support.toys import Folders, make_toy, random_ids
from verbatim import LLM, SamplingParams
from verbatim.batch import Batch
from verbatim.model.decoder import Decoder
from verbatim.model.mtp_source import Mtp
from verbatim.placement import resident
from verbatim.placement.recorded import RecordedSteps, Recording, Step, rounded_rows


class Counting:
    """A recorder that counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.runs = 0

    def __call__(self, step: Step) -> Recording:
        self.recorded += 1

        def replay() -> Any:
            self.runs += 1
            return step()

        return replay, 0


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Every model records its steps and those of draft layers, and draws drafts one by one, as on a GPU."""
    counting, plain = Counting(), resident.Resident.__init__

    def opened(self: Any, *args: Any) -> None:
        plain(self, *args)
        self.decoder.record_steps(lambda _: RecordedSteps(counting))

    monkeypatch.setattr(resident.Resident, "__init__", opened)
    monkeypatch.setattr(resident.Resident, "record_steps", lambda self: None)
    monkeypatch.setattr(Decoder, "chain", lambda *args, **options: None)
    return counting


@contextmanager
def plainly() -> Iterator[None]:
    """Disable recording and replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedSteps, "run", lambda *args: None)
        yield


def test_row_counts_are_rounded_up_to_few_sizes_at_most_doubled() -> None:
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
    assert recording.runs == 21 and recording.recorded == 5  # for 16, 8, 4, 2 and 1 rows
    with plainly():
        assert generated(LLM(module), prompts, params) == found
    assert recording.runs == 21


def test_recorded_steps_of_pipeline_stages_give_the_same_bits(
    recording: Counting, folders: Folders
) -> None:
    prompts = [random_ids(3 + 2 * i, i) for i in range(5)]
    params = [SamplingParams(max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(5)]
    folder = folders("llama")
    with plainly():
        expected = generated(LLM(folder), prompts, params)
    for micro_batches in (1, 2):
        before = recording.runs
        placement = staged(micro_batches=micro_batches)
        assert generated(LLM(folder, placement=placement), prompts, params) == expected
        assert recording.runs - before >= 2 * 7


def test_steps_with_hooks_experts_or_long_chunks_are_not_recorded(recording: Counting) -> None:
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
        assert recording.runs == 3
        llm.generate(random_ids(17, 1), params)
        assert recording.runs == 5  # the prompt chunk is too long


def test_replaced_weight_is_recorded_again(recording: Counting) -> None:
    module, params = make_toy("llama"), SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
    with LLM(module) as llm:
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 2  # the prompt and a token
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 2
        module.lm_head.weight.data = module.lm_head.weight.data.flip(0)
        llm.generate(random_ids(5, 1), params)
        assert recording.recorded == 4


def test_inputs_of_a_recorded_step_are_kept_alive() -> None:
    kept: list[weakref.ref[Any]] = []

    def record(step: Any) -> Any:
        batch: Batch = inspect.getclosurevars(step).nonlocals["batch"]
        tensors = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        kept.extend(weakref.ref(x) for x in tensors if isinstance(x, torch.Tensor))
        result = step()
        return (lambda: result), 0  # like a CUDA graph, which does not keep its inputs alive

    with LLM(make_toy("llama")) as llm:
        decoder: Any = llm.engine.runner.decoder  # type: ignore[attr-defined]
        decoder.record_steps(lambda _: RecordedSteps(record))
        llm.generate(random_ids(5, 1), SamplingParams(max_tokens=3, ignore_eos=True))
        gc.collect()
        assert kept and all(tensor() is not None for tensor in kept)


def test_failed_recording_falls_back_to_plain_steps_with_the_reason() -> None:
    def fails(step: Step) -> Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    params = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    with LLM(make_toy("llama")) as llm:
        expected = all_facts(llm.generate([random_ids(5, 1)], params))
        decoder: Any = llm.engine.runner.decoder  # type: ignore[attr-defined]
        decoder.record_steps(lambda _: RecordedSteps(fails))
        llm.generate(random_ids(17, 1), params.replace(max_tokens=1))
        assert decoder.steps.reason is None  # the chunk is too long
        assert all_facts(llm.generate([random_ids(5, 1)], params)) == expected
        assert "not permitted" in decoder.steps.status


def test_steps_with_indexers_are_not_recorded_on_a_gpu(recording: Counting) -> None:
    with LLM(build("deepseek_v32")) as llm:
        llm.generate(random_ids(5, 1), SamplingParams(max_tokens=3, ignore_eos=True))
        decoder: Any = llm.engine.runner.decoder  # type: ignore[attr-defined]
        assert "indexers copy the number of keys" in decoder.steps.status
    assert recording.recorded == 0


def test_steps_of_a_draft_model_are_replayed(recording: Counting) -> None:
    prompts = [random_ids(5, i) for i in range(3)]
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True)
    model = make_toy("llama")
    with plainly():
        expected = generated(LLM(model), prompts, params)
    with LLM(model, draft=make_toy("llama"), num_draft_tokens=3) as llm:
        assert generated(llm, prompts, params) == expected
        assert llm.stats()["draft"]["acceptance"] == [1.0] * 3
        forwards = llm.stats()["forwards"] + llm.engine.drafting.proposer.runner.num_forwards
    assert recording.runs == 3 + 2 * 3, forwards


@pytest.mark.parametrize("drafting", ["early-exit", "mtp", "ngram"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_steps_of_drafts_and_their_verification_are_recorded(
    name: str, drafting: str, recording: Counting
) -> None:
    """With recurrent states, only steps of one row per sequence are recorded."""
    pair = toy(name, 1 if name == "qwen3_5" else 2, torch.bfloat16)
    draft: Any = Mtp(pair.mtp) if drafting == "mtp" else drafting
    prompts = [random_ids(3 + i, i) for i in range(3)]
    plain = SamplingParams(temperature=0.2, max_tokens=12, seed=1, ignore_eos=True)
    params = [plain, plain.replace(hidden_states=True), plain.replace(prompt_logprobs=1, n=2)]
    with plainly():
        expected = generated(LLM(pair.main), prompts, params)
    assert recording.runs == 0
    options: dict[str, Any] = dict(prefix_cache=False, kv_memory="8MB")
    with LLM(pair.main, draft=draft, num_draft_tokens=3, **options) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        if name == "qwen3":
            assert recording.runs >= llm.engine.runner.num_forwards + (drafting != "ngram")
        assert recording.runs > 0
