"""Three sequences through mixtures of experts, and what their routers chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support import sweep, toys
from support.stores import poisoned_store
from verbatim.batch import Batch
from verbatim.model.decoder import Decoder
from verbatim.placement.resident import Resident

LENGTHS = (13, 6, 9)
WHOLE = [(0, n) for n in LENGTHS]
CUT = (5, 1, 4)
BLOCK_SIZE, BLOCKS = 4, 4  # the blocks of each sequence
TABLES = [[3, 9, 1, 5], [2, 8, 12, 4], [10, 6, 11, 7]]
SPARE = [13, 14, 15, 16]
IDS = [toys.random_ids(n, seed=n) for n in LENGTHS]
ROUTED = (
    "afmoe aria_text axk1 beam cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe "
    "flex_olmo flint gemma4_text:moe glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa "
    "granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 laguna mellum mimo_v2_flash "
    "minimax_m2 minimax:full mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open"
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
    runner = Resident(decoder, poisoned_store(decoder, 17, BLOCK_SIZE), None)
    for store in runner.records.values():
        store.ids.fill_(99)
    return runner


def batch(
    which: list[int], spans: list[tuple[int, int]], tables: Any = TABLES, **fields: Any
) -> Batch:
    """Positions `spans[i]` of sequence `which[i]`, with the logits of all of them."""
    starts = torch.tensor([0, *(stop - start for start, stop in spans)]).cumsum(0)
    ids = [i for s, (start, stop) in zip(which, spans, strict=True) for i in IDS[s][start:stop]]
    return Batch(
        token_ids=torch.tensor(ids),
        positions=torch.cat([torch.arange(start, stop) for start, stop in spans]),
        query_starts=starts.to(torch.int32),
        context_lens=torch.tensor([stop for _, stop in spans], dtype=torch.int32),
        block_tables=torch.tensor([tables[s] for s in which], dtype=torch.int32),
        logit_rows=torch.arange(len(ids)),
        **fields,
    )


def records(runner: Resident) -> list[Tensor]:
    return [runner.record("routing", TABLES[s], n) for s, n in enumerate(LENGTHS)]


def other_experts(runner: Resident, seed: int = 0) -> list[Tensor]:
    """Random experts for every token and layer of every sequence."""
    generator = torch.Generator().manual_seed(seed)
    made = runner.choices["routing"]
    shape = (made.layers, made.count)
    return [
        torch.rand(n, *shape, generator=generator).topk(made.k)[1].to(torch.int16) for n in LENGTHS
    ]


def expert_layers(model: Any) -> list[tuple[Any, Any]]:
    """(the layer's block, its experts) of every routed layer."""
    return [
        (block, block.experts)
        for block in model.modules()
        if hasattr(getattr(block, "experts", None), "has_gate")
    ]
