"""`LLM(device=...)`: which devices are accepted, and which are rejected; and the memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.toys import make_toy
from verbatim import LLM, InvalidRequest, NotSupported, options
from verbatim.kernels import numerics_key
from verbatim.model.device import CPU, Device, resolve_device
from verbatim.model.products import threads
from verbatim.model.quantized import moved_to, placeholder


def test_auto_device_is_the_cpu_also_for_a_live_cpu_module() -> None:
    assert resolve_device("auto", "auto") == resolve_device("cpu", True) == CPU
    assert resolve_device("auto", "auto", make_toy("llama")) == CPU


@pytest.mark.parametrize(
    ("device", "deterministic", "error", "message"),
    [
        ("tpu", "auto", NotSupported, "device='tpu'"),
        (3.5, "auto", NotSupported, "device=3.5"),
        ("meta", "auto", NotSupported, "device='meta'"),
        ("cpu", False, NotSupported, "deterministic=False"),
        ("cpu", "yes", InvalidRequest, "deterministic='yes'"),
        ("cpu", 1, InvalidRequest, "deterministic=1"),
    ],
)
def test_invalid_device_or_deterministic_value_is_rejected(
    device: Any, deterministic: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(device=device, deterministic=deterministic)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_device_without_a_gpu_is_rejected_with_the_reason() -> None:
    with pytest.raises(NotSupported, match=r"device='cuda:1': no GPU: .*(sees none|without CUDA)"):
        LLM(device="cuda:1")


def test_moving_a_live_module_and_missing_gpu_index_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = make_toy("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidRequest, match="the live module is on cpu, and is used in place"):
        resolve_device("cuda:1", "auto", module)
    with pytest.raises(NotSupported, match="there are 2 GPUs"):
        resolve_device("cuda:2", "auto")


def test_processes_of_a_machine_get_gpus_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device(torch.device("cuda", 1), batch_invariant=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = [gpu.nth(number) for number in range(4)]
    assert [device.torch.index for device in found] == [1, 2, 0, 1]
    assert all(device.batch_invariant for device in found)
    assert CPU.nth(3) == CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NotSupported, match=r"device=cuda:1: .* has no GPU"):
        gpu.nth(0)


def test_moving_a_placeholder_weight_allocates_no_memory() -> None:
    weight, meta = torch.ones(1000, 1000), torch.device("meta")
    moved = moved_to(placeholder(weight), meta)
    assert moved.shape == weight.shape
    assert moved.untyped_storage().nbytes() == weight.itemsize
    assert moved_to(weight, meta).untyped_storage().nbytes() == weight.nbytes
    assert moved_to(placeholder(weight), CPU.torch).isnan().all()


def test_numerics_key_depends_on_gpu_mode_and_quantization() -> None:
    keys = {
        numerics_key("bfloat16", "bfloat16", packed, {"name": name, "deterministic": deterministic})
        for name in ("NVIDIA H200", "NVIDIA L4")
        for deterministic in (True, False)
        for packed in (None, "int8-g64")
    }
    assert len(keys | {numerics_key("bfloat16", "bfloat16")}) == 9


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/jobs/7", "jobs/7", ("memory.max", "memory.current", "inactive_file")),
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        (
            *("4:cpu,memory:/host/path", "memory"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_of_a_container_is_within_its_limit(
    line: str, folder: str, files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, groups = tmp_path / "groups" / folder, tmp_path / "proc"
    group.mkdir(parents=True)
    groups.write_text(f"1:name=systemd:/\n{line}\n")
    monkeypatch.setattr(options, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(options, "_OWN_GROUPS", groups)
    whole = options.total_memory()
    limit, used, reclaimable = files
    (group / limit).write_text("300000000\n")
    (group / used).write_text("100000000\n")
    (group / "memory.stat").write_text(f"anon 5\n{reclaimable} 40000000\n{reclaimable}s 9\n")
    assert options.total_memory() == 300_000_000 < whole
    assert options.available_memory() == 240_000_000
    (group / limit).write_text("max\n")
    assert options.total_memory() == whole


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/jobs/7", {"jobs/7/cpu.max": "max 100000", "jobs/cpu.max": "250000 100000"}),
        ("0::/", {"cpu.max": "250000 100000"}),
        (
            "4:cpu,cpuacct:/host/path",
            {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_default_threads_are_within_the_quota_of_a_container(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").write_text(f"1:name=systemd:/\n{line}\n")
    monkeypatch.setattr(options, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(options, "_OWN_GROUPS", tmp_path / "proc")
    monkeypatch.setattr(options, "_UNSET_THREADS", 32)
    monkeypatch.setattr(options, "processor_limit", options.processor_limit.__wrapped__)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    set_threads = [32]
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    with threads(None):
        assert set_threads == [32]
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    with threads(None):
        assert set_threads == [32, 3]
    assert set_threads == [32, 3, 32]
    set_threads.append(7)
    with threads(None):
        assert set_threads[-1] == 7, "it was set"
