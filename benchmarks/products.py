"""Matrix products at Qwen3-0.6B's shapes, compared with torch's.

    python benchmarks/products.py [--dtype bfloat16] [--format bf16,int8,int4,w8a8,w4a8] [--rows 1,8,32]
                                  [--threads 2] [--quick]

torch's are `F.linear`, `torch._weight_int8pack_mm` (a scale for each column), and for int4
`torch.ops.aten._weight_int4pack_mm_for_cpu` (groups of 64, as ours). Only w8a8 and w4a8 quantize activations.

Weights come from memory: each round uses matrices that together exceed the last-level cache. The two sides
alternate, and medians of rounds are compared, so a busy machine slows both. The limits are measured, too:
bytes per second of a plain read, and operations per second of the faster side on large square matrices.
On a machine shared with others, `--threads 1` counts the thread's own CPU time instead of the clock.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from verbatim import kernels
from verbatim.model.products import linear
from verbatim.quantization.formats import resolve_quantization
from verbatim.quantization.matrix import QuantizedMatrix, pack

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


Weight = TypeVar("Weight")
Calls = dict[str, Callable[[Tensor, Any], object]]


def medians(
    calls: dict[str, Callable[[Weight], object]],
    operands: list[Weight],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Return the median seconds per call; every round runs each function over all operands."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            for operand in operands:
                call(operand)
            times[name].append((clock() - start) / len(operands))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def read_limit(clock: Callable[[], float]) -> float:
    """Return the bytes per second of a sum over 512 MB."""
    data = torch.ones(64 << 20, dtype=torch.float64)
    return data.nbytes / min(
        medians({"read": torch.sum}, [data], 1, clock)["read"] for _ in range(5)
    )


def compute_limit(dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Return the best operations per second of a 2048 x 2048 matrix product, torch's or ours."""
    matrix = torch.randn(2048, 2048).to(dtype)
    calls: dict[str, Callable[[Tensor], object]] = {
        "torch": lambda other: F.linear(matrix, other),
        "ours": lambda other: linear(matrix, other),
    }
    best = min(min(medians(calls, [matrix], 1, clock).values()) for _ in range(5))
    return 2 * 2048**3 / best


@dataclass
class Operand:
    """One matrix, in our layout and in torch's."""

    ours: Tensor
    theirs: tuple[Tensor, ...]


def operands(
    form: str, num_out: int, depth: int, dtype: torch.dtype
) -> tuple[list[Operand], Calls]:
    """Return matrices that together exceed the caches, and the products of x with one of them."""
    weight = torch.randn(num_out, depth).to(dtype)
    if form == "bf16":
        one = Operand(weight, (weight,))
        calls: Calls = {
            "torch": lambda x, w: F.linear(x, *w.theirs),
            "ours": lambda x, w: linear(x, w.ours),
        }
    else:
        kind = resolve_quantization(form)
        assert kind is not None
        packing = kind.packing((num_out, depth), dtype)
        codes = torch.randint(-128, 128, (num_out, depth), dtype=torch.int8)
        if kind.bits == 8:
            theirs: tuple[Tensor, ...] = (codes, torch.ones(num_out, dtype=dtype))
        else:
            nibbles = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes & 15).int(), 1)
            theirs = (nibbles, torch.ones(depth // 64, num_out, 2, dtype=dtype))
        one = Operand(pack(weight, packing), theirs)
        int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
        calls = {
            "torch": lambda x, w: (
                torch._weight_int8pack_mm(x, *w.theirs)
                if kind.bits == 8
                else int4(x, w.theirs[0], 64, w.theirs[1])
            ),
            "ours": lambda x, w: linear(x, QuantizedMatrix(w.ours, packing)),
        }
    count = max(1, COLD_BYTES // one.ours.nbytes)
    copies = [Operand(one.ours.clone(), tuple(t.clone() for t in one.theirs)) for _ in range(count)]
    return copies, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--format", default="bf16", help="of bf16, int8, int4, w8a8, w4a8")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
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
    print(
        "| product | weights | rows | torch us | ours us | ratio | GB/s | GFLOP/s | of the limit |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, (num_out, depth)), form in itertools.product(SHAPES.items(), args.format.split(",")):
        if name == "head" and args.quick:
            continue
        weights, products = operands(form, num_out, depth, dtype)
        nbytes = weights[0].ours.nbytes
        for num_rows in map(int, args.rows.split(",")):
            if num_rows > 64 and name == "head":
                continue  # logits are computed for few rows
            x = torch.randn(num_rows, depth).to(dtype)
            calls = {key: functools.partial(call, x) for key, call in products.items()}
            used = weights if num_rows <= 64 else weights[: max(1, len(weights) // 8)]
            with torch.inference_mode():
                seconds = medians(calls, used, 3 if args.quick else 11, clock)
            ours = seconds["ours"]
            bandwidth, flops = nbytes / ours, 2 * num_rows * num_out * depth / ours
            share = max(bandwidth / bytes_limit, flops / compute)
            print(
                f"| {name} | {form} | {num_rows} | {seconds['torch'] * 1e6:.0f} | {ours * 1e6:.0f} "
                f"| {seconds['torch'] / ours:.2f} | {bandwidth / 1e9:.1f} | {flops / 1e9:.0f} "
                f"| {share:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
