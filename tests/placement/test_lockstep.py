"""Data-parallel ranks with unequal work: none hangs, and tokens do not depend on the other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.programs import run_ranks
from support.toys import make_toy, random_ids
from verbatim import InvalidRequest, NotSupported, SamplingParams, rl
from verbatim.compat.coati import generate, generate_streaming


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_unequal_work_all_return_same_tokens(world: int, tmp_path: Path) -> None:
    reports = run_ranks(world, tmp_path, "rank")
    module = make_toy("llama")
    seeds: set[int] = set()
    for rank, report in enumerate(reports):
        assert report["again"]
        assert report["blocks"] == 0
        if rank == 0:
            assert report["shape"] == [0, 2, 0]
            continue
        seeds |= {row[0] for row in report["seeds"]}
        for b, (group, seed) in enumerate(zip(report["rows"], report["seeds"], strict=True)):
            ids = random_ids(5 + 9 * rank + 2 * b, seed=b)
            params = SamplingParams(max_tokens=3 + 5 * rank, ignore_eos=True, n=2, seed=seed[0])
            assert group == [row[: 3 + 5 * rank] for row in alone(module, ids, params)]
    assert len(seeds) == world * (world - 1) // 2  # no two prompts share a seed, on any rank
    assert len({report["forwards"] for report in reports}) == 1

    tokenizer = SimpleNamespace(padding_side="left", eos_token_id=2, pad_token_id=0)
    for rank, report in enumerate(reports):
        rows = torch.tensor([random_ids(4 + rank, seed=9), random_ids(4 + rank, seed=10)])
        assert report["coati"] == generate(module, rows, tokenizer, 12 + 6 * rank, seed=3).tolist()

    *others, last = [report["refused"] for report in reports]
    assert last.startswith("InvalidRequest: prompt: id 1000000 is outside")
    assert set(others) == {
        f"RequestFailed: rank {world - 1} failed, so all ranks of its process group stop"
    }
    failed, stopped, pressed, asleep = (
        [report[name] for report in reports] for name in ("failed", "stopped", "pressed", "asleep")
    )
    assert failed.pop(1) == "OSError: the disk is gone"
    assert set(failed) == {"10 tokens"}
    assert asleep.pop(1) == "VerbatimError: the engine sleeps; call wake() first"
    for errors in (stopped, pressed):
        assert errors.pop(1) == "KeyboardInterrupt: "
    assert all("rank 1 failed" in error for error in stopped + pressed + asleep)
    assert [report["scored"] for report in reports] == [
        [min(rank, 2), 2, 5 + rank] for rank in range(world)
    ]


def alone(module, ids: list[int], params: SamplingParams) -> list[list[int]]:
    from verbatim import LLM

    with LLM(module) as llm:
        return [c.token_ids for c in llm.generate(ids, params)[0].outputs]


def test_process_group_without_torch_distributed_or_in_a_stream_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"torch\.distributed is not initialised"):
        rl.rollout(make_toy("llama"), [[5, 6]], process_group=object())
    tokenizer = SimpleNamespace(padding_side="left", eos_token_id=2, pad_token_id=0)
    with pytest.raises(NotSupported, match="process_group in a stream"):
        generate_streaming(
            make_toy("llama"), torch.tensor([[5, 6]]), tokenizer, 9, process_group=object()
        )
