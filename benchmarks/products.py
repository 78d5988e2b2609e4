"""Matrix products at Qwen3-0.6B's shapes, beside torch's `F.linear`.

    python benchmarks/products.py [--dtype bfloat16] [--rows 1,8,32] [--threads 2] [--quick]

Weights come from memory: each round runs through matrices that together do not fit the last cache.
The two are interleaved, and medians of rounds are compared, so a busy machine shows in both. The
limits are measured too: bytes a second of a plain read, operations a second of the better of the two
on large square matrices.
On a machine shared with others, `--threads 1` counts the thread's own CPU time instead of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels
from verbatim.model.products import linear

SHAPES = {  # name: (N, K)
    "q": (2048, 1024),
    "k, v": (1024, 1024),
    "o": (1024, 2048),
    "gate, up": (3072, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
COLD_BYTES = 128 << 20


def medians(
    calls: dict[str, Callable[[Tensor], object]],
    operands: list[Tensor],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median seconds a call, every round running each function over all operands."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            for operand in operands:
                call(operand)
            times[name].append((clock() - start) / len(operands))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def read_limit(clock: Callable[[], float]) -> float:
    """Bytes a second of a sum over 512 MB."""
    data = torch.ones(64 << 20, dtype=torch.float64)
    return data.nbytes / min(
        medians({"read": torch.sum}, [data], 1, clock)["read"] for _ in range(5)
    )


def compute_limit(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Operations a second of the product of two 2048 x 2048 matrices, torch's or ours, at its best."""
    matrix = torch.randn(2048, 2048).to(dtype)
    calls: dict[str, Callable[[Tensor], object]] = {
        "torch": lambda other: F.linear(matrix, other),
        "ours": lambda other: linear(matrix, other),
    }
    best = min(min(medians(calls, [matrix], 1, clock).values()) for _ in range(5))
    return 2 * 2048**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no head")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    dtype = getattr(torch, args.dtype)
    bytes_limit, compute = read_limit(clock), compute_limit(dtype, clock)
    print(
        f"{args.dtype}, {args.threads} threads, {kernels.instruction_set() or 'torch'}; limits: "
        f"read {bytes_limit / 1e9:.0f} GB/s, best product {compute / 1e9:.0f} GFLOP/s\n"
    )
    print("| product | rows | F.linear us | ours us | ratio | GB/s | GFLOP/s | of the limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (num_out, depth) in SHAPES.items():
        if name == "head" and args.quick:
            continue
        one = torch.randn(num_out, depth).to(dtype)
        weights = [one, *(one.clone() for _ in range(max(1, COLD_BYTES // one.nbytes) - 1))]
        for num_rows in map(int, args.rows.split(",")):
            if num_rows > 64 and name == "head":
                continue  # logits are wanted of few rows
            x = torch.randn(num_rows, depth).to(dtype)
            calls: dict[str, Callable[[Tensor], object]] = {
                "torch": lambda weight, x=x: F.linear(x, weight),
                "ours": lambda weight, x=x: linear(x, weight, backend=args.backend),
            }
            some = weights if num_rows <= 64 else weights[: max(1, len(weights) // 8)]
            with torch.inference_mode():
                seconds = medians(calls, some, 3 if args.quick else 11, clock)
            ours = seconds["ours"]
            bandwidth, flops = one.nbytes / ours, 2 * num_rows * num_out * depth / ours
            share = max(bandwidth / bytes_limit, flops / compute)
            print(
                f"| {name} | {num_rows} | {seconds['torch'] * 1e6:.0f} | {ours * 1e6:.0f} "
                f"| {seconds['torch'] / ours:.2f} | {bandwidth / 1e9:.1f} | {flops / 1e9:.0f} "
                f"| {share:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
