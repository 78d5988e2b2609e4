"""A model that does not fit on a GPU: step time, compared with its limit and accelerate's `device_map`.

    python benchmarks/offload_gpu.py --layers 8 --share 0.4

Random weights in the shape of an 8B model are written to /dev/shm. `--share` of their bytes is the budget of
the GPU, including K and V and buffers; the other weights are in RAM. The limit of a step is the larger of the
time to copy these over the bus, at the measured rate, and the step time with all weights on the GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verbatim import LLM, Offload, SamplingParams
from verbatim.placement.offload.machine import _copying

_GPU = torch.device("cuda", 0)


def write_model(folder: Path, layers: int) -> int:
    """Write a model of `layers` layers; return the bytes of its weights."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with _GPU:
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    nbytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return nbytes


def step_s(llm: LLM, sequences: int, tokens: int) -> tuple[float, list[Any]]:
    """Return the seconds of a decode step, and the ids."""
    prompts = [[1 + (31 * i + j) % 30_000 for j in range(64)] for i in range(sequences)]

    def run(count: int) -> tuple[float, list[Any]]:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        results = llm.generate(prompts, params)
        return time.perf_counter() - begin, [r.outputs[0].token_ids for r in results]

    run(2)
    (short, _), (long, ids) = run(4), run(4 + tokens)
    return (long - short) / tokens, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--modes", default="True False", help="of deterministic")
    parser.add_argument("--peer", action="store_true", help="measure accelerate, too")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), **vars(args)}
    try:
        nbytes = results["weight_bytes"] = write_model(folder, args.layers)
        gpu, common = int(args.share * nbytes), dict(device="cuda", max_length=256)
        bus = results["bus_bytes_per_s"] = _copying(_GPU)
        for deterministic in args.modes.split():
            mode: dict[str, Any] = {"deterministic": deterministic == "True", **common}
            with LLM(str(folder), kv_memory="1GB", **mode) as llm:
                resident_s, expected = step_s(llm, args.sequences, args.tokens)
            offload = Offload(gpu=gpu, cpu="16GB", workload=(64, 32))
            begin = time.perf_counter()
            with LLM(str(folder), placement=offload, **mode) as llm:
                opened_s = time.perf_counter() - begin
                seconds, ids = step_s(llm, args.sequences, args.tokens)
                runner: Any = llm.engine.runner
                copied = sum(use.nbytes for use in runner.weights._copied.values())
                info = llm.info()
            limit = max(copied / bus, resident_s)
            results[f"deterministic={deterministic}"] = {
                "plan": info["plan_summary"],
                "same tokens": ids == expected,
                "opened_s": opened_s,
                "step_s": seconds,
                "resident_step_s": resident_s,
                "copied_bytes_per_step": copied,
                "limit_s": limit,
                "of limit": limit / seconds,
            }
        if args.peer:
            memory = {0: gpu, "cpu": 16 << 30}
            theirs = AutoModelForCausalLM.from_pretrained(
                folder, device_map="auto", max_memory=memory, dtype=torch.bfloat16
            )
            ids = torch.ones(args.sequences, 64, dtype=torch.int64, device=_GPU)
            times = []
            for count in (2, 8):
                begin = time.perf_counter()
                theirs.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
                times.append(time.perf_counter() - begin)
            results["accelerate_step_s"] = (times[1] - times[0]) / 6
        print(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
