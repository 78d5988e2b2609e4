"""Sparse attention with an indexer, compared with dense attention, for one layer.

    python benchmarks/indexer.py [--contexts 4096 16384 65536] [--rows 1 4] [--rounds 7]

An indexer like DeepSeek V3.2's, 64 heads of 128, chooses 2,048 keys; attention has 16 heads, with keys of 192
and values of 128. Each row is a sequence, in bfloat16, with blocks of 16 tokens in random order. All sides
take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions, IndexOptions
from verbatim.kv.store import KVStore, LayerShape

HEADS, KEY, VALUE = 16, 192, 128
INDEX_HEADS, INDEX, TOP_K = 64, 128, 2048
BLOCK = 16


def measure(context: int, rows: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each side."""
    shapes = [LayerShape(HEADS, KEY, VALUE), LayerShape(1, INDEX, 0)]
    blocks = rows * context // BLOCK
    store = KVStore(shapes, 1 + blocks, BLOCK, torch.bfloat16, torch.device("cpu"))
    for tensor in store.tensors:
        tensor.normal_()
    tables = (1 + torch.randperm(blocks)).view(rows, -1).int()
    lens = torch.full((rows,), context, dtype=torch.int32)
    batch = AttentionBatch(torch.arange(rows + 1, dtype=torch.int32), lens, tables)
    q = torch.randn(rows, HEADS, KEY).bfloat16()
    index_q = torch.randn(rows, INDEX_HEADS, INDEX).bfloat16()
    index = IndexOptions(TOP_K, torch.randn(rows, INDEX_HEADS))
    dense = AttentionOptions(KEY**-0.5)
    chosen = AttentionOptions(KEY**-0.5, chosen=store.attend(1, index_q, batch, index))
    sides = {
        "choose": lambda: store.attend(1, index_q, batch, index),
        "attend": lambda: store.attend(0, q, batch, chosen),
        "dense": lambda: store.attend(0, q, batch, dense),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 + rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| context | rows | choose, ms | attend to them, ms | dense attention, ms |")
    print("| --- | --- | --- | --- | --- |")
    with torch.inference_mode():
        for context in args.contexts:
            for rows in args.rows:
                cells = [f"{value:.1f}" for value in measure(context, rows, args.rounds).values()]
                print(f"| {context} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
