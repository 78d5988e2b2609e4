"""A decode step over a long context on one GPU, with K and V in bfloat16, 8 and 4 bits.

    python benchmarks/gpu_kv.py [--rows 32] [--context 4096] [--layers 36]

Random weights of Qwen3-8B's shape and random K and V, with `deterministic=True`. The time is that of a
recorded step without sampling, between CUDA events; its share is of a copy's bandwidth, as in gpu.py.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from gpu import QWEN3_8B, copy_bandwidth, make_model, weight_bytes
from verbatim.batch import Batch
from verbatim.kv.store import KVStore, bytes_per_token
from verbatim.model.decoder import Decoder
from verbatim.placement.recorded import RecordedSteps, cuda_recorder
from verbatim.quantization.formats import resolve_kv_dtype

BLOCK_SIZE = 16


def step_ms(decoder: Decoder, kv_dtype: str, rows: int, context: int) -> tuple[float, int]:
    """Return the milliseconds of a decode step, and the bytes that it reads of K and V."""
    device, dtype = torch.device("cuda", 0), resolve_kv_dtype(kv_dtype)
    blocks = -(-context // BLOCK_SIZE)
    store = KVStore(decoder.spec.layers, 1 + rows * blocks, BLOCK_SIZE, dtype, device)
    for tensor in store.tensors:  # finite, as elements and as scales
        tensor.view(torch.uint8).random_(0, 64)
    tables = [[*range(1 + r * blocks, 1 + (r + 1) * blocks)] for r in range(rows)]
    batch = Batch.of([([7 + r], context - 1, table) for r, table in enumerate(tables)], range(rows))
    graphs = RecordedSteps(cuda_recorder(device))
    times = []
    with torch.inference_mode():
        for _ in range(13):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            assert graphs.run(decoder, batch, store) is not None, graphs.reason
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times[1:]), bytes_per_token(
        decoder.spec.layers, dtype
    ) * context * rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=36)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    model = make_model(**QWEN3_8B | dict(num_hidden_layers=options.layers))
    decoder = Decoder(model)
    for kv_dtype in ("bfloat16", "int8", "int4"):
        ms, kv_bytes = step_ms(decoder, kv_dtype, options.rows, options.context)
        row = {
            "kv_dtype": kv_dtype,
            "ms": ms,
            "tokens_per_s": options.rows / ms * 1000,
            "kv_GB": kv_bytes / 1e9,
            "share_of_copy_bandwidth": (kv_bytes + weight_bytes(model)) / ms * 1000 / bandwidth,
        }
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
