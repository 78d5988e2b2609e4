"""Pipeline stages and tensor-parallel ranks with Triton kernels, on a GPU or under the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.programs import PATIENCE_S
from support.requests_mixed import all_facts
from support.toys import Folders
from support.triton_here import DEVICE, INTERPRETED
from verbatim import LLM, Cluster, SamplingParams, TensorParallel

pytestmark = pytest.mark.slow

TINY = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=64,
)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr("verbatim.kernels.requested", lambda: "triton")
        monkeypatch.setenv("VERBATIM_KERNELS", "triton")  # for other processes


def generated(folder: Path, placement: Any = None) -> tuple[list[Any], dict[str, Any]]:
    params = [SamplingParams(max_tokens=2, ignore_eos=True, seed=i, logprobs=1) for i in range(2)]
    device: dict[str, Any] = dict(device=DEVICE.type, deterministic=True, kv_memory="1MB")
    with LLM(folder, placement=placement, dtype="bfloat16", **device) as llm:
        return all_facts(llm.generate([[5, 9, 4, 30, 7], [6, 11]], params)), llm.info()


@pytest.mark.parametrize(
    "placement",
    [Cluster(stages=2, spares=0, patience_s=PATIENCE_S), TensorParallel(2)],
    ids=["stages", "ranks"],
)
def test_stages_and_ranks_are_bit_identical_to_one_process(
    placement: Any, folders: Folders
) -> None:
    folder = folders("llama", **TINY)
    expected, alone = generated(folder)
    found, info = generated(folder, placement)
    assert found == expected
    assert info["numerics_key"] == alone["numerics_key"]
    if isinstance(placement, TensorParallel):
        assert info["split_linears"] > 0
