"""MTP (multi-token prediction) layers: the drafts are those of transformers, and no token changes."""

from __future__ import annotations

import functools
import gc
import json
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from support import toys
from support.layer_batches import whole_runs
from support.mtp_toys import Toy, save_as_qwen, save_with_mtp, toy
from support.pairwise import slow_but
from support.poison import poison, poison_blocks
from support.requests_mixed import all_facts, generated, mixed_requests
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    SamplingParams,
    VerbatimError,
    storyteller,
)
from verbatim.batch import Batch
from verbatim.model.mtp_source import Mtp, load_mtp

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)
STORY = "Once upon a time, there was a"
SLIDING, MIXTURE = "mistral", "deepseek_v3"


@cache
def story_models() -> Toy:
    """The model in the package and its MTP layer, as transformers reads them, in float32."""
    folder = storyteller.path()
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [rf"layers\.{main.config.num_hidden_layers}\."]
    return Toy(main, MtpModel.from_pretrained(main).eval())


class Spy:
    """Records what MTP layers draft, with NaN in all of their memory that was not written."""

    def __init__(self, llm: LLM) -> None:
        runner: Any = llm.engine.runner
        proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
        self.mtp, self.figures = runner.draft_layers, llm.engine.drafting.totals  # type: ignore[union-attr]
        self.logits: list[Tensor] = []  # of the latest proposal, [R, V] of each forward
        self.drafts: dict[Any, list[int]] = {}  # by the ids so far, with sample index
        self.all_logits: dict[Any, list[Tensor]] = {}
        pool = llm.engine.scheduler.pool
        stores = self.mtp.stores
        poison_blocks(
            pool,
            stores[-1],  # the others have copied their blocks before
            lambda blocks: [poison(s, blocks) for s in stores],
            pool.num_blocks,
            self.mtp.hidden,
        )
        run, propose = self.mtp.run, proposer.propose

        def noted_run(k: int, batch: Batch, store: Any) -> Tensor:
            logits: Tensor = run(k, batch, store)
            assert torch.isfinite(logits).all(), "NaN has reached a draft"
            self.logits.append(logits)
            return logits

        def noted_propose(sequences: list[Any], lengths: list[int]) -> list[list[int]]:
            self.logits = []
            answers: list[list[int]] = propose(sequences, lengths)
            for s, answer in zip(sequences, answers, strict=True):
                key = tuple(s.token_ids(0, s.num_tokens)), s.sample_index
                self.drafts[key] = answer
                self.all_logits[key] = self.logits
            return answers

        self.mtp.run, proposer.propose = noted_run, noted_propose
        self.mtp.chain = lambda *_: None  # a chain in one call returns no logits


def open_toy(pair: Toy, tokens: int | None = 4, **options: Any) -> LLM:
    """`tokens` to a draft; None opens the engine without drafts."""
    drafting: dict[str, Any] = {}
    if tokens is not None:
        drafting = dict(draft=Mtp(pair.mtp), num_draft_tokens=tokens)
    return LLM(pair.main, **{"kv_memory": "8MB", "block_size": 4, **drafting, **options})


def open_story(tokens: int | None, dtype: str = "float32", **options: Any) -> LLM:
    drafting = {} if tokens is None else dict(draft="mtp", num_draft_tokens=tokens)
    return LLM(dtype=dtype, **{"kv_memory": "16MB", **drafting, **options})


# Drafts of transformers, without a cache


def causal(length: int, window: int | None) -> Tensor:
    """An additive mask [1, 1, L, L]."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (window or length + 1))
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def layer_outputs(pair: Toy, k: int, ids: list[int], hidden: Tensor) -> Tensor:
    """The outputs `[S, H]` of layer `k` in slots 0 to S - 1, at once, from hidden states `[S, H]`."""
    mtp, slots = pair.mtp, len(hidden)
    embeds = mtp.embed_tokens(torch.tensor([ids[1 + k : 1 + k + slots]]))
    positions = torch.arange(1 + k, 1 + k + slots)[None]
    out: Tensor = mtp.layers[k](
        embeds,
        hidden[None],
        mtp.rotary_emb(embeds, position_ids=positions),
        causal(slots, getattr(mtp.config, "sliding_window", None)),
        positions,
        None,  # the cache, whose name changed with transformers 5.24
    )
    return out[0]


@torch.no_grad()
def drafted_from_scratch(pair: Toy, ids: list[int], tokens: int) -> tuple[list[int], list[Tensor]]:
    """A greedy draft after `ids`, and the logits `[V]` that each of its tokens was taken from."""
    main, mtp, count = pair.main, pair.mtp, len(pair.mtp.layers)
    ids, known, logits = list(ids), len(ids), []
    made = main.get_decoder()(torch.tensor([ids[:-1]])).last_hidden_state[0]
    for step in range(tokens):
        if step < count:
            inputs = made
        else:  # the last layer's own output stands in for the input of its next slot
            inputs = torch.cat([inputs, made[-1:]])
        made = layer_outputs(pair, min(step, count - 1), ids, inputs)
        logits.append(mtp._project_to_logits(made[None, -1:])[0, 0])
        ids.append(int(logits[-1].argmax()))
    return ids[known:], logits


def check_drafts(pair: Toy, spy: Spy, tokens: int, tolerance: float = 1e-4) -> None:
    """Every draft and its logits are those of a computation without any cache."""
    assert spy.drafts and not spy.figures.num_errors
    for (ids, _), draft in spy.drafts.items():
        expected, expected_logits = drafted_from_scratch(pair, list(ids), len(draft))
        assert 0 < len(draft) <= tokens and draft == expected
        found = spy.all_logits[ids, 0]
        for ours, theirs in zip(found, expected_logits, strict=True):
            torch.testing.assert_close(ours[-1], theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "layers"),
    slow_but(
        [(MIXTURE, 1)],
        [("qwen3", 1), ("qwen3", 2), ("qwen3", 3), (SLIDING, 2), (MIXTURE, 1), ("glm4_moe", 2)],
    ),
)
def test_drafts_and_logits_match_mtp_layers_of_transformers(name: str, layers: int) -> None:
    pair = toy(name, layers)
    with open_toy(pair, 5) as llm:
        spy = Spy(llm)
        for prompt in ([7], toys.random_ids(17, 1)):
            llm.generate(prompt, GREEDY)
        check_drafts(pair, spy, 5)


def test_bundled_model_drafts_match_after_accepted_and_rejected_drafts() -> None:
    with open_story(3) as llm:
        spy = Spy(llm)
        (result,) = llm.generate(STORY, GREEDY.replace(max_tokens=60))
        check_drafts(story_models(), spy, 3)
        drafted, accepted = result.metrics.draft.num_drafted, result.metrics.draft.num_accepted
    assert 0 < sum(accepted) < sum(drafted) and accepted[0] > 0.7 * drafted[0]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_first_draft_matches_mtp_forward_of_transformers(layers: int) -> None:
    pair, prompt = toy("qwen3", layers), toys.random_ids(21, 5)
    with open_toy(pair, layers) as llm:
        spy = Spy(llm)
        llm.generate(prompt, GREEDY.replace(max_tokens=layers + 2))
    (ids, _), draft = next(iter(spy.drafts.items()))
    row = torch.tensor([ids])
    with torch.no_grad():
        hidden = pair.main(row[:, :-1], output_hidden_states=True).hidden_states[-1]
        drafted, logits, _ = pair.mtp(
            input_ids=row[:, 1:],
            last_hidden_states=hidden,
            attention_mask=torch.ones_like(row[:, 1:]),
            position_ids=torch.arange(1, row.shape[1])[None],
            mtp_cache=MtpCache(config=pair.main.config.get_mtp_config()),
        )
    assert draft == drafted[0].tolist()
    for ours, theirs in zip(spy.all_logits[ids, 0], logits[0], strict=True):
        torch.testing.assert_close(ours[-1], theirs, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_gives_same_drafts() -> None:
    pair, ids = toy("qwen3", 2), toys.random_ids(30, 8)
    with open_toy(pair, 3) as whole, open_toy(pair, 3, max_batch_tokens=8) as pieces:
        spies = [Spy(whole), Spy(pieces)]
        results = [llm.generate(ids, GREEDY) for llm in (whole, pieces)]
    assert all_facts(results[0]) == all_facts(results[1])
    assert spies[0].drafts == spies[1].drafts


@pytest.mark.parametrize(
    ("name", "layers"),
    slow_but([("qwen3", 2)], [("qwen3", 1), ("qwen3", 2), ("glm4_moe", 1)]),
)
def test_draft_chain_in_one_call_matches_drafting_step_by_step(
    name: str, layers: int, tmp_path: Path
) -> None:
    save_with_mtp(toy(name, layers), tmp_path)
    drafts, calls = [], list[int]()
    options: dict[str, Any] = dict(max_sequences=3, max_batch_tokens=20, kv_memory="8MB")
    for chained in (True, False):
        with LLM(tmp_path, draft="mtp", num_draft_tokens=5, **options) as llm:
            spy = Spy(llm)
            if chained:
                plain = functools.partial(type(spy.mtp).chain, spy.mtp)

                def chain(*args: Any, plain: Any = plain) -> Any:
                    drawn = plain(*args)
                    calls.extend(map(len, drawn or ()))
                    return drawn

                spy.mtp.chain = chain
            llm.generate(*mixed_requests(8))
            drafts.append(spy.drafts)
    assert drafts[0] == drafts[1] and max(calls) > 1


# Sessions, and Qwen's hybrid models


@pytest.mark.parametrize("name", slow_but(["glm4_moe"], ["qwen3", "glm4_moe"]))
def test_session_turn_gets_same_drafts_as_one_prompt(name: str) -> None:
    pair, params = toy(name, 2), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with open_toy(pair, 3) as llm, llm.session(120, seed=7) as session, open_toy(pair, 3) as other:
        spy, fresh = Spy(llm), Spy(other)
        for inputs, position in (([5, 6, 7] * 5, None), ([9, 10], 14), ([9, 10], 20), ([8], None)):
            session.position = session.position if position is None else position
            result = session.generate(inputs, params)
            (alone,) = other.generate([result.prompt_token_ids], params.replace(seed=7))
            assert result.outputs[0].logprobs == alone.outputs[0].logprobs
            assert spy.drafts and spy.drafts == fresh.drafts
            spy.drafts.clear()
            fresh.drafts.clear()


@pytest.mark.skipif(
    "pre_fc_norm_hidden" not in Path(conversion_mapping.__file__).read_text(),
    reason="this version of transformers doesn't know Qwen's names of MTP layers",
)
@pytest.mark.parametrize("name", slow_but(["qwen3_5"], ["qwen3_5", "qwen3_next"]))
def test_mtp_layers_of_qwen_hybrids_draft_with_same_bits(name: str, tmp_path: Path) -> None:
    pair = toy(name, 1)
    save_as_qwen(pair, tmp_path)
    prompts, params = mixed_requests(8)
    expected = generated(LLM(str(tmp_path), kv_memory="8MB"), prompts, params)
    drafting: dict[str, Any] = dict(draft="mtp", num_draft_tokens=3, kv_memory="8MB")
    for options in ({}, dict(max_batch_tokens=9, block_size=5)):
        with LLM(str(tmp_path), **drafting, **options) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected
    with LLM(str(tmp_path), **drafting) as llm:
        spy = Spy(llm)
        llm.generate(toys.random_ids(11, 2), GREEDY)
        # transformers computes prompts by another formula.
        check_drafts(pair, spy, 3, tolerance=1e-3)


# The same drafts


def common_drafts(ours: Spy, others: Spy) -> int:
    """How many drafts both made after the same ids; they must be equal as far as both go."""
    assert not ours.figures.num_errors and not others.figures.num_errors
    common = ours.drafts.keys() & others.drafts.keys()
    for key in common:
        a, b = ours.drafts[key], others.drafts[key]
        assert a[: len(b)] == b[: len(a)], key
    return len(common)


def test_evicted_sequence_gets_same_drafts() -> None:
    pair = toy("qwen3", 2)
    prompts = [toys.random_ids(20 + i, i) for i in range(4)]
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=30, ignore_eos=True)
    with open_toy(pair, 3) as roomy, open_toy(pair, 3, kv_memory=240_000) as tiny:
        spies = Spy(roomy), Spy(tiny)
        expected, found = roomy.generate(prompts, params), tiny.generate(prompts, params)
        assert tiny.stats()["preemptions"] > 0
    assert all_facts(found) == all_facts(expected)
    assert common_drafts(*spies) > 60


def test_cached_prefix_gives_same_drafts() -> None:
    params = GREEDY.replace(max_tokens=40)
    with open_story(2, block_size=4) as llm:
        first = Spy(llm)
        (plain,) = llm.generate(STORY, params)
        before = dict(first.drafts)
        (cached,) = llm.generate(STORY, params)
        assert cached.num_cached_tokens > 0
        assert first.drafts == before  # no other drafts after the same ids
    assert cached.metrics.draft.num_accepted == plain.metrics.draft.num_accepted


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_shared_blocks_of_request_without_drafts_give_same_drafts(layers: int) -> None:
    pair, prompt = toy("qwen3", layers), toys.random_ids(18, 3)
    params = GREEDY.replace(max_tokens=40)
    with open_toy(pair, 4) as fresh, open_toy(pair, 4) as shared:
        spies = Spy(fresh), Spy(shared)
        fresh.generate(prompt, params)
        # Block by block, the second request swaps its own for those of the first, which hold the same.
        shared.generate([prompt] * 2, [params.replace(draft=False), params])
        assert shared.stats()["draft"]["errors"] == 0
    assert common_drafts(*spies) == len(spies[1].drafts) > 10
    assert spies[0].drafts == spies[1].drafts


def test_samples_of_one_prompt_are_drafted_from_their_own_tokens() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    with open_story(2) as together, open_story(2) as alone:
        (result,) = together.generate(STORY, params)
        acceptance = together.stats()["draft"]["acceptance"][0]
        alone.generate(STORY, params.replace(n=1))
        assert len({tuple(c.token_ids) for c in result.outputs}) == 3
        assert acceptance > 0.7 * alone.stats()["draft"]["acceptance"][0]


# Memory


def test_whole_model_decode_gives_mtp_layers_same_hidden_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, hidden = whole_runs(monkeypatch), []
    for fused in (True, False):
        with LLM(draft="mtp", num_draft_tokens=0, kv_memory="1MB", fused=fused) as llm:
            rows = llm.engine.runner.draft_layers.hidden.rows.zero_()  # type: ignore[attr-defined]
            llm.generate([STORY, "The dragon"], GREEDY)
            hidden.append(rows.view(torch.uint8).clone())
    assert sum(map(bool, runs)) >= GREEDY.max_tokens - 1
    assert torch.equal(*hidden)


def test_memory_of_mtp_layers_counts_as_kv_memory() -> None:
    pair = toy("qwen3", 2)
    with open_toy(pair, None) as plain, open_toy(pair, 2) as drafting:
        without, info = plain.info(), drafting.info()
        per_token = 2 * 2 * 20 * 2 * 4 + 2 * 64 * 4  # K and V of two layers, two hidden states
        assert info["kv_bytes_per_token"] == without["kv_bytes_per_token"] + per_token
        tokens = info["num_blocks"] * info["block_size"]
        assert info["kv_bytes"] == tokens * info["kv_bytes_per_token"] <= 8_000_000
        assert info["mtp_layers"] == 2 and info["parameters"] == without["parameters"]
        assert info["mtp_weight_bytes"] == 4 * info["mtp_parameters"] > 0
        mtp = drafting.engine.runner.draft_layers  # type: ignore[attr-defined]
        held = [weakref.ref(store) for store in mtp.stores]
    assert not any(store.nbytes for store in mtp.stores)
    del mtp, drafting
    gc.collect()
    assert all(store() is None for store in held)


# Live modules


def test_user_hooks_see_forwards_of_model_but_no_drafts() -> None:
    pair = toy("qwen3", 2)
    seen: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        for name, module in (("embed", pair.mtp.embed_tokens), ("head", pair.mtp.shared_head))
    ]
    try:
        with open_toy(pair, 3) as llm:
            (result,) = llm.generate([5, 6, 7], GREEDY)
            forwards = llm.stats()["forwards"]
    finally:
        for handle in handles:
            handle.remove()
    assert sum(result.metrics.draft.num_drafted) > 0
    assert seen.count("embed") == seen.count("head") == forwards


def test_modules_are_restored_on_close() -> None:
    pair = toy("qwen3", 1)

    def snapshot() -> list[Any]:
        return [
            [(name, list(m.__dict__), m.training) for name, m in model.named_modules()]
            + [dict(model.config.__dict__), len(model.get_input_embeddings()._forward_hooks)]
            for model in (pair.main, pair.mtp)
        ]

    pair.mtp.get_input_embeddings = lambda: pair.mtp.embed_tokens
    pair.mtp.train()
    try:
        before = snapshot()
        with open_toy(pair, 2) as llm:
            llm.generate([5, 6, 7], GREEDY)
        assert snapshot() == before
        assert not pair.main.get_decoder()._forward_hooks
    finally:
        pair.mtp.eval()


def test_edited_lm_head_takes_effect() -> None:
    main = toys.make_toy("qwen3", num_mtp_layers=1, mtp_layer_types=["full_attention"])
    pair = Toy(main, MtpModel(main, 1).eval())

    class Doubled(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    with open_toy(pair, 2) as llm:
        llm.generate([5, 6, 7], GREEDY)
        torch.nn.utils.parametrize.register_parametrization(main.lm_head, "weight", Doubled())
        drafted = llm.generate([5, 6, 7], GREEDY)
        assert llm.stats()["draft"]["errors"] == 0
    with open_toy(pair, None) as llm:
        assert all_facts(llm.generate([5, 6, 7], GREEDY)) == all_facts(drafted)


# Models that are rejected when opened


def opening_fails(error: type[VerbatimError], message: str, *args: Any, **options: Any) -> None:
    with pytest.raises(error, match=message):
        LLM(*args, **{"draft": "mtp", "kv_memory": "8MB", **options})


def test_live_module_requires_its_own_mtp_layers() -> None:
    pair, other = toy("qwen3", 1), toy("qwen3", 2)
    opening_fails(InvalidRequest, r"live module has no files.*Mtp\(model=", pair.main)
    opening_fails(InvalidRequest, "not those of the model", pair.main, draft=Mtp(other.mtp))
    opening_fails(InvalidRequest, "must be transformers' MtpModel", pair.main, draft=Mtp(pair.main))
    none = MtpModel(pair.main, 0)
    opening_fails(InvalidRequest, "it has 0 layers", pair.main, draft=Mtp(none))


def test_mtp_layers_may_come_from_another_folder(tmp_path: Path) -> None:
    """Also for a live module, whose config does not have them and is not changed."""
    pair, plain = toy("qwen3", 2), toys.make_toy("qwen3")
    save_with_mtp(pair, tmp_path / "beside")
    plain.load_state_dict(pair.main.state_dict())
    before = plain.config.to_dict()
    with LLM(plain, draft=Mtp(str(tmp_path / "beside")), num_draft_tokens=4) as llm:
        assert plain.config.to_dict() == before
        spy = Spy(llm)
        llm.generate(toys.random_ids(17, 1), GREEDY)
        check_drafts(pair, spy, 4)


def test_mtp_layers_and_bodies_that_cannot_run_on_flat_batches_are_rejected() -> None:
    main = toys.make_toy("qwen3", num_mtp_layers=1, mtp_layer_types=["full_attention"])
    mtp = MtpModel(main, 1).eval()
    mtp.layers[0].eh_proj = torch.nn.Linear(64, 64)
    opening_fails(NotSupported, "few tokens .* raised.*shapes", main, draft=Mtp(mtp))
    mtp = MtpModel(main, 1).eval()
    mtp.layers[0].mtp_block = torch.nn.Identity()
    opening_fails(NotSupported, "can't be run on flat batches", main, draft=Mtp(mtp))
    main.get_decoder = torch.nn.Identity  # a model's own methods may be wrong
    opening_fails(NotSupported, "hidden states of its body can't be kept", main, draft=Mtp(mtp))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with two MTP layers, to be damaged."""
    save_with_mtp(toy("qwen3", 2), tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("number", [None, 0, -1, "one", True])
def test_config_without_valid_num_mtp_layers_is_rejected(folder: Path, number: Any) -> None:
    edit_config(folder, lambda config: config.update(num_mtp_layers=number))
    if number is None:
        edit_config(folder, lambda config: config.pop("num_mtp_layers"))
    if not number:  # then their tensors are unused
        opening_fails(
            ModelError, r"30 tensors are not used.*layers\.3\.eh_proj", str(folder), draft=None
        )
    try:
        LLM(str(folder), kv_memory="8MB", unused_weights="ignore").close()
    except ModelError:  # transformers itself refuses such a config
        assert number in ("one", True, -1)
        return
    opening_fails(
        NotSupported,
        rf"Qwen3ForCausalLM has no MTP layers.*num_mtp_layers is {re.escape(repr(number))}",
        str(folder),
        unused_weights="ignore",
    )


def test_config_without_mtp_layer_types_is_rejected(folder: Path) -> None:
    edit_config(folder, lambda config: config.pop("mtp_layer_types"))
    opening_fails(NotSupported, "does not say what.*mtp_layer_types", str(folder))


@pytest.mark.parametrize("lost", ["eh_proj", "self_attn.q_proj", "", "shared_head.norm", None])
def test_incomplete_mtp_layers_are_rejected(folder: Path, lost: str | None) -> None:
    path = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if not k.startswith(f"model.layers.4.{lost}")}
    if lost is None:  # one has another shape
        kept["model.layers.4.eh_proj.weight"] = torch.zeros(64, 64)
    save_file(kept, path, metadata={"format": "pt"})
    opening_fails(ModelError, "does not hold 2 complete MTP layers", str(folder))


@pytest.mark.parametrize("ignored", [None, ["^other"]])
def test_loading_mtp_layers_does_not_change_model(folder: Path, ignored: list[str] | None) -> None:
    main, field = AutoModelForCausalLM.from_pretrained(folder), "_keys_to_ignore_on_load_unexpected"
    main.config.name_or_path = "org/elsewhere"
    main.__dict__.pop(field, None)
    if ignored is not None:
        setattr(main, field, ignored)
    before = list(main.__dict__), main.__dict__.get(field)
    mtp = load_mtp(main, folder)
    assert (list(main.__dict__), main.__dict__.get(field)) == before
    assert main.config.name_or_path == "org/elsewhere"
    assert mtp.shared_head is main.lm_head
    for ours, theirs in zip(toy("qwen3", 2).mtp.layers, mtp.layers, strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name
