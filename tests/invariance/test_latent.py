"""Latent attention (MLA): a cache of latent vectors gives the results of one of keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.toys import VOCAB, make_toy, random_ids, scores_of
from verbatim import LLM, SamplingParams
from verbatim.model.device import Device

NAMES = ["deepseek_v3", "kimi_linear", "deepseek_v32"]
IDS = random_ids(40, seed=5)


def attention_of(module: Any) -> Any:
    return next(m for m in module.modules() if "kv_b_proj" in m._modules)


def kv_bytes(llm: LLM) -> int:
    return int(llm.info()["kv_bytes_per_token_by_kind"]["keys_and_values"])


@pytest.mark.parametrize("name", NAMES)
def test_latent_vectors_and_expanded_keys_and_values_give_the_same_scores(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_toy(name)
    attention = attention_of(module)
    layers = sum("kv_b_proj" in m._modules for m in module.modules())
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    expanded = attention.num_heads * (attention.qk_head_dim + attention.v_head_dim)
    expected = scores_of(module, IDS)
    for stores_latent, width in ((True, latent), (False, expanded)):
        monkeypatch.setattr(Device, "stores_latent", stores_latent)
        with LLM(module) as llm:
            assert kv_bytes(llm) == 4 * layers * width
            scores = torch.tensor(llm.score(IDS)[1:])
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantized_latent_vectors_give_the_same_tokens_in_any_chunks(kv_dtype: str) -> None:
    module = make_toy("deepseek_v3", dtype=torch.bfloat16)
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    results = []
    for options in ({}, dict(max_batch_tokens=7), dict(fused=False)):
        with LLM(module, kv_dtype=kv_dtype, prefix_cache=False, **options) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([IDS], [params])
            results.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert results[0] == results[1] == results[2]


def test_adapters_of_up_projection_change_no_bits_of_other_requests(tmp_path: Path) -> None:
    from support.lora import save_adapter

    module = make_toy("deepseek_v3", dtype=torch.bfloat16)
    module.save_pretrained(tmp_path / "base")
    adapters = {
        name: save_adapter(
            tmp_path / name, module, rank=5 + i, seed=i, layers=r"self_attn\.kv_b_proj"
        )
        for i, name in enumerate("ab")
    }
    prompts = [random_ids(9 + 7 * i, seed=i) for i in range(6)]
    params = [
        SamplingParams(max_tokens=8, temperature=0, logprobs=2, adapter=[None, "a", "b"][i % 3])
        for i in range(6)
    ]
    with LLM(tmp_path / "base", adapters=adapters, prefix_cache=False) as llm:  # type: ignore[arg-type]
        together = llm.generate(prompts, params)
        alone = [llm.generate([x], [p])[0] for x, p in zip(prompts, params, strict=True)]
        plain = llm.score(IDS)
        assert llm.score(IDS, adapter="a") != plain != llm.score(IDS, adapter="b")
    facts = [
        [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in x] for x in (together, alone)
    ]
    assert facts[0] == facts[1]


def test_up_projection_stays_exact_in_quantized_models(tmp_path: Path) -> None:
    make_toy("deepseek_v3").save_pretrained(tmp_path)
    with LLM(tmp_path, quantization="int8") as llm:
        attention = attention_of(llm.engine.runner.decoder.module)
        assert type(attention.kv_b_proj) is torch.nn.Linear
        assert type(attention.o_proj).__name__ == "QuantizedLinear"
        assert all(
            0 <= i < VOCAB
            for i in llm.generate([IDS], [SamplingParams(max_tokens=4)])[0].outputs[0].token_ids
        )
