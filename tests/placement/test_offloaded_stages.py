"""Offloaded stages give the same tokens as a resident model, also when lost, moved, asleep or updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import toys
from support.mtp_toys import save_with_mtp, toy
from support.programs import until
from support.requests_mixed import mixed_facts, resident_facts
from support.stages import ThreadHosts, check_threads_end, num_threads, serving, staged
from support.toys import Folders
from verbatim import (
    LLM,
    Cluster,
    InvalidRequest,
    ModelError,
    Offload,
    OutOfBlocks,
    PipelineParallel,
    VerbatimError,
)
from verbatim.draft import EarlyExit
from verbatim.placement.distributed.stage_share import StageShare

COUNT = 6  # requests
ON_DISK: dict[str, Any] = dict(weights=(0, 0, 100), kv=(0, 0, 100), activations=(0, 0, 100))
PARTLY: dict[str, Any] = dict(weights=(30, 0, 70), batch_size=2, micro_batches=3)


def tiered(tiers: dict[str, Any], **settings: Any) -> Cluster:
    return staged(offload=Offload(policy=None, **tiers), **settings)


@pytest.mark.parametrize(
    "tiers",
    [pytest.param(PARTLY, id="partly", marks=pytest.mark.slow), pytest.param(ON_DISK, id="disk")],
)
def test_offloaded_stages_give_tokens_of_resident_model(
    tiers: dict[str, Any], folders: Folders
) -> None:
    with LLM(folders("llama"), placement=tiered(tiers, stages=3), max_length=200) as llm:
        assert mixed_facts(llm) == resident_facts(folders("llama"))
        for host in serving(llm):
            layers: Any = host.stage
            weights = layers.running.weights
            assert weights.bytes_read > 0
            held = sum(slot.tier_bytes for slot in weights.units.slots)
            away = sum(s.tier_bytes for s in weights.units.slots if s.tier == "disk")
            assert 0.4 * held < away <= held
        assert all("of memory" in stage["plan"] for stage in llm.info()["stages"])


@pytest.mark.parametrize(
    "draft",
    [pytest.param(draft, marks=pytest.mark.slow) for draft in (None, "mtp")] + [EarlyExit(1)],
    ids=str,
)
def test_lost_moved_sleeping_and_updated_stages_give_same_tokens(
    draft: Any, tmp_path: Path
) -> None:
    before = num_threads()
    save_with_mtp(toy("qwen3", 2), tmp_path)
    new = toys.make_toy("qwen3", seed=7)
    options: dict[str, Any] = dict(max_length=200, draft=draft)
    with LLM(tmp_path, **options) as llm:
        expected = mixed_facts(llm, COUNT)
        llm.update_weights(new)
        updated = mixed_facts(llm, COUNT)
    with LLM(tmp_path, placement=tiered(PARTLY, layers=(2, 1)), **options) as llm:
        assert mixed_facts(llm, COUNT) == expected
        for place in (0, 1):
            host = serving(llm)[place]
            host.before = lambda batch, host=host: host.kill()
            assert mixed_facts(llm, COUNT) == expected
        assert llm.stats()["cluster"]["restarts"] == 2
        llm.sleep(weights=True)
        llm.wake()
        assert mixed_facts(llm, COUNT) == expected
        llm.engine.runner.group.move([(0, 1), (1, 3)])  # type: ignore[attr-defined]
        assert mixed_facts(llm, COUNT) == expected
        for _ in range(2):
            llm.update_weights(new)
            assert mixed_facts(llm, COUNT) == updated
        llm.sleep()
        llm.wake()
        assert mixed_facts(llm, COUNT) == updated
    check_threads_end(before)


@pytest.mark.parametrize(
    ("tiers", "quantization"),
    [
        pytest.param(PARTLY, "int8", id="partly"),
        pytest.param(ON_DISK, "int8", id="disk", marks=pytest.mark.slow),
        pytest.param(None, "int4", id="memory-int4", marks=pytest.mark.slow),
        pytest.param(None, "w8a8", id="memory-w8a8"),
    ],
)
def test_failed_update_keeps_old_weights(
    tiers: dict[str, Any] | None, quantization: str, folders: Folders
) -> None:
    new = toys.make_toy("llama", seed=7)
    state = dict(new.state_dict())
    name = [n for n in state if "down_proj" in n][-1]
    bad = state | {name: torch.full_like(state[name], torch.nan)}
    options: dict[str, Any] = dict(max_length=200, quantization=quantization)
    expected = resident_facts(folders("llama"), COUNT, quantization=quantization)
    with LLM(folders("llama"), **options) as llm:
        llm.update_weights(state)
        updated, error = mixed_facts(llm, COUNT), llm.info()["quantization"]["worst"]
    placement = staged() if tiers is None else tiered(tiers)
    with LLM(folders("llama"), placement=placement, **options) as llm:
        with pytest.raises(ModelError, match="NaN"):
            llm.update_weights(bad)
        until(lambda: all(host.stage._weights is None for host in serving(llm)))
        assert mixed_facts(llm, COUNT) == expected != updated
        llm.update_weights(state)
        assert mixed_facts(llm, COUNT) == updated
        assert error in [stage["worst"] for stage in llm.info()["quantization"]["stages"]]


@pytest.mark.slow
def test_lost_and_moved_stages_of_recurrent_layers_give_same_tokens(folders: Folders) -> None:
    """A stage without attention has no K and V, so that all of its cache is recurrent states."""
    folder, offload = folders("bamba"), Offload()
    expected = resident_facts(folder, COUNT)
    with LLM(folder, placement=staged(offload=offload, layers=(2, 1)), max_length=200) as llm:
        host = serving(llm)[1]
        host.before = lambda batch: host.kill()
        assert mixed_facts(llm, COUNT) == expected
        llm.engine.runner.group.move([(0, 1), (1, 3)])  # type: ignore[attr-defined]
        assert mixed_facts(llm, COUNT) == expected


def test_closing_a_stage_frees_file_of_weights_that_were_not_written(folders: Folders) -> None:
    new = toys.make_toy("llama", seed=7).state_dict()
    with LLM(folders("llama"), max_length=200, placement=tiered(ON_DISK)) as llm:
        llm.engine.runner.new_weights(new, check_finite=False)
        files = [host.stage.weights._new_file for host in serving(llm)]
        assert all(file.nbytes for file in files)
    assert not any(file.nbytes for file in files)


def test_invalid_offloads_of_stages_are_rejected(folders: Folders) -> None:
    with pytest.raises(InvalidRequest, match=r"offload='2GB'.*must be an Offload"):
        Cluster(offload="2GB")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"offload=2.*must be an Offload"):
        PipelineParallel(2, offload=2)  # type: ignore[arg-type]
    small, nowhere = Offload(cpu="10KB"), Offload(disk="/nowhere")
    for offload, error in ((small, OutOfBlocks), (nowhere, VerbatimError)):
        with pytest.raises(error, match=r"(bytes are needed|TierFailed.*nowhere).*stage"):
            LLM(folders("llama"), placement=staged(offload=offload))


def test_offloaded_layers_are_divided_by_memory_of_machines(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because a machine with little memory would slow the others down."""
    hosts = ThreadHosts("small", "large")
    use = StageShare.use

    def little(layers: Any, *args: Any, **kwargs: Any) -> Any:
        on = [host.machine for host in hosts.hosts if host.stage is layers]
        return use(layers, *args, **kwargs) | {"memory": 20_000 if on == ["small"] else 60_000}

    monkeypatch.setattr(StageShare, "use", little)
    folder, offload = folders("llama"), Offload(cpu="20MB", policy=None)
    with LLM(folder, placement=staged(hosts=hosts, offload=offload), max_length=200) as llm:
        (one, _), (other, end) = (stage["layers"] for stage in llm.info()["stages"])
        assert (one, other, end) == (0, 1, 3)
        assert mixed_facts(llm, 4) == resident_facts(folder, 4)
    with pytest.raises(OutOfBlocks, match="can't be divided"):
        LLM(folder, placement=staged(hosts=ThreadHosts("small")))


@pytest.mark.slow
def test_offloaded_pipeline_ranks_give_same_tokens(folders: Folders) -> None:
    placement = PipelineParallel(2, offload=Offload(cpu="30MB", kv=(0, 0, 100)))
    with LLM(folders("llama"), placement=placement, max_length=200) as llm:
        assert mixed_facts(llm) == resident_facts(folders("llama"))
