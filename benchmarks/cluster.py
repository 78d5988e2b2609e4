"""A model on several processes of this machine: what a hop costs, what concurrent sessions gain, how long a
loss takes.

    python benchmarks/cluster.py [--rounds 5] [--layers 12] [--kills 20] [--picture FILE]

The model has hidden states of (1, 2048) in bfloat16 and random weights. It runs in one to three stages, and
on two tensor-parallel ranks. Whatever is timed has said the resident model's words first, bit for bit.
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
        "--kills", type=int, help="only kill stages so often, at random moments, idle and busy"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers)
        if args.kills:
            kill_at_random(Path(folder), args.kills)
            return
        with LLM(folder, max_length=256) as whole:
            said = {count: talk(whole, count)[0] for count in (1, SESSIONS)}
            measure(Path(folder), whole, said, args)


def make_model(folder: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % 31_000 + 3 for j in range(PROMPT)] for i in range(count)]


def talk(llm: LLM, count: int) -> tuple[list[Any], float]:
    """What `count` sessions say at once, and seconds from the first token of all to the last."""
    params = [SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(count)]
    begin = time.perf_counter()
    results = llm.generate(prompts(count), params)
    spent = time.perf_counter() - begin
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results], spent


def measure(folder: Path, whole: LLM, said: dict[int, Any], args: argparse.Namespace) -> None:
    print(
        f"{'placement':>17} {'ms a step':>10} {'against whole':>14} {'hop, ms':>8} {'all else, ms':>13} "
        f"{'MB of weights':>14}"
    )
    for stages in (1, 2, 3, None):
        placement = Cluster(stages=stages, spares=1) if stages else TensorParallel(2)
        with LLM(folder, max_length=256, placement=placement) as llm:
            assert talk(llm, 1)[0] == said[1], "other words"
            ratios, steps = [], []
            for number in range(args.rounds):
                pair = [(llm, steps), (whole, [])]
                times = {id(one): talk(one, 1)[1] for one, _ in pair[:: 1 - 2 * (number % 2)]}
                steps.append(times[id(llm)])
                ratios.append(times[id(whole)] / times[id(llm)])
            step, hop, rest = 1e3 * statistics.median(steps) / TOKENS, "-", "-"
            if stages:
                busy, hops = times_of(llm)
                hop = f"{1e3 * statistics.median(hops):.3f}" if hops else "-"
                rest = f"{step - 1e3 * statistics.median(busy):.2f}"
            info = llm.info()
            held = [x["weight_bytes"] for x in info.get("stages", ())] or info["rank_weight_bytes"]
            print(
                f"{f'{stages} stages' if stages else 'tensor parallel 2':>17} {step:10.2f} "
                f"{statistics.median(ratios):14.2f} {hop:>8} {rest:>13} {max(held) / 1e6:14.0f}"
            )
            if stages == 2:
                concurrent(llm, said, args.rounds)
            if stages == 3:
                if args.picture:
                    draw(llm, args.picture)
                recovery(llm, said)


def spans_of(llm: LLM) -> list[list[Any]]:
    """Step, micro-batch, begin, end and rows of the last work of each stage."""
    runner = cast(Clustered, llm.engine.runner)
    return [status["spans"] for status in runner._each("status")]


def times_of(llm: LLM) -> tuple[list[float], list[float]]:
    """Seconds of all stages' work in each decode step, and of each hop between two stages."""
    stages = [
        {step: (begin, end) for step, _, begin, end, n in row if n == 1} for row in spans_of(llm)
    ]
    steps = [
        [stage[step] for stage in stages] for step in stages[0] if all(step in s for s in stages)
    ]
    busy = [sum(end - begin for begin, end in step) for step in steps]
    return busy, [b[0] - a[1] for step in steps for a, b in itertools.pairwise(step)]


def concurrent(llm: LLM, said: dict[int, Any], rounds: int) -> None:
    """Eight sessions at once against the same one after another."""
    assert talk(llm, SESSIONS)[0] == said[SESSIONS], "other words"
    params = [SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(SESSIONS)]
    ratios, rates = [], []
    for _ in range(rounds):
        together = talk(llm, SESSIONS)[1]
        begin = time.perf_counter()
        for prompt, one in zip(prompts(SESSIONS), params, strict=True):
            llm.generate([prompt], one)
        ratios.append((time.perf_counter() - begin) / together)
        rates.append(SESSIONS * TOKENS / together)
    print(
        f"       {SESSIONS} sessions at once on 2 stages: {statistics.median(rates):.1f} tokens/s, "
        f"{statistics.median(ratios):.2f} times one after another (aim 1.5)"
    )


def recovery(llm: LLM, said: dict[int, Any]) -> None:
    """Kill each stage once in the middle of an answer."""
    for place in range(3):
        time.sleep(8)  # a spare gets ready
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
        assert ids == said[1][0][0], "other words after a kill"
        took = llm.stats()["cluster"]["recovery_s"][-1]
        print(
            f"       stage {place} of 3 killed: replaced in {took:.2f} s, longest wait {gap:.2f} s"
        )


def kill_at_random(folder: Path, count: int) -> None:
    """Kill a stage at random moments, from half a second after opening on: seconds until the next token."""
    params = SamplingParams(max_tokens=4 * TOKENS, seed=0, ignore_eos=True)
    with LLM(folder, max_length=300) as whole:
        expected = whole.generate(prompts(1)[0], params)[0].outputs[0].token_ids
    rng = random.Random(0)
    for busy in (False, True):
        burners = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range((os.cpu_count() or 1) if busy else 0)
        ]
        gaps = []
        try:
            for _ in range(count):
                with LLM(folder, max_length=300, placement=Cluster(stages=2, spares=1)) as llm:
                    moment = time.perf_counter() + rng.uniform(0.5, 4.0)
                    pid = llm.info()["stages"][rng.randrange(2)]["pid"]
                    killed, gap = False, 0.0
                    while not killed:
                        ids: list[int] = []
                        last = time.perf_counter()
                        for delta in llm.stream(prompts(1)[0], params):
                            now = time.perf_counter()
                            if killed:
                                gap = max(gap, now - last)
                            elif now > moment:
                                os.kill(pid, signal.SIGKILL)
                                killed = True
                            last = now
                            ids += delta.token_ids
                        assert ids == expected, "other words after a kill"
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
    """Who computed when, in a forward of many rows and the steps after it."""
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
