"""A model in several processes: the cost of a hop, the gain of concurrent sessions, the time of a recovery.

    python benchmarks/cluster.py [--rounds 5] [--layers 12] [--kills 20 [--prompt 64]] [--picture FILE]

The model has hidden states of (1, 2048) in bfloat16 and random weights. It runs in one to three stages, and
on two tensor-parallel ranks. Before it is timed, its output must equal the resident model's, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from verbatim import LLM, Cluster, SamplingParams, TensorParallel
from verbatim.placement.distributed.runner import Clustered

TOKENS = 48
PROMPT = 64
SESSIONS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--picture", type=Path)
    parser.add_argument(
        "--kills",
        type=int,
        help="only kill stages, this many times, at random moments, idle and busy",
    )
    parser.add_argument("--prompt", type=int, default=PROMPT, help="its tokens, with --kills")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers)
        if args.kills:
            kill_at_random(Path(folder), args.kills, args.prompt)
            return
        with LLM(folder, max_length=256, prefix_cache=False) as whole:
            expected = {count: talk(whole, count)[0] for count in (1, SESSIONS)}
            measure(Path(folder), whole, expected, args)


def make_model(folder: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompts(count: int, length: int = PROMPT) -> list[list[int]]:
    return [[(7 * i + 13 * j) % 31_000 + 3 for j in range(length)] for i in range(count)]


def talk(llm: LLM, count: int) -> tuple[list[Any], float, float]:
    """Return the outputs of `count` concurrent sessions, and the seconds of prefill and of a decode step."""
    params = [SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(count)]
    begin = time.perf_counter()
    results = llm.generate(prompts(count), params)
    spent = time.perf_counter() - begin
    prefill = max(result.metrics.first_token_s for result in results)
    outputs = [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results]
    return outputs, prefill, (spent - prefill) / (TOKENS - 1)


def measure(
    folder: Path, whole: LLM, expected_by_count: dict[int, Any], args: argparse.Namespace
) -> None:
    print(
        f"{'':17} | {'one session:':>12} {'ms a step':>10} {'of whole':>9} {'hop, ms':>8} "
        f"| {SESSIONS} sessions: {'prefill, s':>10} {'ms a step':>10} {'of whole':>9} | MB of weights"
    )
    for stages in (1, 2, 3, 0):
        placement = Cluster(stages=stages, spares=1) if stages else TensorParallel(2)
        hops = ""
        with LLM(folder, max_length=256, prefix_cache=False, placement=placement) as llm:
            medians = {}
            for count, expected in expected_by_count.items():
                assert talk(llm, count)[0] == expected, "outputs differ"
                pairs = []
                for number in range(args.rounds):
                    pair = [llm, whole][:: 1 - 2 * (number % 2)]
                    times = {one: talk(one, count)[1:] for one in pair}
                    pairs.append((*times[llm], times[whole][1] / times[llm][1]))
                medians[count] = [statistics.median(each) for each in zip(*pairs, strict=True)]
                if count == 1 and stages > 1:
                    hops = f"{1e3 * statistics.median(hops_of(llm)):.3f}"
            info = llm.info()
            held = [x["weight_bytes"] for x in info.get("stages", ())] or info["rank_weight_bytes"]
            (_, step, ratio), (prefill, steps, ratios) = medians[1], medians[SESSIONS]
            print(
                f"{f'{stages} stages' if stages else 'tensor parallel 2':>17} | {'':12} {1e3 * step:10.2f} "
                f"{ratio:9.2f} {hops:>8} | {'':11} {prefill:10.2f} "
                f"{1e3 * steps:10.2f} {ratios:9.2f} | {max(held) / 1e6:.0f}"
            )
            if stages == 3:
                if args.picture:
                    draw(llm, args.picture)
                recovery(llm, expected_by_count)


def spans_of(llm: LLM) -> list[list[Any]]:
    """Return step, micro-batch, begin, end and rows of each stage's latest work."""
    runner = cast(Clustered, llm.engine.runner)
    return runner._call_stages("spans")


def hops_of(llm: LLM) -> list[float]:
    """Return the seconds from the end of a stage's work to the begin of the next one's, in decode steps."""
    stages = [
        {step: (begin, end) for step, _, begin, end, n in row if n == 1} for row in spans_of(llm)
    ]
    return [
        following[step][0] - end
        for one, following in itertools.pairwise(stages)
        for step, (_, end) in one.items()
        if step in following
    ]


def recovery(llm: LLM, expected_by_count: dict[int, Any]) -> None:
    """Kill each stage once in the middle of an answer, and print the time to replace it."""
    for place in range(3):
        time.sleep(8)  # for a spare to get ready
        pid = llm.info()["stages"][place]["pid"]
        ids: list[int] = []
        gap, last = 0.0, time.perf_counter()
        params = SamplingParams(max_tokens=TOKENS, seed=0, ignore_eos=True)
        for number, delta in enumerate(llm.stream(prompts(1)[0], params)):
            now = time.perf_counter()
            gap, last = max(gap, now - last if number else 0.0), now
            ids += delta.token_ids
            if number == TOKENS // 2:
                os.kill(pid, signal.SIGKILL)
        assert ids == expected_by_count[1][0][0], "outputs differ after a kill"
        seconds = llm.stats()["cluster"]["recovery_s"][-1]
        print(
            f"       stage {place} of 3 killed: replaced in {seconds:.2f} s, longest wait {gap:.2f} s"
        )


def kill_at_random(folder: Path, count: int, length: int) -> None:
    """Kill a stage at random moments after opening, and print the seconds until the next token."""
    params = SamplingParams(max_tokens=4 * TOKENS, seed=0, ignore_eos=True)
    prompt, limit = prompts(1, length)[0], length + 4 * TOKENS
    with LLM(folder, max_length=limit) as whole:
        expected = whole.generate(prompt, params)[0].outputs[0].token_ids
    rng = random.Random(0)
    for busy in (False, True):
        burners = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range((os.cpu_count() or 1) if busy else 0)
        ]
        gaps = []
        try:
            for _ in range(count):
                with LLM(folder, max_length=limit, placement=Cluster(stages=2, spares=1)) as llm:
                    moment = time.perf_counter() + rng.uniform(0.5, 4.0)
                    pid = llm.info()["stages"][rng.randrange(2)]["pid"]
                    killed, gap = False, 0.0
                    while not killed:
                        ids: list[int] = []
                        last = time.perf_counter()
                        for delta in llm.stream(prompt, params):
                            now = time.perf_counter()
                            if killed:
                                gap = max(gap, now - last)
                            elif now > moment:
                                os.kill(pid, signal.SIGKILL)
                                killed = True
                            last = now
                            ids += delta.token_ids
                        assert ids == expected, "outputs differ after a kill"
                    gaps.append(gap)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        state = "both cores busy" if busy else "idle"
        print(
            f"{count} kills, {state}: median {statistics.median(gaps):.2f} s, worst {max(gaps):.2f} s"
        )


def draw(llm: LLM, path: Path) -> None:
    """Draw when each stage computes, in a forward of many rows and the steps after it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    long = [[(3 * i + 7 * j) % 31_000 + 3 for j in range(200)] for i in range(SESSIONS)]
    llm.generate(long, SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    spans = spans_of(llm)
    first = min(row[-13 - 2][2] if len(row) > 15 else row[0][2] for row in spans)
    figure, axes = plt.subplots(figsize=(10, 2.4), layout="constrained")
    colours = plt.get_cmap("tab10").colors
    for place, row in enumerate(spans):
        for step, part, begin, end, _ in row:
            if end > first:
                axes.broken_barh(
                    [(1e3 * (begin - first), 1e3 * (end - begin))],
                    (place - 0.4, 0.8),
                    color=colours[step % 10],
                    alpha=1.0 if part % 2 else 0.75,
                )
    axes.set_yticks(range(len(spans)), [f"stage {place}" for place in range(len(spans))])
    axes.invert_yaxis()
    axes.set(xlim=(0, None), xlabel="milliseconds; one colour a step, shades are micro-batches")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
