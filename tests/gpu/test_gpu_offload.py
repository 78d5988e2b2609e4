"""`Offload` on a GPU: same bits as the resident model in every placement, and memory within the budget."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from support.requests_mixed import all_facts, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import LLM, Offload, OutOfBlocks, SamplingParams

TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("bfloat16", dict()),
    "qwen3_moe": ("bfloat16", dict(hidden_size=64, moe_intermediate_size=32)),
    "lfm2": ("float32", dict()),
}
PLACES: list[dict[str, Any]] = [
    dict(gpu="2GB", cpu="2GB"),
    dict(weights=(30, 30, 40), kv=(0, 100, 0), activations=(0, 100, 0)),
    dict(weights=(0, 0, 100), kv=(30, 30, 40), activations=(30, 30, 40)),
    dict(weights=(40, 30, 30), kv=(50, 0, 50), overlap=False, attention_top_k=500),
]


@pytest.mark.parametrize("name", TOYS)
def test_every_offload_placement_gives_bits_of_resident_model(name: str, tmp_path: Path) -> None:
    dtype, changes = TOYS[name]
    make_toy(name, **changes).save_pretrained(tmp_path)
    prompts, params = mixed_requests()
    common: dict[str, Any] = dict(
        device="cuda", deterministic=True, dtype=dtype, max_length=200, kv_memory="20MB"
    )
    with LLM(tmp_path, **common) as llm:
        expected = all_facts(llm.generate(prompts, params))
    for place in PLACES:
        offload = Offload(batch_size=3, micro_batches=2, policy=None, **place)
        with LLM(tmp_path, placement=offload, **common) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected, place
            some = [llm.generate(prompts[i], params[i])[0] for i in (0, 5, 16)]
            assert all_facts(some) == [expected[i] for i in (0, 5, 16)], ("alone", place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 340 MB in bfloat16."""
    path = tmp_path_factory.mktemp("offload")
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def test_offload_stays_within_gpu_budget_and_frees_memory(folder: Path) -> None:
    prompts = [random_ids(20 + 7 * i, i, high=8000) for i in range(12)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    common: dict[str, Any] = dict(
        device="cuda", deterministic=True, max_length=512, max_sequences=16
    )
    with LLM(folder, kv_memory="100MB", **common) as llm:
        expected = all_facts(llm.generate(prompts, params))
    workload: dict[str, Any] = dict(workload=(64, 16))
    budgets = [("700MB", "1GB"), ("250MB", "1GB"), ("250MB", "150MB"), ("150MB", "100MB")]
    for gpu, cpu in budgets:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with LLM(folder, placement=Offload(gpu=gpu, cpu=cpu, **workload), **common) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected, (gpu, cpu)
            peak = torch.cuda.max_memory_allocated() - before
            assert peak <= int(gpu[:-2]) * 10**6, (gpu, cpu, peak, llm.info()["plan"])
            tiers = llm.info()["unit_tiers"].values()
            assert any("gpu" in held for held in tiers)
            assert (gpu == "700MB") == all(set(held) == {"gpu"} for held in tiers), tiers
        del llm
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 1_000_000, (gpu, cpu)
    with pytest.raises(
        OutOfBlocks, match=r"at least \d+ bytes are needed on the GPU and \d+ in RAM"
    ):
        LLM(folder, placement=Offload(gpu="20MB", cpu="1GB"), **common)


@pytest.mark.parametrize("deterministic", [True, False])
def test_offloaded_weights_can_be_updated_and_sleep(folder: Path, deterministic: bool) -> None:
    common: dict[str, Any] = dict(device="cuda", deterministic=deterministic, max_length=512)
    prompt = random_ids(40, 1, high=8000)
    params = SamplingParams(max_tokens=8, temperature=0.0, seed=3)
    new = load_file(folder / "model.safetensors")
    new |= {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(4096, 1024) / 30 for i in range(9)}
    with LLM(folder, kv_memory="100MB", **common) as llm:
        first = all_facts(llm.generate([prompt], params))
        llm.update_weights(new)
        second = all_facts(llm.generate([prompt], params))
    assert first != second
    offload = Offload(weights=(40, 30, 30), batch_size=4, micro_batches=1, policy=None)
    with LLM(folder, placement=offload, kv_memory="100MB", **common) as llm:
        assert all_facts(llm.generate([prompt], params)) == first
        llm.update_weights(new)
        assert all_facts(llm.generate([prompt], params)) == second
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate([prompt], params)) == second
