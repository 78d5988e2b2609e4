"""A mixed workload on Qwen3-0.6B's shape with random weights: Verbatim, and transformers in two ways.

    python benchmarks/throughput.py [--layers 28] [--requests 64] [--seats 32] [--rounds 3]
    python benchmarks/throughput.py --profile [--layers 28]   # where a decode step's time goes
    python benchmarks/throughput.py --queue                   # the cost of waiting requests per step

Prompts of 16 to 512 tokens, outputs of 8 to 256, from a fixed seed; greedy, nothing ends early. All engines
run the same module, so the same weights, in one process, and take turns; figures are medians over the rounds,
and only requested tokens count. Ratios are meaningful on a shared machine, absolute numbers only within one
run. The limit is the time to read the weights once in each of Verbatim's steps, and the KV that its decode
rows need, at the measured bandwidth; it does not include the arithmetic of prefill.

transformers' static batches are padded on the left, in the order of arrival, and each runs until its longest
request ends. Its continuous batching computes the attention of a batch as one packed row, with a mask between
requests: every row pays for the contexts of all others, and each layer copies K and V for every query head.
So it has its own limits of requests and tokens per batch; the defaults were the fastest, on 4 of the layers.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from decode import WIDTH, read_bandwidth

from verbatim import LLM, SamplingParams

PROMPTS, OUTPUTS = (16, 512), (8, 256)  # tokens, inclusive
AGREED = 8  # number of first tokens to compare
TINY = dict(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Job:
    """One request: a prompt, and the number of tokens to generate."""

    prompt: list[int]
    num_tokens: int


@dataclass
class Engine:
    """One way to run jobs; `run` returns the seconds and each job's new ids."""

    name: str
    run: Callable[[list[Job]], tuple[float, list[list[int]]]]
    jobs: list[Job]
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def take_turn(self) -> None:
        seconds, self.outputs = self.run(self.jobs)
        lengths = [len(ids) for ids in self.outputs]
        assert lengths == [job.num_tokens for job in self.jobs], (self.name, lengths)
        self.seconds.append(seconds)

    @property
    def tokens_per_s(self) -> float:
        return sum(job.num_tokens for job in self.jobs) / statistics.median(self.seconds)


def make_model(width: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen3ForCausalLM(Qwen3Config(**width)).eval()
    finally:
        torch.set_default_dtype(before)


def make_jobs(count: int) -> list[Job]:
    noise = torch.Generator().manual_seed(0)

    def between(ends: tuple[int, int]) -> list[int]:
        return torch.randint(ends[0], ends[1] + 1, (count,), generator=noise).tolist()

    lengths = zip(between(PROMPTS), between(OUTPUTS), strict=True)
    return [Job(_random_ids(prompt, noise), output) for prompt, output in lengths]


def _random_ids(length: int, noise: torch.Generator, vocab_size: int = 150_000) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=noise).tolist()


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


# ---- the three engines


def run_verbatim(llm: LLM, jobs: list[Job]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    results = llm.generate([job.prompt for job in jobs], [_greedy(job.num_tokens) for job in jobs])
    seconds = time.perf_counter() - start
    return seconds, [result.outputs[0].token_ids for result in results]


def run_static(model: Any, jobs: list[Job], rows: int) -> tuple[float, list[list[int]]]:
    """Run transformers' `generate` on padded batches of `rows`, each until its longest request ends."""
    outputs: list[list[int]] = []
    start = time.perf_counter()
    for first in range(0, len(jobs), rows):
        batch = jobs[first : first + rows]
        width = max(len(job.prompt) for job in batch)
        longest = max(job.num_tokens for job in batch)
        pads = [width - len(job.prompt) for job in batch]
        ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        with torch.inference_mode():
            padded = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        rows_out = padded[:, width:].tolist()
        outputs += [row[: job.num_tokens] for row, job in zip(rows_out, batch, strict=True)]
    return time.perf_counter() - start, outputs


def run_continuous(
    model: Any, jobs: list[Job], options: argparse.Namespace
) -> tuple[float, list[list[int]]]:
    """Run transformers' continuous batching; the time does not include creating its cache and thread."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    compiled: dict[str, Any] = {}
    if (
        options.cb_compile
    ):  # pads the inputs: by its own defaults to 64 rows and 16,384 tokens of KV
        compiled = dict(q_padding_interval_size=16, kv_padding_interval_size=1024)
    pages = -(-(PROMPTS[1] + OUTPUTS[1]) // options.cb_page)  # of the longest request
    config = ContinuousBatchingConfig(
        page_size=options.cb_page,
        num_blocks=(options.cb_seats + 2) * pages * 5 // 4,  # never waits for memory, nor evicts
        max_batch_tokens=options.cb_tokens,
        max_requests_per_batch=options.cb_seats,
        max_blocks_per_request=0,  # the block table is for flash attention, on GPUs
        allow_block_sharing=False,  # prompts have no common prefix, but the rounds would
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
        scheduler_type=options.cb_scheduler,
        default_compile_level=options.cb_compile,
        **compiled,
    )
    generation = GenerationConfig(
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(job.num_tokens for job in jobs),
    )
    model.set_attn_implementation(options.cb_attention)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, persistent_manager=True
    ) as manager:
        start = time.perf_counter()
        ids = [manager.add_request(j.prompt, max_new_tokens=j.num_tokens) for j in jobs]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(jobs):
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "transformers' generation thread has ended"
            elif result.error is not None:
                raise RuntimeError(f"transformers' continuous batching: {result.error}")
            elif result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - start
    model.set_attn_implementation("sdpa")
    return seconds, [outputs[request_id] for request_id in ids]


def compare(options: argparse.Namespace, dtype: torch.dtype) -> None:
    jobs = make_jobs(options.requests)
    subset = jobs[: options.cb_requests or None]
    model, bandwidth = open_shape(options, dtype)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    longest = PROMPTS[1] + OUTPUTS[1]
    with LLM(model, kv_memory="6GB", max_sequences=options.seats, max_length=longest) as llm:
        known: dict[str, Engine] = {
            "verbatim": Engine(
                f"Verbatim, {options.seats} concurrent requests",
                lambda jobs: run_verbatim(llm, jobs),
                jobs,
            ),
            "static": Engine(
                f"transformers, static batches of {options.batch}",
                lambda jobs: run_static(model, jobs, options.batch),
                jobs,
            ),
            "continuous": Engine(
                f"transformers, continuous, {options.cb_seats} concurrent requests",
                lambda jobs: run_continuous(model, jobs, options),
                subset,
            ),
        }
        engines = [known[name] for name in options.engines]
        warm_up = [Job(job.prompt[:16], 2) for job in jobs[: options.batch]]
        for engine in engines:
            engine.run(warm_up)
        before = llm.stats()["forwards"]
        for _ in range(options.rounds):
            for engine in engines:
                engine.take_turn()
        num_steps = (llm.stats()["forwards"] - before) // options.rounds
        kv_per_token = llm.info()["kv_bytes_per_token"]
    if "continuous" in options.engines:
        model.destroy_cached_continuous_batching_manager()
    report(engines, options, weight_bytes, kv_per_token, bandwidth, num_steps)


def open_shape(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, float]:
    """Return the model and the memory bandwidth; print the setup."""
    model = make_model({**WIDTH, "num_hidden_layers": options.layers}, dtype)
    weight_bytes = sum(p.nbytes for p in model.parameters())  # a tied weight counts once
    bandwidth = read_bandwidth()
    print(
        f"{options.dtype}, {torch.get_num_threads()} threads, {options.layers} of "
        f"{WIDTH['num_hidden_layers']} layers, weights {weight_bytes / 1e9:.2f} GB, "
        f"memory reads {bandwidth / 1e9:.0f} GB/s; {platform.machine()}, torch {torch.__version__}"
    )
    return model, bandwidth


def report(
    engines: list[Engine],
    options: argparse.Namespace,
    weight_bytes: int,
    kv_per_token: int,
    bandwidth: float,
    num_steps: int,
) -> None:
    first = engines[0]
    tokens = sum(job.num_tokens for job in first.jobs)
    print(
        f"{len(first.jobs)} requests, {sum(len(job.prompt) for job in first.jobs):,} prompt tokens, "
        f"{tokens:,} new ones; medians of {options.rounds} rounds\n"
    )
    print(
        f"{'engine':48} | {'tokens/s':>8} {'least':>8} {'most':>8} | {'seconds':>8} {'Verbatim is':>12}"
    )
    for engine in engines:
        count = sum(job.num_tokens for job in engine.jobs)
        print(
            f"{engine.name:48} | {engine.tokens_per_s:8.1f} {count / max(engine.seconds):8.1f} "
            f"{count / min(engine.seconds):8.1f} | {statistics.median(engine.seconds):8.1f} "
            f"{first.tokens_per_s / engine.tokens_per_s:10.2f} x",
            flush=True,
        )
    print()
    if options.engines[0] == "verbatim":
        read = sum(_decode_positions(job) for job in first.jobs) * kv_per_token
        limit = tokens * bandwidth / (num_steps * weight_bytes + read)
        print(
            f"limit of {num_steps} steps at {tokens / num_steps:.1f} new tokens each: {limit:.1f} tokens/s "
            f"without prefill's arithmetic; Verbatim is at {first.tokens_per_s / limit:.0%}"
        )
    for engine in engines[1:]:
        pairs = list(zip(first.outputs, engine.outputs, strict=False))
        agreed = sum(a[:AGREED] == b[:AGREED] for a, b in pairs)
        whole = sum(a == b for a, b in pairs)
        print(
            f"{engine.name}: the first {AGREED} tokens are Verbatim's in {agreed} of {len(pairs)} requests, "
            f"all tokens in {whole}"
        )
    if "continuous" in options.engines:
        print(
            f"continuous batching: {options.cb_attention}, {options.cb_tokens} tokens and "
            f"{options.cb_seats} requests a batch, pages of {options.cb_page}, {options.cb_scheduler}, "
            f"compile level {options.cb_compile}, synchronous, blocks not shared"
        )
    if 0 < options.cb_requests < len(first.jobs) and "continuous" in options.engines:
        print(f"continuous batching ran the first {options.cb_requests} requests only")


def _decode_positions(job: Job) -> int:
    """Return the KV positions that a job's decode rows read: P + 1 for the second token, and so on."""
    steps = job.num_tokens - 1
    return steps * len(job.prompt) + steps * (steps + 1) // 2


# ---- where a step's time goes


@dataclass
class Step:
    """Seconds in the parts of one engine step, by their names."""

    start: float
    end: float = 0.0
    rows: int = 0
    chunks: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        return self.end - self.start - sum(self.parts.values())


PARTS = "schedule", "forward", "sample", "commit"


@contextmanager
def timed_steps(llm: LLM) -> Iterator[list[Step]]:
    """Time every step of the engine and its parts during the block."""
    engine = llm.engine._engine
    steps: list[Step] = []

    def timed(owner: Any, method: str, part: str) -> Callable[[], None]:
        original = getattr(owner, method)

        def with_timer(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            taken = time.perf_counter() - start
            parts = steps[-1].parts
            parts[part] = parts.get(part, 0.0) + taken
            if part == "schedule" and result is not None:
                steps[-1].chunks = len(result.chunks)
                steps[-1].rows = sum(chunk.num_rows for chunk in result.chunks)
            return result

        setattr(owner, method, with_timer)
        return lambda: delattr(owner, method)

    def step() -> bool:
        steps.append(Step(time.perf_counter()))
        has_work = original_step()
        steps[-1].end = time.perf_counter()
        return has_work

    original_step = engine.step
    engine.step = step  # type: ignore[method-assign]
    undo = [
        timed(engine.scheduler, "schedule", "schedule"),
        timed(engine.runner, "forward", "forward"),
        timed(engine.runner, "sample", "sample"),
        timed(engine, "_commit", "commit"),
        lambda: delattr(engine, "step"),
    ]
    try:
        yield steps
    finally:
        for restore in undo:
            restore()


def profile(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the times of the parts of a decode step of equal rows, from its start to the next one's."""
    rows = options.seats
    model, _ = open_shape(options, dtype)
    noise = torch.Generator().manual_seed(0)
    prompts = [_random_ids(128, noise) for _ in range(rows)]
    medians: dict[str, list[float]] = {}
    with LLM(model, kv_memory="6GB", max_sequences=rows, max_length=256) as llm:
        llm.generate(prompts, _greedy(2))
        with timed_steps(llm) as steps:
            for _ in range(options.rounds):
                llm.generate(prompts, _greedy(64))
        for step, after in itertools.pairwise(steps):
            # The last step of a round is followed by the end of `generate`, so its period is not a step's.
            if step.rows == step.chunks == rows == after.rows == after.chunks:
                parts = {part: step.parts.get(part, 0.0) for part in PARTS}
                parts["rest of the step"] = step.rest
                parts["between two steps"] = after.start - step.end
                parts["whole"] = after.start - step.start
                parts["outside the forward"] = parts["whole"] - parts["forward"]
                for part, taken in parts.items():
                    medians.setdefault(part, []).append(taken)
    whole = statistics.median(medians["whole"])
    print(
        f"{rows} decode rows at contexts of 129 to 191, {WIDTH['vocab_size']:,} ids, greedy; "
        f"medians of {len(medians['whole'])} steps\n"
    )
    print(f"{'part':22} | {'ms':>9} | {'share':>7}")
    for part, taken in medians.items():
        median = statistics.median(taken)
        print(f"{part:22} | {median * 1e3:9.3f} | {median / whole:7.1%}")
    share = statistics.median(medians["outside the forward"]) / whole
    print(
        f"\nscheduler, sampler and bookkeeping take {share:.1%} of a step (aim: under 5 % at 28 layers)"
    )


# ---- the cost of waiting requests


def queue(options: argparse.Namespace) -> None:
    """Print the microseconds per step of a tiny model outside the forward, by number of waiting requests."""
    model = make_model(TINY, torch.float32)
    states = ["0 wait", *(f"{count:,} wait" for count in options.waiting)]
    states.append(f"0 wait, {options.waiting[-1]:,} have finished")
    times: dict[str, dict[str, list[float]]] = {state: {} for state in states}
    for _ in range(options.rounds):
        with LLM(model, kv_memory="64MB", max_sequences=options.seats, max_length=512) as llm:
            for state, waiting in zip(states, [0, *options.waiting, 0], strict=True):
                last = state == states[-2]
                _measure_queue(llm, options, waiting, times[state], let_all_finish=last)
    print(
        f"{torch.get_num_threads()} threads, {options.seats} decode rows of a model of 1 layer and "
        f"{TINY['vocab_size']:,} ids; medians of {options.rounds} rounds of {options.steps} steps; "
        f"microseconds\n"
    )
    names = list(times[states[0]])
    widths = [max(10, len(name)) for name in names]
    print(f"{'':32} | " + " ".join(f"{n:>{w}}" for n, w in zip(names, widths, strict=True)))
    for state, parts in times.items():
        figures = [statistics.median(parts[name]) * 1e6 for name in names]
        print(
            f"{state:32} | " + " ".join(f"{f:{w}.0f}" for f, w in zip(figures, widths, strict=True))
        )


def _measure_queue(
    llm: LLM,
    options: argparse.Namespace,
    waiting: int,
    found: dict[str, list[float]],
    *,
    let_all_finish: bool,
) -> None:
    noise = torch.Generator().manual_seed(waiting)
    engine = llm.engine

    def submit(count: int, num_tokens: int) -> list[Any]:
        requests = []
        for _ in range(count):
            prompt = _random_ids(8, noise, TINY["vocab_size"])
            requests.append(llm.engine.admission.admit(prompt, _greedy(num_tokens)))
            engine.submit(requests[-1])
        return requests

    running = submit(options.seats, options.steps + 16)
    for _ in range(4):  # all have a reservation, and their prompts are done
        engine.step()
    queued = submit(waiting, 1)
    for _ in range(4):
        engine.step()
    with timed_steps(llm) as steps:
        for _ in range(options.steps):
            start = time.perf_counter()
            engine.step()
            whole = time.perf_counter() - start
            step = steps[-1]
            assert step.rows == step.chunks == options.seats
            parts = {part: step.parts[part] for part in PARTS if part != "forward"}
            parts["rest of step"] = step.rest
            parts["around it"] = whole - (step.end - step.start)
            parts["all outside the forward"] = whole - step.parts["forward"]
            parts["forward"] = step.parts["forward"]
            for part, taken in parts.items():
                found.setdefault(part, []).append(taken)
    assert len(llm.engine.scheduler.waiting) == waiting
    if not let_all_finish:
        for request in [*queued, *running]:
            engine.abort(request)
    while llm.engine.has_work:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="the parts of a decode step")
    parser.add_argument("--queue", action="store_true", help="the cost of waiting requests")
    parser.add_argument("--layers", type=int, default=WIDTH["num_hidden_layers"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seats", type=int, default=32, help="Verbatim's max_sequences")
    parser.add_argument("--batch", type=int, default=16, help="rows of a static batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    names = ["verbatim", "static", "continuous"]
    parser.add_argument("--engines", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--cb-requests", type=int, default=0, help="only the first N requests; 0: all"
    )
    parser.add_argument("--cb-seats", type=int, default=8)
    parser.add_argument("--cb-tokens", type=int, default=128, help="tokens of a batch")
    attentions = ["paged|eager", "sdpa"]
    parser.add_argument("--cb-attention", choices=attentions, default=attentions[0])
    parser.add_argument("--cb-page", type=int, default=256)
    parser.add_argument("--cb-scheduler", choices=["fifo", "prefill_first"], default="fifo")
    parser.add_argument("--cb-compile", type=int, default=0, help="default_compile_level")
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--steps", type=int, default=100, help="of each state of the queue")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    dtype = getattr(torch, options.dtype)
    if options.profile:
        profile(options, dtype)
    elif options.queue:
        queue(options)
    else:
        compare(options, dtype)


if __name__ == "__main__":
    main()
