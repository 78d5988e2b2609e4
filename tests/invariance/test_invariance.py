"""Batch invariance: a request's ids and log-probs are bit-identical in every schedule."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from support.odd_toys import DTYPES, MODELS, open_toy
from support.pairwise import slow_but
from support.programs import run_program
from support.requests_mixed import all_facts, facts, generated, mixed_requests, submitted
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams

# Every third model in one dtype; in the slow suite, all of them in both.
some_in_one_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(list(zip([*MODELS][::3], itertools.cycle(DTYPES))), itertools.product(MODELS, DTYPES)),
)


@some_in_one_dtype
def test_every_schedule_gives_the_same_bits(name: str, dtype: str) -> None:
    prompts, params = mixed_requests()
    with open_toy(name, dtype) as llm:
        before = llm.stats()["forwards"]
        plain = llm.generate(prompts, params)
        forwards = llm.stats()["forwards"] - before
        # As many forwards as the longest request has tokens: the batch did not run one by one.
        assert forwards == max(len(c.token_ids) for r in plain for c in r.outputs)
        expected = all_facts(plain)
        some = (0, 2, 4, 7, 8, 16)
        assert [facts(llm.generate(prompts[i], params[i])[0]) for i in some] == [
            expected[i] for i in some
        ], "alone"
        order = [5, 16, 2, 9, 0, 13, 7, 1, 15, 3, 11, 6, 14, 4, 10, 8, 12]
        reordered = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert all_facts(reordered) == [expected[i] for i in order], "reordered"
        for i in (3, 7):
            *_, last = llm.stream(prompts[i], params[i])
            assert last.result is not None and facts(last.result) == expected[i], "streamed"
        for threads in (1, 3, 7):
            torch.set_num_threads(threads)
            assert all_facts(llm.generate(prompts, params)) == expected, f"{threads} threads"
        torch.set_num_threads(2)
    with open_toy(name, dtype, max_batch_tokens=7, block_size=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "chunked"
    with open_toy(name, dtype, max_batch_tokens=40, max_sequences=3, num_threads=1) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "three at a time"


def routed(name: str) -> dict[str, Any]:
    """Additional sampling parameters for mixture-of-experts models."""
    return dict(record_routing=True) if "moe" in name or name == "gpt_oss" else {}


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_but(
        [("qwen3_moe", "bfloat16")],
        itertools.product(("llama", "qwen3_moe", "gemma2", "gpt_oss"), DTYPES),
    ),
)
def test_evicted_requests_finish_with_the_same_bits(name: str, dtype: str) -> None:
    prompts, params = mixed_requests()
    params = [p if p.num_beams > 1 else p.replace(**routed(name)) for p in params]
    with open_toy(name, dtype, prefix_cache=False) as llm:
        expected = all_facts(llm.generate(prompts, params))
        per_token = llm.info()["kv_bytes_per_token"]
    # Room for a hundred tokens: the longest request fits, two of them do not.
    for options in (dict(), dict(prefix_cache=False), dict(max_batch_tokens=13)):
        memory = dict(kv_memory=per_token * 104, block_size=8)
        with open_toy(name, dtype, **memory, **options) as llm:
            results = llm.generate(prompts, params)
            stats = llm.stats()
            assert stats["preemptions"] > 0
            assert stats["blocks_used"] == 0
            assert all_facts(results) == expected
            assert sum(r.metrics.preemptions for r in results) == stats["preemptions"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["qwen3_moe"], ("llama", "qwen3_moe", "gemma2")))
def test_every_chunk_size_gives_the_same_bits(name: str) -> None:
    prompts, params = [random_ids(23, 1), random_ids(9, 2)], mixed_requests(12)[1]
    params = [params[7].replace(**routed(name)), params[9]]
    expected = generated(open_toy(name, "bfloat16"), prompts, params)
    for rows in range(1, 25):
        with open_toy(name, "bfloat16", max_batch_tokens=rows, block_size=1 + rows % 7) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected, f"chunks of {rows}"


@some_in_one_dtype
def test_cached_prefixes_give_the_same_bits(name: str, dtype: str) -> None:
    prompts, params = mixed_requests()
    params = [p if p.num_beams > 1 else p.replace(**routed(name)) for p in params]
    stem = random_ids(37, seed=99)
    prompts = [stem[: 8 * (i % 5)] + prompt for i, prompt in enumerate(prompts)]
    expected = generated(open_toy(name, dtype, block_size=4, prefix_cache=False), prompts, params)
    with open_toy(name, dtype, block_size=4) as llm:
        forever = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
        # A request that keeps running keeps the prefix cache of a live module valid for the others.
        submitted(llm, [stem], [forever])
        assert all_facts(llm.generate(prompts, params)) == expected, "shared with those in flight"
        again = llm.generate(prompts, params)
        assert all_facts(again) == expected, "found"
        wholly = [r for r in again if r.prompt_logprobs is None and len(r.prompt_token_ids) > 8]
        assert wholly and all(
            r.num_cached_tokens == (len(r.prompt_token_ids) - 1) // 4 * 4 for r in wholly
        )


@pytest.mark.parametrize("name", slow_but(["qwen3_moe"], ["llama", "qwen3_moe"]))
def test_priorities_and_evictions_give_the_same_bits(name: str) -> None:
    prompts, params = mixed_requests()
    expected = generated(open_toy(name, "bfloat16"), prompts, params)
    for rng_seed in range(3):
        rng = random.Random(rng_seed)
        ranked = [p.replace(priority=rng.randint(-3, 3)) for p in params]
        with open_toy(name, "bfloat16", max_sequences=4, max_batch_tokens=24) as llm:
            engine = llm.engine
            requests = []
            for prompt, asked in zip(prompts, ranked, strict=True):
                requests += submitted(llm, [prompt], [asked])
                for _ in range(rng.randint(0, 3)):
                    engine.step()
            while engine.step():
                if rng.random() < 0.2:
                    engine.call(engine.scheduler.evict_all)
            found = [request.result for request in requests]
            assert all(found) and all_facts(found) == expected  # type: ignore[arg-type]
            assert llm.stats()["blocks_used"] == 0


_RESTART = """
import sys
import torch
from support.odd_toys import open_toy
from support.requests_mixed import generated, mixed_requests
torch.manual_seed(int(sys.argv[1]))
print(generated(open_toy("qwen3_moe", "bfloat16", num_threads=int(sys.argv[1])), *mixed_requests(6)))
"""


@pytest.mark.slow
def test_process_restart_gives_the_same_bits() -> None:
    first, second = (run_program("-c", _RESTART, threads) for threads in (1, 2))
    assert first == second
    assert len(first) > 300


def test_global_random_state_is_neither_used_nor_changed() -> None:
    prompts, params = mixed_requests(9)
    with open_toy("llama", "float32") as llm:
        torch.manual_seed(1)
        first = all_facts(llm.generate(prompts, params))
        torch.manual_seed(2)
        state = torch.get_rng_state()
        assert all_facts(llm.generate(prompts, params)) == first
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", slow_but(["qwen3_moe"], ("llama", "gemma2", "qwen3_moe", "gpt2", "gpt_oss"))
)
def test_thread_parallel_torch_loops_give_the_same_bits(name: str, dtype: str) -> None:
    """torch divides elementwise loops and reductions from 32,768 elements on."""
    wide = dict(hidden_size=540, n_embd=540, n_head=6, num_hidden_layers=2, n_layer=2)
    ids = random_ids(200, seed=4)
    model = make_toy(name, dtype=DTYPES[dtype], **{**MODELS[name], **wide})
    expected = None
    for threads in (2, 1, 3, 7):
        torch.set_num_threads(threads)
        for max_batch_tokens in (2048, 77):
            with LLM(model, max_batch_tokens=max_batch_tokens) as llm:
                scores = llm.score(ids)
            expected = expected or scores
            assert scores == expected, (threads, max_batch_tokens)
