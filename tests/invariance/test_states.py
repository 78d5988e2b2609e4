"""Models with recurrent layers: states are read, written, shared and freed as K and V are."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from support.pairwise import parametrize_combinations, slow_but
from support.requests_mixed import (
    all_facts,
    check_nothing_is_left,
    facts,
    generated,
    keep_prefixes,
    mixed_requests,
    submitted,
)
from support.stages import serving, staged
from support.toys import RECURRENT_FAMILIES, RECURRENT_TOYS, make_toy, random_ids, scores_of
from verbatim import LLM, InvalidRequest, SamplingParams, rl
from verbatim.api.opening import open_engine
from verbatim.placement.options import EngineOptions

PLAIN_OPEN = open_engine  # taken before a fixture replaces it by one that poisons blocks
ONE_OF_EACH = ["qwen3_next", "granite_hybrid", "lfm2", "mamba"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=1)

SHORT = GREEDY.replace(max_tokens=5)
# A few in the fast suite, all of them in the slow one.
ALL_TOYS = slow_but(ONE_OF_EACH[::2], RECURRENT_TOYS)
ONE_FAST = slow_but(["qwen3_next"], ("qwen3_next", "mamba", "deepseek_v4", *RECURRENT_FAMILIES[1:]))


@pytest.mark.parametrize("name", slow_but(RECURRENT_FAMILIES[::2], RECURRENT_TOYS))
def test_logprobs_match_chunked_forward_of_transformers(name: str) -> None:
    """transformers computes a prompt in chunks of 16 to 64 tokens, by another formula."""
    model = make_toy(name, max_position_embeddings=512)
    rows = [random_ids(300, seed=1), random_ids(65, seed=2), random_ids(1, seed=3) * 2]
    with LLM(model) as llm:
        scores = llm.score(rows)
    for ids, score in zip(rows, scores, strict=True):
        truth = scores_of(model, ids)
        assert torch.allclose(torch.tensor(score[1:]), truth, atol=1e-4, rtol=1e-4)


# How many float32 values layers keep, by kind: for a token, and for a sequence.
KEPT: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "llama": ({"keys_and_values": 3 * 2 * 2 * 16}, {}),
    # Latent vectors of 16 elements, and 8 rotated ones.
    "deepseek_v32": ({"keys_and_values": 3 * (16 + 8), "index_keys": 3 * 16}, {}),
    # One layer has records of windows of 16 tokens, two of windows of 4 that overlap by one, with an indexer.
    "deepseek_v4": (
        {"keys_and_values": 4 * 32 + 32, "records": 3 * 32, "index_keys": 2 * 16},
        {"recurrences": 3 * (32 + 2 * 2 * (32 + 16))},
    ),
    # The rows of two token shifts, and the sums of weighted means.
    "rwkv": ({}, {"convolutions": 3 * 2 * 64, "recurrences": 3 * 3 * 64}),
}


@pytest.mark.parametrize("name", [*KEPT, "qwen3_5", "qwen4", "granite_dense", "zaya"])
def test_pool_for_32000_tokens_has_bytes_reported_by_info(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, length = make_toy(name), 32_000
    with LLM(model) as llm:
        info = llm.info()
    per_token, state = info["kv_bytes_per_token_by_kind"], info["state_bytes_by_kind"]
    assert sum(per_token.values()) == info["kv_bytes_per_token"]
    assert sum(state.values()) == info["state_bytes"]
    if name in KEPT:
        in_bytes = [{kind: 4 * count for kind, count in kinds.items()} for kinds in KEPT[name]]
        assert [per_token, state] == in_bytes
    slots = 3 if state else 0
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: slots)
    memory = length * max(1, info["kv_bytes_per_token"]) + slots * info["state_bytes"]
    with LLM(model, kv_memory=memory, max_length=256, max_sequences=200, block_size=32) as llm:
        store, routing = llm.engine.runner.store, llm.info()["routing_bytes"]
        kv = store.nbytes
        states = sum(tensor.nbytes for tensor in store.states.tensors) if store.states else 0
        assert kv == store.num_blocks * 32 * info["kv_bytes_per_token"]
        assert states == slots * info["state_bytes"]
        spare = memory // 500 if per_token else length
        assert memory - spare <= kv + states + routing <= memory


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT_TOYS)
def test_logprobs_match_recurrent_forward_of_transformers(name: str) -> None:
    """After a prompt, transformers computes one token at a time from the state that its cache keeps."""
    # transformers bounds Nemotron-H's time steps from below in prompts alone; Verbatim does in every row.
    unbounded = {"time_step_min": 1e-9} if name == "nemotron_h" else {}
    model = make_toy(name, max_position_embeddings=512, **unbounded)
    rows = [random_ids(300, seed=1), random_ids(65, seed=2)]
    arguments = inspect.signature(model.forward).parameters
    has_attention = "position_ids" in arguments
    # Names of the cache, which depend on the model and on the version of transformers.
    names = ("cache", "past_key_values", "cache_params", "state")
    with LLM(model) as llm:
        scores = llm.score(rows)
    for ids, score in zip(rows, scores, strict=True):
        logits, kept = [], {}
        with torch.no_grad():
            if name == "recurrent_gemma":  # its modules keep their states, its outputs no cache
                model._setup_cache(model.config, 1, model.device, model.dtype)
                kept = {next(n for n in names if n in arguments): DynamicCache(config=model.config)}
            for i, token in enumerate(ids[:-1]):
                inputs = dict(input_ids=torch.tensor([[token]]), **kept)
                if has_attention:  # a cache whose first layer is recurrent counts no positions
                    inputs["position_ids"] = torch.tensor([[i]])
                out = model(**inputs, use_cache=True)
                logits.append(out.logits[0, 0])
                kept = {n: out[n] for n in names if n in out} or kept
                kept = dict(list(kept.items())[:1])
                assert kept
        truth = torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
        assert torch.allclose(torch.tensor(score[1:]), truth[:, 0], atol=1e-4, rtol=1e-4)


def test_rwkv_weights_are_not_modified() -> None:
    """transformers divides some of them in eval mode, and multiplies them again in training."""
    model, ids = make_toy("rwkv", num_hidden_layers=4, rescale_every=2), random_ids(40, seed=1)
    weights = [p.clone() for p in model.parameters()]
    with LLM(model) as llm:
        scores = llm.score([ids])
    assert all(map(torch.equal, model.parameters(), weights))
    truth = scores_of(model, ids)
    assert not all(map(torch.equal, model.parameters(), weights))
    with LLM(model) as llm:
        scores += llm.score([ids])
    for score in scores:
        assert torch.allclose(torch.tensor(score[1:]), truth, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL_TOYS)
def test_eviction_after_every_other_step_gives_same_bits(name: str) -> None:
    prompts, params = mixed_requests(9)
    expected = generated(LLM(make_toy(name), prefix_cache=False), prompts, params)
    with LLM(make_toy(name), block_size=4, max_batch_tokens=24) as llm:
        engine, requests = llm.engine, submitted(llm, prompts, params)
        steps = 0
        while engine.step():
            steps += 1
            if steps % 2:
                engine.call(engine.scheduler.evict_all)
        assert all_facts([request.result for request in requests]) == expected
        check_nothing_is_left(llm)


@pytest.mark.parametrize("slots", [3, 4, 7])
def test_few_state_slots_are_shared_by_many_requests(slots: int, monkeypatch: Any) -> None:
    prompts, params = mixed_requests(12)
    expected = generated(LLM(make_toy("lfm2"), prefix_cache=False), prompts, params)
    monkeypatch.setattr(EngineOptions, "num_states", lambda self, state_bytes: slots)
    with LLM(make_toy("lfm2"), block_size=4) as llm:
        assert llm.info()["state_slots"] == slots
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["preemptions"] > 0
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", ONE_FAST)
def test_session_continues_from_its_state_or_an_earlier_cached_one(name: str) -> None:
    with LLM(make_toy(name), block_size=4) as llm:
        keep_prefixes(llm)
        with llm.session(max_length=200, seed=1) as session:
            found = []
            for turn, kept in ((13, None), (6, None), (21, 25), (2, None), (5, 3)):
                if kept is not None:
                    session.position = kept
                before = session.token_ids
                result = session.generate(random_ids(turn, seed=turn), GREEDY)
                found.append((result.num_cached_tokens, len(before)))
                with LLM(make_toy(name)) as other:
                    alone = other.generate([before + random_ids(turn, seed=turn)], GREEDY)[0]
                assert result.outputs[0].token_ids == alone.outputs[0].token_ids
                assert result.outputs[0].logprobs == alone.outputs[0].logprobs
        # All kept tokens but the last, or the last cached state before them.
        assert found == [(0, 0), (32, 33), (12, 25), (65, 66), (0, 3)]
        llm.generate([[1]], GREEDY)  # frees the blocks of the closed session
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", [toy for toy in ONE_FAST if "zaya" not in toy.values])
def test_states_are_restored_after_stage_is_killed(name: str, tmp_path: Any) -> None:
    prompts, params = mixed_requests(12)
    make_toy(name).save_pretrained(tmp_path)
    expected = generated(LLM(tmp_path), prompts, params)
    # Micro-batches of at most 12 rows, so that prompts are split.
    with LLM(tmp_path, placement=staged(micro_batches=2), max_batch_tokens=24) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected
        for victim in (0, 1):
            stage = serving(llm)[victim]
            deltas = llm.stream(prompts[8], params[8])
            next(deltas)
            stage.kill()
            *_, last = deltas
            assert last.result is not None and facts(last.result) == expected[8]
        assert all_facts(llm.generate(prompts, params)) == expected
        assert llm.stats()["cluster"]["restarts"] == 2
        check_nothing_is_left(llm)


def test_model_that_passes_router_states_between_layers_is_not_split(tmp_path: Any) -> None:
    """ZAYA's routers read the router states of the previous layer."""
    make_toy("zaya").save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="cut into 1 stages at most"):
        LLM(tmp_path, placement=staged())


@pytest.mark.parametrize(
    "name", slow_but(["qwen3_5", "mamba"], ["qwen3_5", "bamba", "lfm2", "mamba"])
)
def test_saved_session_is_loaded_with_its_state(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("verbatim.api.llm.open_engine", PLAIN_OPEN)
    path = tmp_path / "one.session"
    with LLM(make_toy(name)) as llm, llm.session(seed=1) as session:
        session.generate(random_ids(20, seed=1), GREEDY)
        session.save(path, kv=True)
        expected = session.generate(random_ids(4, seed=2), GREEDY)
    with LLM(make_toy(name)) as llm:
        with llm.session(load=path) as session:
            result = session.generate(random_ids(4, seed=2), GREEDY)
        assert result.num_cached_tokens == expected.num_cached_tokens == 39
        assert facts(result) == facts(expected)
        llm.generate([[1]], GREEDY)
        check_nothing_is_left(llm)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_rollout_logprobs_are_exact_and_gradients_reach_recurrent_layers(name: str) -> None:
    model = make_toy(name)
    prompts = [random_ids(7, seed=1), random_ids(11, seed=2)]
    rolled = rl.rollout(model, prompts, SamplingParams(max_tokens=12, ignore_eos=True), seed=3)
    rows = rolled.sequences, rolled.attention_mask
    scores = rl.score(model, *rows)
    assert torch.equal(rolled.of_responses(scores), rolled.logprobs)
    live = rl.logprobs(model, *rows)
    assert torch.allclose(live, scores, atol=1e-4)
    live.sum().backward()
    recurrent = [p for n, p in model.named_parameters() if "A_log" in n or "conv" in n]
    assert recurrent and all(p.grad is not None and p.grad.any() for p in recurrent)


@parametrize_combinations(
    2,
    name=["qwen3_next", "granite_hybrid", "lfm2", "mamba2"],
    # Prompts longer than the drafter's largest forward.
    max_batch_tokens=[2048, 5],
)
def test_draft_model_with_same_weights_is_always_accepted(name: str, max_batch_tokens: int) -> None:
    model, prompts = make_toy(name), [random_ids(17, seed=3)]
    expected = generated(LLM(model), prompts, GREEDY)
    options = dict(draft=make_toy(name), num_draft_tokens=3, max_batch_tokens=max_batch_tokens)
    with LLM(model, **options) as llm:
        results = llm.generate(prompts, GREEDY)
        assert all_facts(results) == expected
        drafts = results[0].metrics.draft
        assert sum(drafts.num_drafted) and drafts.num_accepted == drafts.num_drafted
        check_nothing_is_left(llm)
