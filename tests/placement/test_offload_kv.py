"""K, V and hidden states that leave memory: the same words, whatever happens on the way."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support import toys
from support.kv_life import GROUPS, HEADS, OPTIONS, SHAPES, Life
from support.pairwise import slow_but, some_combinations
from support.requests_mixed import facts, finish_despite_ctrl_c, mixed_requests, press_ctrl_c
from verbatim import LLM, Offload, SamplingParams, TierFailed
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.quantized import PACKINGS, KVDtype
from verbatim.kv.store import KVStore, LayerShape
from verbatim.placement.offload.kv import TieredKVStore, assign_tiers
from verbatim.placement.offload.prefetch import Job, Prefetcher
from verbatim.placement.offload.schedule import HiddenStates, Part
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.sparse import top_k_attention
from verbatim.placement.offload.stream import Ring, Use
from verbatim.placement.offload.trace import Trace
from verbatim.weights.files import PAGE

pytestmark = pytest.mark.usefixtures("one_thread")

KV = ((100, 0, 0), (0, 100, 0), (0, 0, 100), (30, 40, 30))
ACTIVATIONS = ((0, 0, 100), (100, 0, 0), (0, 100, 0), (30, 40, 30))
BLOCKS = ((4, 1), (2, 2), (1, 4))  # (batch size, number of batches)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, seed=1)
CPU = torch.device("cpu")


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("verbatim")]


def offloaded(folder: Path, *, micro_tokens: int = 13, **settings: Any) -> LLM:
    """An LLM whose micro-batches have few rows, so that prompts are cut."""
    engine = {"dtype": "float32", "kv_memory": 190_000, "max_batch_tokens": 60, "max_length": 200}
    engine |= {k: settings.pop(k) for k in (*engine, "kv_dtype") if k in settings}
    settings = {"weights": (0, 0, 100), "batch_size": 2, "micro_batches": 2} | settings
    llm = LLM(folder, placement=Offload(gpu="100MB", **settings), **engine)
    order: Any = llm.engine.runner.decoder._order
    order._plan = replace(order._plan, micro_tokens=micro_tokens)
    return llm


def run(llm: LLM, count: int = 12) -> list[Any]:
    return [facts(result) for result in llm.generate(*mixed_requests(count))]


def resident(folder: Path, **settings: Any) -> list[Any]:
    with LLM(folder, max_length=200, **settings) as llm:
        return run(llm)


MATRIX = [
    dict(kv=kv, activations=act, overlap=overlap, cpu_cache_compute=here, batch_size=size, micro_batches=n)
    for kv, act, overlap, here, (size, n) in some_combinations(
        kv=KV, activations=ACTIVATIONS, overlap=(True, False), here=(None, False, True), blocks=BLOCKS
    )
]  # fmt: skip


def assert_same_words(folder: Path, dtype: str, cases: list[dict[str, Any]]) -> None:
    expected = resident(folder, dtype=dtype)
    preempted = 0
    for case in cases:
        with offloaded(folder, dtype=dtype, **case) as llm:
            assert run(llm) == expected, case
            runner = llm.engine.runner
            preempted += llm.stats()["preemptions"]
            for kind in ("read", "write"):
                assert bool(runner.trace.nbytes(f"{kind} K and V")) == bool(case["kv"][2])
            assert runner.info()["attention"] == "exact"
            for share, held in zip(case["kv"], runner.store.bytes_by_tier().values(), strict=True):
                assert bool(share) == bool(held)
    assert preempted, "the memory for K and V is too large to show evictions"


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
def test_kv_and_hidden_states_on_any_tier_give_the_same_words(
    name: str,
    dtype: str,
    cases: list[dict[str, Any]],
    folders: Callable[[str], Path],
    no_thread_left: None,
) -> None:
    assert_same_words(folders(name), dtype, cases)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("mistral", "int4"),
        pytest.param("qwen3_moe", "int8", marks=pytest.mark.slow),
        pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_kv_in_few_bits_give_the_same_words_on_the_disk(
    name: str, kv_dtype: str, folders: Callable[[str], Path]
) -> None:
    expected = resident(folders(name), dtype="float32", kv_dtype=kv_dtype)
    for kv, overlap in (((0, 0, 100), True), ((30, 40, 30), False)):
        settings: dict[str, Any] = dict(kv=kv, overlap=overlap, cpu_cache_compute=False)
        with offloaded(folders(name), kv_dtype=kv_dtype, **settings) as llm:
            assert run(llm) == expected
            assert llm.engine.runner.info()["kv_dtype"] == kv_dtype


def test_five_prompts_in_batches_of_two(folders: Callable[[str], Path]) -> None:
    prompts = [toys.random_ids(n, n) for n in (5, 33, 16, 1, 40)]
    with LLM(folders("gpt2"), dtype="float32") as llm:
        expected = [facts(r) for r in llm.generate(prompts, GREEDY)]
    for kv in KV:
        settings: dict[str, Any] = dict(batch_size=2, micro_batches=3, activations=(0, 0, 100))
        with offloaded(folders("gpt2"), micro_tokens=64, kv=kv, **settings) as llm:
            assert [facts(r) for r in llm.generate(prompts, GREEDY)] == expected
            moved = llm.engine.runner.trace.nbytes
            assert moved("read hidden states") == moved("write hidden states") > 0


def test_prefixes_and_sleep(folders: Callable[[str], Path], no_thread_left: None) -> None:
    prompt = toys.random_ids(40, 1)
    with LLM(folders("mistral"), dtype="float32") as llm:
        expected = facts(llm.generate([prompt], GREEDY)[0])
    with offloaded(folders("mistral"), kv=(0, 0, 100)) as llm:
        assert facts(llm.generate([prompt], GREEDY)[0]) == expected
        again = llm.generate([prompt], GREEDY)[0]
        assert facts(again) == expected and again.num_cached_tokens >= 32
        llm.sleep()
        assert not [t for t in threading.enumerate() if t.name.startswith("verbatim-kv")]
        assert llm.engine.runner.store.staging_bytes == 0
        llm.wake()
        last = llm.generate([prompt], GREEDY)[0]
        assert facts(last) == expected and not last.num_cached_tokens


def test_ctrl_c_within_forwards_changes_no_word(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    expected, chance = resident(folders("gpt2"), dtype="float32"), random.Random(3)
    settings: dict[str, Any] = dict(kv=(0, 0, 100), activations=(0, 0, 100))
    with offloaded(folders("gpt2"), **settings) as llm, monkeypatch.context() as patch:
        calls = ("follow", "take", "give_back", "finish", "drop", "_fill")
        press_ctrl_c(patch, chance, 0.004, Ring, *calls)
        press_ctrl_c(patch, chance, 0.004, HiddenStates, "send", "bring")
        results, raised = finish_despite_ctrl_c(llm, *mixed_requests(12))
    assert [facts(result) for result in results] == expected
    assert raised > 5


def test_timings_without_overlap_are_all_of_a_forward(folders: Callable[[str], Path]) -> None:
    with offloaded(folders("gpt2"), kv=(0, 0, 100), activations=(0, 0, 100), overlap=False) as llm:
        run(llm)
        found, seconds = llm.engine.runner.timings(), llm.engine.runner.trace.seconds
        assert min(found) > 0
        assert seconds("wait K and V") > 0 and seconds("store K and V") > 0
        assert not [t for t in threading.enumerate() if t.name.startswith("verbatim")]


# The store alone.


def two_stores(
    folder: Path,
    *,
    dtype: KVDtype = torch.float32,
    percents: tuple[float, float, float] = (20, 20, 60),
    overlap: bool = True,
    **settings: Any,
) -> tuple[TieredKVStore, Scratch]:
    scratch = Scratch(folder, None)
    shape = (SHAPES, 40, 4, dtype, CPU)
    tiered = TieredKVStore(
        *shape,
        percents=percents,
        groups=GROUPS,
        scratch=scratch,
        trace=Trace(),
        overlap=overlap,
        **settings,
    )
    return tiered, KVStore(*shape), scratch


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes that take an odd while, so that what is not waited for is seen."""
    chance = random.Random(0)
    for name in ("read_into", "write_from"):
        plain = getattr(Scratch, name)

        def slow(self: Scratch, *args: Any, plain: Any = plain, **kwargs: Any) -> None:
            time.sleep(chance.choice([0, 0, 0.0001]))
            plain(self, *args, **kwargs)

        monkeypatch.setattr(Scratch, name, slow)


@pytest.mark.parametrize(
    ("seed", "overlap"),
    slow_but([(0, True), (1, False), (2, True)], itertools.product(range(4), (True, False))),
)
def test_a_random_life_equals_that_of_a_plain_store(
    seed: int, overlap: bool, tmp_path: Path, slow_disk: None, no_thread_left: None
) -> None:
    dtype = (torch.float32, PACKINGS["int8"], torch.bfloat16, PACKINGS["int4"])[seed]
    tiered, plain, scratch = two_stores(
        tmp_path, dtype=dtype, overlap=overlap, cpu_cache_compute=bool(seed % 2)
    )
    life = Life(tiered, plain, seed)
    for i in range(40):
        life.step(strange=i % 8 == 7)
    assert life.pieces > 2 * life.forwards > 30 and life.compared > 200
    moved = tiered.trace.nbytes
    assert moved("read K and V") and moved("write K and V")
    assert tiered.trace.seconds("wait K and V") > 0
    tiered.release()
    scratch.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_anywhere_leaves_a_store_that_goes_on(
    seed: int, tmp_path: Path, slow_disk: None, no_thread_left: None
) -> None:
    tiered, plain, scratch = two_stores(tmp_path, percents=(0, 0, 100))
    life, chance = Life(tiered, plain, seed), random.Random(seed)
    broken = 0
    for i in range(60):
        done = life.step(breaks=chance.randrange(1, 1500) if i % 2 else None)
        broken += not done
    assert broken > 10 and life.forwards > 20
    tiered.release()
    scratch.close()


def test_whole_pages_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(tmp_path, None)
    if scratch._direct < 0:
        pytest.skip("the file system of the temporary folder has no direct reads")
    shape = LayerShape(2, 64, 64)  # 16 positions of it in float32 are two pages
    store = TieredKVStore(
        [shape], 8, 16, torch.float32, CPU, percents=(0, 0, 100), groups=[[0]],
        scratch=scratch, trace=Trace(), overlap=False,
    )  # fmt: skip
    used: set[int] = set()
    for name in ("preadv", "pwritev"):
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, *a, f=plain: (used.add(fd), f(fd, *a))[1])
    store.poison([1, 2, 5])
    store.copy_blocks([(1, 3)])
    assert used == {scratch._direct} and 2 * PAGE == 2 * 16 * 64 * 4
    store.release()
    scratch.close()


def test_layers_are_dealt_out_evenly() -> None:
    tiers = assign_tiers([10] * 20, (30, 40, 30))
    assert [tiers.count(t) for t in ("gpu", "cpu", "disk")] == [6, 8, 6]
    for first in range(0, 20, 10):
        assert set(tiers[first : first + 10]) == {"gpu", "cpu", "disk"}
    assert assign_tiers([3, 5, 7], (0, 0, 100)) == ["disk"] * 3


def test_a_store_needs_its_room_at_once(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 10_000)
    with pytest.raises(TierFailed, match=r"disk_limit is 10000"):
        TieredKVStore(
            SHAPES, 400, 4, torch.float32, CPU, percents=(0, 0, 100), groups=GROUPS,
            scratch=scratch, trace=Trace(),
        )  # fmt: skip
    scratch.close()


# Faults.


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int) -> None:
    """Let the system call `name` fail on the unnamed file, from the `after`-th time on."""
    plain: Any = getattr(os, name)
    left = itertools.count(after, -1)

    def call(fd: int, *args: Any) -> Any:
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}") and next(left) <= 0:
            raise OSError(number, os.strerror(number))
        return plain(fd, *args)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
@pytest.mark.parametrize(
    ("call", "number"),
    [("preadv", errno.EIO), ("pwritev", errno.ENOSPC), ("pwritev", errno.EIO)],
    ids=["read", "full", "write"],
)
def test_a_fault_of_the_disk_is_told_and_leaves_nothing(
    call: str,
    number: int,
    overlap: bool,
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_left: None,
) -> None:
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
def test_what_the_last_layer_could_not_write_is_told(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered, plain, scratch = two_stores(tmp_path, percents=(0, 0, 100), overlap=overlap)
    life = Life(tiered, plain, 0)
    life._come_and_go()
    batch, _ = life._batch()
    numbers = torch.randn(batch.num_tokens, 4, 8)
    failing(monkeypatch, "pwritev", errno.EIO, after=0)

    def forward() -> None:
        with tiered.stores_for([batch]) as (store,):
            store.write(0, numbers[:, :2], numbers[:, 2:], batch.slots(4))
            store.attend(0, numbers, batch.attention, OPTIONS[0])

    with pytest.raises(TierFailed):
        forward()
    tiered.release()
    scratch.close()


def test_a_full_disk_is_found_when_the_model_is_opened(
    folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_thread_left: None,
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFailed, match=r"no room for \d+ bytes in .*No space left"):
        offloaded(folders("gpt2"), kv=(50, 0, 50), disk=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_store_goes_on_after_a_fault_that_has_passed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_thread_left: None
) -> None:
    tiered, plain, scratch = two_stores(tmp_path, percents=(0, 0, 100))
    life = Life(tiered, plain, 5)
    faults = 0
    for after in range(1, 40, 3):
        for _ in range(2):
            life.step()
        with monkeypatch.context() as patch:
            failing(patch, call, errno.EIO, after)
            batch, _ = life._batch()
            try:
                life._forward([batch], GROUPS)
            except TierFailed:
                faults += 1
    assert faults > 3 and life.forwards > 10
    tiered.release()
    scratch.close()


def test_what_a_job_raises_is_kept_and_ends_no_thread() -> None:
    worker, done = Prefetcher("verbatim-test", 2), []
    worker.start()
    first = Job(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    second = Job(lambda: done.append(2))
    for job in (first, second):
        worker.submit(job)
    worker.finish()
    assert isinstance(first.error, ZeroDivisionError) and done == [2] and second.error is None
    worker.stop()
    worker.stop()


# Hidden states.


class _Waiting:
    """As much of a `Part` as matters here."""

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.number, self.inputs, self.unit = number, (args, kwargs), None


def test_hidden_states_are_freed_and_come_back(tmp_path: Path) -> None:
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
        _Waiting(3, torch.tensor([4])),  # ids
    ]
    for part in parts:
        away.send(part)
    assert hidden.untyped_storage().nbytes() == 0 and len(away._away) == 1
    assert trace.nbytes("write hidden states") == 300
    reserved = scratch.nbytes
    for part in parts:
        away.bring(part)
    assert torch.equal(hidden, before) and torch.equal(view, before[1:])
    broken: Part = _Waiting(0, torch.randn(3, 50))  # type: ignore[assignment]
    away.send(broken)  # and never brought back: its forward broke off
    for _ in range(20):
        away.send(parts[0])
        away.bring(parts[0])
    assert torch.equal(hidden, before) and scratch.nbytes <= reserved + 2 * PAGE
    assert trace.nbytes("read hidden states") == 21 * 300
    scratch.close()


# Sparse attention.


def one_sequence(
    store: KVStore, length: int, options: AttentionOptions, top_k: int, cuts: Any
) -> Any:
    """Attention of all rows of one sequence, in pieces that end at `cuts`."""
    numbers = torch.Generator().manual_seed(1)
    shape = store.layers[0][0].shape
    q = torch.randn(length, HEADS, 8, generator=numbers)
    k, v = (torch.randn(length, shape[1], 8, generator=numbers) for _ in range(2))
    k[5] = k[3]  # a tie
    table = torch.tensor([[3, 1, 2, 5, 4, 7, 6, 9, 8, 10][: -(-length // 16)]], dtype=torch.int32)
    positions = torch.arange(length)
    slots = table[0, positions // 16].long() * 16 + positions % 16
    store.write(0, k, v, slots)
    found = [
        top_k_attention(
            store,
            0,
            q[begin:end],
            AttentionBatch(
                torch.tensor([0, end - begin], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                table,
            ),
            options,
            top_k=top_k,
            value_size=8,
        )
        for begin, end in itertools.pairwise([0, *cuts, length])
    ]
    return torch.cat(found), q, k, v


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=0.4),
        AttentionOptions(scale=0.4, window=20),
        AttentionOptions(scale=0.4, softcap=1.0, sinks=torch.tensor([0.0, 1.0, 2.0, -1.0])),
        AttentionOptions(scale=0.4, alibi=torch.tensor([0.01, 0.1, 0.2, 0.3])),
    ],
    ids=["plain", "window", "softcap-sinks", "alibi"],
)
def test_sparse_attention_is_that_of_the_likeliest_keys(options: AttentionOptions) -> None:
    store, length, top_k = KVStore([LayerShape(2, 8, 8)], 12, 16, torch.float32, CPU), 150, 7
    store.poison(list(range(12)))
    found, q, k, v = one_sequence(store, length, options, top_k, [])
    places = torch.arange(length)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi is not None:
        scores = scores + options.alibi[:, None, None] * (places - places[:, None])
    seen = places <= places[:, None]
    if options.window:
        seen = seen & (places[:, None] - places < options.window)
    scores = torch.where(seen, scores, -torch.inf)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0).bool() & seen
    scores = torch.where(mask, scores, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks[:, None, None].expand(-1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for cuts in ([1], [3, 70], [64, 128], list(range(1, 150, 13))):
        assert torch.equal(one_sequence(store, length, options, top_k, cuts)[0], found)
    whole = one_sequence(store, length, options, length, [])[0]
    many = one_sequence(store, length, options, length + 50, [60])[0]
    assert torch.equal(whole, many) and not torch.equal(whole, found)


@pytest.mark.slow
def test_a_sparse_model_says_so_and_has_the_same_words_in_every_schedule(
    folders: Callable[[str], Path],
) -> None:
    exact = resident(folders("gemma2"), dtype="float32")
    settings: dict[str, Any] = dict(attention_top_k=300, kv=(0, 0, 100))
    with offloaded(folders("gemma2"), **settings) as llm:
        assert run(llm) == exact
    found = []
    for kv, size, rows in (((100, 0, 0), 4, 64), ((0, 0, 100), 1, 5), ((30, 40, 30), 2, 17)):
        settings = dict(kv=kv, batch_size=size, attention_top_k=4, cpu_cache_compute=False)
        with offloaded(folders("gemma2"), micro_tokens=rows, **settings) as llm:
            assert llm.engine.runner.info()["attention"] == "approximate: top 4 keys"
            found.append(run(llm))
    assert found[0] == found[1] == found[2] != exact
    with offloaded(folders("gemma2"), kv_dtype="int4", kv=(0, 0, 100), attention_top_k=4) as llm:
        assert run(llm) != found[0]  # K and V are others, and nothing breaks


def test_what_is_used_once_more_is_read_again_only_when_it_was_written_again() -> None:
    file = bytearray(PAGE)

    def move(memory: memoryview, *, write: bool) -> int:
        file[:] = memory if write else file
        memory[:] = file
        return PAGE

    ring = Ring("K and V", Prefetcher("verbatim-test", 1), Trace())
    first = Use("first", PAGE, [partial(move, write=False)])
    second = Use("second", PAGE, [partial(move, write=False)], [first])
    try:
        ring.reserve(3 * PAGE)
        ring.follow([first, second], repeat=False)
        for number, use in enumerate([first, second, first, second]):
            memory = ring.take(use)
            assert memory.eq(number).all(), number
            memory.fill_(number + 1)
            ring.give_back(partial(move, write=True))
        ring.finish()
    finally:
        ring.close()
