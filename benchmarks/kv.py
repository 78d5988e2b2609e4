"""The cost of quantized K and V in log-prob, and the bytes they save, on the packaged model or any other.

    python benchmarks/kv.py [--model FOLDER] [--dtype float32] [--tokens 250]
    python benchmarks/kv.py --formats    # other formats of the same size, on rows of a model and random ones
    python benchmarks/kv.py --speed      # one attention call, 16 query and 8 KV heads, 128 wide

Stories are drawn once with unquantized KV and then scored with every kind of KV. The error is the
difference of a token's log-prob. "Top id" is the share of positions with the same likeliest id, "greedy"
the number of tokens of a greedy continuation before the first that differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from verbatim import LLM, SamplingParams, kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.attention import paged_attention
from verbatim.kv.store import KVStore
from verbatim.quantization.formats import KV_PACKINGS
from verbatim.quantization.rows import pack_rows, unpack_rows

PROMPTS = [
    "Once upon a time",
    "The old lighthouse keeper",
    "In the village by the river there lived",
    "A fox and a crow",
    "Why does the moon follow us?",
]


def open_model(args: argparse.Namespace, kv_dtype: str) -> LLM:
    return LLM(args.model, dtype=args.dtype, kv_dtype=kv_dtype, max_sequences=len(PROMPTS))


def drawn(llm: LLM, tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=tokens, ignore_eos=True)
    results = llm.generate(PROMPTS, params)
    return [r.prompt_token_ids + r.outputs[0].token_ids for r in results]


def look(llm: LLM, ids: list[list[int]], tokens: int) -> tuple[Tensor, list[int], list[list[int]]]:
    """Return log-probs and likeliest ids at all positions, and greedy continuations."""
    results = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=1))
    logprobs = [x for r in results for x in (r.prompt_logprobs or [])[1:]]
    tops = [top[0][0] for r in results for top in (r.prompt_top_logprobs or [])[1:] if top]
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return (
        torch.tensor(logprobs),
        tops,
        [r.outputs[0].token_ids for r in llm.generate(PROMPTS, greedy)],
    )


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of entries before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def compare(args: argparse.Namespace) -> None:
    with open_model(args, "auto") as llm:
        ids = drawn(llm, args.tokens)
        expected, expected_tops, expected_greedy = look(llm, ids, args.tokens)
        info = llm.info()
    print(
        f"{info['model']}, {info['numerics_key']}, {len(expected)} log-probs, mean {expected.mean():.2f}\n"
    )
    print("| KV | bytes a token | of bf16 | mean error | 99% below | max error | top id | greedy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    bf16 = None
    for kv_dtype in ("bfloat16", "float32", "int8", "int4"):
        with open_model(args, kv_dtype) as llm:
            logprobs, tops, greedy = look(llm, ids, args.tokens)
            size = llm.info()["kv_bytes_per_token"]
        bf16 = bf16 or size
        error = (logprobs - expected).abs()
        same = statistics.mean(a == b for a, b in zip(tops, expected_tops, strict=True))
        run = statistics.mean(agreed(a, b) for a, b in zip(greedy, expected_greedy, strict=True))
        cells = [kv_dtype, f"{size:,}", f"{size / bf16:.0%}", f"{error.mean():.4f}"]
        cells += [f"{error.quantile(0.99):.3f}", f"{error.max():.3f}", f"{same:.1%}"]
        print(f"| {' | '.join(cells)} | {run:.0f} of {args.tokens} |")


# ---- Formats ----


def up(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def symmetric(x: Tensor, bits: int, group: int) -> Tensor:
    """Quantize with one bf16 scale per group and no offset: codes from -n to n."""
    n = 2 ** (bits - 1) - 1
    parts = []
    for part in x.split(group, -1):
        scale = up(part.abs().amax(-1, keepdim=True) / n)
        codes = torch.where(scale > 0, part / scale, 0.0).round().clamp(-n, n)
        parts.append(codes * scale)
    return torch.cat(parts, -1)


def symmetric_even(x: Tensor, bits: int, group: int) -> Tensor:
    """Quantize as `symmetric`, but with all 2^bits levels, at odd multiples of half a step."""
    n = 2**bits - 1
    parts = []
    for part in x.split(group, -1):
        scale = up(part.abs().amax(-1, keepdim=True) / n)  # half a step
        codes = torch.where(scale > 0, (part / scale + n) / 2, 0.0).round().clamp(0, n)
        parts.append((2 * codes - n) * scale)
    return torch.cat(parts, -1)


def with_low(x: Tensor, bits: int, group: int) -> Tensor:
    """Quantize as the KV store does, in groups of any length."""
    packing = next(p for p in KV_PACKINGS.values() if p.bits == bits)
    return torch.cat(
        [unpack_rows(pack_rows(g, packing), g.shape[-1], packing) for g in x.split(group, -1)], -1
    )


FORMATS: list[tuple[str, Callable[[Tensor, int, int], Tensor], int, int, float]] = [
    ("scale", symmetric, 8, 32, 8.5),
    ("scale and low (int8)", with_low, 8, 64, 8.5),
    ("scale", symmetric, 4, 16, 5.0),
    ("scale, even levels", symmetric_even, 4, 16, 5.0),
    ("scale and low (int4)", with_low, 4, 32, 5.0),
]


def captured(args: argparse.Namespace) -> dict[str, Tensor]:
    """Return K and V that the model writes for stories, and random rows, all `[N, D]`."""
    written: list[tuple[Tensor, Tensor]] = []
    original = KVStore.write

    def write(self: KVStore, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        written.append((k.float().flatten(0, 1), v.float().flatten(0, 1)))
        original(self, layer, k, v, slots)

    with open_model(args, "auto") as llm:
        ids = drawn(llm, args.tokens)
        KVStore.write = write  # type: ignore[method-assign]
        try:
            llm.score(ids)
        finally:
            KVStore.write = original  # type: ignore[method-assign]
    k, v = (torch.cat(x) for x in zip(*written, strict=True))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 128, generator=generator)
    wide = rows * (0.8 * torch.randn(1, 128, generator=generator)).exp()
    outliers = rows * torch.where(torch.arange(128) % 41 == 7, 12.0, 1.0)
    return {"its K": k, "its V": v, "normal": rows, "uneven": wide, "outliers": outliers}


def compare_formats(args: argparse.Namespace) -> None:
    data = captured(args)
    print(
        "Root mean square error over that of the rows. normal, uneven, outliers: 128 wide, random.\n"
    )
    print(f"| bits | group | held | {' | '.join(data)} |")
    print("| --- " * (3 + len(data)) + "|")
    for name, quant, bits, group, cost in FORMATS:
        errors = [
            (quant(x, bits, group) - x).square().mean() / x.square().mean() for x in data.values()
        ]
        cells = " | ".join(f"{error.sqrt():.2%}" for error in errors)
        print(f"| {bits}, {cost} with scales | {group} | {name} | {cells} |")


# ---- Speed ----


def attention_calls(sequences: int, context: int, rows: int) -> list[Callable[[], object]]:
    """Return the same attention call over bfloat16, float32, int8 and int4 KV."""
    heads, kv_heads, size, block = 16, 8, 128, 16
    blocks = sequences * context // block
    k, v = torch.randn(2, blocks, kv_heads, block, size).bfloat16()
    q = torch.randn(sequences * rows, heads, size).bfloat16()
    rows_of = AttentionBatch(
        torch.arange(0, sequences * rows + 1, rows).int(),
        torch.full((sequences,), context).int(),
        torch.randperm(blocks).reshape(sequences, -1).int(),
    )
    batch = (rows_of, AttentionOptions(scale=size**-0.5))
    packed = [
        partial(
            paged_attention, q, pack_rows(k, p), pack_rows(v, p), *batch, value_size=size, packing=p
        )
        for p in KV_PACKINGS.values()
    ]
    return [
        partial(paged_attention, q, k, v, *batch),
        partial(paged_attention, q, k.float(), v.float(), *batch),
        *packed,
    ]


def compare_speed(seconds: float) -> None:
    threads = torch.get_num_threads()
    print(f"{kernels.instruction_set()}, {threads} threads; bf16 queries; least times in ms\n")
    print("| sequences x context, rows | bfloat16 | float32 | int8 | int4 |")
    print("| --- | --- | --- | --- | --- |")
    for sequences, context, rows in ((1, 1024, 1), (8, 1024, 1), (32, 1024, 1), (1, 1024, 1024)):
        calls = attention_calls(sequences, context, rows)
        times: list[list[float]] = [[] for _ in calls]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[0]) < 3:
            for call, durations in zip(calls, times, strict=True):
                start = time.perf_counter()
                call()
                durations.append(time.perf_counter() - start)
        cells = " | ".join(f"{min(durations) * 1e3:.2f}" for durations in times)
        print(f"| {sequences} x {context}, {rows} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder; the packaged model without it")
    parser.add_argument("--dtype", default="auto", help="of the model: auto, float32 or bfloat16")
    parser.add_argument("--tokens", type=int, default=250, help="of each story")
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0, help="per line of --speed")
    args = parser.parse_args()
    if args.formats:
        compare_formats(args)
    elif args.speed:
        compare_speed(args.seconds)
    else:
        compare(args)


if __name__ == "__main__":
    main()
