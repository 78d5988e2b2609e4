"""Prefill and decode of Qwen3-0.6B's shape with random weights, and of transformers in the same run.

    python benchmarks/decode.py [--rows 1 8 32] [--prompts 128 1024] [--steps 24] [--rounds 3]

Both engines run the same module, so the same weights, in one process. They take turns, and the figures
are medians of steps over all turns: ratios are meaningful on a shared machine, absolute numbers only
within one run. The limit is the time to read the weights and the KV once at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from verbatim import LLM, SamplingParams

WIDTH = dict(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


@dataclass
class Times:
    """Seconds of each prefill and each decode step."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def make_model(dtype: torch.dtype, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model of Qwen3-0.6B's shape, with these changes and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen3ForCausalLM(Qwen3Config(**{**WIDTH, **changes})).eval()
    finally:
        torch.set_default_dtype(before)


def read_bandwidth() -> float:
    """Return the bytes per second of a plain sum over 1 GB, the best of five."""
    data = torch.ones(2**28, dtype=torch.float32)
    data.sum()
    best = min(_timed(data.sum) for _ in range(5))
    return data.nbytes / best


def _timed(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run_verbatim(llm: LLM, prompts: list[list[int]], steps: int, times: Times) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
    requests = [llm.engine.admission.admit(prompt, params) for prompt in prompts]
    for request in requests:
        llm.engine.submit(request)
    prefill = 0.0
    while not requests[-1].sequences[0].output_ids:
        prefill += _timed(llm.engine.step)
    times.prefill.append(prefill)
    while not requests[-1].finished:
        times.decode.append(_timed(llm.engine.step))


def run_transformers(model: Any, prompts: list[list[int]], steps: int, times: Times) -> None:
    class Clock:
        """A logits processor, which is called after the forward of each step."""

        def __init__(self) -> None:
            self.marks: list[float] = [time.perf_counter()]

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.marks.append(time.perf_counter())
            return scores

    from transformers import LogitsProcessorList

    clock = Clock()
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps + 1,
            min_new_tokens=steps + 1,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
        )
    marks = clock.marks
    times.prefill.append(marks[1] - marks[0])
    times.decode += [b - a for a, b in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    model = make_model(dtype)
    weight_bytes = sum(p.nbytes for p in model.parameters())  # a tied weight counts once
    bandwidth = read_bandwidth()
    print(
        f"{options.dtype}, {torch.get_num_threads()} threads, weights {weight_bytes / 1e9:.2f} GB, "
        f"memory reads {bandwidth / 1e9:.0f} GB/s"
    )
    print(
        f"{'prompt':>6} {'rows':>4} | {'prefill tok/s':>13} {'transf.':>8} {'ratio':>6} | "
        f"{'decode tok/s':>12} {'transf.':>8} {'ratio':>6} | {'of limit':>8}"
    )
    with LLM(model, kv_memory="6GB", max_sequences=64) as llm:
        kv_per_token = llm.info()["kv_bytes_per_token"]
        for length in options.prompts:
            for rows in options.rows:
                ours, theirs = Times(), Times()
                noise = torch.Generator().manual_seed(rows)
                prompts = torch.randint(0, 150_000, (rows, length), generator=noise).tolist()
                for _ in range(options.rounds):
                    run_verbatim(llm, prompts, options.steps, ours)
                    run_transformers(model, prompts, options.steps, theirs)
                report(length, rows, ours, theirs, weight_bytes, kv_per_token, bandwidth)


def report(
    length: int,
    rows: int,
    ours: Times,
    theirs: Times,
    weight_bytes: int,
    kv_per_token: int,
    bandwidth: float,
) -> None:
    mine, other = statistics.median(ours.decode), statistics.median(theirs.decode)
    first, other_first = statistics.median(ours.prefill), statistics.median(theirs.prefill)
    limit = (weight_bytes + rows * length * kv_per_token) / bandwidth
    print(
        f"{length:6} {rows:4} | {rows * length / first:13.0f} {rows * length / other_first:8.0f} "
        f"{other_first / first:6.2f} | {rows / mine:12.1f} {rows / other:8.1f} {other / mine:6.2f} | "
        f"{limit / mine:8.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
