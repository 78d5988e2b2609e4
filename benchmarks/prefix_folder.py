"""The time to the first token after a restart, with and without the prompt's prefix in a folder.

    python benchmarks/prefix_folder.py [--tokens 10000] [--layers 8] [--width 512] [--rounds 3]

A model of Qwen3's architecture with random weights, saved to a temporary folder; each engine is opened in a
new process. The files were written a moment before, so they are read from the page cache. Log-probs of all
runs must be bitwise equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys, time
from verbatim import LLM, SamplingParams

model, folder, tokens = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
prompt = [3 + (i * i * 7 + i) % 1000 for i in range(tokens)]
begin = time.perf_counter()
with LLM(model, prefix_folder=folder, max_length=tokens + 64, kv_memory="1500MB") as llm:
    opened = time.perf_counter()
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0))
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, logprobs=2))
    answer = {
        "open_s": opened - begin,
        "first_token_s": result.metrics.first_token_s,
        "per_token_s": result.metrics.per_token_s,
        "cached": result.num_cached_tokens,
        "made": [result.outputs[0].token_ids, result.outputs[0].logprobs],
    }
    done = time.perf_counter()
answer["close_s"] = time.perf_counter() - done
print(json.dumps(answer))
"""


def run(model: Path, folder: Path | None, tokens: int) -> dict[str, Any]:
    """Open the model in a new process, and complete the prompt."""
    command = [sys.executable, "-c", PROGRAM, str(model), str(folder or ""), str(tokens)]
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    import torch
    from decode import make_model

    shape = dict(num_hidden_layers=args.layers, hidden_size=args.width, vocab_size=1024)
    shape |= dict(intermediate_size=3 * args.width, num_attention_heads=args.width // 64)
    shape |= dict(num_key_value_heads=args.width // 128, head_dim=64)
    shape |= dict(max_position_embeddings=2 * args.tokens)
    with tempfile.TemporaryDirectory() as root:
        model, folder = Path(root) / "model", Path(root) / "prefixes"
        make_model(torch.bfloat16, **shape).save_pretrained(model)
        without = [run(model, None, args.tokens) for _ in range(args.rounds)]
        first = run(model, folder, args.tokens)
        sizes = [path.stat().st_size for path in folder.iterdir()]
        again = [run(model, folder, args.tokens) for _ in range(args.rounds)]
    runs = [*without, first, *again]
    assert all(one["made"] == first["made"] for one in runs), "other bits"
    assert not any(one["cached"] for one in [*without, first])
    assert all(one["cached"] > args.tokens - 17 for one in again)
    plain, read = (statistics.median(r["first_token_s"] for r in rs) for rs in (without, again))
    print(f"{args.tokens} tokens, {len(sizes)} files of {sum(sizes) / 1e6:.1f} MB together")
    print(f"first token without the folder: {plain:.2f} s; while it is written: ", end="")
    print(f"{first['first_token_s']:.2f} s, and {first['close_s']:.2f} s to close")
    print(f"first token after a restart: {read:.3f} s, {100 * read / plain:.1f} %; same bits")


if __name__ == "__main__":
    main()
