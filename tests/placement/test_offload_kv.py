"""Offloaded KV cache and hidden states give the same tokens, also after faults and interrupts."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support import toys
from support.pairwise import parametrize_combinations, slow_but, some_combinations
from support.poison import poison
from support.programs import PATIENCE_S
from support.requests_mixed import (
    facts,
    finish_despite_ctrl_c,
    mixed_facts,
    mixed_requests,
    press_ctrl_c,
    resident_facts,
)
from support.toys import Folders
from verbatim import LLM, Offload, SamplingParams, TierFailed
from verbatim.batch import AttentionBatch, Batch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.store import KVStore, LayerShape
from verbatim.placement.offload.choice import assign_tiers
from verbatim.placement.offload.kv import DiskLayer, TieredKVStore
from verbatim.placement.offload.schedule import HiddenStates, SuspendedForward
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.sparse import top_k_attention
from verbatim.placement.offload.stream import Readers, Ring, Use
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import PAGE, bytes_of

KV = ((100, 0, 0), (0, 100, 0), (0, 0, 100), (30, 40, 30))
ACTIVATIONS = ((0, 0, 100), (100, 0, 0), (0, 100, 0), (30, 40, 30))
BLOCKS = ((4, 1), (2, 2), (1, 4))  # (batch size, number of batches)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=1)
CPU = torch.device("cpu")
SHAPE = LayerShape(2, 8, 8)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay reads and writes at random, so that a missing wait shows."""
    chance = random.Random(0)
    for name in ("read", "write_from"):
        plain = getattr(Scratch, name)

        def slow(self: Scratch, *args: Any, plain: Any = plain, **kwargs: Any) -> None:
            time.sleep(chance.choice([0, 0, 0.0001]))
            plain(self, *args, **kwargs)

        monkeypatch.setattr(Scratch, name, slow)


def offloaded(folder: Path, *, micro_tokens: int = 13, **settings: Any) -> LLM:
    """Open an LLM with micro-batches of few rows, so that prompts are split."""
    engine = {"dtype": "float32", "kv_memory": 190_000, "max_batch_tokens": 60, "max_length": 200}
    engine |= {k: settings.pop(k) for k in (*engine, "kv_dtype") if k in settings}
    settings = {"weights": (0, 0, 100), "batch_size": 2, "micro_batches": 2} | settings
    llm = LLM(folder, placement=Offload(gpu="100MB", **settings), **engine)
    order: Any = llm.engine.runner.decoder._order
    order._plan = replace(order._plan, micro_tokens=micro_tokens)
    return llm


def on_disk(
    scratch: Scratch,
    shape: LayerShape = SHAPE,
    *,
    num_blocks: int = 8,
    block_size: int = 4,
    overlap: bool = True,
) -> TieredKVStore:
    """Return a store of one layer, on the disk."""
    settings: dict[str, Any] = dict(percents=(0, 0, 100), groups=[[0]], overlap=overlap)
    size = num_blocks, block_size, torch.float32, CPU
    return TieredKVStore([shape], *size, scratch=scratch, trace=Trace(), **settings)


MATRIX = [
    dict(kv=kv, activations=act, overlap=overlap, batch_size=size, micro_batches=n)
    for kv, act, overlap, (size, n) in some_combinations(
        kv=KV, activations=ACTIVATIONS, overlap=(True, False), blocks=BLOCKS
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "cases"),
    [
        ("gpt2", "bfloat16", MATRIX[:2]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3_moe", "float32", MATRIX[2::3]),
                ("mistral", "bfloat16", MATRIX[3::3]),
                ("gemma2", "float32", MATRIX[4::3]),
            )
        ),
    ],
)
def test_kv_cache_and_hidden_states_on_any_tier_give_same_tokens(
    name: str,
    dtype: str,
    cases: list[dict[str, Any]],
    folders: Folders,
    slow_disk: None,
    no_thread_left: None,
) -> None:
    folder = folders(name)
    expected = resident_facts(folder, 12, dtype=dtype)
    preempted = 0
    for case in cases:
        with offloaded(folder, dtype=dtype, **case) as llm:
            assert mixed_facts(llm, 12) == expected, case
            runner = llm.engine.runner
            preempted += llm.stats()["preemptions"]
            for kind in ("read", "write"):
                assert bool(runner.trace.nbytes(f"{kind} K and V")) == bool(case["kv"][2])
            assert runner.info()["attention"] == "exact"
            for share, held in zip(case["kv"], runner.store.bytes_by_tier().values(), strict=True):
                assert bool(share) == bool(held)
    assert preempted, "the memory for K and V is too large to show evictions"


def test_prefixes_on_disk_are_cached_until_sleep(folders: Folders, no_thread_left: None) -> None:
    prompt = toys.random_ids(40, 1)
    with LLM(folders("mistral"), dtype="float32") as llm:
        expected = facts(llm.generate([prompt], GREEDY)[0])
    with offloaded(folders("mistral"), kv=(0, 0, 100)) as llm:
        assert facts(llm.generate([prompt], GREEDY)[0]) == expected
        again = llm.generate([prompt], GREEDY)[0]
        assert facts(again) == expected and again.num_cached_tokens >= 32
        llm.sleep()
        assert not [t for t in threading.enumerate() if t.name.startswith("verbatim-K and V")]
        assert llm.engine.runner.store.staging_bytes == (0, 0)
        llm.wake()
        last = llm.generate([prompt], GREEDY)[0]
        assert facts(last) == expected and not last.num_cached_tokens


@pytest.mark.parametrize("overlap", slow_but([True], [True, False]))
def test_ctrl_c_during_forwards_does_not_change_tokens(
    overlap: bool,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    slow_disk: None,
    no_thread_left: None,
) -> None:
    expected, chance = resident_facts(folders("gpt2"), 8), random.Random(3)
    settings: dict[str, Any] = dict(kv=(0, 0, 100), activations=(0, 0, 100), overlap=overlap)
    with offloaded(folders("gpt2"), **settings) as llm, monkeypatch.context() as patch:
        for owner, *calls in (
            (Ring, "follow", "reserve", "take", "release", "finish", "drop", "_fill"),
            (HiddenStates, "evict", "restore"),
            (TieredKVStore, "copy_blocks"),
            (DiskLayer, "views", "load", "save"),
        ):
            press_ctrl_c(patch, chance, 0.004, owner, *calls)
        results, raised = finish_despite_ctrl_c(llm, *mixed_requests(8))
    assert [facts(result) for result in results] == expected
    assert raised > 5


@pytest.mark.slow
def test_timings_without_overlap_are_positive(folders: Folders) -> None:
    with offloaded(folders("gpt2"), kv=(0, 0, 100), activations=(0, 0, 100), overlap=False) as llm:
        mixed_facts(llm, 12)
        found, seconds = llm.engine.runner.timings(), llm.engine.runner.trace.seconds
        assert min(found) > 0
        assert seconds("wait K and V") > 0 and seconds("store K and V") > 0


def test_whole_pages_bypass_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch(tmp_path, None)
    if scratch._direct < 0:
        pytest.skip("the file system of the temporary folder has no direct reads")
    shape = LayerShape(2, 64, 64)  # 16 positions in float32 take two pages
    store = on_disk(scratch, shape, block_size=16, overlap=False)
    used: set[int] = set()
    for name in ("preadv", "pwritev"):
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, *a, f=plain: (used.add(fd), f(fd, *a))[1])
    poison(store, [1, 2, 5])
    store.copy_blocks([(1, 3)])
    assert used == {scratch._direct} and 2 * PAGE == 2 * 16 * 64 * 4
    store.release()
    scratch.close()


def test_tiers_are_spread_evenly_over_layers() -> None:
    tiers = assign_tiers([10] * 20, (30, 40, 30))
    assert [tiers.count(t) for t in ("gpu", "cpu", "disk")] == [6, 8, 6]
    for first in range(0, 20, 10):
        assert set(tiers[first : first + 10]) == {"gpu", "cpu", "disk"}
    assert assign_tiers([3, 5, 7], (0, 0, 100)) == ["disk"] * 3


def test_store_beyond_disk_limit_raises_tier_failed(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 10_000)
    with pytest.raises(TierFailed, match=r"disk_limit is 10000"):
        on_disk(scratch, num_blocks=400)
    scratch.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_dependent_block_copies_and_micro_batches_are_ordered(
    overlap: bool, tmp_path: Path, slow_disk: None, no_thread_left: None
) -> None:
    scratch = Scratch(tmp_path, None)
    tiered = on_disk(scratch, overlap=overlap)
    plain = KVStore([SHAPE], 8, 4, torch.float32, CPU)
    contents = [torch.randn(8, 2, 4, 8) for _ in range(2)]
    found = []
    for store in (tiered, plain):
        store.write_blocks(list(range(8)), contents)
        store.copy_blocks([(1, 2), (2, 3), (3, 1)])  # each target is a source
        found.append(store.read_blocks(list(range(8))))
    assert all(map(torch.equal, *found))
    # Two pieces of one sequence: the second reads what the first writes.
    batches = [Batch.of([(range(5), 0, [1, 2])]), Batch.of([(range(6), 5, [1, 2, 3])])]
    rows = [torch.randn(batch.num_tokens, 2, 8) for batch in batches]
    outputs: list[list[torch.Tensor]] = []
    for whole in (tiered, plain):
        outputs.append([])
        with whole.stores_for(batches) as stores:
            for store, batch, x in zip(stores, batches, rows, strict=True):
                store.write(0, x, x, batch.slots(4))
                options = AttentionOptions(scale=0.3)
                outputs[-1].append(store.attend(0, x, batch.attention, options))
    assert all(map(torch.equal, *outputs))
    tiered.release()
    scratch.close()


# Faults.


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int) -> None:
    """Make the system call `name` fail on the unnamed file, from the `after`-th call on."""
    plain: Any = getattr(os, name)
    left = itertools.count(after, -1)

    def call(fd: int, *args: Any) -> Any:
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}") and next(left) <= 0:
            raise OSError(number, os.strerror(number))
        return plain(fd, *args)

    monkeypatch.setattr(os, name, call)


@parametrize_combinations(
    failure=[("preadv", errno.EIO), ("pwritev", errno.ENOSPC), ("pwritev", errno.EIO)],
    overlap=[True, False],
)
def test_disk_error_is_raised_and_leaves_no_files(
    failure: tuple[str, int],
    overlap: bool,
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_left: None,
) -> None:
    call, number = failure
    settings: dict[str, Any] = dict(kv=(0, 0, 100), activations=(0, 0, 100))
    llm = offloaded(folders("gpt2"), disk=tmp_path, overlap=overlap, **settings)
    with llm:
        llm.generate([[5, 6, 7]], GREEDY)
        failing(monkeypatch, call, number, after=40)
        with pytest.raises(TierFailed) as caught:
            llm.generate(*mixed_requests(12))
        assert str(tmp_path) in str(caught.value) and os.strerror(number) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
def test_write_error_of_last_layer_is_raised(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(tmp_path, None)
    store = on_disk(scratch, overlap=overlap)
    batch, rows = Batch.of([(range(5), 0, [1, 2])]), torch.randn(5, 2, 8)
    failing(monkeypatch, "pwritev", errno.EIO, after=0)

    def forward() -> None:
        with store.stores_for([batch]) as (one,):
            one.write(0, rows, rows, batch.slots(4))
            one.attend(0, rows, batch.attention, AttentionOptions(scale=0.3))

    with pytest.raises(TierFailed):
        forward()
    store.release()
    scratch.close()


def test_full_disk_is_detected_at_open(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFailed, match=r"no room for \d+ bytes in .*No space left"):
        offloaded(folders("gpt2"), kv=(50, 0, 50), disk=tmp_path)
    assert not list(tmp_path.iterdir())


# Hidden states.


class _Waiting:
    """A stub of `SuspendedForward`."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.number, self.inputs, self.unit = number, (args, kwargs), None


def test_hidden_states_are_freed_and_restored(tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4)
    scratch = Scratch(tmp_path, None)
    trace = Trace()
    away: Any = HiddenStates(module, (0, 0, 100), scratch, trace)
    hidden = torch.randn(3, 50, dtype=torch.bfloat16)
    view, before = hidden[1:], hidden.clone()
    parts: list[Any] = [
        _Waiting(0, view),
        _Waiting(1, hidden_states=hidden),  # shared
        _Waiting(2, module.weight[None]),
        _Waiting(3, torch.tensor([4])),  # token ids
    ]
    for part in parts:
        away.evict(part)
    assert hidden.untyped_storage().nbytes() == 0 and len(away._moved) == 1
    assert trace.nbytes("write hidden states") == 300
    reserved = scratch.nbytes
    for part in parts:
        away.restore(part)
    assert torch.equal(hidden, before) and torch.equal(view, before[1:])
    broken: SuspendedForward = _Waiting(0, torch.randn(3, 50))  # type: ignore[assignment]
    away.evict(broken)  # never brought back, as if its forward was aborted
    for _ in range(20):
        away.evict(parts[0])
        away.restore(parts[0])
    assert torch.equal(hidden, before) and scratch.nbytes <= reserved + 2 * PAGE
    assert trace.nbytes("read hidden states") == 21 * 300
    scratch.close()


def test_module_tensors_are_listed_once_for_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, scratch, calls = torch.nn.Linear(4, 4), Scratch(tmp_path, None), []
    buffers = module.buffers
    monkeypatch.setattr(module, "buffers", lambda: (calls.append(0), buffers())[1])
    away: Any = HiddenStates(module, (0, 0, 100), scratch, Trace())
    for _ in range(2):
        for number in range(5):
            away.evict(_Waiting(number, torch.randn(3, 50)))
    assert len(calls) == 2
    scratch.close()


# Sparse attention.


def one_sequence(
    store: KVStore, length: int, options: AttentionOptions, top_k: int, cuts: Any
) -> Any:
    """Compute the attention of all rows of a sequence, in chunks that end at `cuts`."""
    generator = torch.Generator().manual_seed(1)
    shape = store.tensors[0].shape
    q = torch.randn(length, 4, 8, generator=generator)
    k, v = (torch.randn(length, shape[1], 8, generator=generator) for _ in range(2))
    k[5] = k[3]  # a tie
    table = torch.tensor([[3, 1, 2, 5, 4, 7, 6, 9, 8, 10][: -(-length // 16)]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0, positions // 16].long() * 16 + positions % 16
    store.write(0, k, v, slots)
    outputs = [
        top_k_attention(
            store,
            0,
            q[begin:end],
            AttentionBatch(
                torch.tensor([0, end - begin], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                table,
            ),
            options.of_rows(slice(begin, end)),
            top_k=top_k,
        )
        for begin, end in itertools.pairwise([0, *cuts, length])
    ]
    return torch.cat(outputs), q, k, v


BIAS = torch.randn(150, 4, 30, generator=torch.Generator().manual_seed(7))  # rows, heads, distances


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=0.4),
        AttentionOptions(scale=0.4, window=20),
        AttentionOptions(scale=0.4, chunk=20),
        AttentionOptions(scale=0.4, softcap=1.0, sinks=torch.tensor([0.0, 1.0, 2.0, -1.0])),
        AttentionOptions(scale=0.4, alibi=torch.tensor([0.01, 0.1, 0.2, 0.3])),
        AttentionOptions(scale=0.4, bias=BIAS, sinks=BIAS[:, :, 0].contiguous()),
    ],
    ids=["plain", "window", "chunk", "softcap-sinks", "alibi", "bias"],
)
def test_sparse_attention_equals_attention_over_top_k_keys(options: AttentionOptions) -> None:
    store, length, top_k = KVStore([SHAPE], 12, 16, torch.float32, CPU), 150, 7
    poison(store, range(12))
    found, q, k, v = one_sequence(store, length, options, top_k, [])
    positions = torch.arange(length)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi is not None:
        scores = scores + options.alibi[:, None, None] * (positions - positions[:, None])
    if options.bias is not None:
        behind = (positions[:, None] - positions).clamp(0, BIAS.shape[2])
        by_distance = torch.nn.functional.pad(BIAS, (0, 1)).transpose(0, 1)
        scores = scores + by_distance.gather(2, behind.expand(len(scores), -1, -1))
    visible = positions <= positions[:, None]
    if options.window:
        visible = visible & (positions[:, None] - positions < options.window)
    if options.chunk:
        visible = visible & (positions >= positions[:, None] // options.chunk * options.chunk)
    scores = torch.where(visible, scores, -torch.inf)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0).bool() & visible
    scores = torch.where(mask, scores, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.expand(length, -1).mT[..., None]
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :length]
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for cuts in ([1], [3, 70], [64, 128], list(range(1, 150, 13))):
        assert torch.equal(one_sequence(store, length, options, top_k, cuts)[0], found)
    whole = one_sequence(store, length, options, length, [])[0]
    many = one_sequence(store, length, options, length + 50, [60])[0]
    assert torch.equal(whole, many) and not torch.equal(whole, found)


def test_chunks_with_more_than_top_k_keys_skip_exact_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact: Any = KVStore.attend
    num_rows: list[int] = []

    def noted(self: KVStore, layer: int, q: torch.Tensor, *rest: Any) -> Any:
        num_rows.append(len(q))
        return exact(self, layer, q, *rest)

    monkeypatch.setattr(KVStore, "attend", noted)
    store = KVStore([SHAPE], 12, 16, torch.float32, CPU)
    one_sequence(store, 150, AttentionOptions(scale=0.4), 7, [3, 20, 80])
    assert num_rows == [3, 17]


@pytest.mark.slow
def test_sparse_model_is_reported_and_gives_same_tokens_in_any_schedule(folders: Folders) -> None:
    exact = resident_facts(folders("gemma2"), 12)
    settings: dict[str, Any] = dict(attention_top_k=300, kv=(0, 0, 100))
    with offloaded(folders("gemma2"), **settings) as llm:
        assert mixed_facts(llm, 12) == exact
    found = []
    for kv, size, rows in (((100, 0, 0), 4, 64), ((0, 0, 100), 1, 5), ((30, 40, 30), 2, 17)):
        settings = dict(kv=kv, batch_size=size, attention_top_k=4)
        with offloaded(folders("gemma2"), micro_tokens=rows, **settings) as llm:
            assert llm.engine.runner.info()["attention"] == "approximate: top 4 keys"
            found.append(mixed_facts(llm, 12))
    assert found[0] == found[1] == found[2] != exact
    with offloaded(folders("gemma2"), kv_dtype="int4", kv=(0, 0, 100), attention_top_k=4) as llm:
        assert mixed_facts(llm, 12) != found[0]  # K and V differ


def test_job_exceptions_are_stored_and_end_no_thread() -> None:
    readers = Readers(2, "verbatim-test")
    first, second = readers.submit(lambda: 1 / 0), readers.submit(int, "2")  # type: ignore[arg-type,return-value]
    assert isinstance(first.exception(), ZeroDivisionError) and second.result() == 2
    assert [readers.submit(int, number).result() for number in range(9)] == list(range(9))
    begun, go_on = threading.Event(), threading.Event()
    busy = [readers.submit(lambda: (begun.set(), go_on.wait(PATIENCE_S))) for _ in range(2)]
    assert begun.wait(PATIENCE_S)
    late = readers.submit(lambda: 1 / 0)
    assert late.cancel()
    go_on.set()
    readers.shutdown()
    assert late.cancelled() and all(job.done() for job in busy)
    readers.shutdown()


def test_ring_rereads_memory_after_its_latest_write() -> None:
    file = bytearray(PAGE)

    def move(memory: torch.Tensor, *, write: bool) -> int:
        view = bytes_of(memory)
        file[:] = view if write else file
        view[:] = file
        return PAGE

    ring = Ring("K and V", 1, Trace())
    first = Use("first", PAGE, [partial(move, write=False)])
    second = Use("second", PAGE, [partial(move, write=False)], [first])
    try:
        ring.reserve(3 * PAGE)
        ring.follow([first, second], repeat=False)
        for number, use in enumerate([first, second, first, second]):
            memory = ring.take(use)
            assert memory.eq(number).all(), number
            memory.fill_(number + 1)
            ring.release(partial(move, write=True))
        ring.finish()
    finally:
        ring.close()
