"""A decode step over a long context on one GPU, with K and V in bfloat16, 8 and 4 bits.

    python benchmarks/gpu_kv.py [--rows 32] [--context 4096] [--layers 36]

Random weights of Qwen3-8B's shape and random K and V, in a recorded step without the draw. Times are of CUDA
events; bandwidth is what a step reads of weights and of K and V over its time.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from gpu import QWEN3_8B, copy_bandwidth, make_model, weight_bytes
from verbatim.batch import Batch
from verbatim.kv.quantized import resolve_kv_dtype
from verbatim.kv.store import KVStore, bytes_per_token
from verbatim.model.decoder import Decoder
from verbatim.placement.graphs import DecodeGraphs, cuda_recorder

BLOCK_SIZE = 16


def step_ms(model: Any, kv_dtype: str, rows: int, context: int, batch_invariant: bool) -> Any:
    """Return the milliseconds of a decode step, and the bytes that it reads of K and V."""
    decoder = Decoder(model, batch_invariant=batch_invariant)
    device, dtype = torch.device("cuda", 0), resolve_kv_dtype(kv_dtype)
    blocks = -(-context // BLOCK_SIZE)
    store = KVStore(decoder.spec.layers, 1 + rows * blocks, BLOCK_SIZE, dtype, device)
    store.batch_invariant = batch_invariant
    for tensor in store.tensors:  # zeros are elements, scales and lows
        tensor.zero_()
    tables = [[*range(1 + r * blocks, 1 + (r + 1) * blocks)] for r in range(rows)]
    batch = Batch.of([([7 + r], context - 1, table) for r, table in enumerate(tables)], range(rows))
    graphs = DecodeGraphs(decoder, store, cuda_recorder(device))
    with torch.inference_mode():
        assert graphs.run(batch) is not None, graphs.reason
        (recorded,) = graphs._recorded.values()
        times = []
        for _ in range(12):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            recorded.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2], bytes_per_token(
        decoder.spec.layers, dtype
    ) * context * rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=36)
    options = parser.parse_args()
    model, bandwidth = (
        make_model(**QWEN3_8B | dict(num_hidden_layers=options.layers)),
        copy_bandwidth(),
    )
    for deterministic in (False, True):
        for kv_dtype in ("bfloat16", "int8", "int4"):
            taken, kv = step_ms(model, kv_dtype, options.rows, options.context, deterministic)
            moved = kv + weight_bytes(model)
            found = {
                "kv_dtype": kv_dtype,
                "deterministic": deterministic,
                "ms": taken,
                "kv_GB": kv / 1e9,
                "tokens_per_s": options.rows / taken * 1000,
                "share_of_copy_bandwidth": moved / taken * 1000 / bandwidth,
            }
            print(json.dumps(found), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
