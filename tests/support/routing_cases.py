"""Three sequences through mixture-of-experts models, and the experts chosen by their routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support import sweep
from support.stores import Sequences
from verbatim.model.decoder import Decoder
from verbatim.placement.resident import Resident

SEQUENCES = Sequences(13, 6, 9, block_size=4, spare=4)
LENGTHS, WHOLE, IDS, TABLES = (SEQUENCES.lengths, SEQUENCES.whole, SEQUENCES.ids, SEQUENCES.tables)
batch = SEQUENCES.batch
ROUTED = (
    "afmoe aria_text axk1 beam cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe "
    "flex_olmo flint gemma4_text:moe glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 inkling_text inkling2_text kolibri1 "
    "laguna lfm2_moe mellum mimo_v2_flash minimax_m2 minimax:full mixtral olmoe phimoe qwen2_moe "
    "qwen3_moe solar_open"
).split()


def build(case: str) -> Any:
    if case not in sweep.cases():
        pytest.skip(f"this transformers has no {case}")
    model = sweep.build(case)
    if case == "aria_text" and not expert_layers(model):
        pytest.skip("the experts of this transformers' aria_text are its own")
    return model


def opened(model: Any) -> Resident:
    decoder = Decoder(model)
    runner = Resident(decoder, SEQUENCES.store(decoder), None)
    for store in runner.records.values():
        store.ids.fill_(99)
    return runner


def records(runner: Resident) -> list[Tensor]:
    return [runner.record("routing", TABLES[s], n) for s, n in enumerate(LENGTHS)]


def other_experts(runner: Resident, seed: int = 0) -> list[Tensor]:
    """Return random experts for every token and layer of every sequence."""
    generator = torch.Generator().manual_seed(seed)
    made = runner.choices["routing"]
    shape = (made.layers, made.count)
    return [
        torch.rand(n, *shape, generator=generator).topk(made.k)[1].to(torch.int16) for n in LENGTHS
    ]


def other_keys(num_tokens: int, layers: int, top_k: int) -> Tensor:
    """Return random key positions of each token in random order: `top_k`, or all that it may attend to."""
    numbers = torch.Generator().manual_seed(num_tokens)
    keys = torch.full((num_tokens, layers, top_k), -1)
    for position in range(num_tokens):
        for layer in range(layers):
            some = torch.randperm(position + 1, generator=numbers)[:top_k]
            keys[position, layer, : len(some)] = some
    return keys


def expert_layers(model: Any) -> list[tuple[Any, Any]]:
    """Return (the block, its experts) of every routed layer."""
    return [
        (block, block.experts)
        for block in model.modules()
        if hasattr(getattr(block, "experts", None), "has_gate")
    ]
