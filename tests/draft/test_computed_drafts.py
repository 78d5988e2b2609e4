"""Drafters that run a model, on one checkpoint: a draft model, early exit, MTP layers.

The last two layers of the checkpoint add nothing, so that the first two give the tokens of the whole model.
"""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from support.drafters import check_no_drafts_left
from support.mtp_toys import Toy, random_mtp, save_with_mtp
from support.pairwise import parametrize_combinations
from support.poison import poison_draft_model
from support.requests_mixed import (
    all_facts,
    facts,
    finish_despite_ctrl_c,
    generated,
    mixed_requests,
    press_ctrl_c,
)
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams
from verbatim.draft import DraftModel, EarlyExit

PROMPT = random_ids(21, seed=5)
LONG = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    main = make_toy(
        "qwen3", num_hidden_layers=4, num_mtp_layers=2, mtp_layer_types=["full_attention"] * 2
    )
    with torch.no_grad():
        for layer in main.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    path = tmp_path_factory.mktemp("checkpoint")
    save_with_mtp(Toy(main, random_mtp(main, 2)), path)
    return path


def drafter(name: str, folder: Path, dtype: str = "auto") -> Any:
    """The value of the option `draft`."""
    drafters = {
        "itself": lambda: DraftModel(folder, dtype=dtype),
        "early exit": lambda: EarlyExit(2),
        "MTP": lambda: "mtp",
        "another model": lambda: make_toy("qwen3", seed=1),
        "a small vocabulary": lambda: make_toy("gemma2", dtype=torch.bfloat16, vocab_size=90),
        "a large vocabulary": lambda: make_toy("opt", vocab_size=200, num_hidden_layers=1),
    }
    return drafters[name]()


def exact_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests whose every token can be drafted: drawing it needs nothing that follows it."""
    kinds: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=0.7),
        dict(temperature=0.7, top_p=0.8, top_k=30, repetition_penalty=1.3),
        dict(temperature=1.3, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2),
        dict(temperature=0.7, bad_words=[[7], [8, 9]], logit_bias={5: 2.0}, min_tokens=5),
        dict(temperature=1.3, allowed_token_ids=list(range(2, 60)), min_p=0.01),
        dict(temperature=0.7, typical_p=0.8, n=3),
        dict(temperature=0.7, stop_token_ids=[11, 12, 13], prompt_logprobs=1),
    ]
    prompts = [random_ids(3 + 9 * i, i) for i in range(len(kinds))]
    return prompts, [SamplingParams(seed=i, max_tokens=22, **k) for i, k in enumerate(kinds)]


@parametrize_combinations(name=["itself", "early exit"], numbers=[("float32", 1), ("bfloat16", 8)])
def test_every_token_of_drafter_with_same_logits_is_accepted(
    name: str, numbers: tuple[str, int], folder: Path
) -> None:
    """Drafts are drawn with the noise, positions, penalties, bans and sample indices of the engine."""
    dtype, number = numbers
    requests = exact_requests()
    expected = generated(LLM(folder, dtype=dtype), *requests)
    options: dict[str, Any] = dict(block_size=4, max_batch_tokens=60, num_draft_tokens=number)
    with LLM(folder, dtype=dtype, draft=drafter(name, folder, dtype), **options) as llm:
        poison_draft_model(llm)
        results = llm.generate(*requests)
        assert all_facts(results) == expected
        assert llm.stats()["draft"]["acceptance"] == [1.0] * number
        assert all(set(r.metrics.draft.acceptance) == {1.0} for r in results)
        check_no_drafts_left(llm)


@parametrize_combinations(
    3,
    settings=[
        dict(max_batch_tokens=7, num_threads=1),
        dict(max_batch_tokens=19, block_size=4, max_sequences=5, num_threads=2),
        dict(block_size=8, tokens=150),  # evictions
        dict(block_size=4, tokens=150, num_threads=3),
        dict(block_size=4, kv_dtype="int8", num_threads=3),
        dict(),
    ],
    name=["early exit", "MTP", "another model", "a small vocabulary", "a large vocabulary"],
    number=[3, None],
)
def test_results_are_same_in_every_schedule_and_with_cached_prefixes(
    settings: dict[str, Any], name: str, number: int | None, folder: Path
) -> None:
    requests, settings = mixed_requests(), dict(settings)
    expected = generated(LLM(folder, kv_dtype=settings.get("kv_dtype", "auto")), *requests)
    draft = drafter(name, folder)
    if tokens := settings.pop("tokens", None):
        with LLM(folder, draft=draft) as llm:
            settings["kv_memory"] = tokens * llm.info()["kv_bytes_per_token"]
    with LLM(folder, draft=draft, num_draft_tokens=number, **settings) as llm:
        for _ in range(2):
            assert all_facts(llm.generate(*requests)) == expected
        check_no_drafts_left(llm)
        assert not tokens or llm.stats()["preemptions"] > 0
        stats = llm.stats()["draft"]
        assert stats["cut"] == 0  # ids outside the model's vocabulary are never drawn
        assert stats["drafted"] > 0 or number is None  # adaptive lengths may stop drafting


@parametrize_combinations(2, name=["itself", "early exit", "MTP"], weights=[False, True])
def test_sleep_frees_drafter_memory_and_wake_continues_with_same_tokens(
    name: str, weights: bool, folder: Path
) -> None:
    expected = generated(LLM(folder), [PROMPT], LONG)
    with LLM(folder, draft=drafter(name, folder), num_draft_tokens=3) as llm:
        poison_draft_model(llm)
        llm.generate(PROMPT, LONG)
        awake, acceptance = llm.info(), llm.stats()["draft"]["acceptance"]
        stream = llm.stream(PROMPT, LONG)
        deltas = [next(stream)]
        llm.sleep(weights=weights)
        asleep = llm.info()
        assert asleep["kv_bytes"] == 0 == asleep["draft"].get("kv_bytes", 0)
        modules = [llm.engine.runner.module]  # type: ignore[attr-defined]
        if name == "itself":
            proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
            assert proposer.pool.num_used == 0
            modules.append(proposer.runner.module)
        parameters = [p for module in modules for p in module.parameters()]
        assert all(p.isnan().all() for p in parameters) == weights
        llm.wake()
        assert llm.info()["kv_bytes"] == awake["kv_bytes"] and llm.info()["draft"] == awake["draft"]
        deltas += stream
        assert deltas[-1].result is not None and facts(deltas[-1].result) == expected[0]
        assert facts(llm.generate(PROMPT, LONG)[0]) == expected[0]
        if name != "MTP":
            assert acceptance == llm.stats()["draft"]["acceptance"] == [1.0] * 3
        check_no_drafts_left(llm)
        gone = [weakref.ref(module) for module in modules]
        del modules, parameters
        proposer = None
    gc.collect()
    assert [module() for module in gone] == [None] * len(gone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["itself", "early exit", "MTP"])
def test_aborts_and_ctrl_c_during_drafts_lose_no_tokens_or_blocks(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, rng = exact_requests(), random.Random(6)
    expected = generated(LLM(folder), *requests)
    options: dict[str, Any] = dict(num_draft_tokens=4, block_size=4)
    with LLM(folder, draft=drafter(name, folder), **options) as llm:
        poison_draft_model(llm)
        stream = llm.stream(PROMPT, LONG)
        for _ in range(4):
            next(stream)
        stream.close()
        check_no_drafts_left(llm)
        runner: Any = llm.engine.runner
        proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
        places: list[tuple[float, Any, str]] = [(0.05, runner, "forward")]
        if name == "itself":
            runner = proposer.runner
            places += [(0.01, proposer, "update"), (0.01, proposer, "_reserve")]
            places += [(0.01, proposer.pool, "share"), (0.01, proposer.pool, "take")]
        places += [(0.2, runner, "draft"), (0.1, runner.draft_layers, "run")]
        for chance, owner, function in places:
            press_ctrl_c(monkeypatch, rng, chance, owner, function)
        results, raised = finish_despite_ctrl_c(llm, *requests)
        monkeypatch.undo()
        assert raised > 10
        assert all(results) and all_facts(results) == expected
        assert name == "MTP" or set(llm.stats()["draft"]["acceptance"]) == {1.0}
        assert not any("forward" in module.__dict__ for module in runner.module.modules())
        check_no_drafts_left(llm)
