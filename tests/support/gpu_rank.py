"""One rank of an expert-parallel model on a GPU, started by tests/gpu/test_places.py."""

from __future__ import annotations

from typing import Any

from support.requests_mixed import all_facts, mixed_requests
from verbatim import LLM, ExpertParallel


def main(rank: int, world: int, folder: str) -> dict[str, Any]:
    prompts, params = mixed_requests(8)
    options: dict[str, Any] = dict(device="cuda", deterministic=True, dtype="bfloat16")
    with LLM(folder, placement=ExpertParallel(), kv_memory="64MB", **options) as llm:
        results = llm.generate(prompts[rank::world], params[rank::world])
        return {"facts": repr(all_facts(results)), "numerics_key": llm.info()["numerics_key"]}
