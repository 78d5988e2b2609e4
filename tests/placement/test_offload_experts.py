"""Offloaded experts: only routed experts are read, and tokens do not depend on which are cached."""

from __future__ import annotations

import gc
import os
import time
import weakref
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import sweep, toys
from support.pairwise import parametrize_combinations, slow_but
from support.requests_mixed import mixed_facts, resident_facts
from support.toys import Folders
from verbatim import LLM, Offload, SamplingParams, TierFailed, kernels
from verbatim.batch import Batch
from verbatim.model.experts import run_experts
from verbatim.model.loader import ModelSource
from verbatim.placement.offload import experts as cache_room
from verbatim.placement.offload.experts import ExpertCache
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Units, find_units
from verbatim.weights.files import DirectFile, OpenFiles, read_whole
from verbatim.weights.lazy import (
    Computed,
    Stored,
    materialize,
    pieces_of,
    rows_can_be_read,
    rows_of,
    traced,
)
from verbatim.weights.opening import open_files

ON_DISK = dict(weights=(0, 0, 100), batch_size=3, micro_batches=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
# One model of each storage form: a tensor per expert, transposed with biases, concatenated by rows,
# stacked, and with experts that have no weights.
FORMS = ("qwen3_moe", "gpt_oss", "dbrx", "granitemoe", "longcat_flash")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return toys.saver(tmp_path_factory, sweep.build)


def offloaded(folder: Path, **settings: Any) -> LLM:
    engine = {k: settings.pop(k) for k in ("quantization", "dtype") if k in settings}
    placement = Offload(gpu=settings.pop("gpu", "300MB"), **(ON_DISK | settings))
    return LLM(folder, max_length=200, placement=placement, **engine)


def cache_of(llm: LLM) -> ExpertCache:
    found: Any = llm.engine.runner.weights.experts
    assert isinstance(found, ExpertCache)
    return found


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Units]:
    loaded = open_files(ModelSource(folder, dtype), False)
    assert loaded.lazy_weights is not None
    units = find_units(loaded.module, loaded.lazy_weights)
    units.split_experts()
    return loaded.module, units


def cache_for(
    folder: Path, slots: int | float, ahead: bool = False
) -> tuple[list[Any], ExpertCache]:
    """Return a model's layers of experts and a cache; `slots` is a number, or a share of all experts."""
    layers: Any = opened(folder)[1].experts
    if isinstance(slots, float):
        slots = int(slots * sum(layer.count for layer in layers))
    return layers, ExpertCache(layers, slots * layers[0].expert_bytes, ahead, Trace(), OpenFiles())


def run_every_expert(layer: Any) -> None:
    """Run a layer with 64 rows for each of its experts."""
    rows = torch.zeros(64 * layer.count, 64)
    layer.module.expert_share.run(layer.module, rows, [64] * layer.count)


def reads_asked_of(cache: ExpertCache) -> list[int]:
    """Return a list that collects the layer number of every expert read from now on."""
    layer_numbers, plain = [], cache.read

    def read(layer: Any, *args: Any) -> Any:
        layer_numbers.append(layer.number)
        return plain(layer, *args)

    cache.read = read  # type: ignore[method-assign]
    return layer_numbers


# ---- same tokens


@parametrize_combinations(
    3,
    name=FORMS,
    quantization=[None, "int8", "int4"],
    settings=[{}, {"overlap": False}, {"weights": (30, 40, 30)}, {"weights": (60, 20, 20)}],
)
def test_offloaded_experts_give_tokens_of_resident_model(
    name: str, quantization: str | None, settings: dict[str, Any], moe: Folders
) -> None:
    with offloaded(moe(name), quantization=quantization, **settings) as llm:
        assert mixed_facts(llm, 9) == resident_facts(moe(name), 9, quantization=quantization)
        cache = cache_of(llm)
        held = cache.capacity == cache.num_experts  # read while the model was opened
        assert held or cache.trace.nbytes("read experts") > 0


@pytest.mark.parametrize("overlap", slow_but([True], [True, False]))
def test_cache_of_one_expert_gives_same_tokens(
    overlap: bool, moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_facts(moe("qwen3_moe"), 9)
    monkeypatch.setattr(ExpertCache, "_divide_memory", _with_slots(1))
    with offloaded(moe("qwen3_moe"), overlap=overlap) as llm:
        assert cache_of(llm).capacity == 1
        assert mixed_facts(llm, 9) == expected


def _with_slots(count: int) -> Any:
    plain = ExpertCache._divide_memory

    def share_out(self: ExpertCache, layers: Any, nbytes: int) -> Any:
        return plain(self, layers, count * layers[0].expert_bytes)

    return share_out


@pytest.mark.slow
def test_offloaded_experts_without_kernels_give_same_tokens(
    moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)
    with LLM(moe("qwen3_moe"), max_length=200) as llm:
        expected = mixed_facts(llm, 5)
    with offloaded(moe("qwen3_moe")) as llm:
        assert mixed_facts(llm, 5) == expected
        assert "no compiled kernels" in next(iter(llm.info()["experts"]))


# ---- reads


def test_only_routed_experts_are_read_and_only_once(moe: Folders) -> None:
    _, units = opened(moe("qwen3_moe"))
    layer = units.experts[0]
    each = layer.expert_bytes
    cache = ExpertCache(units.experts, 100 * each, True, Trace(), OpenFiles())
    share: Any = layer.module.expert_share
    whole = {key: materialize(stack.lazy, read_whole) for key, stack in layer.stacks.items()}
    rows = torch.randn(6, 64)
    counts = [0, 3, 0, 0, 1, 0, 2, 0]
    out = share.run(layer.module, rows, counts)
    futures.wait(share.pool.jobs)
    chosen = {e for e, count in enumerate(counts) if count}
    held = {e for e, slot in enumerate(share.slots.tolist()) if slot >= 0}
    assert held == chosen
    read = cache.trace.nbytes("read experts")
    assert 3 * each <= read <= 3 * (each + 3 * 2 * 4096)
    for key, tensor in whole.items():
        layer.stacks[key].parameter.data = tensor
    layer.module.__dict__.pop("expert_share")
    assert torch.equal(out, run_experts(layer.module, rows, counts))
    assert torch.equal(share.run(layer.module, rows, counts), out)
    assert cache.trace.nbytes("read experts") == read
    cache.close()


def test_frequently_used_experts_stay_cached(moe: Folders) -> None:
    """With memory for a quarter of the experts, frequently used ones are rarely read again."""
    layers, cache = cache_for(moe("qwen3_moe"), 0.25)
    noise = np.random.default_rng(0)
    popular = np.array([0.35, 0.35, *[0.05] * 6])
    reads, steps = reads_asked_of(cache), 60
    for _ in range(steps):
        for layer in layers:
            counts = np.zeros(layer.count, dtype=int)
            counts[noise.choice(layer.count, 2, replace=False, p=popular)] = 1
            layer.module.expert_share.run(layer.module, torch.zeros(2, 64), counts)
    assert len(reads) < 0.6 * 2 * steps * len(layers)  # random eviction would read three quarters
    cache.close()


def test_cyclic_use_of_all_experts_keeps_cached_ones(moe: Folders) -> None:
    """If every step uses every expert, the oldest one is needed next and must not be evicted."""
    layers, cache = cache_for(moe("qwen3_moe"), 0.75)
    reads = reads_asked_of(cache)
    for step in range(6):
        if step == 3:
            reads.clear()
        for layer in layers:
            run_every_expert(layer)
    total = sum(layer.count for layer in layers)
    assert len(reads) / 3 <= 0.45 * total  # evicting the oldest would read all of them
    cache.close()


def test_experts_of_next_layer_are_prefetched(moe: Folders) -> None:
    layers, cache = cache_for(
        moe("qwen3_moe"), 2 * opened(moe("qwen3_moe"))[1].experts[0].count, True
    )
    reads = reads_asked_of(cache)
    for _ in range(3):
        found = []
        for layer in layers:
            reads.clear()
            run_every_expert(layer)
            found.append(set(reads))
    assert any(found)
    assert all(read <= {(number + 1) % len(layers)} for number, read in enumerate(found))
    cache.close()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_expert_is_sliced_from_every_storage_form(
    name: str, dtype: torch.dtype, moe: Folders
) -> None:
    _, units = opened(moe(name), dtype)
    assert units.experts
    for stack in (s for layer in units.experts for s in layer.stacks.values()):
        whole = materialize(stack.lazy, read_whole)
        rows = whole.shape[0] // stack.experts
        for expert in range(stack.experts):
            lazy = stack.expert(expert)
            assert torch.equal(
                materialize(lazy, read_whole), whole[expert * rows : (expert + 1) * rows]
            )
            pieces = [materialize(piece, read_whole).flatten() for piece in pieces_of(lazy)]
            assert torch.equal(
                torch.cat(pieces), whole[expert * rows : (expert + 1) * rows].flatten()
            )


# ---- memory, errors and reports


def test_larger_budget_caches_more_experts(moe: Folders) -> None:
    held = []
    for gpu in ("900KB", "1100KB", "1400KB"):
        placement = Offload(gpu=gpu, policy=None, workload=(16, 8))
        with LLM(moe("qwen3_moe"), max_length=64, max_sequences=4, placement=placement) as llm:
            plan, cache = llm.info()["plan"], cache_of(llm)
            assert plan["memory_bytes"] <= plan["budget"]
            assert cache.nbytes <= plan["memory"]["experts"]
            report = f"read when chosen, {cache.capacity} of {cache.num_experts} held in memory"
            assert report in next(iter(llm.info()["experts"]))
            held.append(cache.capacity)
            llm.generate([[5, 6, 7]] * 4, GREEDY)
            stats = llm.stats()["offload"]
            assert stats["experts_bytes"]["actual"] == cache.nbytes
            assert cache.buffer_bytes <= plan["memory"]["expert buffers"]
    assert held == sorted(held)
    assert held[0] < held[-1]


@pytest.mark.parametrize("quantization", slow_but([None], [None, "int4"]))
def test_model_that_fits_in_memory_has_no_expert_cache(
    quantization: str | None, moe: Folders
) -> None:
    """Its quantized experts are not unpacked, either."""
    expected = resident_facts(moe("qwen3_moe"), 9, quantization=quantization)
    for settings in ({"weights": (100, 0, 0)}, {"weights": None}):
        with offloaded(moe("qwen3_moe"), quantization=quantization, **settings) as llm:
            assert mixed_facts(llm, 9) == expected
            runner: Any = llm.engine.runner
            assert runner.weights.experts is None
            assert set(llm.info()["experts"]) == {"in the kernel call of their layer"}
            assert (
                not {"unpacked weights", "converted weights"} & llm.info()["plan"]["memory"].keys()
            )
            module = runner.module
        held = [b for layer in module.modules() for b in layer.buffers() if b.dtype is torch.uint8]
        assert all(b.untyped_storage().nbytes() <= 4 for b in held)


def test_close_frees_the_expert_cache(moe: Folders) -> None:
    llm = offloaded(moe("qwen3_moe"))
    llm.generate([[5, 6, 7]] * 4, GREEDY)
    memory = [weakref.ref(t) for t in cache_of(llm).layers[0].pool._memory.values()]
    llm.close()
    gc.collect()
    assert all(ref() is None for ref in memory)


def test_prefetch_does_not_evict_experts_of_the_running_layer(moe: Folders) -> None:
    """With fewer slots than experts per layer, prefetching does not increase reads."""
    read = {}
    for ahead in (False, True):
        layers, cache = cache_for(moe("qwen3_moe"), 4, ahead)
        for step in range(5):
            if step == 2:
                before = cache.trace.nbytes("read experts")
            for layer in layers:
                run_every_expert(layer)
        futures.wait(layers[0].module.expert_share.pool.jobs)
        read[ahead] = cache.trace.nbytes("read experts") - before
        cache.close()
    assert read[True] <= 1.05 * read[False]


@pytest.mark.parametrize("overlap", [True, False])
def test_waiting_for_experts_counts_as_load_time(
    overlap: bool, moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DirectFile.read

    def slowly(self: DirectFile, *args: Any) -> int:
        time.sleep(0.002)
        return plain(self, *args)

    monkeypatch.setattr(DirectFile, "read", slowly)
    with offloaded(moe("qwen3_moe"), overlap=overlap) as llm:
        runner: Any = llm.engine.runner
        assert runner.timings().compute_s >= 0
        llm.generate([[5, 6, 7]], GREEDY)
        found, seconds = runner.timings(), runner.trace.seconds
        waited = seconds("wait experts")
        assert 0.01 < waited <= found.load_s
        assert 0 <= found.compute_s <= seconds("compute weights") + seconds("make weights") - waited


def test_other_parameters_of_experts_module_are_shared_by_cache(moe: Folders) -> None:
    _, units = opened(moe("qwen3_moe"))
    layer = units.experts[0]
    layer.module.post_expert_norm = torch.nn.RMSNorm(64)
    cache = ExpertCache(units.experts, 1, False, Trace(), OpenFiles())
    held: Any = cache.layers[0].local_experts
    assert held.post_expert_norm.weight is layer.module.post_expert_norm.weight  # type: ignore
    cache.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["read", "_read"])  # `_read` runs in another thread
def test_failed_expert_read_leaves_cache_consistent(
    method: str, moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(moe("qwen3_moe")) as llm:
        expected = mixed_facts(llm, 9)
        plain = getattr(ExpertCache, method)

        def read(self: ExpertCache, *args: Any) -> Any:
            if noise.random() < 0.05:
                raise MemoryError
            return plain(self, *args)

        for seed in range(6):
            noise = np.random.default_rng(seed)
            monkeypatch.setattr(ExpertCache, method, read)
            with pytest.raises(MemoryError):
                mixed_facts(llm, 9)
            monkeypatch.undo()
            assert mixed_facts(llm, 9) == expected


def test_files_are_closed_when_the_expert_cache_fails_to_open(
    moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(ExpertCache, "_divide_memory", failing)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(MemoryError):
            offloaded(moe("qwen3_moe"), quantization="int4")
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("overlap", [True, False])
def test_expert_read_error_raises_tier_failed(
    overlap: bool, moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = offloaded(moe("qwen3_moe"), overlap=overlap)
    module: Any = llm.engine.runner.module

    def read(self: DirectFile, *args: Any) -> int:
        raise TierFailed(f"disk tier: reading {self.path} failed")

    monkeypatch.setattr(DirectFile, "read", read)
    with pytest.raises(TierFailed, match="safetensors"):
        llm.generate([[5, 6, 7]] * 4, GREEDY)
    llm.close()
    assert not any("expert_share" in layer.__dict__ for layer in module.modules())


def test_ctrl_c_while_experts_run_leaves_cache_consistent(
    moe: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(moe("qwen3_moe")) as llm:
        expected = mixed_facts(llm, 9)
        plain, calls = cache_room.run_experts, 0

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 7:
                raise KeyboardInterrupt
            return plain(*args, **kwargs)

        monkeypatch.setattr(cache_room, "run_experts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]] * 4, GREEDY)
        monkeypatch.undo()
        assert mixed_facts(llm, 9) == expected


@pytest.mark.slow
def test_logits_are_freed_without_garbage_collection(moe: Folders) -> None:
    with offloaded(moe("qwen3_moe")) as llm:
        runner: Any = llm.engine.runner
        plain, size = runner.forward, runner.vocab_size
        found: list[int] = []

        def forward(batch: Batch) -> Any:
            alive = (o for o in gc.get_objects() if type(o) is torch.Tensor)
            found.append(sum(t.dim() > 1 and t.shape[-1] == size and t.numel() > 0 for t in alive))
            return plain(batch)

        runner.forward = forward
        gc.collect()
        gc.disable()
        try:
            llm.generate([[5, 6, 7]] * 6, SamplingParams(max_tokens=12, ignore_eos=True))
        finally:
            gc.enable()
    assert max(found[6:]) <= max(found[:3])


def test_rows_of_transposed_or_column_sharded_matrices_cannot_be_read() -> None:
    """As ranks save them: a row is not contiguous in a file, and a matrix is no concatenation by rows."""
    transposed = Computed(torch.ops.aten.t.default, (torch.zeros(2, 2),), {}, None)
    assert rows_of(transposed, 0, 1) is None
    parts = [traced(Stored(name, Path("x"), 0, 24, torch.float32, (3, 2))) for name in ("a", "b")]
    columns, rows = torch.cat(parts, 1).lazy, torch.cat(parts).lazy
    assert rows_can_be_read(rows) and not rows_can_be_read(columns)
    stack = torch.stack([torch.cat(parts, 1), torch.cat(parts, 1)]).lazy
    entry = rows_of(stack, 1, 2)
    assert pieces_of(entry) == entry.args[0]
    entry = rows_of(torch.stack([torch.cat(parts)]).lazy, 0, 1)
    assert [piece.name for piece in pieces_of(entry)] == ["a", "b"]
