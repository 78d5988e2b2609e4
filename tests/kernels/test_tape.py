"""Steps recorded on a CPU: bit-identical to plain steps, and which steps can't be recorded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.pairwise import parametrize_combinations, slow_but
from support.requests_mixed import all_facts, generated, mixed_requests
from support.stages import staged
from support.sweep import build
from support.toys import Folders, make_toy, random_ids, saver
from verbatim import LLM, PipelineParallel, SamplingParams
from verbatim.errors import NotSupported
from verbatim.kernels.functions import has_kernels, in_team
from verbatim.model import decoder
from verbatim.placement import resident, tape
from verbatim.placement.recorded import ON_CPU
from verbatim.protocols import Forward

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="without kernels steps are not recorded"
)

# Recurrent states beside attention; a mixer without kernels; layers with fused parts; experts; a forward
# that reads numbers from constant tensors; indexers, which choose keys for each row, blocks of keys for each
# group of heads, or records; a model that would search its ids for padding; constant masks; a recurrence
# without kernels.
INDEXED = ["deepseek_v32", "minimax_m3_vl_text", "deepseek_v4"]
NAMES = "zaya mamba falcon_h1 falcon llama4_text jamba gemma3n_text openai-gpt xmod xlstm".split()
NAMES += INDEXED
PROMPTS = [random_ids(5, i) for i in range(3)]
LONG = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of the sweep, each saved once."""
    # transformers 5.17 does not run a saved DeepSeek V4 in bfloat16.
    return saver(
        tmp_path_factory,
        lambda name: build(name).to(torch.float32 if name == "deepseek_v4" else torch.bfloat16),
    )


def plainly(folder: Path, prompts: Any, params: Any, **options: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERBATIM_RECORDED_STEPS", "0")
        with LLM(folder, max_length=200, **options) as llm:
            assert llm.info()["recorded_steps"] is None
            return all_facts(llm.generate(prompts, params))


@pytest.mark.parametrize(
    "options", slow_but([{}], [{}, dict(kv_dtype="int8", quantization="int4")]), ids=str
)
@pytest.mark.parametrize("name", slow_but(["falcon_h1", "llama4_text"], NAMES))
def test_recorded_steps_are_bit_identical_to_plain_steps(
    name: str, options: dict[str, Any], saved: Folders
) -> None:
    prompts, params = mixed_requests(7)
    params = [p.replace(max_tokens=9 + 4 * i, ignore_eos=True) for i, p in enumerate(params)]
    expected = plainly(saved(name), prompts, params, **options)
    with LLM(saved(name), max_length=200, **options) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        steps = llm.info()["recorded_steps"]
        assert isinstance(steps, int) and steps > 1, steps
        some = [llm.generate(prompts[i], params[i])[0] for i in (0, 5, 6)]
        assert all_facts(some) == [expected[i] for i in (0, 5, 6)]


@pytest.mark.parametrize("name", slow_but(INDEXED[:1], INDEXED[:2]))
def test_indexer_choices_are_returned_by_a_model_with_recorded_steps(
    name: str, saved: Folders
) -> None:
    prompts, params = [random_ids(20, 1)], LONG.replace(record_indices=True)
    expected = plainly(saved(name), prompts, params)
    with LLM(saved(name), max_length=200) as llm:
        llm.generate(prompts, LONG)
        assert llm.info()["recorded_steps"] == 1
        assert all_facts(llm.generate(prompts, params)) == expected


def test_recorded_steps_follow_sleep_and_weight_updates(saved: Folders) -> None:
    with LLM(saved("falcon_h1")) as llm:
        first = all_facts(llm.generate(PROMPTS, LONG))
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(PROMPTS, LONG)) == first
        new = load_file(saved("falcon_h1") / "model.safetensors")
        llm.update_weights({name: x * 1.5 if "norm" in name else x for name, x in new.items()})
        second = all_facts(llm.generate(PROMPTS, LONG))
        assert second != first and llm.info()["recorded_steps"] == 1
        llm.engine.runner.decoder.record_steps(lambda _: None)  # type: ignore[attr-defined]
        assert all_facts(llm.generate(PROMPTS, LONG)) == second


@pytest.mark.slow
def test_steps_of_a_module_edited_by_its_owner_are_not_recorded(saved: Folders) -> None:
    """The owner replaces a parameter, a number or a module, which a replay would not notice."""
    for edit in ("parameter", "number", "module", "asleep"):
        found = []
        for records in (True, False):
            with LLM(saved("llama4_text"), fused=records) as llm:
                llm.generate(PROMPTS, LONG)
                assert llm.info()["recorded_steps"] == (1 if records else None)
                if edit == "asleep":
                    llm.sleep()
                    llm.sleep(weights=True)
                    llm.wake()
                    llm.generate(PROMPTS, LONG)
                    assert llm.info()["recorded_steps"] == (1 if records else None)
                    llm.sleep()
                layer = llm.engine.module.model.layers[1]  # type: ignore[attr-defined]
                mlp = layer.feed_forward
                if edit == "number":
                    layer.input_layernorm.eps = 0.5
                elif edit == "module":
                    norm = copy.deepcopy(layer.post_attention_layernorm)
                    norm.weight.data *= 3
                    layer.post_attention_layernorm = norm
                else:
                    name, weight = next(mlp.named_parameters())
                    owner = mlp.get_submodule(name.rpartition(".")[0])
                    new = torch.nn.Parameter(weight.flip(0), requires_grad=False)
                    setattr(owner, name.rpartition(".")[2], new)
                if edit == "asleep":
                    llm.wake()
                found.append(all_facts(llm.generate(PROMPTS, LONG)))
                assert llm.info()["recorded_steps"] is None
        assert found[0] == found[1], edit


@pytest.mark.slow
def test_pipeline_stages_record_their_steps(saved: Folders) -> None:
    expected = plainly(saved("falcon_h1"), PROMPTS, LONG)
    with LLM(saved("falcon_h1"), max_length=200, placement=PipelineParallel(2)) as llm:
        assert all_facts(llm.generate(PROMPTS, LONG)) == expected
        for stage in llm.engine.runner.group.call("status"):  # type: ignore[attr-defined]
            assert stage["recorded_steps"] == 1


def test_micro_batches_of_one_recorded_size_keep_their_hidden_states(saved: Folders) -> None:
    prompts = [*PROMPTS, random_ids(5, 3)]
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True, hidden_states=True)
    expected = plainly(saved("falcon_h1"), prompts, params)
    with LLM(saved("falcon_h1"), max_length=200, placement=staged(micro_batches=2)) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        for stage in llm.engine.runner.group.call("status"):  # type: ignore[attr-defined]
            assert stage["recorded_steps"] == 1


def test_models_run_in_one_kernel_call_and_live_modules_are_not_recorded(folders: Folders) -> None:
    for model in (folders("llama"), build("falcon")):
        with LLM(model) as llm:
            llm.generate([random_ids(5, 1)], LONG)
            assert llm.info()["recorded_steps"] is None


class Reads(torch.nn.Module):
    """Its output depends on tensor values that are read in Python, or on random numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "item":
            return x * (1.0 if float(x.sum()) > 1e9 else 0.5)
        if self.how == "tolist":
            return x * (1.0 if sum(x.flatten().tolist()) > 1e9 else 0.5)
        if self.how == "random":
            return x + 0 * torch.rand_like(x)
        return x


@pytest.mark.parametrize(
    ("how", "said"),
    [("item", "_local_scalar_dense"), ("tolist", "tolist"), ("random", "rand_like")],
)
def test_steps_that_depend_on_tensor_values_or_randomness_are_not_recorded(
    how: str, said: str
) -> None:
    module = make_toy("llama")
    module.model.norm = torch.nn.Sequential(module.model.norm, Reads(how))
    expected = generated(LLM(module), [random_ids(5, 1)], LONG)
    with LLM(module) as llm:
        steps = resident.RecordedSteps(tape.record_on_cpu, ON_CPU)
        llm.engine.runner.decoder.record_steps(lambda _: steps)  # type: ignore[attr-defined]
        assert all_facts(llm.generate([random_ids(5, 1)], LONG)) == expected
        assert said in str(llm.info()["recorded_steps"])


@parametrize_combinations(name=["mamba2", "jetmoe"], recorded=[True, False])
def test_steps_on_two_threads_give_the_same_bits(
    name: str, recorded: bool, saved: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If layers run in pieces, the threads are a team for the whole step."""
    prompts, params = mixed_requests(7)
    expected = plainly(saved(name), prompts, params, num_threads=1)
    in_teams = []
    monkeypatch.setattr(decoder, "_TEAM_NUMBERS", 1)
    monkeypatch.setattr(decoder, "in_team", lambda work: in_teams.append(1) or in_team(work))
    monkeypatch.setenv("VERBATIM_RECORDED_STEPS", str(int(recorded)))
    with LLM(saved(name), max_length=200, num_threads=2) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
    assert in_teams


@pytest.mark.parametrize(
    "compute",
    [
        *(lambda x: x >> 1, lambda x: x << 1, lambda x: x & 6, lambda x: x | 9, lambda x: x ^ 5),
        *(lambda x: x.view(torch.uint8) >> 4, lambda x: x.float().exp(), lambda x: x.sort()[0]),
    ],
)
def test_repeated_step_reads_its_inputs_again(compute: Any) -> None:
    """Such as quantized weights, which an update replaces."""
    x, other = (
        torch.randint(1 << 20, (9,), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    )
    expected = compute(other)
    repeat, _ = tape.record_on_cpu(lambda: (Forward(compute(x), None), None))
    repeat()
    x.copy_(other)
    assert torch.equal(repeat()[0].logits, expected)


def test_unrepeatable_step_is_detected() -> None:
    calls, x = [0], torch.ones(3)

    def step() -> tuple[Forward, None]:
        calls[0] += 1
        return Forward(x * calls[0]), None

    repeat, _ = tape.record_on_cpu(step)
    with pytest.raises(NotSupported, match="not bit-identical"):
        repeat()


def test_memory_of_recordings_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_ids(5, i) for i in range(6)]
    params = [LONG.replace(max_tokens=6 + 5 * i) for i in range(6)]
    module = build("falcon")
    expected = generated(LLM(module), prompts, params)
    recorded = list[int]()

    def noted(step: Any) -> Any:
        replay, nbytes = tape.record_on_cpu(step)
        recorded.append(nbytes)
        return replay, nbytes

    for limit in (10**9, 1):
        recorded.clear()
        with LLM(module) as llm:
            steps = resident.RecordedSteps(noted, ON_CPU._replace(nbytes=limit))
            decoder = llm.engine.runner.decoder  # type: ignore[attr-defined]
            decoder.record_steps(lambda _, steps=steps: steps)
            for _ in range(2):
                assert all_facts(llm.generate(prompts, params)) == expected
            kept = steps.status
            assert min(recorded) > 1000
            assert (kept, len(recorded)) == ((6, 6) if limit > 1 else (1, len(recorded)))
            assert limit > 1 or len(recorded) > 6
