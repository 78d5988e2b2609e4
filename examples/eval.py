"""A small evaluation with numbers that are bitwise equal at any batch size.

    python examples/eval.py [--batch-sizes 1 8 32] [--compare]

Three metrics of the storyteller: its perplexity on a few lines, how often it ranks the true end of a sentence
above a false one, and how often its stories mention a bridge. Each is measured with 1, 8 and 32 prompts at a
time. The exit status is 1 if any number differs by a single bit. `--compare` also measures the first two with
transformers' padded batches.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import struct
import sys
from collections.abc import Callable, Iterator

from verbatim import LLM, SamplingParams

OPENINGS = [
    "Once upon a time, in a quiet forest, there lived a brave horse named Ella.",
    "Once upon a time, there was a kind otter who lived by the sea. Her name was Clara.",
    "Once upon a time, near a wide river, there lived a clever fox named Oliver.",
    "One day, there was a race in the forest. The prize was a shiny coin.",
    "One night, a wild storm came. The wind howled, and the rain beat on the roof.",
    "Winter came early that year, and there was little to eat.",
    "On the other side sat a cheerful boy who could not get home either.",
    "Every Sunday, Poppy visited her grandmother on the other side of the valley.",
]
# A beginning, its true ending and a false one.
ENDINGS = [
    ("Once upon a time, there was a brave horse who lived in a deep", " forest.", " supper."),
    ("Once upon a time, near a wide", " river,", " friend,"),
    ("One night, a wild storm came. The wind howled, and the rain beat on the", " roof.", " coin."),
    ("In the middle of the night, there was a knock at the", " door.", " sea."),
    ("He gave Louis some hot soup and a place by the", " fire.", " race."),
    ("All night long, they told each other", " stories.", " boards."),
    ("Winter came early that year, and there was little to", " eat.", " sing."),
    ("At last, there was a new bridge. They met in the", " middle.", " prize."),
]
STORIES = 64


def main() -> int:
    options = parse()
    numbers: list[dict[str, float]] = []
    with LLM() as llm:
        for size in options.batch_sizes:
            numbers.append(evaluate(lambda rows: llm.score(rows), llm, size))
            show(f"verbatim, {size} at a time", numbers[-1])
        if options.compare:
            for size in options.batch_sizes:
                show(f"transformers, {size} at a time", compared(llm, size))
    same = all(bits(result) == bits(numbers[0]) for result in numbers)
    print("the same bits at every batch size" if same else "DIFFERENT at different batch sizes")
    return 0 if same else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--compare", action="store_true", help="with transformers as well")
    return parser.parse_args()


Score = Callable[[list[list[int]]], list[list[float | None]]]


def evaluate(score: Score, llm: LLM, size: int) -> dict[str, float]:
    return {
        **likelihoods(score, llm, size),
        "stories with a bridge": bridges(llm, size) / STORIES,
    }


def likelihoods(score: Score, llm: LLM, size: int) -> dict[str, float]:
    """Return the metrics that need only log-probs."""
    encode = llm.tokenizer.encode
    rows = [encode(text) for text in OPENINGS]
    rows += [encode(start + end) for start, *ends in ENDINGS for end in ends]
    scores = [row[1:] for batch in batches(rows, size) for row in score(batch)]
    openings, endings = scores[: len(OPENINGS)], scores[len(OPENINGS) :]
    sums = [math.fsum(row) for row in endings]
    surprise = -math.fsum(p for row in openings for p in row) / sum(map(len, openings))
    right = sum(true > false for true, false in zip(sums[::2], sums[1::2], strict=True))
    return {"perplexity": math.exp(surprise), "true endings": right / len(ENDINGS)}


def bridges(llm: LLM, size: int) -> int:
    """Count the stories that mention a bridge; each has its own seed."""
    params = [SamplingParams(max_tokens=200, seed=seed) for seed in range(STORIES)]
    texts = [
        result.outputs[0].text
        for batch in batches(params, size)
        for result in llm.generate(["Once upon a time"] * len(batch), batch)
    ]
    return sum("bridge" in text for text in texts)


def compared(llm: LLM, size: int) -> dict[str, float]:
    """Return the likelihoods by transformers: padded batches through its own forward, in the same dtype."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from verbatim import storyteller

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(storyteller.path(), dtype="auto")

    def score(rows: list[list[int]]) -> list[list[float | None]]:
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [
            [None, *values[: len(row) - 1].tolist()]
            for row, values in zip(rows, logprobs, strict=True)
        ]

    return likelihoods(score, llm, size)


def batches(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def bits(numbers: dict[str, float]) -> str:
    """Return a fingerprint that changes with every bit."""
    packed = struct.pack(f"{len(numbers)}d", *numbers.values())
    return hashlib.sha256(packed).hexdigest()[:8]


def show(name: str, numbers: dict[str, float]) -> None:
    values = "  ".join(f"{key} {value:.6g}" for key, value in numbers.items())
    print(f"{name:28} {bits(numbers)}  {values}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
