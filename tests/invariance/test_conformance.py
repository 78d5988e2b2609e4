"""The conformance suite: what every placement, draft, cache and quantization must do for every architecture.

Each case is one engine, compared with a resident engine without drafts and prefix caching that has the same
weights and the same KV format. Every supported pair of options occurs in some case; MTP drafts are rejected
for architectures without MTP layers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import toys
from support.lora import save_adapter
from support.pairwise import Case, covering, pairs_of, slow_but
from support.requests_mixed import all_facts, check_nothing_is_left, facts, mixed_requests
from support.routing_cases import other_keys
from support.stages import check_threads_end, num_threads, staged
from support.toys import Folders
from verbatim import (
    LLM,
    EngineClosed,
    FinishReason,
    Offload,
    PipelineParallel,
    SamplingParams,
    TensorParallel,
    VerbatimError,
)

WITHOUT_MTP = """qwen3_moe gemma2 gpt2 qwen3_next llama4_text deepseek_v32 minimax_m3 deepseek_v4
    granite_hybrid lfm2""".split()
DIMENSIONS = {
    "placement": ("resident", "offload", "cluster", "tensor", "pipeline", "offloaded stages"),
    "draft": ("none", "ngram", "mtp", "early-exit", "model"),
    "cache": ("plain", "no prefixes", "int8", "int4", "tiny"),
    "quantization": ("none", "int8", "int4", "w8a8", "w4a8"),
    "architecture": ("qwen3", "deepseek_v3", *WITHOUT_MTP),
}
SLOW = ("tensor", "pipeline", "offloaded stages")
IN_TORCH = ("deepseek_v4", "minimax_m3")  # mostly: their cases take up to five seconds
REFUSED = {frozenset({("draft", "mtp"), ("architecture", name)}) for name in WITHOUT_MTP}
# Sorted by architecture, whose cases share expected results.
CASES = sorted(covering(DIMENSIONS, REFUSED), key=lambda case: case[:2:-1])
if os.environ.get("VERBATIM_CONFORMANCE") == "all":  # hundreds of cases, for large refactorings
    CASES = [
        case
        for case in itertools.product(*DIMENSIONS.values())
        if not pairs_of(DIMENSIONS, case) & REFUSED
    ]


def fast_cases() -> list[Case]:
    """Return one case per architecture that is not too slow, each with options that others use least."""
    uses: Counter[tuple[str, str]] = Counter()

    def seen(case: Case) -> tuple[int, int]:
        counts = [uses[choice] for choice in zip(DIMENSIONS, case, strict=True)]
        return -counts.count(0), sum(counts)

    found = []
    for architecture in sorted({*DIMENSIONS["architecture"]} - {*IN_TORCH}):
        possible = [case for case in CASES if case[-1] == architecture and case[0] not in SLOW]
        found.append(min(possible, key=seen))
        uses.update(zip(DIMENSIONS, found[-1], strict=True))
    return found


LAST_MATRICES = r"\b(o_proj|o_b_proj|out_proj|c_proj)"  # output projections of attention and mixers
LONG = SamplingParams(max_tokens=24, ignore_eos=True, seed=7)
PROMPT = toys.random_ids(19, seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Toy checkpoints by architecture and seed, with MTP layers where the architecture has them."""
    from support.mtp_toys import save_with_mtp, toy

    @cache
    def folder(name: str, seed: int = 0) -> Path:
        path = tmp_path_factory.mktemp(f"{name}-{seed}")
        if name in ("qwen3", "deepseek_v3") and not seed:
            save_with_mtp(toy(name, 1), path)
        else:
            toys.make_toy(name, seed=seed).save_pretrained(path)
        save_adapter(path / "lora", toys.make_toy(name), layers=LAST_MATRICES)
        return path

    return folder


@contextmanager
def open_case(choice: dict[str, str], checkpoint: Folders, seed: int = 0) -> Iterator[LLM]:
    placements: dict[str, Callable[[], Any]] = {
        "offload": lambda: Offload(
            weights=(30, 40, 30), kv=(30, 40, 30), activations=(0, 50, 50), micro_batches=2
        ),
        "cluster": staged,
        "offloaded stages": lambda: staged(
            offload=Offload(weights=(30, 0, 70), kv=(0, 30, 70), policy=None)
        ),
        "tensor": lambda: TensorParallel(size=2),
        "pipeline": lambda: PipelineParallel(size=2),
    }
    caches: dict[str, dict[str, Any]] = {
        "plain": {},
        "no prefixes": dict(prefix_cache=False),
        "int8": dict(kv_dtype="int8"),
        "int4": dict(kv_dtype="int4"),
        "tiny": dict(kv_memory=_tiny(choice["architecture"], choice["placement"] == "tensor")),
    }
    options: dict[str, Any] = dict(kv_memory="8MB", block_size=8, max_batch_tokens=64)
    options |= caches[choice["cache"]]
    if choice["placement"] != "resident":
        options["placement"] = placements[choice["placement"]]()
    if choice["draft"] == "model":
        options["draft"] = checkpoint(choice["architecture"], 1)
    elif choice["draft"] != "none":
        options["draft"] = choice["draft"]
    if choice["quantization"] != "none":
        options["quantization"] = choice["quantization"]
    with LLM(checkpoint(choice["architecture"], seed), **options) as llm:
        if choice["placement"] == "offload":  # small micro-batches, so that prompts are split
            order: Any = llm.engine.runner.decoder._order
            order._plan = replace(order._plan, micro_tokens=13)
        yield llm


@cache
def _tiny(architecture: str, on_ranks: bool) -> int:
    """Bytes for 160 tokens, fewer than the requests have together, or for 12 states if those take more.

    Each of two ranks keeps all states, and the K and V of half of the KV heads, or of the only one.
    """
    with LLM(toys.make_toy(architecture), kv_memory="1MB", block_size=8) as llm:
        info, shapes = llm.info(), llm.engine.runner.store.shapes
    tokens, states = 160 * (info["kv_bytes_per_token"] + 1), 12 * info["state_bytes"]
    copied = states or all(shape.kv_heads == 1 for shape in shapes)
    return max(tokens, states) * (2 if on_ranks and copied else 1)


@pytest.fixture(scope="module")
def expected(checkpoint: Folders) -> Callable[..., dict[str, Any]]:
    """Reference results: of a resident engine with the same weights, without drafts and prefix cache."""

    @cache
    def of(architecture: str, kept: str, quantization: str, seed: int) -> dict[str, Any]:
        plain = {"placement": "resident", "draft": "none", "quantization": quantization}
        plain |= {"architecture": architecture, "cache": kept}
        with open_case(plain, checkpoint, seed) as llm:
            found: dict[str, Any] = {"long": facts(llm.generate([PROMPT], LONG)[0])}
            if not seed:  # updated weights are compared by the long request only
                found["mixed"] = all_facts(llm.generate(*mixed_requests(12)))
                found["records"] = recorded(llm)
                found["adapted"] = adapted(llm, checkpoint(architecture))
            found["numerics_key"] = llm.info()["numerics_key"]
            return found

    def of_case(choice: dict[str, str], seed: int = 0) -> dict[str, Any]:
        kept = choice["cache"] if choice["cache"].startswith("int") else "no prefixes"
        return of(choice["architecture"], kept, choice["quantization"], seed)

    return of_case


@pytest.mark.parametrize(
    "case", slow_but(*([(case,) for case in some] for some in (fast_cases(), CASES))), ids="-".join
)
def test_conformance(
    case: Case, checkpoint: Folders, expected: Callable[..., dict[str, Any]]
) -> None:
    choice = dict(zip(DIMENSIONS, case, strict=True))
    same = expected(choice)
    before = num_threads()
    with open_case(choice, checkpoint) as llm:
        assert llm.info()["numerics_key"] == same["numerics_key"]
        prompts, params = mixed_requests(12)
        assert all_facts(llm.generate(prompts, params)) == same["mixed"]
        if choice["cache"] == "tiny":
            assert llm.stats()["preemptions"] > 0
        check_streams(llm, prompts, params, same["mixed"])
        check_what_comes_between(llm, same["long"])
        assert recorded(llm) == same["records"]
        assert adapted(llm, checkpoint(choice["architecture"])) == same["adapted"] != same["long"]
        check_interrupt(llm, same["long"])
        check_update(choice, llm, checkpoint, expected)
        check_nothing_is_left(llm)
    with pytest.raises(EngineClosed):
        llm.generate([PROMPT], LONG)
    check_threads_end(before)


def check_streams(llm: LLM, prompts: Any, params: Any, same: list[Any]) -> None:
    """Streams, also concurrent ones in coroutines, give the same results as the batch."""

    async def streamed(i: int) -> Any:
        (result,) = [d.result async for d in llm.astream(prompts[i], params[i]) if d.result]
        return facts(result)

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(streamed(i) for i in range(len(prompts))))

    (result,) = [d.result for d in llm.stream(prompts[3], params[3]) if d.result]
    assert facts(result) == same[3]
    assert asyncio.run(at_once()) == same


def check_what_comes_between(llm: LLM, same: Any) -> None:
    """Eviction, pause, sleep, aborts and abandoned streams do not change the results of a running request."""
    stream, deltas = llm.stream(PROMPT, LONG), []
    deltas.append(next(stream))
    for _ in llm.stream(PROMPT[::-1], LONG):
        break
    victim = llm.engine.admission.admit(PROMPT[:5], LONG)
    llm.engine.submit(victim)
    deltas.append(next(stream))
    llm.engine.abort(victim)
    deltas.append(next(stream))
    assert victim.result is not None
    assert victim.result.outputs[0].finish_reason is FinishReason.ABORT
    llm.engine.call(llm.engine.scheduler.evict_all)
    deltas.append(next(stream))
    llm.pause()
    llm.resume()
    llm.sleep()
    info = llm.info()
    assert info["kv_bytes"] == info.get("kv_tiers", {}).get("disk", 0)  # files keep their space
    llm.wake()
    deltas.append(next(stream))
    llm.sleep(weights=True)
    llm.wake()
    deltas += stream
    assert deltas[-1].result is not None and facts(deltas[-1].result) == same


def recorded(llm: LLM) -> list[Any]:
    """The facts of a request that records its routing and indices, and of requests that replay other ones."""
    choices = llm.engine.runner.choices
    names = [name for name in choices if choices[name].reason is None]
    params = LONG.replace(max_tokens=6, **{f"record_{name}": True for name in names})
    (result,) = llm.generate([PROMPT], params)
    found = [facts(result)]
    for name in names:
        record = getattr(result.outputs[0], name)
        count = choices[name].count
        other = (record + 1) % count if count else other_keys(*record.shape)
        if choices[name].replay_reason is None:
            (result,) = llm.generate([PROMPT], params.replace(**{f"replay_{name}": other}))
            found.append(facts(result))
    return found


def adapted(llm: LLM, folder: Path) -> Any:
    """The facts of a request with an adapter."""
    llm.load_adapter("lora", folder / "lora")
    (result,) = llm.generate([PROMPT], LONG.replace(adapter="lora"))
    llm.unload_adapter("lora")
    return facts(result)


def check_interrupt(llm: LLM, same: Any) -> None:
    """Ctrl-C ends only the request of the caller that it interrupts."""
    stream = llm.stream(PROMPT, LONG)
    deltas = [next(stream)]

    def interrupt(ids: Any, logits: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return logits

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT[:7]], LONG.replace(logits_processors=[interrupt]))
    finally:
        signal.signal(signal.SIGINT, handler)
    deltas += stream
    assert deltas[-1].result is not None and facts(deltas[-1].result) == same


def check_update(
    choice: dict[str, str], llm: LLM, checkpoint: Folders, expected: Callable[..., Any]
) -> None:
    """After a weight update, results match those of an engine opened with the new weights."""
    llm.update_weights(checkpoint(choice["architecture"], 1))
    assert facts(llm.generate([PROMPT], LONG)[0]) == expected(choice, seed=1)["long"]


@pytest.mark.parametrize("architecture", slow_but(WITHOUT_MTP[::3], WITHOUT_MTP))
def test_mtp_draft_is_rejected_for_architecture_without_mtp_layers(
    architecture: str, checkpoint: Folders
) -> None:
    choice = dict(placement="resident", draft="mtp", cache="plain", quantization="none")
    with (
        pytest.raises(VerbatimError, match=r"[Mm]tp"),
        open_case(choice | {"architecture": architecture}, checkpoint),
    ):
        pass


# ---- injected faults that the suite must detect


def perturb_rows_in_company(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    forward = runner.forward

    def perturbed(batch: Any) -> Any:
        found = forward(batch)
        if batch.num_sequences > 1 and len(found.logits):
            found.logits[0] *= 1.001
        return found

    runner.forward = perturbed


def draw_without_position(llm: LLM) -> None:
    runner: Any = llm.engine.runner
    sample = runner.sample

    def drawn(forward: Any, plan: Any) -> Any:
        for row in plan.rows:
            row.position = 0
        return sample(forward, plan)

    runner.sample = drawn


def keep_keys_of_evicted_blocks(llm: LLM) -> None:
    pool: Any = llm.engine.scheduler.pool
    discard = pool._discard

    def kept(block: int) -> None:
        key = pool._keys.get(block)
        discard(block)
        if key is not None:
            pool._by_key[key], pool._keys[block] = block, key

    pool._discard = kept


def lose_aborts(llm: LLM) -> None:
    llm.engine.abort = lambda request: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "fault",
    [perturb_rows_in_company, draw_without_position, keep_keys_of_evicted_blocks, lose_aborts],
)
def test_suite_detects_injected_fault(
    fault: Callable[[LLM], None], checkpoint: Folders, expected: Callable[..., Any]
) -> None:
    choice = dict(placement="resident", draft="none", cache="plain", quantization="none")
    choice |= {"architecture": "qwen3"}
    same = expected(choice)
    if fault is keep_keys_of_evicted_blocks:
        choice["cache"] = "tiny"
    with open_case(choice, checkpoint) as llm:
        fault(llm)
        with pytest.raises((AssertionError, KeyError)):
            check_requests(llm, mixed_requests(12), same)


def check_requests(llm: LLM, asked: Any, same: dict[str, Any]) -> None:
    assert all_facts(llm.generate(*asked)) == same["mixed"]
    check_what_comes_between(llm, same["long"])
    check_nothing_is_left(llm)
