"""The offload policy: its choices, its limits and its predictions."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pairwise import slow_but
from support.programs import resident_bytes
from support.requests_mixed import facts, mixed_requests
from support.toys import RECURRENT_FAMILIES, RECURRENT_TOYS, TOYS, make_toy
from verbatim import LLM, InvalidRequest, Offload
from verbatim.common.heap import Heap
from verbatim.errors import OutOfBlocks, TierFailed
from verbatim.kv.store import bytes_per_token
from verbatim.model.device import Device
from verbatim.placement.offload import cost
from verbatim.placement.offload import machine as machines
from verbatim.placement.offload import planner as planners
from verbatim.placement.offload.choice import assign_tiers
from verbatim.placement.offload.cost import Forecast, Load, Plan, Prediction
from verbatim.placement.offload.kv import NUM_STAGED
from verbatim.placement.offload.machine import NOMINAL, Machine, measure
from verbatim.placement.offload.planner import Planner
from verbatim.placement.offload.report import amount, comparison_table
from verbatim.placement.offload.shape import ModelShape, SlotShape, UnitShape
from verbatim.placement.options import EngineOptions, engine_options
from verbatim.quantization.formats import Quantization
from verbatim.weights.lazy import sources

GB = 1_000_000_000
PAGE = 4096


def options(**changes) -> EngineOptions:
    return engine_options(**changes)


def model(
    layers=28, hidden=2048, inner=6144, vocab=151_936, heads=16, kv_heads=8, *, tied=True, experts=0
):
    """Return the sizes of a typical decoder in bfloat16; by default 3.4 GB.

    Args:
        experts: number of experts that each MLP is split into; each token uses 8.
    """
    slots, units, width = [], [], 128

    def add(*shape, of_experts=False):
        elements = torch.Size(shape).numel()
        nbytes = 2 * elements
        padded = -(-nbytes // PAGE) * PAGE
        elements *= len(shape) > 1
        slots.append(SlotShape(nbytes, padded, elements=elements, of_experts=of_experts))
        return len(slots) - 1

    embedding = add(vocab, hidden)
    units.append(UnitShape((embedding,), gathers=True))
    for _ in range(layers):
        matrices = [
            (heads * width, hidden),
            (2 * kv_heads * width, hidden),
            (hidden, heads * width),
        ]
        mlp, routed = [(inner, hidden), (inner, hidden), (hidden, inner)], ()
        if experts:
            routed = tuple(add(*shape, of_experts=True) for shape in mlp)
            mlp = [(experts, hidden)]
        own = (add(hidden), *(add(*shape) for shape in matrices + mlp))
        one = 6 * inner * hidden // experts if experts else 0
        units.append(UnitShape(own, False, True, routed, one, one))
    held = (add(hidden),)
    units.append(UnitShape((embedding if tied else add(vocab, hidden),)))
    attention = (heads + 2 * kv_heads) * width
    kv_layers = (kv_heads * width * 2 * 2,) * layers
    mlp = inner * 8 // experts if experts else inner
    return ModelShape(
        tuple(slots), tuple(units), held, 2, kv_layers, hidden, mlp, attention, vocab,
        experts, 8 if experts else 0,
    )  # fmt: skip


def planned(shape, machine=NOMINAL, limit=40_960, given=None, **said) -> tuple[Plan, Prediction]:
    found = Planner(shape, Offload(**said), given or options(), limit).best(machine)
    return found.plan, found.prediction


def test_model_that_fits_stays_in_memory():
    plan, prediction = planned(model(), gpu="16GB")
    assert plan.weights == (100, 0, 0) and plan.kv == (100, 0, 0)
    assert prediction.decode.weight_bytes == 0 and "ring" not in plan.memory
    assert prediction.limit == "computing"
    assert plan.reasons[0] == "All weights that a step reads as a whole stay in memory."
    # The KV cache takes the rest, for longer sequences and cached prefixes.
    assert plan.kv_bytes > 0.5 * 16 * GB


def test_large_lm_head_is_held_rather_than_streamed():
    shape = model()
    plan, _ = planned(shape, gpu="2GB", workload=(32, 32))
    head = shape.units[-1].slots[0]
    assert plan.tiers[head] == "gpu"
    assert plan.memory["ring"] < shape.slots[head].nbytes  # its minimum if the head were streamed
    assert 0 < plan.weights[2] < 100


def test_kv_cache_goes_to_disk_only_if_writes_are_fast():
    fast = replace(NOMINAL, read_rate=2e10, write_rate=2e10)
    slow = replace(NOMINAL, read_rate=2e10, write_rate=2e6)
    assert planned(model(), fast, gpu="1GB")[0].kv[2] > 0
    assert planned(model(), slow, gpu="1GB")[0].kv[2] == 0


@pytest.mark.parametrize(
    ("write_rate", "kept"), [(2e7, "kv"), (1e12, "weights")], ids=["dear KV", "cheap KV"]
)
def test_memory_is_given_to_data_with_slowest_disk_access(write_rate, kept):
    # A KV cache of 2.35 GB and 3.4 GB of weights in 4 GB.
    machine = replace(NOMINAL, read_rate=5e8, write_rate=write_rate)
    plan, _ = planned(model(), machine, gpu="4GB", batch_size=16, micro_batches=2)
    in_memory = {"weights": plan.weights[0], "kv": plan.kv[0]}
    assert in_memory.pop(kept) > 95
    assert next(iter(in_memory.values())) < 50


def test_kv_cache_stays_in_memory_unless_disk_is_clearly_faster():
    # The predicted gain of a KV cache on disk is smaller than the error of the prediction.
    shape = model(layers=40, hidden=768, inner=2304, vocab=8192, heads=8, kv_heads=2, tied=False)
    plan, _ = planned(
        shape, given=options(max_sequences=4), gpu="250MB", limit=64, workload=(12, 24)
    )
    assert plan.kv[2] == 0 and plan.weights[2] > 0


def test_sufficient_budgets_use_no_disk_and_fill_the_gpu_first():
    plan, _ = planned(model(), gpu="3GB", cpu="5GB", workload=(32, 32))
    assert set(plan.tiers) == {"gpu", "cpu"} and plan.weights[2] == 0
    buffers = sum(plan.memory.get(kind, 0) for kind in ("computation", "logits", "slack", "ring"))
    tiers = zip(model().slots, plan.tiers, strict=True)
    slots = sum(slot.nbytes for slot, tier in tiers if tier == "gpu")
    assert slots + plan.kv_bytes * plan.kv[0] / 100 + buffers > 2.9 * GB
    assert plan.weights[1] + plan.kv[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("experts", [0, 64], ids=["dense", "experts"])
@pytest.mark.parametrize("budget", [4, 8])
def test_no_given_kv_share_is_predicted_faster_than_the_chosen_one(budget, experts):
    shape = model(layers=24, inner=25_600, experts=experts, kv_heads=4)
    free = planned(shape, gpu=budget * GB)[1].tokens_per_s
    for kv in ((100, 0, 0), (50, 0, 50), (0, 0, 100)):
        assert planned(shape, gpu=budget * GB, kv=kv)[1].tokens_per_s <= free / 0.97, kv


@pytest.mark.parametrize(
    "workload", slow_but([((32, 32),)], [((32, 32),), ((512, 128),)]), ids=["short", "long"]
)
def test_more_memory_is_never_predicted_to_be_slower(workload):
    shape, best = model(layers=6, inner=28_672), 0.0
    for budget in (0.8, 1, 1.4, 2, 3, 4, 6, 10):
        plan, prediction = planned(shape, gpu=int(budget * GB), workload=workload)
        # Of plans within 2% of the fastest, the one with the least work for the disk is taken.
        assert prediction.tokens_per_s >= 0.97 * best, budget
        assert plan.memory_bytes <= budget * GB
        best = max(best, prediction.tokens_per_s)


_sizes = st.fixed_dictionaries(
    dict(
        layers=st.integers(1, 6),
        hidden=st.integers(1, 64).map(lambda n: 16 * n),
        inner=st.integers(1, 4000),
        vocab=st.integers(100, 160_000),
        heads=st.sampled_from([1, 4, 12]),
        kv_heads=st.sampled_from([1, 2]),
        tied=st.booleans(),
    )
)


@settings(max_examples=15)
@given(
    sizes=_sizes,
    gpu=st.integers(1, 1000).map(lambda n: n * 700_000),
    cpu=st.none() | st.integers(0, 300).map(lambda n: n * 1_000_000),
    workload=st.tuples(st.integers(1, 2000), st.integers(1, 300)),
    kv=st.sampled_from([None, (100, 0, 0), (0, 0, 100), (30, 40, 30)]),
    activations=st.sampled_from([None, (30, 40, 30)]),
)
def test_plan_respects_budgets_or_is_rejected(sizes, gpu, cpu, workload, kv, activations):
    shape = model(**sizes)
    budget = gpu + (cpu or 0)
    try:
        plan, prediction = planned(
            shape, gpu=gpu, cpu=cpu, workload=workload, kv=kv, activations=activations
        )
    except (OutOfBlocks, InvalidRequest) as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert f"allow for {budget}" in refused
        return
    resident = sum(s.nbytes for s, at in zip(shape.slots, plan.tiers, strict=True) if at != "disk")
    streamed = [shape.streamed_bytes(unit, plan.tiers) for unit in shape.units]
    in_memory = int(plan.kv_bytes * (plan.kv[0] + plan.kv[1]) / 100)
    logits, ring = plan.block_size * shape.vocab * 4, plan.memory.get("ring", 0)
    assert resident + ring + in_memory + logits <= plan.memory_bytes <= budget
    assert ring >= max(streamed)
    assert plan.kv_bytes >= 2 * 16 * shape.kv_bytes_per_token
    assert all(plan.tiers[i] != "disk" for i in shape.resident)
    assert kv is None or plan.kv == kv
    assert prediction.tokens_per_s > 0 and prediction.sequences <= plan.block_size
    if cpu is not None:
        for at, (tier, most) in enumerate((("gpu", gpu), ("cpu", cpu))):
            own = [s.nbytes for s, t in zip(shape.slots, plan.tiers, strict=True) if t == tier]
            assert sum(own) + plan.kv_bytes * plan.kv[at] / 100 <= most


def test_user_settings_are_kept_in_plan():
    plan, _ = planned(
        model(),
        given=options(kv_memory="300MB", max_batch_tokens=77, max_sequences=40, block_size=8),
        gpu="3GB",
        cpu="1GB",
        weights=(20, 5, 75),
        kv=(50, 0, 50),
        activations=(0, 100, 0),
        batch_size=5,
        micro_batches=3,
        overlap=False,
    )
    assert (plan.weights, plan.kv, plan.activations) == ((20, 5, 75), (50, 0, 50), (0, 100, 0))
    assert (plan.batch_size, plan.micro_batches, plan.block_size) == (5, 3, 15)
    assert (plan.kv_bytes, plan.kv_block, plan.max_batch_tokens) == (300_000_000, 8, 77)
    assert not plan.overlap


@pytest.mark.parametrize(
    "said", [dict(batch_size=6), dict(batch_size=1), dict(micro_batches=4), {}]
)
def test_block_size_does_not_exceed_max_sequences(said):
    plan, _ = planned(model(), given=options(max_sequences=36), gpu="3GB", **said)
    assert plan.block_size <= 36 and said.items() <= asdict(plan).items()


def test_converted_weights_count_in_ram_and_dequantized_ones_on_gpu():
    """With a GPU, weights are converted in RAM as they are read, and dequantized in the GPU's memory."""
    gpu = replace(
        options(), device=Device(torch.device("cpu"), batch_invariant=True, is_separate=True)
    )
    sizes = model(layers=2, hidden=64, inner=128, vocab=500)
    offload = dict(gpu="20MB", cpu="400MB", weights=(0, 0, 100), workload=(32, 8))

    def plan_of(**changes) -> Plan:
        slots = tuple(replace(slot, **changes) for slot in sizes.slots[1:])
        return planned(replace(sizes, slots=(sizes.slots[0], *slots)), given=gpu, **offload)[0]

    assert plan_of(converted_bytes=50_000_000).memory["converted weights"] >= 50_000_000
    with pytest.raises(InvalidRequest, match=r"are needed on the GPU .*unpacked weights"):
        plan_of(is_quantized=True, unpacked_bytes=50_000_000)


def test_percentages_without_budgets_are_kept_in_plan():
    plan, _ = planned(model(), weights=(100, 0, 0), kv=(100, 0, 0))
    assert plan.budget is None and set(plan.tiers) == {"gpu"}


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        (dict(gpu="300MB"), OutOfBlocks, ["at least ", "ring ", "allow for 300000000"]),
        (
            dict(gpu="1GB", weights=(100, 0, 0)),
            InvalidRequest,
            ["weights=(100.0, 0.0, 0.0)", "weights 3.44 GB", "gpu=1000000000"],
        ),
        (
            dict(gpu="1GB", kv=(100, 0, 0), batch_size=250, micro_batches=1),
            InvalidRequest,
            ["kv=(100.0, 0.0, 0.0)", "batch_size=250", "logits"],
        ),
        (dict(gpu=0, cpu="200MB"), OutOfBlocks, ["gpu=0 and cpu=200000000 allow for 200000000"]),
        (
            dict(weights=(100, 0, 0), kv=(0, 0, 100), disk_limit=1000),
            TierFailed,
            ["the disk tier is too small", "disk_limit=1000"],
        ),
    ],
    ids=["ring", "weights", "batch", "cpu", "disk"],
)
def test_rejected_plan_names_needed_and_given_memory(said, error, says):
    with pytest.raises(error) as refused:
        planned(model(), **said)
    for part in says:
        assert part in str(refused.value)


def test_rejected_plan_names_memory_that_suffices_without_disk():
    given = options(kv_memory="300MB")
    with pytest.raises(InvalidRequest) as refused:
        planned(model(), given=given, gpu="200MB", disk_limit=0)
    needed = int(re.search(r"at least (\d+) bytes", str(refused.value))[1])
    assert planned(model(), given=given, gpu=needed, disk_limit=0)[0].kv == (100, 0, 0)


def test_excessive_kv_memory_is_rejected():
    with pytest.raises(InvalidRequest, match=r"kv_memory=900000000.*K and V 900 MB"):
        planned(model(), given=options(kv_memory="900MB"), gpu="1GB", kv=(100, 0, 0))


def test_kv_memory_counts_whole_blocks_and_the_size_of_each_layer():
    shape = replace(model(layers=4), kv_layers=(1000, 1000, 1000, 8000))
    said = dict(gpu="4GB", kv=(50, 0, 50), batch_size=2, micro_batches=1, workload=(300, 30))
    plan, _ = planned(shape, given=options(block_size=1000), **said)
    assert assign_tiers(shape.kv_layers, plan.kv) == ["gpu", "disk", "gpu", "disk"]
    assert plan.memory["K and V"] == plan.kv_bytes * 2000 // 11_000
    assert plan.memory["K and V buffers"] >= NUM_STAGED * 2 * 1000 * 8000


def test_kv_cache_on_disk_respects_disk_limit():
    plan, _ = planned(model(), gpu="1GB", disk_limit="400MB")
    assert plan.kv_bytes * plan.kv[2] / 100 <= 400_000_000


# Numbers for arithmetic by hand: 1,000 weights per matrix, 10 us per weight and row.

ROUND = Machine(read_rate=1e6, write_rate=5e5, product_s=((1, 1e-5), (10, 1e-4)))
MEMORY_RATE = 2 / 1e-5  # bytes/s


@pytest.fixture
def products_alone(monkeypatch):
    """Only reads, writes, matrix products, attention and sampling take time."""
    monkeypatch.setattr(cost, "_UNIT_S", 0.0)
    monkeypatch.setattr(cost, "_PASSES", 0)


SMALL = ModelShape(
    slots=(SlotShape(2000, 4096, elements=1000), SlotShape(2000, 8192, elements=1000)),
    units=(UnitShape((0,), attends=True), UnitShape((1,), attends=True)),
    resident=(),
    itemsize=2,
    kv_layers=(100, 100),
    hidden=10,
    intermediate=10,
    attention=30,
    vocab=10,
)


def small_plan(**changes) -> Plan:
    settled = dict(
        weights=(0, 0, 100), kv=(100, 0, 0), activations=(100, 0, 0), tiers=("disk", "disk"),
        memory={"ring": 100_000}, kv_bytes=200 * 16 * 9, batch_size=4, micro_batches=2, micro_tokens=10,
        max_batch_tokens=10, workload=(512, 128),
    )  # fmt: skip
    return Plan(**{**settled, **changes})


def test_step_prediction_matches_hand_calculation(products_alone):
    plan = small_plan(overlap=False)
    step = Forecast(SMALL, ROUND, plan).step(Load(8, 8, 50, 8))
    assert step.weight_bytes == 4096 + 8192
    assert step.io_s == pytest.approx(0.012288)
    # Two micro-batches of 4 rows at 4e-5 s a weight, 1,000 weights, two units; K and V: 8 x 50 x 200 bytes.
    assert step.compute_s == pytest.approx(2 * 2 * 1000 * 4e-5 + 8 * 50 * 200 / MEMORY_RATE)
    assert step.seconds == pytest.approx(step.io_s + step.compute_s)
    assert step.kv_bytes == 0


@pytest.mark.parametrize("read_rate", [1e6, 1e3], ids=["processor", "disk"])
def test_reads_overlap_compute_if_ring_holds_two_units(read_rate):
    machine, load = replace(ROUND, read_rate=read_rate), Load(8, 8, 50, 8)
    for ring, overlaps in ((4096 + 8192, True), (8192, False)):
        step = Forecast(SMALL, machine, small_plan(memory={"ring": ring})).step(load)
        longer, shorter = max(step.io_s, step.compute_s), min(step.io_s, step.compute_s)
        assert step.seconds == pytest.approx(longer if overlaps else longer + shorter)


def test_kv_on_disk_prediction_matches_hand_calculation():
    plan = small_plan(kv=(50, 0, 50), tiers=("gpu", "gpu"), overlap=False)
    step = Forecast(SMALL, ROUND, plan).step(Load(8, 8, 50, 8))
    read, written = 8 * 50 * 100, 8 * 16 * 100  # whole blocks of 16 are written
    assert step.weight_bytes == 0
    assert step.kv_bytes == read + written
    assert step.io_s == pytest.approx(read / 1e6 + written / 5e5)


def test_workload_prediction_matches_hand_calculation(products_alone):
    plan = small_plan(overlap=False, workload=(40, 24))
    found = Forecast(SMALL, ROUND, plan).prediction  # 64 tokens each: the KV cache holds two
    assert found.sequences == 2
    decode_s = 0.012288 + 2 * 1000 * 2e-5 + 2 * 52 * 200 / MEMORY_RATE
    assert found.decode.seconds == pytest.approx(decode_s)
    # 80 rows of prompts in 8 forwards of 10 rows, each of which attends to 5 positions, of 30 numbers.
    prompts_s = 8 * (0.012288 + 2 * (1000 * 1e-4 + 10 * 5 * 30 * 1e-5))
    assert found.prefill_s == pytest.approx(prompts_s)
    total = prompts_s + 24 * (decode_s + 2 * 10 * cost._LOGIT * 1e-5)
    assert found.tokens_per_s == pytest.approx(2 * 24 / total)
    assert found.limit == "computing"


def test_product_times_are_interpolated_between_measured_rows():
    assert ROUND.product(1) == 1e-5
    assert ROUND.product(5.5) == pytest.approx(5.5e-5)
    assert ROUND.product(20) == pytest.approx(2e-4)
    assert ROUND.product(0) == 0
    assert ROUND.packed(20) == ROUND.product(20)


def test_quantized_products_have_their_own_speed():
    machine = replace(ROUND, packed_s=((1, 2e-6),))

    def products_s(**changes):
        shape = replace(SMALL, slots=tuple(replace(slot, **changes) for slot in SMALL.slots))
        return Forecast(shape, machine, small_plan()).products_s(shape.units[0], 10)

    assert products_s() == pytest.approx(1000 * 1e-4)
    assert products_s(is_quantized=True) == pytest.approx(1000 * 2e-5)
    # It is dequantized as a whole.
    assert products_s(is_quantized=True, unpacked_bytes=1) == products_s()


def test_amounts_are_rounded_before_the_unit_is_chosen():
    assert [amount(n) for n in (0, 999, 999_600, 1e9, 2.5e12)] == [
        "0 bytes", "999 bytes", "1 MB", "1 GB", "2,500 GB",
    ]  # fmt: skip


# Real models.


@pytest.mark.parametrize(
    "name", slow_but([*list(TOYS)[::10], *RECURRENT_FAMILIES[::5]], [*TOYS, *RECURRENT_TOYS])
)
def test_forecast_sizes_match_opened_model(name, folders):
    with LLM(folders(name), max_length=64, placement=Offload(gpu="100MB", policy=None)) as llm:
        runner = llm.engine.runner
        layers, shape = runner.decoder.spec.layers, runner.forecast.shape
        expected = bytes_per_token(layers, torch.float32)
        expected += runner.choices["routing"].bytes_per_token
        assert expected <= shape.kv_bytes_per_token <= 1.1 * expected
        assert shape.nbytes == sum(p.nbytes for p in make_toy(name).parameters())
        assert shape.vocab == runner.vocab_size
        assert shape.state_bytes == sum(s.nbytes for s in runner.decoder.spec.states)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(
            name, said, id=name, marks=[pytest.mark.slow] * (name not in ("qwen3_moe", "gpt2"))
        )
        for name, said in {
            "llama": dict(gpu="500KB", policy=None),
            "qwen3_moe": dict(gpu="600KB", cpu="500KB", policy=None),
            "gpt2": dict(gpu=0, cpu="1300KB", weights=(0, 30, 70)),
            "deepseek_v3": dict(gpu="2MB", weights=(20, 0, 80), kv=(50, 0, 50), overlap=False),
        }.items()
    ],
)
def test_small_budget_is_kept_with_tokens_of_resident_model(name, said, folders):
    prompts, params = mixed_requests(8)
    with LLM(folders(name), max_length=160) as llm:
        expected = [facts(result) for result in llm.generate(prompts, params)]
    placement = Offload(workload=(40, 8), **said)
    with LLM(folders(name), max_length=160, max_sequences=8, placement=placement) as llm:
        assert [facts(result) for result in llm.generate(prompts, params)] == expected
        runner, stats = llm.engine.runner, llm.stats()["offload"]
    plan = runner.plan
    assert runner.weights.bytes_read > 0  # it did not fit
    budget = (placement.gpu or 0) + (placement.cpu or 0)
    assert plan.memory_bytes <= budget
    actual = {kind: both["actual"] for kind, both in stats.items() if kind.endswith("_bytes")}
    for kind in ("weights", "ring", "K and V"):
        assert actual.get(f"{kind}_bytes", 0) <= plan.memory.get(kind, 0), kind
    read = stats["decode_weights_bytes"]
    most = 1.0 if runner.weights.experts is None else 1.5  # routing is random
    assert read["actual"] <= most * read["predicted"]


def test_resident_model_has_no_offload_stats():
    with LLM(make_toy("llama")) as llm:
        assert "offload" not in llm.stats()


def test_plan_chooses_max_batch_tokens_unless_given(folders):
    kwargs = dict(max_length=128, placement=Offload(gpu="1MB", policy=None))
    with LLM(folders("llama"), **kwargs) as llm:
        runner, scheduler = llm.engine.runner, llm.engine.scheduler
        assert scheduler.max_batch_tokens == runner.plan.max_batch_tokens
        assert scheduler.max_prompt_rows == runner.plan.prompt_rows < 256
    kwargs["placement"] = Offload(gpu="50MB", policy=None)
    with LLM(folders("llama"), max_batch_tokens=2048, **kwargs) as llm:
        assert llm.engine.scheduler.max_batch_tokens == 2048
    with LLM(folders("llama"), max_length=128) as llm:
        assert llm.engine.scheduler.max_batch_tokens == 2048


def test_machine_is_measured_only_if_the_policy_needs_it(folders, monkeypatch):
    def measured(*_):
        raise AssertionError

    monkeypatch.setattr(planners, "measure", measured)
    LLM(folders("llama"), placement=Offload(gpu="1MB", policy=None)).close()
    with pytest.raises(AssertionError):
        LLM(folders("llama"), placement=Offload(gpu="1MB"))
    monkeypatch.undo()
    monkeypatch.setattr(machines, "_writing", None)  # a folder with a small limit is not written to
    LLM(folders("llama"), max_length=128, placement=Offload(gpu="1MB", disk_limit="1MB")).close()


def test_measurement_is_cached_and_leaves_no_files(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "_measured", {})
    with LLM(folders("llama"), placement=Offload(gpu="1MB", policy=None)) as llm:
        slots = llm.engine.runner.weights.units.slots
        tensors = [stored for slot in slots for stored in sources(slot.lazy)]
    found = measure(tensors, tmp_path, torch.float32)
    assert all(value > 0 for value in asdict(found).values() if isinstance(value, int | float))
    assert [rows for rows, _ in found.product_s] == [1, 8, 64, 512]
    assert os.listdir(tmp_path) == []
    packing = Quantization(activation_bits=8, bits=8).packing((6, 64), torch.float32)
    packed = measure(tensors, tmp_path, torch.float32, packing=packing)
    assert replace(packed, packed_s=()) == found
    assert [rows for rows, _ in packed.packed_s] == [1, 8, 64, 512]
    monkeypatch.setattr(machines, "_products", None)  # fails if called
    assert measure(tensors, tmp_path, torch.float32) == found
    again = replace(packing, shape=(2, 3, 128))  # another matrix of the same kind
    assert measure(tensors, tmp_path, torch.float32, packing=again) == packed


def test_failed_write_of_measurement_is_not_an_error_of_opening(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
    assert machines._writing(tmp_path) is None
    assert os.listdir(tmp_path) == []


def test_report_shows_predicted_beside_actual():
    table = comparison_table(
        {
            "decode_step_s": {"predicted": 0.5, "actual": 0.25},
            "decode_weights_bytes": {"predicted": 2e9, "actual": 2e9},
            "read_in_decode_per_s": {"predicted": 4e9, "actual": None},
            "tokens_per_s": {"predicted": None, "actual": 12.345},
        }
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines[1] == ["decode", "step", "500", "ms", "250", "ms", "0.50"]
    assert lines[2] == ["decode", "weights", "2", "GB", "2", "GB", "1.00"]
    assert lines[3] == ["read", "in", "decode/s", "4", "GB/s"]
    assert lines[4] == ["tokens/s", "12.3"]


def test_freed_heap_memory_beyond_limit_is_returned():
    heap = Heap(0)
    if not heap.free_bytes:
        pytest.skip("this C library does not tell what it keeps")
    kept = [torch.ones(100_000) for _ in range(200)]  # 400 KB each: contiguous on the heap
    del kept[::2]
    for limit, is_kept in ((1 << 40, True), (1_000_000, False)):
        before = resident_bytes()
        Heap(limit).tidy()
        assert (resident_bytes() > before - 10_000_000) == is_kept, limit
    assert all(float(block.sum()) == 100_000 for block in kept)
