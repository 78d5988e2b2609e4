"""The cost of quantized weights in perplexity, the bytes they save, and how fast they are unpacked.

    python benchmarks/quantize.py              # the packaged model on stories that it was not trained on
    python benchmarks/quantize.py --activations    # the same, with and without activations in 8 bits
    python benchmarks/quantize.py --formats    # other formats of equal size, on its matrices and random ones
    python benchmarks/quantize.py --speed      # unpacking 4096 x 4096, by rows and by columns

Logit errors are those of one position of each text, against float32: the largest, and the root mean square
relative to that of the centered logits. "Top id" is the share of texts with the same likeliest next id.
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
from verbatim.quantization.formats import GROUP_SIZES, Quantization
from verbatim.quantization.matrix import pack, unpack

_LENGTH = 512


def texts(count: int) -> list[str]:
    """Return documents of held-out seeds."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "storyteller"))
    import data

    return [data.document_text(random.Random(f"held-out:{i}")) for i in range(count)]


def look(
    ids: list[list[int]], dtype: str, quantization: Any
) -> tuple[float, Tensor, dict[str, Any]]:
    """Return the mean log-prob of a token, the logits in the middle of each text, and `LLM.info()`."""
    logits_of: dict[tuple[int, ...], Tensor] = {}

    def note(prefix: Any, logits: Tensor) -> Tensor:
        logits_of[tuple(int(i) for i in prefix)] = logits.float().clone()
        return logits

    middles = [row[: 2 + 7 * i % (len(row) - 2)] for i, row in enumerate(ids)]
    with LLM(dtype=dtype, quantization=quantization) as llm:
        results = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
        llm.generate(middles, SamplingParams(max_tokens=1, logits_processors=[note]))
        info = llm.info()
    logprobs = [x for result in results for x in (result.prompt_logprobs or [])[1:]]
    mean = math.fsum(logprobs) / len(logprobs)
    return mean, torch.stack([logits_of[tuple(row)] for row in middles]), info


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
    exact, expected = 0.0, torch.empty(0)
    for dtype, quantization in kinds:
        mean, logits, info = look(ids, dtype, quantization)
        if not len(expected):
            exact, expected = mean, logits
        details = info.get("quantization") or {}
        error, centered = logits - expected, expected - expected.mean(-1, keepdim=True)
        rms = (error.square().mean() / centered.square().mean()).sqrt()
        same = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
        growth = math.exp(exact - mean) - 1
        cells = [dtype if quantization is None else f"{quantization.name}, {dtype}"]
        cells += [
            f"{info['weight_bytes'] * 8 / info['parameters']:.2f}",
            f"{info['weight_bytes']:,}",
            f"{details.get('relative_error', 0):.2%}",
        ]
        cells += [
            f"{math.exp(-mean):.4f} ({growth:+.2%})",
            f"{rms:.2%}",
            f"{error.abs().max():.2f}",
        ]
        print(f"| {' | '.join(cells)} | {same:.1%} |")


# ---- Formats ----


def ends(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    """Quantize with the minimum and the step of each group, both in dtype `heads`."""
    parts, levels = x.view(len(x), -1, group), 2**bits - 1
    low = parts.amin(-1, keepdim=True).to(heads).float()
    scale = ((parts.amax(-1, keepdim=True) - low) / levels).to(heads).float()
    codes = torch.where(scale > 0, (parts - low) / scale, 0.0).round().clamp(0, levels)
    return (low + scale * codes).view_as(x)


def symmetric(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    """Quantize with one step per group, and codes on both sides of zero."""
    parts, levels = x.view(len(x), -1, group), 2 ** (bits - 1) - 1
    scale = (parts.abs().amax(-1, keepdim=True) / levels).to(heads).float()
    codes = torch.where(scale > 0, parts / scale, 0.0).round().clamp(-levels - 1, levels)
    return (codes * scale).view_as(x)


def ours(x: Tensor, bits: int, group: int, heads: torch.dtype) -> Tensor:
    packing = Quantization(bits, group).packing(x.shape, x.dtype)
    return unpack(pack(x, packing), packing)


def matrices() -> Iterator[tuple[str, list[Tensor]]]:
    """Yield named matrices, with rows of a multiple of 128 elements."""
    from safetensors.torch import load_file

    tensors = load_file(storyteller.path() / "model.safetensors")
    linear = [w.float() for n, w in tensors.items() if n.endswith("_proj.weight")]
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
    for name, weights in matrices():
        print(f"\n{name}: bits a weight, relative error\n")
        print("| | " + " | ".join(f"int{b}, {g}" for b in (8, 4) for g in GROUP_SIZES) + " |")
        print("| --- " * 7 + "|")
        for title, quantize, heads, count in kinds:
            cells = []
            for bits in (8, 4):
                for group in GROUP_SIZES:
                    error = sum(
                        float((quantize(w, bits, group, heads) - w).square().sum()) for w in weights
                    )
                    norm = sum(float(w.square().sum()) for w in weights)
                    size = bits + 8 * count * heads.itemsize / group
                    cells.append(f"{size:.2f}: {math.sqrt(error / norm):.3%}")
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
                packing = Quantization(bits).packing((4096, 4096), dtype, columns)
                packed = pack(weight, packing)
                cells = [f"{str(dtype)[6:]}, int{bits}, {'columns' if columns else 'rows'}"]
                for backend in (kernels.instruction_set() or "none", "none"):
                    for threads in (1, 2):
                        torch.set_num_threads(threads)
                        times = []
                        for _ in range(3 if backend == "none" else 15):
                            begin = time.perf_counter()
                            with kernels.using(backend):
                                unpack(packed, packing)
                            times.append(time.perf_counter() - begin)
                        cells.append(f"{weight.nbytes / min(times) / 1e9:.1f}")
                print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument(
        "--activations", action="store_true", help="also measure activations in 8 bits"
    )
    parser.add_argument("--formats", action="store_true")
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    (formats if args.formats else speed if args.speed else errors)(args)


if __name__ == "__main__":
    main()
