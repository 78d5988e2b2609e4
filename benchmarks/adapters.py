"""Decoding with a LoRA adapter for each row, compared with the same rows without, in the same run.

    python benchmarks/adapters.py [--rows 8] [--rank 16] [--steps 24] [--rounds 7] [--layers 28]
        [--vocab 151936] [--attention]

Qwen3-0.6B's shape with random weights in bfloat16, and adapters for all linear layers of attention and MLP
(`--attention`: only those of attention). The sides use one engine and take turns, and each round gives a
ratio, which is meaningful on a shared machine. The time is that of decode steps; prompts have 8 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode import make_model
from safetensors.torch import save_file

from verbatim import LLM, SamplingParams


def save_adapter(folder: Path, module: Any, rank: int, attention: bool) -> Path:
    """Write an adapter of random matrices."""
    tensors = {}
    for name, layer in module.named_modules():
        is_target = "self_attn." in name or ("mlp." in name and not attention)
        if is_target and isinstance(layer, torch.nn.Linear):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, layer.in_features) / 32
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(layer.out_features, rank) / 32
    folder.mkdir()
    config = dict(peft_type="LORA", r=rank, lora_alpha=rank)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def step_times(llm: LLM, names: list[str | None], steps: int) -> list[float]:
    """Return the seconds of each decode step of a request per name."""
    ids = [[7 + 3 * row + i for i in range(8)] for row in range(len(names))]
    params = [SamplingParams(max_tokens=steps, ignore_eos=True, seed=1, adapter=n) for n in names]
    requests = [llm.engine.admission.admit(*pair) for pair in zip(ids, params, strict=True)]
    for request in requests:
        llm.engine.submit(request)
    llm.engine.step()  # the prompts
    times = []
    while not all(request.finished for request in requests):
        begin = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--attention", action="store_true")
    options = parser.parse_args()
    module = make_model(torch.bfloat16, num_hidden_layers=options.layers, vocab_size=options.vocab)
    names = [f"adapter {row}" for row in range(options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            name: save_adapter(Path(folder) / name, module, options.rank, options.attention)
            for name in names
        }
        llm = LLM(module, adapters=adapters, prefix_cache=False, max_length=256, kv_memory="256MB")
    sides: dict[str, list[str | None]] = {
        "no adapters": [None] * options.rows,
        f"{options.rows} adapters": list(names),
        "one adapter": [names[0]] * options.rows,
    }
    medians: dict[str, list[float]] = {side: [] for side in sides}
    with llm:
        for round_ in range(options.rounds + 1):
            for side, used in sides.items():
                median = statistics.median(step_times(llm, used, options.steps))
                if round_:  # the first one warms up
                    medians[side].append(median)
    plain = medians["no adapters"]
    print(f"rank {options.rank}, {options.layers} layers, {torch.get_num_threads()} threads")
    for side, times in medians.items():
        ratios = [a / b for a, b in zip(plain, times, strict=True)]
        speed = options.rows / statistics.median(times)
        print(
            f"{side:>12}: {1e3 * statistics.median(times):7.2f} ms a step, {speed:7.1f} tokens/s, "
            f"{statistics.median(ratios):.3f} of the speed without ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
