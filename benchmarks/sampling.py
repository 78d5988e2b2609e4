"""The time of a sampling step: the kernel, the torch reference, transformers' warpers + multinomial.

    python benchmarks/sampling.py [--rows 1 8 32] [--vocab 151936] [--repeats 15] [--threads 2]

The three take turns within every repeat, so that other work on the machine affects all of them. The
figures are medians over the repeats, with the fastest repeat of the kernel beside its median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from verbatim import kernels
from verbatim.batch import SamplePlan, SampleRow
from verbatim.params import SamplingParams
from verbatim.sampling.sampler import sample_rows

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1.0": {},
    "temperature 0.8": {"temperature": 0.8},
    "0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def transformers_step(logits: Tensor, params: dict[str, Any]) -> Tensor:
    if params.get("temperature") == 0:
        return logits.argmax(dim=-1)
    scores = logits
    if "temperature" in params:
        scores = hf.TemperatureLogitsWarper(params["temperature"])(None, scores)
    if "top_k" in params:
        scores = hf.TopKLogitsWarper(params["top_k"])(None, scores)
    if "top_p" in params:
        scores = hf.TopPLogitsWarper(params["top_p"])(None, scores)
    if "min_p" in params:
        scores = hf.MinPLogitsWarper(params["min_p"])(None, scores)
    return torch.multinomial(scores.softmax(dim=-1), 1)


def measure(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step in each repeat; a slow step runs only in the first three."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            durations = times[name]
            if len(durations) >= 3 and statistics.median(durations) > 200:
                continue
            start = time.perf_counter()
            step()
            durations.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    # Like a model's logits: a few hundred likely ids and many unlikely ones.
    logits = torch.randn(max(args.rows), args.vocab) * 2
    logits += 8 * (torch.rand_like(logits) < 2e-3)
    logits = logits.to(getattr(torch, args.dtype))
    print(
        f"{args.vocab} ids, {args.dtype}, {args.threads} threads, kernels: {kernels.instruction_set()}"
    )
    print(f"{'ms a step':28}{'rows':>5}{'kernel':>10}{'(best)':>10}{'reference':>11}{'hf':>10}")
    for name, params in CASES.items():
        for num_rows in args.rows:
            batch = logits[:num_rows]
            plan = SamplePlan(
                [SampleRow(SamplingParams(**params), 7, b, 100) for b in range(num_rows)]
            )

            def step(batch: Tensor = batch, plan: SamplePlan = plan) -> Any:
                return sample_rows(batch, plan)

            def reference(step: Callable[[], Any] = step) -> Any:
                with kernels.using("none"):
                    return step()

            steps: dict[str, Callable[[], Any]] = {
                "reference": reference,
                "hf": lambda batch=batch, params=params: transformers_step(batch, params),
            }
            if kernels.library() is not None:
                steps["kernel"] = step
            times = measure(steps, args.repeats)
            kernel = times.get("kernel", [float("nan")])
            row = f"{name:28}{num_rows:5}{statistics.median(kernel):10.2f}{min(kernel):10.2f}"
            print(
                row + f"{statistics.median(times['reference']):11.1f}"
                f"{statistics.median(times['hf']):10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
