"""Offload from a device with its own memory, which the CPU simulates: copies replace transfers.

The same on a GPU: `tests/gpu/test_gpu_offload.py`.
"""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

import verbatim.api.llm
from support import toys
from support.pairwise import slow_but
from support.requests_mixed import mixed_facts, resident_facts
from support.toys import Folders
from verbatim import LLM, Offload, OutOfBlocks
from verbatim.model.device import Device
from verbatim.placement.offload.runner import Offloaded

GPU = Device(torch.device("cpu"), batch_invariant=True, is_separate=True)
PLACES: list[dict[str, Any]] = [
    dict(gpu="300MB", cpu="300MB"),
    dict(weights=(0, 100, 0), overlap=False),
    dict(weights=(30, 30, 40), kv=(0, 100, 0), activations=(0, 100, 0)),
    dict(weights=(0, 0, 100), kv=(30, 30, 40), activations=(30, 30, 40)),
    dict(weights=(40, 30, 30), kv=(50, 0, 50), overlap=False),
]


def offloaded(monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: Any) -> LLM:
    """Open a model on the simulated device."""
    kv_memory = settings.pop("kv_memory", "20MB")
    offload = Offload(**dict(batch_size=3, micro_batches=2, policy=None) | settings)
    with monkeypatch.context() as patch:
        patch.setattr(verbatim.api.llm, "resolve_device", lambda *_: GPU)
        return LLM(folder, dtype="float32", max_length=200, kv_memory=kv_memory, placement=offload)


@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gpt2", "qwen3_moe", "lfm2"]))
def test_every_placement_gives_tokens_of_resident_model(
    name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in PLACES:
        with offloaded(monkeypatch, folders(name), **place) as llm:
            assert mixed_facts(llm) == resident_facts(folders(name)), place
            _check_memory(llm.engine.runner)
    assert not [t for t in threading.enumerate() if "weights" in t.name]


def _check_memory(runner: Any) -> None:
    """Check that the device's memory is distinct from RAM, and that every weight is in its tier."""
    assert isinstance(runner, Offloaded)
    weights, plan = runner.weights, runner.plan
    assert weights.device_ring is not None
    host, device = weights.ring._memory, weights.device_ring._memory
    assert host is not None and device is not None
    assert not device.nbytes or host.data_ptr() != device.data_ptr()
    assert weights.device_ring.nbytes == plan.memory.get("GPU ring", 0)
    for slot in weights.units.slots:
        in_place = slot.parameter.untyped_storage().nbytes() >= slot.nbytes
        assert in_place == (slot.tier == "gpu"), (slot.name, slot.tier)
        assert (slot.data is None) == (slot.tier == "disk"), (slot.name, slot.tier)
    sizes = runner.store.bytes_by_tier()
    assert sum(t.nbytes for t in runner.store.tensors) == sizes["gpu"]
    assert sum(sizes.values()) == runner.store.num_blocks * runner.block_size * sum(
        k * 4 for k in (shape.elements for shape in runner.store.shapes)
    )


def test_weights_are_copied_once_for_all_micro_batches(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(monkeypatch, folders("llama"), weights=(0, 60, 40)) as llm:
        runner: Any = llm.engine.runner
        trace, units = runner.weights.trace, runner.weights._copied
        before, forwards = trace.nbytes("wait device weights"), runner.num_forwards
        mixed_facts(llm)
        copied = trace.nbytes("wait device weights") - before
        a_forward = sum(use.nbytes for use in units.values())
        assert copied == a_forward * (runner.num_forwards - forwards)


def test_updates_and_sleep_give_tokens_of_resident_model(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_facts(folders("llama", seed=1), 6)
    with offloaded(monkeypatch, folders("llama"), weights=(30, 40, 30)) as llm:
        assert mixed_facts(llm, 6) == resident_facts(folders("llama"), 6)
        llm.update_weights(toys.make_toy("llama", seed=1).state_dict())
        assert mixed_facts(llm, 6) == expected
        llm.sleep(weights=True)
        assert all(slot.data is None for slot in llm.engine.runner.weights.units.slots)  # type: ignore[attr-defined]
        llm.wake()
        assert mixed_facts(llm, 6) == expected


def test_update_in_pieces_leaves_no_old_weights_on_device(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage receives large weights in several messages; the device may copy units between two of them."""
    new = toys.make_toy("llama", seed=1).state_dict()
    with offloaded(monkeypatch, folders("llama"), weights=(0, 60, 40)) as llm:
        runner: Any = llm.engine.runner
        writer = runner.writer()
        writer.prepare(new)
        for name in reversed(writer.exact):
            runner.write_weights(writer, {name: new[name]})
            wait(job for region in runner.weights.device_ring._regions for job in region.jobs)
        assert mixed_facts(llm, 6) == resident_facts(folders("llama", seed=1), 6)


@pytest.mark.slow
def test_smaller_budgets_move_weights_to_ram_and_then_to_disk(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    expected, shares = resident_facts(folder, 6), []
    size: dict[str, Any] = dict(workload=(60, 10), kv_memory=None, policy="auto")
    for gpu, cpu in (("100MB", "100MB"), ("30MB", "100MB"), ("30MB", "8MB")):
        with offloaded(monkeypatch, folder, gpu=gpu, cpu=cpu, **size) as llm:
            assert mixed_facts(llm, 6) == expected, (gpu, cpu)
            shares.append(llm.info()["plan"]["weights"])
    assert shares[0] == [100, 0, 0]
    assert 0 < shares[1][0] < 100 and shares[1][2] == 0
    assert 0 < shares[2][0] < 100 and shares[2][2] > 0
    size |= dict(gpu="1MB", cpu="100MB", batch_size=None, micro_batches=None)
    match = r"at least \d+ bytes are needed on the GPU and \d+ in RAM"
    with pytest.raises(OutOfBlocks, match=match):
        offloaded(monkeypatch, folder, **size)
