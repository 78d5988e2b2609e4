"""On a real GPU: the promise, the oracle, recorded steps, memory. `python -m pytest tests/gpu -m gpu`.

The kernels' own tests (`tests/kernels/test_triton_kernels.py`, `tests/kernels/test_triton_llm.py`) run on a
GPU where there is one, and under Triton's interpreter elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import odd_toys
from support.backends import by
from support.odd_toys import DTYPES
from support.requests_mixed import all_facts, facts, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import LLM, NotSupported, SamplingParams
from verbatim.batch import SamplePlan, SampleRow
from verbatim.kernels.triton import linear
from verbatim.sampling.sampler import sample_rows

MODELS = {name: odd for name, odd in odd_toys.MODELS.items() if name != "falcon"}
MODELS["qwen3"] = dict(hidden_size=100, head_dim=20)
# transformers' own experts need rows of a multiple of 16 bytes there.
MODELS["gpt_oss"] = dict(hidden_size=60, intermediate_size=52)


def toy(name: str, dtype: torch.dtype) -> Any:
    return make_toy(name, dtype=dtype, **MODELS[name]).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_gives_the_same_bits(name: str, dtype: str) -> None:
    prompts, params = mixed_requests()
    module = toy(name, DTYPES[dtype])
    with LLM(module, deterministic=True) as llm:
        expected = all_facts(llm.generate(prompts, params))
        some = (0, 2, 4, 7, 8, 16)
        alone = [facts(llm.generate(prompts[i], params[i])[0]) for i in some]
        assert alone == [expected[i] for i in some], "alone"
        info = llm.info()
    with LLM(module, deterministic=True, max_batch_tokens=7, block_size=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "chunked"
    kv_memory = info["kv_bytes_per_token"] * 104
    if info["state_bytes"]:  # half of it is for them, and a sequence needs three slots
        kv_memory = 2 * max(kv_memory, 3 * info["state_bytes"])
    memory = dict(kv_memory=kv_memory, block_size=8)
    with LLM(module, deterministic=True, **memory) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "evicted"
        assert llm.stats()["preemptions"] > 0
    with LLM(module, deterministic=True, draft="ngram") as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "drafted"


def test_long_contexts_keep_their_bits() -> None:
    """Over several splits of keys, in decode and in chunks of prefill."""
    module = make_toy("llama", dtype=torch.bfloat16, max_position_embeddings=4096).cuda()
    prompts = [random_ids(length, length) for length in (2100, 511, 512, 513, 1500)]
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    with LLM(module, deterministic=True) as llm:
        expected = [facts(llm.generate(prompt, params)[0]) for prompt in prompts]
    for rows in (2048, 300, 64):
        with LLM(module, deterministic=True, max_batch_tokens=rows) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected, f"chunks of {rows}"


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_transformers(name: str, deterministic: bool) -> None:
    module, prompt = toy(name, torch.float32), random_ids(19, 1)
    theirs = module.generate(
        torch.tensor([prompt], device="cuda"), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    params = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0)
    with LLM(module, deterministic=deterministic) as llm:
        found = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert found == theirs[0, len(prompt) :].tolist()


def test_the_storyteller_is_moved_recorded_and_put_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = ["Once upon a time", "The cat", "A long time ago there was"] * 4
    params = [SamplingParams(max_tokens=20 + i, seed=i, ignore_eos=True) for i in range(12)]
    with LLM(device="cuda", deterministic=True) as llm:
        recorded = all_facts(llm.generate(prompts, params))
        gpu = llm.info()["gpu"]
        assert isinstance(gpu["graphs"], int) and gpu["graphs"] > 1, gpu
        assert llm.info()["numerics_key"].startswith(gpu["name"].replace(" ", "-"))
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(prompts, params)) == recorded, "after a sleep"
    monkeypatch.setenv("VERBATIM_CUDA_GRAPHS", "0")
    with LLM(device="cuda", deterministic=True) as llm:
        assert all_facts(llm.generate(prompts, params)) == recorded, "kernel by kernel"
        assert "graphs" not in llm.info()["gpu"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_steps_of_experts_are_recorded(name: str) -> None:
    module, prompts = toy(name, torch.bfloat16), [random_ids(5 + i, i) for i in range(5)]
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, record_routing=True)
    found = []
    with LLM(module, deterministic=True) as llm:
        for recorded in (False, True):
            if recorded:
                llm.engine.runner.record_steps()  # type: ignore[attr-defined]
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            found.append([(o.token_ids, o.logprobs, o.routing.tolist()) for o in outputs])
        assert llm.info()["gpu"]["graphs"] == 1, llm.info()["gpu"]
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(512, 4096), (208, 12288), (77, 320), (1000, 75)], ids=str)
def test_products_have_the_same_bits_in_tiles_of_all_heights(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    def numbers(*sizes: int) -> torch.Tensor:  # of many sizes, so that every rounding shows
        exponents = torch.randint(-5, 6, sizes, generator=generator, device="cuda")
        return (torch.randn(sizes, generator=generator, device="cuda") * 2.0**exponents).to(dtype)

    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = numbers(4096, shape[1]), numbers(*shape)
    device = x.device
    assert linear.tile_for(1, dtype, device) == linear.TILES[0]
    assert linear.tile_for(4096, dtype, device) == linear.TILES[-1]
    want = linear.linear(x, weight, float32=True)
    for rows in (1, 2, 16, 64, 77, 300):
        assert torch.equal(linear.linear(x[:rows], weight, float32=True), want[:rows]), rows


def test_draws_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(128, 151_936, generator=generator)).bfloat16()
    rows = [
        SampleRow(SamplingParams(temperature=0.25 * (i % 6)), 2**63 + 977 * i, i, 31 * i)
        for i in range(128)
    ]
    found = sample_rows(logits.cuda(), SamplePlan(rows))
    assert repr(found) == repr(by("none", sample_rows)(logits, SamplePlan(rows)))


def test_memory_is_given_back() -> None:
    with LLM(device="cuda", kv_memory="10MB") as llm:  # workspaces of cuBLAS stay with the process
        llm.generate("Once", SamplingParams(max_tokens=3))
    del llm
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LLM(device="cuda", kv_memory="200MB") as llm:
        llm.generate("Once", SamplingParams(max_tokens=3))
        assert torch.cuda.memory_allocated() - before > 150_000_000
    del llm
    assert torch.cuda.memory_allocated() - before < 50_000_000


def test_what_is_not_done_is_refused() -> None:
    for options in (dict(quantization="int8"), dict(kv_dtype="int8"), dict(draft="early-exit")):
        with pytest.raises(NotSupported, match="cuda:0"):
            LLM(device="cuda", **options)
