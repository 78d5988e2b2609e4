"""The memory of one long context, compared with the figures of `LLM.info()`.

    python -m benchmarks.long_context [--shape qwen3.5] [--tokens 32000]

A model of random weights is opened with memory for the K and V of that many tokens and three states (the one
that is read, the one that is written, and zeros), and a prompt is computed. Any further growth of the process
is due to the activations of a step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.peers.weights import SHAPES, make_random
from verbatim import LLM, SamplingParams
from verbatim.placement.options import EngineOptions

BLOCK = 32
NUM_STATES = 3


def resident() -> int:
    """Return the resident bytes of this process."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmRSS:") + 1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.5")
    parser.add_argument("--tokens", type=int, default=32_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        module = make_random(**SHAPES[options.shape])
        module.config.max_position_embeddings = options.tokens
        module.save_pretrained(folder)
        del module
        with LLM(folder, max_length=64, kv_memory="300MB") as llm:
            info = llm.info()
        EngineOptions.num_states = lambda self, state_bytes: NUM_STATES  # type: ignore[method-assign]
        needed = (-(-options.tokens // BLOCK) + 1) * BLOCK * info["kv_bytes_per_token"]
        needed += NUM_STATES * info["state_bytes"]
        with LLM(folder, kv_memory=needed, block_size=BLOCK) as llm:
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            llm.generate([[5, 6, 7] * 40], params)
            before, begin = resident(), time.perf_counter()
            prompt = [3 + (i * i * 7 + i) % 1000 for i in range(options.tokens - 2)]
            llm.generate([prompt], params)
            seconds = time.perf_counter() - begin
            print(f"{options.shape}, {options.tokens} tokens: {seconds:.0f} s")
            print(
                f"  a token {info['kv_bytes_per_token']} bytes, a state {info['state_bytes']} bytes"
            )
            print(f"  by these numbers {needed}, held {llm.info()['kv_bytes']} bytes")
            print(f"  the process grew by {resident() - before} bytes")


if __name__ == "__main__":
    main()
