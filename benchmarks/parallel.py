"""Decode of a model on one process and on two ranks: seconds, and what each rank holds.

    python benchmarks/parallel.py [--ranks 2] [--tokens 32] [--rows 8]

A llama of random weights is saved, opened in one process and on ranks, one after the other, each with the
processors that there are. The words must be equal, and the program fails where they are not. The ranks of
one machine share its memory bandwidth and its processors, so what may be gained is what one process leaves.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

from verbatim import LLM, SamplingParams, TensorParallel

WIDTH = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=2048,
)


def run(folder: str, placement: Any, rows: int, tokens: int) -> tuple[float, float, Any, Any]:
    """Seconds of a prefill and of a decode step, the words, and what `info` says."""
    prompts = [[7 + row, *range(10, 265)] for row in range(rows)]
    begin = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    more = SamplingParams(temperature=0.0, max_tokens=1 + tokens, ignore_eos=True)
    with LLM(folder, placement=placement, prefix_cache=False, kv_memory="512MB") as llm:
        llm.generate(prompts[:1], more)
        clock = time.perf_counter()
        llm.generate(prompts, begin)
        prefill = time.perf_counter() - clock
        results = llm.generate(prompts, more)
        step = (time.perf_counter() - clock - 2 * prefill) / tokens
        return prefill, step, [r.outputs[0].token_ids for r in results], llm.info()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; {args.rows} prompts of 256 tokens")
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**WIDTH)).bfloat16().save_pretrained(folder)
        words = []
        for placement in (None, TensorParallel(args.ranks)):
            prefill, step, made, info = run(folder, placement, args.rows, args.tokens)
            words.append(made)
            held = info.get("rank_weight_bytes", [info["weight_bytes"]])
            print(
                f"{info['placement']:16} prefill {prefill:6.2f} s, decode step {1e3 * step:6.1f} ms, "
                f"weights {', '.join(f'{x / 1e6:.0f} MB' for x in held)}"
            )
    assert words[0] == words[1], "the words differ"
    print("the words are the same")


if __name__ == "__main__":
    main()
