"""A model offloaded to RAM and disk gives the same tokens as a resident one."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import toys
from support.mtp_toys import save_with_mtp, toy
from support.pairwise import parametrize_combinations, slow_but
from support.programs import run_program
from support.requests_mixed import all_facts, generated, mixed_facts, mixed_requests, resident_facts
from support.stages import num_threads
from support.toys import Folders
from verbatim import (
    LLM,
    EngineClosed,
    InvalidRequest,
    ModelError,
    NotSupported,
    Offload,
    OutOfBlocks,
    SamplingParams,
    TierFailed,
    VerbatimError,
    kernels,
)
from verbatim.batch import Batch
from verbatim.model.flat import FlatContext
from verbatim.model.layer_trial import LayerTrial
from verbatim.placement.micro_batches import split_batch
from verbatim.placement.offload.stream import Ring, Use, use_of
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Unit
from verbatim.placement.offload.weights import Weights
from verbatim.weights import skeleton
from verbatim.weights.files import (
    PAGE,
    DirectFile,
    OpenFiles,
    buffer_bytes,
    bytes_of,
    pages,
    read_into,
    read_whole,
    round_to_pages,
)
from verbatim.weights.lazy import Computed, Stored, materialize, rows_can_be_read, rows_of
from verbatim.weights.update import overwrite

pytestmark = pytest.mark.usefixtures("no_thread_left")
ARCHITECTURES = ("llama", "qwen3_moe", "gpt2", "mistral", "gemma2")
WEIGHTS = ((100, 0, 0), (0, 100, 0), (0, 0, 100), (30, 40, 30))
BUDGET = "300MB"
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


_ENGINE = ("max_batch_tokens", "draft", "unused_weights")


def offloaded(folder: Path, dtype: str = "float32", **settings: Any) -> LLM:
    settings = {"weights": (0, 0, 100), "batch_size": 3, "micro_batches": 2} | settings
    engine = {k: settings.pop(k) for k in _ENGINE if k in settings}
    return LLM(
        folder, dtype=dtype, max_length=200, placement=Offload(gpu=BUDGET, **settings), **engine
    )


@parametrize_combinations(
    3, name=ARCHITECTURES, dtype=["float32", "bfloat16"], weights=WEIGHTS, overlap=[True, False]
)
def test_weights_on_any_tier_give_same_tokens(
    name: str, dtype: str, weights: Any, overlap: bool, folders: Folders
) -> None:
    with offloaded(folders(name), dtype, weights=weights, overlap=overlap) as llm:
        assert mixed_facts(llm) == resident_facts(folders(name), dtype=dtype)


@pytest.mark.parametrize("same", [True, False], ids=["tied", "untied"])
def test_checkpoint_storing_both_tied_tensors_gives_same_tokens(same: bool, tmp_path: Path) -> None:
    toys.make_toy("gpt2").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + (0 if same else 0.5)
    save_file(tensors, path, metadata={"format": "pt"})
    expected = resident_facts(tmp_path, 4)
    with offloaded(tmp_path) as llm:
        assert mixed_facts(llm, 4) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float16_checkpoint_is_converted_on_read(dtype: str, tmp_path: Path) -> None:
    toys.make_toy("mixtral").half().save_pretrained(tmp_path)
    expected = resident_facts(tmp_path, 4, dtype=dtype)
    with offloaded(tmp_path, dtype) as llm:
        assert mixed_facts(llm, 4) == expected


# ---- each layer is read once


def reads_of(llm: LLM, prompts: list[list[int]]) -> tuple[int, int]:
    """Return the weight bytes read for these prompts, and the number of forwards."""
    runner: Any = llm.engine.runner
    before = runner.weights.bytes_read, runner.num_forwards
    llm.generate(prompts, GREEDY)
    return runner.weights.bytes_read - before[0], runner.num_forwards - before[1]


def streamed_bytes(runner: Any) -> int:
    """Return the bytes that a forward reads, without embedding rows and experts."""
    return sum(use.nbytes for use in runner.weights._streamed.values())


def test_weights_are_read_once_per_step_for_all_micro_batches(folders: Folders) -> None:
    prompts = [toys.random_ids(6, i, high=toys.VOCAB) for i in range(8)]
    for batch_size, micro_batches in ((8, 1), (2, 4), (1, 8)):
        with offloaded(
            folders("llama"), batch_size=batch_size, micro_batches=micro_batches, overlap=False
        ) as llm:
            read, forwards = reads_of(llm, prompts)
            runner: Any = llm.engine.runner
            assert forwards == 5
            per_forward = streamed_bytes(runner)
            rows = read - forwards * per_forward  # embedding rows
            assert 0 < rows < 0.5 * per_forward


def test_prefetched_units_are_never_discarded(folders: Folders) -> None:
    """No prefetched unit is discarded, so the reads exceed those of the forwards by at most one forward."""
    with offloaded(folders("llama")) as llm:
        runner: Any = llm.engine.runner
        before, forwards = runner.trace.nbytes("wait weights"), runner.num_forwards
        llm.generate([[5, 6, 7]], GREEDY)
        num_forwards = runner.num_forwards - forwards
        read = runner.trace.nbytes("wait weights") - before
        assert read <= (num_forwards + 1) * streamed_bytes(runner)


@pytest.mark.parametrize(
    ("name", "kinds"),
    slow_but(
        [("mixtral", 1), ("deepseek_v3", 2)],
        [("llama", 1), ("mixtral", 1), ("deepseek_v3", 2), ("qwen3_next", 2)],
    ),
)
def test_layers_run_fused_and_one_of_each_kind_is_read_for_trial(
    name: str, kinds: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()
    patched = Weights.patched

    def counted(self: Weights, unit: Unit) -> Any:
        taken.append(unit.name)
        return patched(self, unit)

    def unfused(*args: Any) -> Any:
        raise AssertionError("a layer runs its own forward")

    monkeypatch.setattr(Weights, "patched", counted)

    def layers_read(fused: bool) -> int:
        taken.clear()
        placement = Offload(gpu=BUDGET, weights=(0, 0, 100))
        with LLM(folders(name), fused=fused, max_length=200, placement=placement) as llm:
            report = llm.info()["fused"]
            assert report is None or (report["layers"] > 1 and not report["plain"])
            read = sum(name.split(".")[-1].isdigit() for name in taken)
            if fused:
                for method in ("attend", "update_state"):
                    monkeypatch.setattr(FlatContext, method, unfused)
                llm.generate([[5, 6, 7]], GREEDY)
        return read

    assert layers_read(fused=False) + kinds == layers_read(fused=True)


def test_read_error_in_layer_trial_is_raised(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise TierFailed("disk: I/O error")

    monkeypatch.setattr(LayerTrial, "_inspect", broken)  # runs in the trial of a layer
    with pytest.raises(TierFailed, match="I/O error"):
        LLM(folders("llama"), max_length=200, placement=Offload(gpu=BUDGET, weights=(0, 0, 100)))


# ---- opening, updates and sleep


def test_offloaded_module_holds_no_second_copy_of_weights(folders: Folders) -> None:
    with offloaded(folders("llama")) as llm:
        runner: Any = llm.engine.runner
        held = {slot.name for slot in runner.weights.units.resident}
        for name, parameter in runner.module.named_parameters():
            assert name in held or parameter.untyped_storage().nbytes() <= 4
        assert llm.info()["placement"] == "offload"
        assert llm.info()["parameters"] == sum(p.numel() for p in runner.module.parameters())


def test_unsupported_offloads_are_rejected(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="a live module"):
        LLM(toys.make_toy("llama"), placement=Offload(gpu=BUDGET))
    with pytest.raises(NotSupported, match="must be None, an Offload"):
        LLM(folders("llama"), placement="offload")
    toys.make_toy("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save({}, tmp_path / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(NotSupported, match=r"needs model\.safetensors"):
        LLM(tmp_path, placement=Offload(gpu=BUDGET))
    with pytest.raises(NotSupported, match="LlamaForCausalLM has no MTP layers"):
        offloaded(folders("llama"), draft="mtp")
    with pytest.raises(InvalidRequest, match=r"make 600 .* sequences, more than max_sequences"):
        offloaded(folders("llama"), batch_size=100, micro_batches=6)


def unnamed_files() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("(deleted)" in os.readlink(link) for link in links if os.path.exists(link))


@parametrize_combinations(
    2,
    name=["llama", "qwen3_moe", "gemma2", "gpt2"],
    quantization=[None, "int8", "w4a8"],
    weights=[WEIGHTS[0], WEIGHTS[2], WEIGHTS[3]],
)
def test_updates_and_sleep_give_tokens_of_resident_model(
    name: str,
    quantization: str | None,
    weights: Any,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = folders(name), folders(name, seed=1)
    before = [load_file(folder / "model.safetensors") for folder in both]
    expected = [resident_facts(folder, 5, quantization=quantization) for folder in both]
    assert expected[0] != expected[1]
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_HEAD_BYTES", 0)
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_PIECE_BYTES", 7000)
    tiers = Offload(gpu=BUDGET, weights=weights, batch_size=3, micro_batches=2)
    with LLM(both[0], max_length=200, quantization=quantization, placement=tiers) as llm:
        for seed in (1, 0, 1):
            llm.update_weights(both[seed])
            assert mixed_facts(llm, 5) == expected[seed], seed
        llm.sleep(weights=True)
        module = llm.engine.runner.module
        assert all(p.untyped_storage().nbytes() <= 4 for p in module.parameters())
        with pytest.raises(VerbatimError, match=r"call wake\(\)"):
            llm.update_weights(both[0])
        llm.wake()
        assert mixed_facts(llm, 5) == expected[1]
        info = llm.info()["quantization"]
    with LLM(both[1], max_length=200, quantization=quantization, placement=tiers) as llm:
        assert llm.info()["quantization"] == info
    for folder, tensors in zip(both, before, strict=True):
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)


def test_quantized_weights_outside_layers_stay_quantized(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("llama")
    expected = resident_facts(folder, 5, quantization="int8")
    with LLM(folder, quantization="int8") as llm:
        packed = llm.info()["quantization"]["packed"]
    monkeypatch.setattr(
        "verbatim.placement.offload.units._MIN_UNIT_SHARE", 0.3
    )  # embedding and LM head
    tiers = Offload(gpu=BUDGET, weights=(0, 0, 100))
    with LLM(folder, max_length=200, quantization="int8", placement=tiers) as llm:
        assert len(llm.engine.runner.weights.units.resident) > 2
        assert mixed_facts(llm, 5) == expected
        info = llm.info()["quantization"]
        assert set(info["packed"]) == set(packed) and "rounded" not in info


def test_failed_update_keeps_old_weights_or_requires_another(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders("llama"), folders("llama", seed=1)
    size = (first / "model.safetensors").stat().st_size
    with offloaded(first, disk_limit=size // 2) as llm:
        files, expected = unnamed_files(), mixed_facts(llm, 5)
        with pytest.raises(TierFailed, match=f"disk_limit is {size // 2}"):
            llm.update_weights(second)
        new = load_file(second / "model.safetensors")
        with pytest.raises(InvalidRequest, match="are missing"):
            llm.update_weights({key: new[key] for key in list(new)[1:]})
        assert mixed_facts(llm, 5) == expected
        assert (unnamed_files(), llm.stats()["weight_version"]) == (files, 0)
    with offloaded(first) as llm:
        files = unnamed_files()
        for _ in range(3):
            llm.update_weights(second)
        assert unnamed_files() == files + 2  # the overlay, through the page cache and past it

        def fail(*args: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("verbatim.placement.offload.weights.use_of", fail)
            with pytest.raises(MemoryError):
                llm.update_weights(first)
        llm.update_weights(first)
        assert mixed_facts(llm, 5) == expected
        monkeypatch.setattr("verbatim.placement.offload.weights.use_of", fail)
        with pytest.raises(MemoryError):
            llm.update_weights(second)
        monkeypatch.undo()
        with pytest.raises(VerbatimError, match="call update_weights again"):
            mixed_facts(llm, 5)
        llm.update_weights(first)
        assert mixed_facts(llm, 5) == expected


def test_failed_write_of_new_weights_frees_their_file(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, new = folders("llama"), load_file(folders("llama", seed=1) / "model.safetensors")
    with offloaded(first, weights=(30, 40, 30)) as llm:
        files, expected = unnamed_files(), mixed_facts(llm, 5)
        writer: Any = llm.engine.runner.writer()  # type: ignore[attr-defined]
        writer.prepare(new)
        assert unnamed_files() == files + 2
        with pytest.raises(AttributeError):
            writer.write(new | {writer.exact[0]: None})
        assert unnamed_files() == files and mixed_facts(llm, 5) == expected


def test_ctrl_c_during_update_completes_the_update(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folders("llama"), folders("llama", seed=1)
    with LLM(second, dtype="float32", max_length=200) as llm:
        expected = mixed_facts(llm, 5)
    with offloaded(first, weights=(30, 40, 30)) as llm:
        write, signals = llm.engine.runner.new_weights, list[int]()

        def interrupted(*args: Any, **settings: Any) -> Callable[[], None]:
            put = write(*args, **settings)
            monkeypatch.setattr(
                "verbatim.placement.offload.weights.overwrite", overwrite_and_signal
            )
            return put

        def overwrite_and_signal(pairs: Any) -> None:
            signals.append(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            overwrite(pairs)

        monkeypatch.setattr(llm.engine.runner, "new_weights", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            llm.update_weights(second)
        assert signals and mixed_facts(llm, 5) == expected


def test_failed_wake_leaves_engine_asleep(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    with offloaded(folder, weights=(30, 40, 30)) as llm:
        expected = mixed_facts(llm, 5)
        llm.sleep(weights=True)
        (folder / "model.safetensors").rename(tmp_path / "away")
        with pytest.raises(TierFailed, match=r"can't open .*model\.safetensors"):
            llm.wake()
        (tmp_path / "away").rename(folder / "model.safetensors")
        llm.wake()
        assert mixed_facts(llm, 5) == expected


def test_disk_folder_stays_the_same_when_the_working_directory_changes(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path)
    tiers = Offload(gpu=BUDGET, weights=(0, 0, 100), disk="disk")
    with LLM(folders("llama"), placement=tiers) as llm:
        monkeypatch.chdir("/")
        llm.update_weights(folders("llama"))
        llm.sleep(weights=True)
        llm.wake()


def test_sleep_beyond_disk_limit_fails_and_keeps_engine_awake(
    folders: Folders,
) -> None:
    tiers = Offload(gpu=BUDGET, weights=(100, 0, 0), disk_limit=PAGE)
    with LLM(folders("llama"), max_length=200, quantization="int8", placement=tiers) as llm:
        files, expected = unnamed_files(), mixed_facts(llm, 5)
        with pytest.raises(TierFailed, match=f"disk_limit is {PAGE}"):
            llm.sleep(weights=True)
        assert mixed_facts(llm, 5) == expected and unnamed_files() == files
        llm.sleep()
        llm.wake()
        assert mixed_facts(llm, 5) == expected


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["budget", "budget, K and V on disk", "disk"])
def test_mtp_layers_of_offloaded_model_stay_within_budget(tiers: str, tmp_path: Path) -> None:
    save_with_mtp(toy("qwen3", 2), tmp_path)
    settings: dict[str, Any] = dict(weights=(0, 0, 100), kv=(0, 50, 50))
    if tiers != "disk":
        settings = dict(gpu="2MB", kv=(0, 0, 100) if "disk" in tiers else None)
    expected = generated(LLM(tmp_path), *mixed_requests(12))
    draft: dict[str, Any] = dict(draft="mtp", num_draft_tokens=3)
    with LLM(tmp_path, placement=Offload(**settings), **draft) as llm:
        assert all_facts(llm.generate(*mixed_requests(12))) == expected
        info, stats = llm.info(), llm.stats()["draft"]
        assert stats["errors"] == 0 and info["mtp_layers"] == 2
        if tiers != "disk":
            # K and V of the MTP layers stay in memory, wherever the plan places those of the model.
            in_memory = info["kv_bytes"] - info["kv_tiers"]["disk"]
            assert in_memory <= info["plan"]["memory"]["K and V"]
            assert info["plan"]["memory"]["MTP layers"] == info["mtp_weight_bytes"]
            assert info["plan"]["memory_bytes"] <= 2_000_000
    with pytest.raises(OutOfBlocks, match=r"bytes are needed .*, MTP layers \d+ KB"):
        LLM(tmp_path, placement=Offload(gpu=500_000), draft="mtp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_of_concatenated_tensors_are_sliced_from_each(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As in an embedding that is sharded by rows."""
    rows = torch.randn(9, 4)
    (tmp_path / "numbers").write_bytes(b"xyz" + rows.numpy().tobytes())
    shards = [
        Stored(f"{first}", tmp_path / "numbers", 3 + 16 * first, 16 * count, rows.dtype, (count, 4))
        for first, count in ((0, 5), (5, 1), (6, 3))
    ]
    lazy = Computed(torch.ops.aten.cat.default, (shards,))
    if dtype != rows.dtype:
        lazy = Computed(torch.ops.aten._to_copy.default, (lazy,), {"dtype": dtype})
    assert rows_can_be_read(lazy)
    for begin, end in itertools.combinations(range(10), 2):
        found = materialize(rows_of(lazy, begin, end), read_whole)
        assert torch.equal(found, rows[begin:end].to(dtype)), (begin, end)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(gpu="16 apples"), "gpu='16 apples'"),
        (dict(gpu="40%"), "gpu='40%'"),
        (dict(cpu=-1), "cpu=-1"),
        (dict(gpu=True), "gpu=True"),
        (dict(weights=(50, 60)), "weights=(50, 60)"),
        (dict(weights=(50, 30, 30)), "weights=(50, 30, 30)"),
        (dict(kv=(50,)), "kv=(50,)"),
        (dict(kv="abc"), "kv='abc'"),
        (dict(activations=(float("nan"), 0, 100)), "activations=(nan, 0, 100)"),
        (dict(weights=(True, 0, 99)), "weights=(True, 0, 99)"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(micro_batches=1.5), "micro_batches=1.5"),
        (dict(attention_top_k=0), "attention_top_k=0"),
        (dict(attention_top_k=2**63), "1 to 2147483647, or None"),
        (dict(gpu=2**63), "bytes, 0 to 4611686018427387904"),
        (dict(overlap=1), "overlap=1"),
        (dict(cpu_cache_compute="yes"), "cpu_cache_compute='yes'"),
        (dict(policy="best"), "policy='best'"),
        (dict(workload=(512,)), "workload=(512,)"),
        (dict(workload=(0, 5)), "workload[0]=0"),
        (dict(disk=5), "disk=5"),
        (dict(disk="a\0b"), "disk='a\\x00b': must be a path"),
        (dict(trace="\ud800"), "trace='\\ud800': must be a path"),
        (dict(disk_limit="lots"), "disk_limit='lots'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_offload_options_are_rejected(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Offload(**settings)
    assert said in str(refused.value)


def test_two_percentages_leave_the_rest_to_disk() -> None:
    assert Offload(weights=(20, 50)).weights == (20, 50, 30)
    assert Offload(gpu="1GB", cpu=0).replace(cpu="2GB").cpu == 2 * 10**9


# ---- errors


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
def test_read_error_closes_engine_and_returns_finished_results(
    overlap: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = offloaded(folders("llama"), overlap=overlap, disk=tmp_path)
    plain, failing = os.preadv, threading.Event()

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if failing.is_set():
            raise OSError(5, "Input/output error")
        return plain(fd, buffers, offset)

    monkeypatch.setattr("verbatim.weights.files.os.preadv", preadv)
    short = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    long = short.replace(max_tokens=50)

    def fail_later(ids: Any, logits: Any) -> Any:
        if len(ids) > 10:
            failing.set()
        return logits

    params = [short, long.replace(logits_processors=[fail_later]), long]
    with pytest.raises(TierFailed, match=r"reading .*model\.safetensors.*Input") as failed:
        llm.generate([[5, 6], [7, 8], [9]], params)
    first, second, third = failed.value.results
    assert first is not None and len(first.outputs[0].token_ids) == 2
    assert second is None and third is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineClosed, match="closed when this happened: reading "):
        llm.generate([[5]], GREEDY)
    llm.close()


def test_truncated_file_is_named_in_error(tmp_path: Path) -> None:
    toys.make_toy("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(ModelError, match=r"model\.safetensors.*(damaged|cut short)"):
        offloaded(tmp_path)
    path.write_bytes(whole)
    with offloaded(tmp_path, overlap=False) as llm:
        os.truncate(path, len(whole) - 5000)
        with pytest.raises(TierFailed, match=r"model\.safetensors changed since the model was op"):
            llm.generate([[5, 6]], GREEDY)


def test_dropped_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    file = DirectFile(tmp_path / "data")
    assert len(os.listdir("/proc/self/fd")) > before
    del file
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("direct", [True, False])
def test_short_read_raises_tier_failed(direct: bool, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 5000)
    file = DirectFile(path)
    file.direct = file.direct and direct
    buffer = bytes_of(pages(3 * PAGE))
    assert file.read([buffer], 0) == 5000
    os.truncate(path, 4999)
    with pytest.raises(TierFailed, match="short ends at byte 4999, but 1 bytes"):
        file.read([buffer], 0)
    file.close()


def test_rejected_direct_reads_fall_back_to_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 40)
    plain, refused = os.preadv, []

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return plain(fd, buffers, offset)

    monkeypatch.setattr("verbatim.weights.files.os.preadv", preadv)
    file, out = DirectFile(path), torch.empty(9000, dtype=torch.uint8)
    read_into(out.numpy(), _piece(path, 300, 9000), file, pages(buffer_bytes(9000)))
    assert _matches_file(_piece(path, 300, 9000), out)
    assert len(refused) == 1 and not file.direct
    file.close()


def test_checkpoint_changed_after_or_during_opening_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.make_toy("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    with offloaded(tmp_path) as llm:
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 0x40]) + whole[-2:])
        with pytest.raises(TierFailed, match="changed since the model was opened"):
            llm.generate([[5, 6]], GREEDY)
    plain = skeleton.stored_in

    def stored_in(file: Path) -> Any:
        found = plain(file)
        (tmp_path / "new").write_bytes(whole)
        (tmp_path / "new").replace(path)
        return found

    monkeypatch.setattr(skeleton, "stored_in", stored_in)
    with pytest.raises(TierFailed, match="changed since the model was opened"):
        offloaded(tmp_path)


def test_weight_files_are_chosen_as_by_transformers(tmp_path: Path) -> None:
    """model.safetensors takes precedence over a stale index, and unused tensors may have any dtype."""
    toys.make_toy("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    whole = tmp_path / "whole"
    torch.manual_seed(5)
    toys.make_toy("llama", seed=9).save_pretrained(whole)
    tensors = load_file(whole / "model.safetensors")
    tensors["unused"] = torch.zeros(4, dtype=torch.complex64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = resident_facts(whole, 3)
    with pytest.raises(ModelError, match="such as unused"):
        offloaded(tmp_path)
    with offloaded(tmp_path, unused_weights="ignore") as llm:
        assert mixed_facts(llm, 3) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"transformers_weights": "other.safetensors"})
    )
    with pytest.raises(NotSupported, match=r"other\.safetensors"):
        offloaded(tmp_path, unused_weights="ignore")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with offloaded(tmp_path, unused_weights="ignore") as llm:
        assert mixed_facts(llm, 3) == expected


def test_collected_llm_leaves_no_threads_or_descriptors(folders: Folders) -> None:
    gc.collect()  # garbage of other tests
    threads, fds = num_threads(), len(os.listdir("/proc/self/fd"))
    llm = offloaded(folders("llama"), kv=(0, 0, 100))
    llm.generate([[5, 6]], GREEDY)
    assert num_threads() > threads
    del llm
    gc.collect()
    assert num_threads() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_failed_draft_opening_leaves_no_threads(folders: Folders) -> None:
    with pytest.raises(ModelError):
        offloaded(folders("llama"), kv=(0, 0, 100), draft="/nonexistent")


def test_generate_in_forked_child_raises_engine_closed(folders: Folders) -> None:
    with offloaded(folders("llama"), kv=(0, 0, 100)) as llm:
        (expected,) = llm.generate([[5, 6]], GREEDY)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                llm.generate([[5, 6]], GREEDY)
                message = "an answer"
            except EngineClosed as error:
                message = str(error)
            os.write(write, message.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert b"before this process was forked" in os.read(read, 1000)
        (found,) = llm.generate([[5, 6]], GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        os.close(read)
        os.close(write)


def test_prompt_longer_than_workload_is_served(folders: Folders) -> None:
    prompt = toys.random_ids(150, 1, high=toys.VOCAB)
    with offloaded(folders("llama"), workload=(8, 4), weights=None) as llm:
        assert len(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) == 5


@pytest.mark.parametrize("after", [0, 3, 9, 12])
def test_read_error_while_opening_leaves_no_files(
    after: int, folders: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fds, plain, left = len(os.listdir("/proc/self/fd")), DirectFile.read, [after]

    def read(self: DirectFile, into: list[memoryview], offset: int, **settings: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise TierFailed("disk tier: broken")
        return plain(self, into, offset, **settings)

    monkeypatch.setattr(DirectFile, "read", read)
    with pytest.raises(TierFailed, match="disk tier: broken"):
        offloaded(folders("llama"), disk=tmp_path, weights=(20, 20, 60))
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) <= fds


def test_unwritable_disk_folder_is_named_in_error(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(TierFailed, match=r"can't write to the folder .*nowhere"):
        offloaded(folders("llama"), disk=tmp_path / "nowhere", kv=(0, 0, 100))


def test_close_releases_descriptors_and_memory(folders: Folders, tmp_path: Path) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    llm = offloaded(folders("llama"), disk=tmp_path, kv=(0, 0, 100), activations=(0, 0, 100))
    runner: Any = llm.engine.runner
    llm.generate([[5, 6, 7], [8]], GREEDY)
    assert list(tmp_path.iterdir()) == []  # written files have no name
    llm.close()
    llm.close()
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert all(
        p.untyped_storage().nbytes() <= 4 for s in runner.weights.units.slots for p in [s.parameter]
    )
    assert runner.weights.ring.nbytes == 0


# ---- the trace


def test_trace_has_spans_of_reads_and_computation(folders: Folders, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with offloaded(folders("llama"), trace=path) as llm:
        llm.generate([[5, 6, 7], [8]], GREEDY)
        assert not path.exists()
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["cat"] for e in spans} >= {"read", "compute"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    names = {e["name"] for e in spans if e["cat"] == "read"}
    assert {"model.layers.0", "model.layers.2", "lm_head"} <= names
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"compute"}


@pytest.mark.parametrize("path", ["nowhere/trace.json", "", "."])
def test_unwritable_trace_path_is_rejected_at_open(
    path: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="trace="):
        offloaded(folders("llama"), trace=path)


def test_trace_follows_symlink_and_keeps_other_files(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "trace.json").symlink_to(tmp_path / "to" / "there.json")
    (tmp_path / "trace.json.new").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with offloaded(folders("llama"), trace="trace.json") as llm:
        llm.generate([[5]], GREEDY)
        monkeypatch.chdir("/")
    assert (tmp_path / "trace.json").is_symlink()
    assert json.loads((tmp_path / "to" / "there.json").read_text())["traceEvents"]
    assert (tmp_path / "trace.json.new").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


# ---- file reads and the ring


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(bytes(torch.arange(100_000).remainder(251).to(torch.uint8).tolist()))
    return path


def _piece(path: Path, offset: int, nbytes: int) -> Stored:
    return Stored(f"{offset}", path, offset, nbytes, torch.uint8, (nbytes,))


def _matches_file(stored: Stored, found: torch.Tensor) -> bool:
    """Compare as bytes, because pytest takes minutes to print thousands of differences."""
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        return file.read(stored.nbytes) == bytes(found.tolist())


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 1), (1, 4096), (4095, 2), (99_999, 1), (3, 99_997)]
)
def test_tensor_at_any_file_offset_is_read(blob: Path, offset: int, nbytes: int) -> None:
    stored = _piece(blob, offset, nbytes)
    assert _matches_file(stored, read_whole(stored))


@pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="no huge pages"
)
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, (4 << 20) + 5])
def test_direct_read_buffers_use_huge_pages(nbytes: int) -> None:
    memory = pages(nbytes)
    assert memory.nbytes == nbytes and not memory.is_inference()
    if not nbytes:
        return
    memory.fill_(7)
    assert memory.data_ptr() % PAGE == 0 and bytes_of(memory).nbytes == nbytes
    flags, is_here = None, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            is_here = begin <= memory.data_ptr() < end
        elif is_here and first == "VmFlags:":
            flags = line.split()[1:]
    assert flags is not None and "hg" in flags


def test_failed_allocation_names_its_size() -> None:
    with pytest.raises(MemoryError, match="288,230,376,151,711,744 bytes can't be allocated"):
        pages(1 << 58)


def test_adjacent_tensors_are_read_in_one_chunk(blob: Path) -> None:
    pieces = [_piece(blob, 5000, 100), _piece(blob, 10, 4900), _piece(blob, 90_000, 7)]
    use = use_of("pieces", pieces, OpenFiles())
    assert len(use.reads) == 2
    assert use.nbytes == round_to_pages(5100) + PAGE
    assert len(use.places) == 3


@contextlib.contextmanager
def _ring_over(
    pieces: list[Stored], capacity: int, threads: int
) -> Iterator[tuple[Ring, list[Use], Callable[[int], bool]]]:
    """Yield a ring, a use for each piece, and a function that takes a piece and compares its bytes."""
    ring, files = Ring("weights", max(1, threads), Trace(), ahead=threads > 0), OpenFiles()
    uses = [use_of(stored.name, [stored], files) for stored in pieces]

    def take(index: int) -> bool:
        region, at = ring.take(uses[index]), uses[index].places[pieces[index]]
        same = _matches_file(pieces[index], region[at : at + pieces[index].nbytes])
        ring.release()
        return same

    try:
        ring.reserve(capacity * PAGE)
        ring.follow(uses, repeat=True)
        yield ring, uses, take
    finally:
        ring.close()
        files.close()


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("capacity", [3, 4, 7, 20])
def test_ring_of_any_size_returns_file_contents(threads: int, capacity: int, blob: Path) -> None:
    pieces = [_piece(blob, 7_000 * i + 13, 1_000 * (i % 3) + 500) for i in range(12)]
    order = [*range(12), *range(12), 5, 4, 11, 11, 0, *range(12)]
    with _ring_over(pieces, capacity, threads) as (ring, uses, take):
        assert all(take(index) for index in order)
        ring.follow([uses[index] for index in (3, 1, 3, 2)], repeat=True)
        assert all(take(index) for index in [3, 1, 3, 2, 3, 1, 3, 2, 2, 7, 3])
        assert ring._trace.nbytes("wait weights") >= len(order) * PAGE


def test_slow_read_of_dropped_region_does_not_corrupt_newer_reads(
    blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow reader still writes to the ring after its region was given up."""
    slow, plain = threading.Event(), DirectFile.read

    def read(self: DirectFile, into: list[memoryview], offset: int, **settings: Any) -> int:
        if offset < 4096:
            slow.wait(0.2)
        return plain(self, into, offset, **settings)

    monkeypatch.setattr(DirectFile, "read", read)
    pieces = [_piece(blob, 20_000 * i, 4096) for i in range(4)]
    with _ring_over(pieces, 2, 2) as (_, _, take):
        assert all(take(index) for index in (2, 1, 3, 2))  # the readers began with 0
        slow.set()


@pytest.mark.parametrize(("max_sequences", "max_rows"), [(1, 100), (2, 4), (5, 3)])
def test_micro_batches_respect_their_limits(max_sequences: int, max_rows: int) -> None:
    whole = Batch.of([(range(rows), 7, [s]) for s, rows in enumerate((3, 1, 10, 1))], range(15))
    parts = split_batch(whole, max_sequences, max_rows)
    assert max(part.num_sequences for part in parts) <= max_sequences
    assert max(part.num_tokens for part in parts) <= max_rows


# ---- LM head in pieces


@parametrize_combinations(
    2,
    name=["llama", "gpt2", "gemma2"],
    dtype=["float32", "bfloat16"],
    weights=[(0, 0, 100), (40, 0, 60)],
)
def test_lm_head_in_pieces_gives_same_tokens(
    name: str, dtype: str, weights: Any, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model has a separate LM head; the heads of two are tied to the embedding."""
    folder = folders(name)
    expected = resident_facts(folder, dtype=dtype)
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_HEAD_BYTES", 0)
    monkeypatch.setattr("verbatim.placement.offload.units._NOT_LAYERS", (torch.nn.Module,))
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_PIECE_BYTES", 7000)
    with offloaded(folder, dtype, weights=weights) as llm:
        runner: Any = llm.engine.runner
        pieces = [unit for unit in runner.weights.units.order if "[" in unit.name]
        if kernels.library() is not None:
            assert len(pieces) > 1
        assert mixed_facts(llm) == expected


def test_changed_file_with_only_the_lm_head_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_HEAD_BYTES", 0)
    monkeypatch.setattr("verbatim.placement.offload.units._MIN_PIECE_BYTES", 1 << 12)
    model = toys.make_toy("llama", tie_word_embeddings=False, vocab_size=4096)
    model.save_pretrained(tmp_path, max_shard_size=model.lm_head.weight.nbytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    path = tmp_path / index["lm_head.weight"]
    assert list(index.values()).count(path.name) == 1
    with offloaded(tmp_path) as llm:
        llm.generate([[5, 6]], GREEDY)
        data = path.read_bytes()
        path.write_bytes(data[:-8] + data[-4:] + data[-8:-4])
        with pytest.raises(TierFailed, match="changed since the model was opened"):
            llm.generate([[5, 6]], GREEDY)


@pytest.mark.slow
def test_sampling_few_rows_at_a_time_gives_same_tokens(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("llama")
    expected = resident_facts(folder)
    with offloaded(folder) as llm:
        runner: Any = llm.engine.runner
        of_a_row = runner.plan.memory["logits"] // runner.vocab_size
        for at_once in (1, 2, 5):
            monkeypatch.setattr(
                "verbatim.placement.offload.runner._SAMPLING_BYTES", of_a_row // at_once
            )
            assert mixed_facts(llm) == expected


def test_ctrl_c_during_embedding_lookup_raises_keyboard_interrupt(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_facts(folders("llama"), 4)
    with offloaded(folders("llama")) as llm:
        pop: Any = torch.overrides._pop_torch_function_stack

        def pop_and_interrupt() -> Any:
            monkeypatch.undo()
            popped = pop()
            signal.raise_signal(signal.SIGINT)
            return popped

        monkeypatch.setattr(torch.overrides, "_pop_torch_function_stack", pop_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]], GREEDY)
        assert mixed_facts(llm, 4) == expected


_AFTER_MAIN = """
import atexit, sys, threading
from verbatim import LLM, Offload, SamplingParams

llm = LLM(sys.argv[1], placement=Offload(gpu="300MB", weights=(0, 0, 100)))


def speak():
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    print(llm.generate([[5, 6]], greedy)[0].outputs[0].token_ids)


def speak_later():
    threading.main_thread().join()
    speak()


atexit.register(speak)
threading.Thread(target=speak_later).start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_threads_and_atexit_generate_after_main_thread_has_ended(
    name: str, folders: Folders
) -> None:
    first, second = run_program("-W", "ignore", "-c", _AFTER_MAIN, folders(name)).splitlines()
    assert first == second
    assert len(json.loads(first)) == 5
