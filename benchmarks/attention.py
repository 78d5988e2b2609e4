"""Attention over blocks against torch's SDPA over contiguous KV, and against a plain read of the KV.

    python benchmarks/attention.py [--dtype bfloat16] [--seconds 4] [--threads N] [--best]

16 query heads, 8 KV heads, 128 wide, blocks of 16 tokens in random order. SDPA runs twice: with
`enable_gqa`, and the fastest way into its fused kernel: at one row the heads of a group passed off
as rows, at many rows KV heads repeated beforehand, which is not timed. All sides take turns in one
process, so that a busy machine slows all of them; the medians are compared, or with `--best` the
least times, which is all that a very busy machine can tell.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from verbatim import kernels
from verbatim.kv.attention import AttentionOptions, paged_attention

HEADS, KV_HEADS, SIZE, BLOCK = 16, 8, 128, 16
OPTIONS = AttentionOptions(scale=SIZE**-0.5)


def measure(sides: dict[str, Callable[[], object]], seconds: float, best: bool) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["read"]) < 5:
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    middle = min if best else statistics.median
    return {name: middle(runs[1:]) for name, runs in times.items()}


def compare(
    sequences: int, context: int, rows: int, dtype: torch.dtype, seconds: float, best: bool
) -> str:
    contiguous = torch.randn(2, sequences, KV_HEADS, context, SIZE).to(dtype)
    tables = torch.randperm(sequences * context // BLOCK).reshape(sequences, -1).int()
    stores = torch.empty(2, tables.numel(), KV_HEADS, BLOCK, SIZE, dtype=dtype)
    in_blocks = contiguous.unflatten(3, (-1, BLOCK)).transpose(2, 3).flatten(1, 2)
    stores[:, tables.flatten().long()] = in_blocks
    del in_blocks
    q = torch.randn(sequences * rows, HEADS, SIZE).to(dtype)
    starts = torch.arange(0, sequences * rows + 1, rows).int()
    lens = torch.full((sequences,), context).int()

    k, v = contiguous
    padded = q.unflatten(0, (sequences, rows)).transpose(1, 2)
    causal = rows > 1
    fused_q, fused_k, fused_v = padded.reshape(sequences, KV_HEADS, -1, SIZE), k, v
    if causal:
        group = HEADS // KV_HEADS
        fused_q, fused_k, fused_v = (
            padded,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
        )
    words = stores.view(torch.float32)
    sides: dict[str, Callable[[], object]] = {
        "verbatim": lambda: paged_attention(q, *stores, starts, lens, tables, OPTIONS),
        "gqa": lambda: F.scaled_dot_product_attention(
            padded, k, v, is_causal=causal, enable_gqa=True
        ),
        "fused": lambda: F.scaled_dot_product_attention(
            fused_q, fused_k, fused_v, is_causal=causal
        ),
        "read": words.sum,
    }
    ours, theirs = sides["verbatim"](), sides["gqa"]()
    torch.testing.assert_close(ours, theirs.transpose(1, 2).flatten(0, 1), rtol=2e-2, atol=2e-2)
    taken = measure(sides, seconds, best)
    ours, gigabytes = taken["verbatim"], stores.nbytes / 1e9
    cells = [f"{sequences} x {context}, {rows} row{'s' * causal}", f"{ours * 1e3:.2f}"]
    cells += [f"{taken[name] * 1e3:.2f} ({taken[name] / ours:.1f}x)" for name in ("gqa", "fused")]
    cells += [f"{gigabytes / ours:.1f}", f"{gigabytes / taken['read']:.1f}"]
    cells += ["" if causal else f"{taken['read'] / ours:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=4.0, help="per line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--best", action="store_true", help="least times instead of medians")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind = "least times" if args.best else "medians"
    print(f"{kernels.instruction_set()}, {args.dtype}, {args.threads} threads; {kind} in ms")
    print("| | verbatim | SDPA gqa | SDPA fused | GB/s | read GB/s | of a read |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in [(1, 1024, 1), (8, 1024, 1), (32, 1024, 1), (1, 1024, 1024)]:
        print(compare(*case, getattr(torch, args.dtype), args.seconds, args.best), flush=True)


if __name__ == "__main__":
    main()
