"""Stages with less memory than their layers take: the same tokens as in memory, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support import toys
from support.mtp_toys import save_with_mtp, toy
from support.pairwise import slow_but
from support.requests_mixed import all_facts, mixed_requests
from support.stages import ThreadHosts, check_threads_end, num_threads, serving
from verbatim import (
    LLM,
    Cluster,
    InvalidRequest,
    ModelError,
    Offload,
    OutOfBlocks,
    PipelineParallel,
)
from verbatim.draft import EarlyExit
from verbatim.placement.distributed import layers as stage_layers

ON_DISK: dict[str, Any] = dict(weights=(0, 0, 100), kv=(0, 0, 100), activations=(0, 0, 100))
PARTLY: dict[str, Any] = dict(weights=(30, 0, 70), batch_size=2, micro_batches=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return toys.saver(tmp_path_factory, toys.make_toy)


def staged(tiers: dict[str, Any], **settings: Any) -> Cluster:
    offload = Offload(policy=None, **tiers)
    return Cluster(**{"stages": 2, "hosts": ThreadHosts(), "offload": offload} | settings)


@pytest.mark.parametrize(
    ("name", "tiers"),
    slow_but(
        {("llama", "partly")},
        [(name, tiers) for name in ("llama", "qwen3_moe", "gpt2") for tiers in ("partly", "disk")],
    ),
)
@pytest.mark.parametrize("quantization", [None, pytest.param("int4", marks=pytest.mark.slow)])
def test_the_same_tokens_from_every_tier(
    name: str, tiers: str, quantization: str | None, saved: Callable[[str], Path]
) -> None:
    options: dict[str, Any] = dict(max_length=200, quantization=quantization)
    with LLM(saved(name), **options) as llm:
        expected = all_facts(llm.generate(*mixed_requests()))
    placement = staged(PARTLY if tiers == "partly" else ON_DISK, stages=3)
    with LLM(saved(name), placement=placement, **options) as llm:
        assert all_facts(llm.generate(*mixed_requests())) == expected
        for host in serving(llm):
            layers: Any = host.stage._share
            weights = layers.running.weights
            assert weights.bytes_read > 0
            held = sum(slot.tier_bytes for slot in weights.units.slots)
            away = sum(s.tier_bytes for s in weights.units.slots if s.tier == "disk")
            assert 0.4 * held < away <= held
        assert all("of memory" in stage["plan"] for stage in llm.info()["stages"])


@pytest.mark.parametrize(
    "draft", [None, pytest.param("mtp", marks=pytest.mark.slow), EarlyExit(1)], ids=str
)
def test_lost_moved_asleep_and_updated(draft: Any, tmp_path: Path) -> None:
    before = num_threads()
    save_with_mtp(toy("qwen3", 2), tmp_path)
    new = toys.make_toy("qwen3", seed=7)
    options: dict[str, Any] = dict(max_length=200, draft=draft)
    requests = mixed_requests(6)
    with LLM(tmp_path, **options) as llm:
        expected = all_facts(llm.generate(*requests))
        llm.update_weights(new)
        updated = all_facts(llm.generate(*requests))
    with LLM(tmp_path, placement=staged(PARTLY, layers=(2, 1)), **options) as llm:
        assert all_facts(llm.generate(*requests)) == expected
        for place in (0, 1):
            host = serving(llm)[place]
            host.before = lambda batch, host=host: host.kill()
            assert all_facts(llm.generate(*requests)) == expected
        assert llm.stats()["cluster"]["restarts"] == 2
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(*requests)) == expected
        llm.engine.runner.supervisor.move([(0, 1), (1, 3)])  # type: ignore[attr-defined]
        assert all_facts(llm.generate(*requests)) == expected
        for _ in range(2):
            llm.update_weights(new)
            assert all_facts(llm.generate(*requests)) == updated
        llm.sleep()
        llm.wake()
        assert all_facts(llm.generate(*requests)) == updated
    check_threads_end(before)


@pytest.mark.parametrize(
    ("tiers", "quantization"),
    [(PARTLY, "int8"), (ON_DISK, "int8"), (None, "int4"), (None, "w8a8")],
    ids=["partly", "disk", "memory-int4", "memory-w8a8"],
)
def test_an_update_that_fails_leaves_the_weights(
    tiers: dict[str, Any] | None, quantization: str, saved: Callable[[str], Path]
) -> None:
    new = toys.make_toy("llama", seed=7)
    state = dict(new.state_dict())
    name = [n for n in state if "down_proj" in n][-1]
    bad = state | {name: torch.full_like(state[name], torch.nan)}
    options: dict[str, Any] = dict(max_length=200, quantization=quantization)
    requests = mixed_requests(4)
    with LLM(saved("llama"), **options) as llm:
        expected = all_facts(llm.generate(*requests))
        llm.update_weights(state)
        updated, error = all_facts(llm.generate(*requests)), llm.info()["quantization"]["worst"]
    placement = Cluster(stages=2, hosts=ThreadHosts()) if tiers is None else staged(tiers)
    with LLM(saved("llama"), placement=placement, **options) as llm:
        with pytest.raises(ModelError, match="NaN"):
            llm.update_weights(bad)
        assert all_facts(llm.generate(*requests)) == expected != updated
        llm.update_weights(state)
        assert all_facts(llm.generate(*requests)) == updated
        assert error in [stage["worst"] for stage in llm.info()["quantization"]["stages"]]


def test_what_a_stage_has_no_room_for_is_refused_by_name(saved: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidRequest, match=r"offload='2GB'.*must be an Offload"):
        Cluster(offload="2GB")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"offload=2.*must be an Offload"):
        PipelineParallel(2, offload=2)  # type: ignore[arg-type]
    for offload, error in (
        (Offload(cpu="10KB"), OutOfBlocks),
        (Offload(disk="/nowhere"), Exception),
    ):
        placement = Cluster(stages=2, hosts=ThreadHosts(), offload=offload)
        with pytest.raises(error, match=r"(bytes are needed|nowhere).*stage|one"):
            LLM(saved("llama"), placement=placement)


def test_layers_that_fit_nowhere_are_divided_by_memory(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine with little memory would hold the others up."""
    hosts = ThreadHosts("small", "large")
    facts = stage_layers.Layers.facts

    def little(layers: Any) -> Any:
        on = [host.machine for host in hosts.hosts if host.stage._share is layers]
        return facts(layers) | {"memory": 20_000 if on == ["small"] else 60_000}

    monkeypatch.setattr(stage_layers.Layers, "facts", little)
    with LLM(saved("llama"), max_length=200) as llm:
        expected = all_facts(llm.generate(*mixed_requests(4)))
    offload = Offload(cpu="20MB", policy=None)
    folder = saved("llama")
    with LLM(
        folder, placement=Cluster(stages=2, hosts=hosts, offload=offload), max_length=200
    ) as llm:
        (one, _), (other, end) = (stage["layers"] for stage in llm.info()["stages"])
        assert (one, other, end) == (0, 1, 3)
        assert all_facts(llm.generate(*mixed_requests(4))) == expected
    with pytest.raises(OutOfBlocks, match="can't be divided"):
        LLM(folder, placement=Cluster(stages=2, hosts=ThreadHosts("small")))


@pytest.mark.slow
def test_ranks_of_this_machine(saved: Callable[[str], Path]) -> None:
    with LLM(saved("llama"), max_length=200) as llm:
        expected = all_facts(llm.generate(*mixed_requests()))
    offload = Offload(cpu="30MB", kv=(0, 0, 100))
    with LLM(saved("llama"), placement=PipelineParallel(2, offload=offload), max_length=200) as llm:
        assert all_facts(llm.generate(*mixed_requests())) == expected
