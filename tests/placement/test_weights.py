"""Weight updates in place: all or nothing, and generation afterwards as with a newly opened model."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from support.programs import in_thread
from support.requests_mixed import submitted
from support.toys import Folders
from support.toys import make_toy as make
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    Result,
    SamplingParams,
    VerbatimError,
    sample,
)
from verbatim.compat import petals
from verbatim.weights.update import NewWeights, _is_finite

PROMPTS = [[5, 9, 23, 40], [7, 8], [5, 9, 23, 41, 3, 3, 60]]
LONG = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)


def other(name: str = "llama") -> torch.nn.Module:
    """The same architecture with other weights."""
    return make(name, seed=1)


def words(llm: LLM, params: SamplingParams = LONG) -> list[tuple[list[int], list[float]]]:
    found = llm.generate(PROMPTS, params)
    return [(c.token_ids, c.logprobs) for result in found for c in result.outputs]


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in module.state_dict().items()}


def bits(module: torch.nn.Module) -> list[tuple[str, int, list]]:
    return [(n, p.data_ptr(), p.flatten().tolist()) for n, p in module.named_parameters()]


@pytest.fixture
def folder(folders: Folders) -> Path:
    return folders("llama", seed=1)


def in_one_buffer(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors one by one, each in the memory of the one before."""
    buffer = torch.empty(max(t.numel() for t in weights.values()))
    for name, tensor in weights.items():
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def in_shards(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save weights in two files, without a config."""
    items = list(weights.items())
    save_file(dict(items[:9]), folder / "a.safetensors")
    save_file(dict(items[9:]), folder / "b.safetensors")
    return folder


# Forms of new weights, made from their tensors, their folder and an empty folder.
WEIGHT_FORMS: dict[str, Callable[[dict[str, torch.Tensor], Path, Path], object]] = {
    "dict": lambda new, folder, empty: new,
    "pairs": lambda new, folder, empty: list(new.items()),
    "iterator": lambda new, folder, empty: iter(new.items()),
    "one buffer": lambda new, folder, empty: in_one_buffer(new),
    "folder": lambda new, folder, empty: folder,
    "file": lambda new, folder, empty: str(folder / "model.safetensors"),
    "shards": lambda new, folder, empty: in_shards(new, empty),
    "module": lambda new, folder, empty: other(),
    "names of wrappers": lambda new, folder, empty: {
        f"module._orig_mod.{n}".replace("layers.1.", "layers.1._orig_mod."): t
        for n, t in new.items()
    },
}


@pytest.mark.parametrize("kind", WEIGHT_FORMS)
def test_every_form_of_new_weights_gives_tokens_of_new_model(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    given = WEIGHT_FORMS[kind](state(other()), folder, tmp_path)
    with LLM(make("llama")) as llm, LLM(other()) as fresh:
        before = words(llm)
        assert llm.update_weights(given) == 1
        assert words(llm) == words(fresh) != before


def test_submodule_called_module_keeps_its_name() -> None:
    module = nn.Sequential()
    module.adapter = nn.LayerNorm(4)
    module.adapter.module = nn.LayerNorm(4)
    NewWeights(module, module.state_dict(), check_finite=True)


def test_update_keeps_memory_of_live_module() -> None:
    module = make("llama")
    places = {n: p.data_ptr() for n, p in module.named_parameters()}
    with LLM(module) as llm:
        llm.update_weights(other())
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == places
    assert all(p.requires_grad for p in module.parameters())


def test_float32_weights_are_rounded_for_bfloat16_engine() -> None:
    new = other()
    with LLM(make("llama").bfloat16()) as llm, LLM(other().bfloat16()) as fresh:
        llm.update_weights(new, check_finite=True)
        assert words(llm) == words(fresh)


def test_folder_is_read_in_the_dtype_of_the_engine(folder: Path, tmp_path: Path) -> None:
    other().half().save_pretrained(tmp_path)
    options: dict[str, Any] = dict(dtype="float32")
    with LLM(folder, **options) as llm, LLM(tmp_path, **options) as fresh:
        llm.update_weights(tmp_path)
        assert words(llm) == words(fresh)


BAD = {
    "missing": lambda s: s.pop("model.layers.1.mlp.up_proj.weight"),
    "unknown": lambda s: s.update({"model.layers.9.x": torch.zeros(1)}),
    "shape": lambda s: s.update({"model.norm.weight": torch.ones(65)}),
    "rank": lambda s: s.update({"model.norm.weight": torch.ones(1, 64)}),
    "integers": lambda s: s.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
    "complex": lambda s: s.update({"model.norm.weight": torch.ones(64, dtype=torch.complex64)}),
    "NaN": lambda s: s["model.layers.2.mlp.up_proj.weight"].view(-1)[-1:].fill_(torch.nan),
    "infinity": lambda s: s["lm_head.weight"].view(-1)[:1].fill_(-torch.inf),
    "twice": lambda s: s.update({"module.model.norm.weight": torch.ones(64)}),
    "number": lambda s: s.update({"model.norm.weight": 5}),
    "name": lambda s: s.update({5: torch.ones(1)}),
    "meta": lambda s: s.update({"model.norm.weight": torch.ones(64, device="meta")}),
    "sparse": lambda s: s.update({"model.norm.weight": torch.ones(64).to_sparse()}),
}


@pytest.mark.parametrize("fault", BAD)
def test_invalid_update_changes_nothing(fault: str) -> None:
    module, new = make("llama"), state(other())
    BAD[fault](new)
    with LLM(module) as llm:
        before = words(llm), bits(module)
        with pytest.raises((InvalidRequest, NotSupported), match="weights"):
            llm.update_weights(new, check_finite=True)
        assert (words(llm), bits(module)) == before
        assert llm.stats()["weight_version"] == 0


def test_overflow_of_model_dtype_fails_check_finite() -> None:
    new = state(other())
    new["model.norm.weight"][0] = 3.4e38
    with LLM(make("llama").bfloat16()) as llm:
        with pytest.raises(InvalidRequest, match=r"model\.norm\.weight holds NaN or infinity"):
            llm.update_weights(new, check_finite=True)
        llm.update_weights(new)  # without check_finite


@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
)
def test_check_finite_agrees_with_torch_isfinite(dtype: torch.dtype, into: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for size, place in ((1, 0), (9, 3), (40_001, 40_000), (40_001, 77)):
        for odd in (torch.nan, torch.inf, -torch.inf, most, -most, 0.0, 3.4e38, 1e39):
            tensor = torch.linspace(-2, 2, size, dtype=torch.float64)
            tensor[place] = odd
            tensor = tensor.to(dtype)
            expected = bool(tensor.to(into).isfinite().all())
            assert _is_finite(tensor, into) is expected, (size, place, odd)
            assert _is_finite(tensor.expand(2, -1).t(), into) is expected
    assert _is_finite(torch.empty(0, 3, dtype=dtype), into)


@pytest.mark.parametrize(
    "weights", [5, None, torch.ones(3), ["a", "b"], [("a",)], [(1, 2, 3)], [([], torch.ones(3))]]
)
def test_invalid_weights_arguments_are_rejected(weights) -> None:
    with LLM(make("llama")) as llm, pytest.raises(InvalidRequest, match="weights"):
        llm.update_weights(weights)


def test_iterator_that_raises_changes_nothing() -> None:
    module, pairs = make("llama"), state(other()).items()

    def broken():
        yield from itertools.islice(pairs, 3)
        raise ConnectionError("the trainer went away")

    with LLM(module) as llm:
        before = bits(module)
        with pytest.raises(ConnectionError):
            llm.update_weights(broken())
        assert bits(module) == before


def test_invalid_weight_folders_are_rejected(tmp_path: Path, folder: Path) -> None:
    with LLM(make("llama")) as llm:
        with pytest.raises(ModelError, match="neither a folder of safetensors"):
            llm.update_weights(tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelError, match="neither a folder of safetensors"):
            llm.update_weights(tmp_path / "empty")
        (tmp_path / "cut.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:5000]
        )
        with pytest.raises(ModelError, match=r"cut\.safetensors is damaged or cut short"):
            llm.update_weights(tmp_path / "cut.safetensors")


def test_one_tied_name_is_enough_and_two_must_have_equal_tensors() -> None:
    module, fresh = (make("qwen2", seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    new = state(fresh)
    with LLM(module) as llm, LLM(fresh) as other:
        with pytest.raises(InvalidRequest, match="tied in this model, but differ"):
            llm.update_weights(new | {"lm_head.weight": new["lm_head.weight"] + 1})
        llm.update_weights({name: x for name, x in new.items() if name != "lm_head.weight"})
        assert words(llm) == words(other)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            new[name][0, 0] = torch.nan  # the same NaN
        llm.update_weights(new)
        assert module.lm_head.weight[0, 0].isnan()


@pytest.mark.parametrize("shared", [lambda x: x, lambda x: torch.from_numpy(x.detach().numpy()[:])])
def test_memory_of_the_model_itself_is_read_before_it_is_overwritten(shared: Any) -> None:
    module = make("llama")
    a, b = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    weights = dict(module.state_dict())
    first, second = weights[a].clone(), weights[b].clone()
    weights[a], weights[b] = shared(weights[b]), shared(weights[a])
    with LLM(module) as llm:
        llm.update_weights(weights)
    assert torch.equal(module.state_dict()[a], second)
    assert torch.equal(module.state_dict()[b], first)


def test_self_overlapping_buffer_is_rejected_before_any_write() -> None:
    module = make("llama")
    module.register_buffer("shared", torch.zeros(1).expand(5))
    before = bits(module)
    new = {**state(other()), "shared": torch.arange(5.0)}
    with LLM(module) as llm, pytest.raises(NotSupported, match="shared is in shared memory"):
        llm.update_weights(new)
    assert bits(module) == before


# The signal may also arrive in a garbage collector callback, where Python only reports the exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_during_update_leaves_no_mixed_weights() -> None:
    """A signal handler that raises, such as a timeout's, interrupts Python code but never the writes."""
    module, states = make("llama"), [state(make("llama", seed=i)) for i in range(2)]
    whole = [[t.flatten().tolist() for t in s.values()] for s in states]

    def late(*_):
        raise TimeoutError

    broken_off = 0
    handler = signal.signal(signal.SIGALRM, late)
    try:
        with LLM(module) as llm:
            for i in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + i * 6e-5)
                    llm.update_weights(states[i % 2])
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except TimeoutError:
                    broken_off += 1
                assert [t.flatten().tolist() for t in state(module).values()] in whole
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert broken_off > 5


def test_two_engines_of_one_module_see_each_others_updates() -> None:
    module = make("llama")
    with LLM(module) as a, LLM(module) as b, LLM(other()) as fresh:
        stream = a.stream(PROMPTS[0], LONG)
        next(stream)
        b.update_weights(other())
        *_, last = stream
        assert last.result is not None
        assert last.result.outputs[0].weight_versions == [0] + [1] * 11
        assert words(a) == words(b) == words(fresh)


def test_update_never_runs_during_another_engines_forward() -> None:
    module, states = make("llama"), [state(make("llama", seed=i)) for i in range(2)]
    scores = []
    for weights in states:
        module.load_state_dict(weights)
        with LLM(module) as llm:
            scores.append(llm.score(PROMPTS[2]))
    stop = threading.Event()

    def trainer() -> None:
        with LLM(module) as b:
            for weights in itertools.cycle(states):
                b.update_weights(weights)
                if stop.is_set():
                    return

    with LLM(module) as a:
        training = in_thread(trainer)
        try:
            for _ in range(150):
                assert a.score(PROMPTS[2]) in scores
        finally:
            stop.set()
            training.result()


def test_optimizer_step_during_stream_is_detected() -> None:
    module, prompt = make("llama"), list(range(3, 60))
    with LLM(module) as llm:
        stream = llm.stream(prompt, LONG)
        next(stream)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        module(torch.tensor([prompt])).logits.square().mean().backward()
        optimizer.step()
        (beside,) = llm.generate([prompt], LONG)  # the stream has computed its prefix
        assert beside.weight_version == 1
        with LLM(module) as fresh:
            expected = fresh.generate([prompt], LONG)[0].outputs[0]
            assert beside.outputs[0].logprobs == expected.logprobs
        *_, last = stream
        assert last.result is not None
        assert last.result.outputs[0].weight_versions == [0] + [1] * 11


def test_update_drops_cached_prefixes(folder: Path, folders: Folders) -> None:
    prompt = [list(range(3, 60))]
    with LLM(folders("llama")) as llm, LLM(folder) as fresh:
        llm.generate(prompt, LONG)
        assert llm.generate(prompt, LONG)[0].num_cached_tokens > 0
        llm.update_weights(folder)
        after, expected = llm.generate(prompt, LONG)[0], fresh.generate(prompt, LONG)[0]
        assert after.num_cached_tokens == 0
        assert after.outputs[0].logprobs == expected.outputs[0].logprobs


def test_weight_version_is_incremented_or_given() -> None:
    with LLM(make("llama")) as llm:
        assert llm.generate(PROMPTS[0], LONG)[0].weight_version == 0
        assert llm.update_weights(other()) == 1
        assert llm.update_weights(other(), version=70) == 70
        assert llm.weights_changed() == 71
        result = llm.generate(PROMPTS[0], LONG)[0]
        assert result.weight_version == llm.stats()["weight_version"] == 71
        assert result.outputs[0].weight_versions == [71] * 12
        for version in ("x", True, -1, 2**63, 1.0):
            with pytest.raises(InvalidRequest, match="version="):
                llm.update_weights(other(), version=version)
        for switch in ("restart", "check_finite"):
            with pytest.raises(InvalidRequest, match=switch):
                llm.update_weights(other(), **{switch: "no"})
        assert llm.stats()["weight_version"] == 71


def updated_after(llm: LLM, steps: int, prompts, params, **options) -> list[Result]:
    """Return the results of requests with one weight update after `steps` steps."""
    requests = submitted(llm, prompts, [params] * len(prompts))
    assert all(llm.engine.step() for _ in range(steps))
    llm.update_weights(other(), **options)
    while llm.engine.step():
        pass
    return [request.result for request in requests]


def spliced(old: LLM, new: LLM, prompt: list[int], versions: list[int]) -> list[int]:
    """Return tokens sampled one by one, each with the weights of its version."""
    row = list(prompt)
    for version in versions:
        module = (new if version else old).engine.runner.module
        logits = module(torch.tensor([row])).logits[:, -1].float()
        row += sample(logits, seed=LONG.seed, position=len(row)).tolist()
    return row[len(prompt) :]


def test_running_requests_continue_with_new_weights() -> None:
    with LLM(make("llama")) as llm, LLM(make("llama")) as old, LLM(other()) as new:
        found = [result.outputs[0] for result in updated_after(llm, 5, PROMPTS, LONG)]
        for prompt, completion in zip(PROMPTS, found, strict=True):
            versions = completion.weight_versions
            assert len(versions) == 12
            assert versions == sorted(versions)
            assert set(versions) == {0, 1}
            assert completion.token_ids == spliced(old, new, prompt, versions)


def test_running_requests_start_over_with_restart() -> None:
    with LLM(make("llama")) as llm, LLM(other()) as fresh:
        params = SamplingParams(max_tokens=12, seed=3, n=3, ignore_eos=True, prompt_logprobs=2)
        found = updated_after(llm, 5, PROMPTS, params, restart=True)
        expected = fresh.generate(PROMPTS, params)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.prompt_logprobs == theirs.prompt_logprobs
            for a, b in zip(ours.outputs, theirs.outputs, strict=True):
                assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
                assert a.weight_versions == [1] * 12
        assert llm.stats()["blocks_used"] == 0


def test_stream_already_read_continues_despite_restart() -> None:
    with LLM(make("llama")) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        ids = [*next(stream).token_ids, *next(stream).token_ids]
        llm.update_weights(other(), restart=True)
        deltas = list(stream)
        for delta in deltas:
            ids += delta.token_ids
        result = deltas[-1].result
        assert result is not None
        assert result.outputs[0].token_ids == ids
        assert result.outputs[0].weight_versions == [0, 0] + [1] * 10


@pytest.mark.parametrize("restart", [False, True])
def test_beam_search_continues_or_restarts_after_update(restart: bool) -> None:
    params = SamplingParams(num_beams=3, n=3, max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(make("llama"), max_sequences=2) as llm, LLM(other()) as fresh:
        ours = updated_after(llm, 4, PROMPTS, params, restart=restart)
        theirs = fresh.generate(PROMPTS, params)
        assert llm.stats()["blocks_used"] == 0
        for a, b in zip(ours, theirs, strict=True):
            for beam in a.outputs:
                assert len(beam.weight_versions) == len(beam.token_ids) == len(beam.logprobs)
            if restart:
                assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]


def test_update_during_prefill_recomputes_all_prompt_logprobs() -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    prompt = [list(range(3, 100))]
    with LLM(make("llama"), max_batch_tokens=16) as llm, LLM(other()) as fresh:
        ours, theirs = updated_after(llm, 3, prompt, params)[0], fresh.generate(prompt, params)[0]
        assert ours.prompt_logprobs == theirs.prompt_logprobs


def test_update_during_sleep_is_rejected_only_if_weights_sleep(
    folder: Path, folders: Folders
) -> None:
    with LLM(folders("llama")) as llm, LLM(other()) as fresh:
        llm.sleep()
        llm.update_weights(folder)
        llm.wake()
        assert words(llm) == words(fresh)
        with pytest.raises(NotSupported, match="were changed since they were read"):
            llm.sleep(weights=True)
    with LLM(folders("llama")) as llm:
        llm.sleep(weights=True)
        with pytest.raises(VerbatimError, match="call wake"):
            llm.update_weights(folder)
        llm.wake()
        assert llm.update_weights(folder) == 1


def test_update_of_closed_engine_is_rejected() -> None:
    llm = LLM(make("llama"))
    llm.close()
    with pytest.raises(VerbatimError, match="closed"):
        llm.update_weights(other())


def test_weights_changed_applies_external_edits_of_live_module() -> None:
    module = make("llama")
    with LLM(module) as llm, LLM(other()) as fresh:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        module.load_state_dict(other().state_dict())
        llm.weights_changed()
        *_, last = stream
        assert last.result is not None
        assert last.result.outputs[0].weight_versions == [0] + [1] * 11
        assert words(llm) == words(fresh)


def test_petals_session_continues_across_weight_update() -> None:
    """After the update, it gives the tokens of the new weights after all earlier tokens."""
    prompt = torch.tensor([[5, 9, 300, 41]])
    plain = dict(max_new_tokens=6, do_sample=False, top_k=0, top_p=1.0, eos_token_id=None)
    from_pretrained = petals.AutoDistributedModelForCausalLM.from_pretrained
    with LLM() as llm, LLM() as before:
        weights = llm.engine.runner.decoder.raw_module.named_parameters()
        drawn = torch.Generator().manual_seed(1)
        new = {n: t + 0.02 * torch.randn(t.shape, generator=drawn).to(t.dtype) for n, t in weights}
        model = from_pretrained(llm)
        with model.inference_session(max_length=64):
            first = model.generate(prompt, **plain)
            llm.update_weights(new)
            second = model.generate(None, **plain)
        assert torch.equal(second, model.generate(first, **plain)[:, first.shape[1] :])
        assert torch.equal(first, from_pretrained(before).generate(prompt, **plain))
        unchanged = from_pretrained(before).generate(first, **plain)[:, first.shape[1] :]
        assert not torch.equal(second, unchanged)
