"""Decode on one GPU: an 8B shape at one row, a 0.6B shape at many, and what `deterministic=True` costs.

    python benchmarks/gpu.py [--parts one quantized many prefill] [--json benchmarks/results/gpu.json]

Random weights in bfloat16, created on the GPU. The limit of a step is to read the weights and the KV once, at
the bandwidth that a copy of 4 GB reaches in the same run (reads and writes). Times are of whole steps, from
one token to the next, including Python and sampling.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import decode
import torch
import triton

import verbatim
from verbatim import LLM, SamplingParams
from verbatim.model.quantizable import choose_packings, owners
from verbatim.model.quantized import hold_quantized, weights_of
from verbatim.quantization.formats import resolve_quantization
from verbatim.quantization.matrix import pack

QWEN3_8B = dict(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    tie_word_embeddings=False,
)


def make_model(**changes: Any) -> Any:
    """Return a model on the GPU, of Qwen3-0.6B's shape with these changes."""
    with torch.device("cuda"):
        return decode.make_model(torch.bfloat16, **changes)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a copy of 4 GB; the best of ten."""
    source = torch.ones(2**31, dtype=torch.bfloat16, device="cuda")
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1000)
    return 2 * source.nbytes / best


def open_engine(model: Any, deterministic: bool) -> LLM:
    """Open a model as if it came from a folder, so that its steps are recorded as CUDA graphs."""

    def loaded(open_: Any, *_: Any) -> Any:
        return replace(open_(None), live=False)

    with mock.patch("verbatim.api.llm.open_weights", loaded):
        return LLM(
            model,
            device="cuda",
            deterministic=deterministic,
            max_batch_tokens=8192,
            kv_memory="40%",
            prefix_cache=False,
        )


def prompts(rows: int, length: int) -> list[list[int]]:
    return [[(i * 7919 + r * 104729) % 150000 + 10 for i in range(length)] for r in range(rows)]


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads, without an untied embedding."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    spared = 0 if embedding is head else embedding.nbytes
    return sum(p.nbytes for p in model.parameters()) - spared


def step_times(llm: LLM, length: int, steps: int) -> list[float]:
    """Return the seconds from token to token of a greedy stream, without the first third."""
    params, times = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True), []
    before = None
    for _ in llm.stream(prompts(1, length)[0], params):
        now = time.perf_counter()
        if before is not None:
            times.append(now - before)
        before = now
    return times[steps // 3 :]


def one_row(model: Any, steps: int, bandwidth: float) -> dict[str, Any]:
    """Measure decode of one row of the 8B shape."""
    results: dict[str, Any] = {}
    for deterministic in (False, True):
        with open_engine(model, deterministic) as llm:
            for length in (128, 1024):
                step_times(llm, length, 4)
                seconds = statistics.median(step_times(llm, length, steps))
                per_token, graphs = llm.info()["kv_bytes_per_token"], llm.info()["recorded_steps"]
                moved = weight_bytes(model) + per_token * (length + steps * 2 // 3)
                results[f"prompt {length}, deterministic={deterministic}"] = {
                    "tokens_per_s": 1 / seconds,
                    "bytes_per_step": moved,
                    "share_of_copy_bandwidth": moved / seconds / bandwidth,
                    "graphs": graphs,
                }
    return results


def quantize(model: Any, name: str) -> None:
    """Quantize a model in place, on the GPU."""
    kind = resolve_quantization(name)
    assert kind is not None
    packings = choose_packings(model, kind)
    packed = {weight: (pack(weight, packing), packing) for weight, packing in packings.items()}
    uses = [(layer, n, *packed[p]) for _, layer, n, p in owners(model) if p in packed]
    for use in uses:
        hold_quantized(*use)


def quantized(steps: int, bandwidth: float, length: int = 128) -> dict[str, Any]:
    """Measure deterministic decode of one row of the 8B shape with quantized weights."""
    results: dict[str, Any] = {}
    for name in ("int8", "int4"):
        model = make_model(**QWEN3_8B)
        embedding = model.get_input_embeddings()
        quantize(model, name)
        with open_engine(model, deterministic=True) as llm:
            step_times(llm, length, 8)
            seconds = statistics.median(step_times(llm, length, steps))
            per_token, graphs = llm.info()["kv_bytes_per_token"], llm.info()["recorded_steps"]
        moved = sum(x.nbytes for x in weights_of(model)) - embedding.matrix.data.nbytes
        moved += per_token * (length + steps * 2 // 3)
        results[name] = {
            "tokens_per_s": 1 / seconds,
            "bytes_per_step": moved,
            "share_of_copy_bandwidth": moved / seconds / bandwidth,
            "graphs": graphs,
        }
    return results


def all_of(llm: LLM, ids: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    results = llm.generate(ids, params)
    return time.perf_counter() - start, [r.outputs[0].token_ids for r in results]


def many_rows(rows: int, tokens: int) -> dict[str, Any]:
    """Measure the new tokens per second of `rows` requests at once, and of continuous batching."""
    model, ids = make_model(), prompts(rows, 128)
    results: dict[str, Any] = {"rows": rows, "prompt": 128, "new tokens": tokens}
    for deterministic in (False, True):
        with open_engine(model, deterministic) as llm:
            all_of(llm, ids, 3)  # records a step of this size
            seconds, outputs = all_of(llm, ids, tokens)
            entry: dict[str, Any] = {"tokens_per_s": rows * tokens / seconds}
            entry["graphs"] = llm.info()["recorded_steps"]
            if deterministic:
                alone = all_of(llm, ids[rows // 2 : rows // 2 + 1], tokens)[1]
                entry["same tokens alone"] = alone == outputs[rows // 2 : rows // 2 + 1]
        results[f"verbatim, deterministic={deterministic}"] = entry
    try:
        results["transformers, continuous batching"] = continuous_batching(model, ids, tokens)
    except Exception as error:  # its requirements change with versions
        results["transformers, continuous batching"] = f"{type(error).__name__}: {error}"
    return results


def continuous_batching(model: Any, ids: list[list[int]], tokens: int) -> dict[str, Any]:
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
    )
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = model.generate_batch(inputs=ids, generation_config=config, progress_bar=False)
        times.append(time.perf_counter() - start)
    num_tokens = sum(len(o.generated_tokens) for o in outputs.values())
    return {"tokens_per_s": num_tokens / times[-1], "attention": model.config._attn_implementation}


def prefill(model: Any) -> dict[str, Any]:
    """Measure the tokens per second of a prompt of 4,000 tokens of the 8B shape."""
    results = {}
    for deterministic in (False, True):
        with open_engine(model, deterministic) as llm:
            times = [all_of(llm, prompts(1, 4000), 1)[0] for _ in range(3)]
        results[f"deterministic={deterministic}"] = 4000 / min(times[1:])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["one", "prefill", "many", "quantized"])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"no GPU: torch {torch.__version__} sees none")
    import transformers

    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {m.__name__: m.__version__ for m in (torch, triton, transformers, verbatim)},
        "copy_bandwidth": bandwidth,
    }
    large = functools.cache(lambda: make_model(**QWEN3_8B))  # one for two parts
    parts = {
        "one": lambda: one_row(large(), options.steps, bandwidth),
        "quantized": lambda: quantized(options.steps, bandwidth),
        "many": lambda: many_rows(options.rows, options.tokens),
        "prefill": lambda: prefill(large()),
    }
    for name in options.parts:
        start = time.perf_counter()
        report[name] = parts[name]()
        report[name]["seconds"] = time.perf_counter() - start
        gc.collect()
        torch.cuda.empty_cache()
        print(name, json.dumps(report[name], indent=1), flush=True)
        if options.json is not None:  # after each part: the next may fail
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in parts}, indent=1))


if __name__ == "__main__":
    main()
