"""Paged attention, compared with a plain read of the KV, torch's SDPA and a square matrix product.

    python benchmarks/attention.py [--kv bfloat16 int8 int4] [--rows 1 8 32] [--contexts 128 1024 8192]
        [--prompts 512 2048 8192] [--kv-heads 8] [--seconds 0.6] [--threads N] [--best]

16 query heads, 8 KV heads, 128 wide, blocks of 16 tokens in random order, bf16 queries (float32 with
`--kv float32`). Decoding, and the read of the same bytes, run over as many layers as exceed the caches.
SDPA has contiguous KV, with the heads of a group as rows, which is its fastest form. A prompt's GFLOP/s
count the products below the diagonal; the matrix is 2048 x 2048 in bf16. All sides take turns in one
process, so that a busy machine slows all of them; the medians are compared, or with `--best` the
minimum times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verbatim import kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.attention import paged_attention
from verbatim.quantization.formats import KV_PACKINGS
from verbatim.quantization.rows import pack_rows

HEADS, SIZE, BLOCK = 16, 128, 16
OPTIONS = AttentionOptions(scale=SIZE**-0.5)
CACHES = 128 << 20  # bytes of KV that exceed the caches


def measure(sides: dict[str, Callable[[], object]], seconds: float, best: bool) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["ours"]) < 4:
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    summary = min if best else statistics.median
    return {name: summary(runs[1:]) for name, runs in times.items()}


class Layers:
    """`count` layers of stores for `sequences` x `context` tokens, and one step's batch."""

    def __init__(self, kv: str, kv_heads: int, sequences: int, context: int, rows: int) -> None:
        self.packing = KV_PACKINGS.get(kv)
        dtype = torch.float32 if kv == "float32" else torch.bfloat16
        blocks = sequences * context // BLOCK
        sample = torch.randn(64, kv_heads, BLOCK, SIZE).to(dtype)
        sample = sample if self.packing is None else pack_rows(sample, self.packing)
        layer = 2 * blocks * sample[0].nbytes
        self.count = -(-CACHES // layer)
        shape = (self.count, 2, blocks, *sample.shape[1:])
        self.stores = torch.empty(shape, dtype=sample.dtype)
        flat = self.stores.view(-1, *sample.shape[1:])
        for first in range(0, len(flat), len(sample)):
            flat[first : first + len(sample)] = sample[: len(flat) - first]
        self.nbytes = layer
        self.q = torch.randn(sequences * rows, HEADS, SIZE).to(dtype)
        rows_of = AttentionBatch(
            torch.arange(0, sequences * rows + 1, rows).int(),
            torch.full((sequences,), context).int(),
            torch.randperm(blocks).reshape(sequences, -1).int(),
        )
        self.batch = (rows_of, OPTIONS)

    def attend(self, layer: int = 0) -> Tensor:
        k_store, v_store = self.stores[layer]
        return paged_attention(
            self.q, k_store, v_store, *self.batch, value_size=SIZE, packing=self.packing
        )


def decode(kv: str, kv_heads: int, sequences: int, context: int, seconds: float, best: bool) -> str:
    layers = Layers(kv, kv_heads, sequences, context, 1)
    flat_kv = layers.stores.view(layers.count, -1).view(torch.float32)

    def sdpa() -> None:
        shape = (2, sequences, kv_heads, context, SIZE)
        q = layers.q.reshape(sequences, kv_heads, -1, SIZE)
        for store in layers.stores:  # in any order: only the time counts
            F.scaled_dot_product_attention(q, *store.view(shape))

    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: [layers.attend(i) for i in range(layers.count)],
        "read": lambda: [layer.sum() for layer in flat_kv],
    }
    if layers.packing is None:
        sides["sdpa"] = sdpa
    times = {n: t / layers.count for n, t in measure(sides, seconds, best).items()}
    ours, gigabytes = times["ours"], layers.nbytes / 1e9
    cells = [f"{kv} KV, {sequences} x {context}", f"{ours * 1e3:.3f}"]
    cells += [f"{times['sdpa'] / ours:.1f}x" if "sdpa" in times else ""]
    cells += [f"{gigabytes / ours:.1f}", f"{gigabytes / times['read']:.1f}"]
    return f"| {' | '.join(cells)} | {times['read'] / ours:.0%} |"


def prefill(kv: str, kv_heads: int, tokens: int, seconds: float, best: bool) -> str:
    layers = Layers(kv, kv_heads, 1, tokens, tokens)
    square = torch.randn(2048, 2048).bfloat16()
    q, k = (torch.randn(1, HEADS, tokens, SIZE, dtype=layers.q.dtype) for _ in range(2))
    sides = {
        "ours": layers.attend,
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        "square": lambda: F.linear(square, square),
    }
    times = measure(sides, seconds, best)
    ours = 2 * tokens * (tokens + 1) * HEADS * SIZE / times["ours"] / 1e9
    rate = 2 * 2048**3 / times["square"] / 1e9
    cells = [f"{kv} KV, prompt of {tokens}", f"{times['ours'] * 1e3:.2f}"]
    cells += [f"{times['sdpa'] / times['ours']:.1f}x", f"{ours:.0f}", f"{rate:.0f}"]
    return f"| {' | '.join(cells)} | {ours / rate:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["bfloat16", "int8", "int4", "float32"]
    parser.add_argument("--kv", nargs="+", default=kinds[:3], choices=kinds)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32], help="sequences")
    parser.add_argument("--contexts", nargs="*", type=int, default=[128, 1024, 8192])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.6, help="per line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--best", action="store_true", help="least times instead of medians")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    how = (args.seconds, args.best)
    kind = "least times" if args.best else "medians"
    print(f"{kernels.instruction_set()}, {args.threads} threads; {kind} in ms")
    if args.rows and args.contexts:
        print("| decoding | verbatim | SDPA | GB/s | read GB/s | of a read |")
        print("| --- | --- | --- | --- | --- | --- |")
    for kv in args.kv:
        for rows in args.rows:
            for context in args.contexts:
                print(decode(kv, args.kv_heads, rows, context, *how), flush=True)
    if args.prompts:
        print("| prefill | verbatim | SDPA | GFLOP/s | matrix GFLOP/s | of it |")
        print("| --- | --- | --- | --- | --- | --- |")
    for kv in args.kv:
        for tokens in args.prompts:
            print(prefill(kv, args.kv_heads, tokens, *how), flush=True)


if __name__ == "__main__":
    main()
