"""The cost of quantized weights in perplexity, the bytes they save, and how fast they are unpacked.

    python benchmarks/quantize.py              # the packaged model on stories that it was not trained on
    python benchmarks/quantize.py --activations    # the same with activations in 8 bits beside as they are
    python benchmarks/quantize.py --formats    # ways to spend the same bits, on its matrices and random ones
    python benchmarks/quantize.py --speed      # unpacking 4096 x 4096, by rows and by columns

Logit errors are those of one position of each text, against float32: the largest, and the root mean square
over that of the logits around their mean. "Top id" is the share of texts whose likeliest next id is the same.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim import LLM, SamplingParams, kernels, storyteller
from verbatim.model.quantization import GROUP_SIZES, Quantization
from verbatim.model.quantize import pack, unpack
from verbatim.model.weight_packing import WeightPacking

_LENGTH = 512


def texts(count: int) -> list[str]:
    """Documents of the held-out seeds."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "storyteller"))
    import data

    return [data.document_text(random.Random(f"held-out:{i}")) for i in range(count)]


def look(
    ids: list[list[int]], dtype: str, quantization: Any
) -> tuple[float, Tensor, dict[str, Any]]:
    """Mean log-prob of a token, the logits in the middle of each text, and what `info` tells."""
    found: dict[tuple[int, ...], Tensor] = {}

    def note(seen: Any, logits: Tensor) -> Tensor:
        found[tuple(int(i) for i in seen)] = logits.float().clone()
        return logits

    middles = [row[: 2 + 7 * i % (len(row) - 2)] for i, row in enumerate(ids)]
    with LLM(dtype=dtype, quantization=quantization) as llm:
        results = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
        llm.generate(middles, SamplingParams(max_tokens=1, logits_processors=[note]))
        info = llm.info()
    logprobs = [x for result in results for x in (result.prompt_logprobs or [])[1:]]
    mean = math.fsum(logprobs) / len(logprobs)
    return mean, torch.stack([found[tuple(row)] for row in middles]), info


def errors(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(storyteller.path())
    ids = [tokenizer(text)["input_ids"][:_LENGTH] for text in texts(args.texts)]
    print(f"{len(ids)} texts, {sum(map(len, ids)):,} ids, {kernels.instruction_set()}\n")
    head = ["bits", "bytes", "weight error", "perplexity", "logit error, rms", "max"]
    print(f"| weights | {' | '.join(head)} | top id |")
    print("| --- " * 8 + "|")
    packed = [
        Quantization(bits, size, head)
        for bits, heads in ((8, (None, 8)), (4, (None, 8, 4)))
        for head in heads
        for size in GROUP_SIZES
    ]
    if args.activations:
        packed = [
            Quantization(bits, size, activation_bits=activations)
            for bits in (8, 4)
            for size in GROUP_SIZES
            for activations in (None, 8)
        ]
    kinds: list[tuple[str, Quantization | None]] = [("float32", None), ("bfloat16", None)]
    kinds += [("float32", q) for q in packed]
    kinds += [("bfloat16", q) for q in packed if q.group_size == 64 and q.head_bits == 8]
    exact, want = 0.0, torch.empty(0)
    for dtype, quantization in kinds:
        mean, logits, info = look(ids, dtype, quantization)
        if not len(want):
            exact, want = mean, logits
        told = info.get("quantization") or {}
        wrong, around = logits - want, want - want.mean(-1, keepdim=True)
        rms = (wrong.square().mean() / around.square().mean()).sqrt()
        same = (logits.argmax(-1) == want.argmax(-1)).float().mean()
        growth = math.exp(exact - mean) - 1
        cells = [dtype if quantization is None else f"{quantization.name}, {dtype}"]
        cells += [
            f"{info['weight_bytes'] * 8 / info['parameters']:.2f}",
            f"{info['weight_bytes']:,}",
            f"{told.get('relative_error', 0):.2%}",
        ]
        cells += [
            f"{math.exp(-mean):.4f} ({growth:+.2%})",
            f"{rms:.2%}",
            f"{wrong.abs().max():.2f}",
        ]
        print(f"| {' | '.join(cells)} | {same:.1%} |")


# ---- Formats ----


def ends(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    """Least element and step of each group, both in `heads`."""
    parts, levels = x.view(len(x), -1, group), 2**bits - 1
    low = parts.amin(-1, keepdim=True).to(heads).float()
    scale = ((parts.amax(-1, keepdim=True) - low) / levels).to(heads).float()
    codes = torch.where(scale > 0, (parts - low) / scale, 0.0).round().clamp(0, levels)
    return (low + scale * codes).view_as(x)


def symmetric(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    """One step of each group, codes on both sides of zero."""
    parts, levels = x.view(len(x), -1, group), 2 ** (bits - 1) - 1
    scale = (parts.abs().amax(-1, keepdim=True) / levels).to(heads).float()
    codes = torch.where(scale > 0, parts / scale, 0.0).round().clamp(-levels - 1, levels)
    return (codes * scale).view_as(x)


def ours(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    packing = WeightPacking(tuple(x.shape), x.dtype, Quantization(bits, group))
    return unpack(pack(x, packing), packing)


def matrices() -> Iterator[tuple[str, list[Tensor]]]:
    """Rows of a multiple of 128 elements."""
    from safetensors.torch import load_file

    found = load_file(storyteller.path() / "model.safetensors")
    linear = [w.float() for n, w in found.items() if n.endswith("_proj.weight")]
    yield "storyteller", [w[:, : w.shape[1] // 128 * 128].contiguous() for w in linear]
    noise = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 2048, generator=noise)
    yield "normal", [normal]
    yield (
        "normal, 1 in 200 columns x 8",
        [normal * torch.where(torch.arange(2048) % 200 == 0, 8, 1)],
    )


def formats(args: argparse.Namespace) -> None:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    kinds: list[tuple[str, Callable[..., Tensor], torch.dtype, int]] = [
        ("ours: low and scale in bf16, outwards", ours, bf16, 2),
        ("low and scale in bf16, to nearest", ends, bf16, 2),
        ("low and scale in float16", ends, f16, 2),
        ("low and scale in float32", ends, f32, 2),
        ("symmetric, scale in bf16", symmetric, bf16, 1),
        ("symmetric, scale in float32", symmetric, f32, 1),
    ]
    for name, found in matrices():
        print(f"\n{name}: bits a weight, relative error\n")
        print("| | " + " | ".join(f"int{b}, {g}" for b in (8, 4) for g in GROUP_SIZES) + " |")
        print("| --- " * 7 + "|")
        for title, way, heads, count in kinds:
            cells = []
            for bits in (8, 4):
                for group in GROUP_SIZES:
                    wrong = sum(
                        float((way(w, bits, group, heads) - w).square().sum()) for w in found
                    )
                    all_of_it = sum(float(w.square().sum()) for w in found)
                    size = bits + 8 * count * heads.itemsize / group
                    cells.append(f"{size:.2f}: {math.sqrt(wrong / all_of_it):.3%}")
            print(f"| {title} | {' | '.join(cells)} |")


# ---- Speed ----


def speed(args: argparse.Namespace) -> None:
    print("GB/s written, best of 15\n")
    print(
        "| | " + " | ".join(f"{b}, {t} threads" for b in ("kernel", "torch") for t in (1, 2)) + " |"
    )
    print("| --- " * 5 + "|")
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(4096, 4096).to(dtype)
        for columns in (False, True):
            for bits in (8, 4):
                packing = WeightPacking((4096, 4096), dtype, Quantization(bits), columns)
                packed, out = pack(weight, packing), torch.empty_like(weight)
                cells = [f"{str(dtype)[6:]}, int{bits}, {'columns' if columns else 'rows'}"]
                for backend in (kernels.instruction_set() or "none", "none"):
                    for threads in (1, 2):
                        torch.set_num_threads(threads)
                        times = []
                        for _ in range(3 if backend == "none" else 15):
                            begin = time.perf_counter()
                            with kernels.using(backend):
                                unpack(packed, packing, out=out)
                            times.append(time.perf_counter() - begin)
                        cells.append(f"{out.nbytes / min(times) / 1e9:.1f}")
                print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument("--activations", action="store_true", help="in 8 bits, beside as they are")
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    (formats if args.formats else speed if args.speed else errors)(args)


if __name__ == "__main__":
    main()
