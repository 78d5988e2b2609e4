"""LoRA adapters per request: results match merged weights, and are bit-identical alone and in a batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.layer_batches import whole_runs
from support.lora import merge, save_adapter
from support.programs import in_thread
from support.requests_mixed import all_facts, generated
from support.stages import ThreadHosts, serving, staged
from support.toys import make_toy, random_ids, scores_of
from verbatim import LLM, InvalidRequest, ModelError, NotSupported, Offload, SamplingParams, rl
from verbatim.errors import StageFailed
from verbatim.model.whole import WholeModel

RANKS = (4, 16, 3, 1, 8, 5, 2, 70)
NAMES = [f"adapter {i}" for i in range(len(RANKS))]
WIDE: dict[str, Any] = dict(hidden_size=192, intermediate_size=264, head_dim=48)


class Toy:
    """A toy model with eight adapters, one folder each, and requests for them and for the base model."""

    def __init__(self, folder: Path, name: str, dtype: torch.dtype, **settings: Any) -> None:
        self.make = lambda: make_toy(name, dtype=dtype, **settings)
        self.base = folder / "base"
        module = self.make()
        module.save_pretrained(self.base)
        self.adapters = {
            adapter: save_adapter(folder / adapter, module, rank=rank, seed=rank)
            for adapter, rank in zip(NAMES, RANKS, strict=True)
        }
        wanted = [None, *NAMES, NAMES[0], NAMES[0], None]
        self.prompts = [random_ids(9 + 2 * i, seed=i) for i in range(len(wanted))]
        self.params = [
            SamplingParams(max_tokens=7, seed=i, adapter=adapter, logprobs=2, ignore_eos=True)
            for i, adapter in enumerate(wanted)
        ]

    def open(self, **options: Any) -> LLM:
        return LLM(self.base, adapters=self.adapters, **options)

    def run(self, llm: LLM) -> list[Any]:
        return all_facts(llm.generate(self.prompts, self.params))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"), "qwen3", torch.bfloat16, **WIDE)


@pytest.fixture(scope="module")
def llm(toy: Toy) -> Iterator[LLM]:
    with toy.open() as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(toy: Toy) -> list[Any]:
    """The results of each request run alone, without fused layers and prefix cache."""
    with toy.open(fused=False, prefix_cache=False) as llm:
        pairs = zip(toy.prompts, toy.params, strict=True)
        return [all_facts(llm.generate([prompt], [params]))[0] for prompt, params in pairs]


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "phi3", "qwen3_next", "qwen3_moe", "deepseek_v3"]
)
def test_adapter_scores_match_merged_model(name: str, tmp_path: Path) -> None:
    layers = r"(self_attn\.\w+_proj|linear_attn\.\w+_proj|c_attn|c_fc|c_proj|mlp\.down_proj)"
    module = make_toy(name)
    module.save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "adapter", module, rank=6, layers=layers)
    ids = random_ids(23, seed=1)
    with LLM(tmp_path / "base", adapters={"a": folder}) as llm:
        for adapter in (None, "a"):
            if adapter:
                merge(module, folder)
            scores = torch.tensor(llm.score(ids, adapter=adapter)[1:])
            torch.testing.assert_close(scores, scores_of(module, ids), atol=2e-4, rtol=0)


def test_fused_recurrent_layers_with_adapter_match_unfused_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = whole_runs(monkeypatch)
    module, ids = make_toy("kimi_linear", dtype=torch.bfloat16), random_ids(23, seed=1)
    module.save_pretrained(tmp_path / "base")
    layers = r"self_attn\.(forget_gate\.f_a|g_a|[qkvbo])_proj"
    options = dict(adapters={"a": save_adapter(tmp_path / "a", module, rank=6, layers=layers)})
    with LLM(tmp_path / "base", **options) as llm:  # type: ignore[arg-type]
        without, scores = llm.score(ids), llm.score(ids, adapter="a")
    assert [bool(run and run.adapted) for run in runs] == [False, True] and scores != without
    with LLM(tmp_path / "base", fused=False, **options) as llm:  # type: ignore[arg-type]
        assert llm.score(ids, adapter="a") == scores


def test_mixed_adapter_batch_is_bit_identical_to_requests_alone(
    toy: Toy, llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight adapters and the base model in one batch: whole-model calls, fused layers, and unfused."""
    runs = whole_runs(monkeypatch)
    assert toy.run(llm) == expected
    assert any(run and run.adapted for run in runs)
    monkeypatch.setattr(WholeModel, "run", lambda *_, **__: None)
    llm.engine.call(llm.engine.scheduler.evict_all)
    llm.engine.scheduler.prefixes.forget()
    assert toy.run(llm) == expected
    with toy.open(fused=False) as plain:
        assert toy.run(plain) == expected
    assert len({json.dumps(str(fact)) for fact in expected}) == len(expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(kv_memory=60_000, block_size=4), id="evicted"),
        pytest.param(dict(max_batch_tokens=5), id="chunked"),
        pytest.param(
            dict(placement=Offload(weights=(0, 50, 50), micro_batches=2)),
            id="offload",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_adapter_results_are_bit_identical_when_evicted_chunked_or_offloaded(
    toy: Toy, expected: list[Any], options: dict[str, Any]
) -> None:
    with toy.open(**options) as llm:
        assert toy.run(llm) == expected


def test_adapters_on_stages_give_same_bits_after_stage_loss_and_sleep(
    toy: Toy, expected: list[Any]
) -> None:
    hosts = ThreadHosts()
    with toy.open(placement=staged(spares=0, hosts=hosts)) as llm:
        assert toy.run(llm) == expected
        hosts.hosts[1].kill()
        assert toy.run(llm) == expected
        llm.sleep(weights=True)
        llm.wake()
        assert toy.run(llm) == expected
        for name in ("lm_head", "model.embed_tokens"):
            with pytest.raises(NotSupported, match=f"{name} is not a linear layer"):
                llm.load_adapter("b", _with_layer(toy, name))
        hosts.room = 0
        serving(llm)[1].kill()
        for _ in range(2):
            with pytest.raises(StageFailed):
                llm.load_adapter("b", toy.adapters[NAMES[0]])
        with pytest.raises(StageFailed):
            llm.unload_adapter(NAMES[0])
        with pytest.raises(InvalidRequest, match="adapter 0"):
            toy.run(llm)
        hosts.room = None
        llm.generate([toy.prompts[0]], SamplingParams(max_tokens=1))
        for host in serving(llm):
            part: Any = host.stage.part
            assert len(part.decoder.adapters.numbers) == len(NAMES) - 1


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        pytest.param(dict(quantization="int4"), None, id="int4"),
        pytest.param(dict(quantization="w8a8"), None, id="w8a8", marks=pytest.mark.slow),
        pytest.param(dict(kv_dtype="int8"), None, id="K and V in int8", marks=pytest.mark.slow),
        pytest.param({}, "none", id="without kernels", marks=pytest.mark.slow),
    ],
)
def test_quantized_or_kernelless_adapter_batch_matches_requests_alone(
    toy: Toy, options: dict[str, Any], kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is not None:
        monkeypatch.setattr("verbatim.kernels.requested", lambda: kernels)
    with toy.open(**options) as llm:
        mixed = toy.run(llm)
    with toy.open(fused=False, prefix_cache=False, **options) as llm:
        pairs = zip(toy.prompts, toy.params, strict=True)
        assert mixed == [all_facts(llm.generate([p], [q]))[0] for p, q in pairs]


def test_cached_prefixes_are_not_shared_between_adapters(toy: Toy, tmp_path: Path) -> None:
    """Nor reused after another adapter is loaded under the same name."""
    prompt, params = random_ids(40, seed=3), SamplingParams(max_tokens=3, seed=1)
    other = save_adapter(tmp_path / "other", toy.make(), seed=99)

    def run(llm: LLM, adapter: str | None) -> tuple[Any, int]:
        (result,) = llm.generate([prompt], params.replace(adapter=adapter))
        return result.outputs[0].logprobs, result.num_cached_tokens

    found: list[Any] = []
    with LLM(toy.base, adapters={"a": toy.adapters[NAMES[0]]}) as llm:
        for adapter in (None, "a"):
            (first, cached), (again, reused) = run(llm, adapter), run(llm, adapter)
            assert first == again and not cached and reused
            found.append(first)
        llm.unload_adapter("a")
        llm.load_adapter("a", other)
        first, cached = run(llm, "a")
        assert first not in found and not cached
        llm.load_adapter("a", toy.adapters[NAMES[0]], replace=True)
        assert run(llm, "a") == (found[1], 0)


def test_session_can_change_adapter_between_turns(toy: Toy, llm: LLM) -> None:
    first, second = SamplingParams(max_tokens=5), random_ids(6, seed=8)
    with llm.session(seed=4) as session:
        session.generate(toy.prompts[0], first.replace(adapter=NAMES[0]))
        ids = session.token_ids
        turn = session.generate(second, first.replace(adapter=NAMES[1]))
        with pytest.raises(NotSupported, match="an adapter computed"):
            session.save("/nowhere", kv=True)
    whole = llm.generate([[*ids, *second]], first.replace(adapter=NAMES[1], seed=4))
    assert whole[0].outputs[0].token_ids == turn.outputs[0].token_ids


def test_running_request_finishes_after_its_adapter_is_unloaded(toy: Toy) -> None:
    params = SamplingParams(max_tokens=30, seed=2, ignore_eos=True, adapter="a")
    with LLM(toy.base, adapters={"a": toy.adapters[NAMES[0]]}) as llm:
        expected = llm.generate([toy.prompts[0]], params)[0].outputs[0].token_ids
        stream = llm.stream(toy.prompts[0], params)
        ids = list(next(stream).token_ids)
        admitted = llm.engine.admission.admit(toy.prompts[0], params)
        llm.unload_adapter("a")
        assert llm.adapters == []
        with pytest.raises(InvalidRequest, match="none is loaded"):
            llm.generate([toy.prompts[0]], params)
        with pytest.raises(InvalidRequest, match="none is loaded"):
            llm.engine.run([admitted])
        ids += [i for delta in stream for i in delta.token_ids]
        assert ids == expected
        assert not llm.engine.runner.decoder.adapters.numbers  # type: ignore[attr-defined]


def test_loading_and_unloading_adapters_does_not_affect_running_requests(
    toy: Toy, llm: LLM, expected: list[Any]
) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            llm.load_adapter("guest", toy.adapters[NAMES[2]])
            llm.generate([toy.prompts[0]], SamplingParams(max_tokens=2, adapter="guest"))
            llm.unload_adapter("guest")

    churning = in_thread(churn)
    try:
        for _ in range(3):
            assert toy.run(llm) == expected
    finally:
        stop.set()
        churning.result()


def test_adapters_stay_loaded_when_base_weights_are_updated(toy: Toy, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, adapter=NAMES[0])
    other = make_toy("qwen3", dtype=torch.bfloat16, seed=7, **WIDE)
    with toy.open() as llm:
        llm.update_weights(other.state_dict())
        found = llm.generate([toy.prompts[0]], params)[0].prompt_logprobs
    other.save_pretrained(tmp_path)
    with LLM(tmp_path, adapters={NAMES[0]: toy.adapters[NAMES[0]]}) as llm:
        assert llm.generate([toy.prompts[0]], params)[0].prompt_logprobs == found


def test_update_weights_accepts_adapter_folder(tmp_path: Path) -> None:
    module = make_toy("llama")
    module.save_pretrained(tmp_path / "base")
    folder = save_adapter(
        tmp_path / "adapter", module, base_model_name_or_path=str(tmp_path / "base")
    )
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with LLM(tmp_path / "base") as llm, LLM(folder) as merged:
        llm.update_weights(folder)
        ours, theirs = (x.generate([[5, 6, 7]], params)[0] for x in (llm, merged))
    assert ours.prompt_logprobs == theirs.prompt_logprobs


def test_rollout_logprobs_match_scores_with_its_adapter(toy: Toy, llm: LLM) -> None:
    """And differ from scores with another adapter or none."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, adapter=NAMES[1])
    made = rl.rollout(llm, toy.prompts[:2], params, group_size=2, seed=1)
    scores = [
        rl.score(llm, made.sequences, made.attention_mask, adapter=adapter).gather(2, made.columns)
        for adapter in (NAMES[1], NAMES[0], None)
    ]
    assert torch.equal(scores[0][made.action_mask], made.logprobs[made.action_mask])
    assert not torch.equal(scores[0], scores[1]) and not torch.equal(scores[0], scores[2])


def test_beam_search_on_live_module_supports_adapters(toy: Toy) -> None:
    params = SamplingParams(num_beams=3, n=2, max_tokens=5, seed=0, temperature=0.0)
    params, module = params.replace(adapter=NAMES[4]), toy.make()
    found = generated(LLM(module, adapters=toy.adapters), toy.prompts, params)
    with LLM(module, adapters=toy.adapters, fused=False, max_batch_tokens=7) as llm:
        assert all_facts(llm.generate(toy.prompts, params)) == found
    assert not any("forward" in layer.__dict__ for layer in module.modules())


# ---- rejected adapters


def _with_layer(toy: Toy, name: str) -> Path:
    """Return the folder of an adapter that also has matrices for the layer `name`."""
    folder = toy.base.parent / f"with {name}"
    layers = rf"(self_attn\.q_proj|{name})"
    return save_adapter(folder, toy.make(), layers=layers)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_adapter_for_lm_head_or_embedding_is_rejected(toy: Toy, llm: LLM, name: str) -> None:
    with pytest.raises(NotSupported, match=f"{name} is not a linear layer"):
        llm.load_adapter("b", _with_layer(toy, name))
    assert "b" not in llm.adapters


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ModelError, "must have lora_A, lora_B, lora_magnitude", {"use_dora": True}),
        (NotSupported, "init_lora_weights='pissa_niter_4'", {"init_lora_weights": "pissa_niter_4"}),
        (NotSupported, "init_lora_weights='loftq'", {"init_lora_weights": "loftq"}),
        (NotSupported, "a_new_field", {"a_new_field": 1}),
        (NotSupported, "rank 300; at most 256", {"rank": 300}),
        (NotSupported, "peft_type='IA3'", {"peft_type": "IA3"}),
        (ModelError, "must be a number", {"lora_alpha": "8"}),
        (ModelError, "must be a finite number", {"lora_alpha": float("inf")}),
        (ModelError, "finite number", {"lora_alpha": 10**400}),
        (ModelError, "finite number", {"lora_alpha": 1e300}),
        (NotSupported, "alpha_pattern", {"alpha_pattern": ["q_proj"]}),
        (NotSupported, "alpha_pattern", {"alpha_pattern": {"(": 2}}),
        # A regex that backtracks for years.
        (NotSupported, "alpha_pattern", {"alpha_pattern": {"(.|.)*!": 2}}),
    ],
)
def test_unsupported_adapter_config_is_rejected(
    toy: Toy, llm: LLM, tmp_path: Path, error: Any, words: str, change: dict[str, Any]
) -> None:
    folder = save_adapter(tmp_path / "b", toy.make(), **change)
    with pytest.raises(error, match=words):
        llm.load_adapter("b", folder)


def test_damaged_adapter_is_rejected(toy: Toy, llm: LLM, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "b", toy.make(), rank=2)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    layer = first.removesuffix(".lora_A.weight")

    def refused(changed: dict[str, torch.Tensor], error: Any, words: str) -> None:
        save_file(changed, file)
        with pytest.raises(error, match=words):
            llm.load_adapter("b", folder)

    nan = torch.full_like(tensors[first], torch.nan)
    wide = torch.zeros(2, 7)
    refused({**tensors, first: nan}, ModelError, "NaN or infinity")
    refused({**tensors, first: wide}, InvalidRequest, "map 7 to")
    refused({**tensors, first: tensors[first][:1].clone()}, ModelError, "inconsistent shapes")
    refused({**tensors, first: tensors[first].int()}, ModelError, "int32: must be float32")
    ranks = {first: torch.zeros(3, 192), f"{layer}.lora_B.weight": torch.zeros(192, 3)}
    refused({**tensors, **ranks}, ModelError, "r of .* is not 3")
    large = torch.full_like(tensors[first], torch.finfo(torch.float32).max)
    refused({**tensors, first: large}, ModelError, r"infinity in torch\.bfloat16")
    refused(
        {k: v for k, v in tensors.items() if k != f"{layer}.lora_B.weight"}, ModelError, "lora_B"
    )
    refused({**tensors, "base_model.model.x.weight": wide}, NotSupported, "is not a LoRA matrix")
    refused({}, ModelError, "no LoRA matrices")
    bare = {key.removeprefix("base_model.model."): x.clone() for key, x in tensors.items()}
    refused(tensors | bare, ModelError, "does not begin with")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        llm.load_adapter("b", folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors; load"):
        llm.load_adapter("b", folder)


def test_invalid_adapter_names_and_paths_are_rejected(toy: Toy, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'adapter 1'"):
        llm.generate([toy.prompts[0]], SamplingParams(adapter="adaptr 1"))
    with pytest.raises(InvalidRequest, match="is loaded; unload it first"):
        llm.load_adapter(NAMES[0], toy.adapters[NAMES[0]])
    with pytest.raises(InvalidRequest, match="must be one of"):
        llm.unload_adapter("other")
    for name in ("", "\ud800", 5):
        with pytest.raises(InvalidRequest, match="string of printable characters"):
            llm.load_adapter(name, toy.adapters[NAMES[0]])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="path of a folder"):
        llm.load_adapter("other", None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="dict of folders"):
        LLM(toy.make(), adapters=["law"])  # type: ignore[arg-type]
    assert llm.info()["adapters"][NAMES[1]]["rank"] == 16
