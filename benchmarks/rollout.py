"""Rollouts for reinforcement learning on Qwen3-0.6B's shape with random weights: Verbatim and transformers.

    python benchmarks/rollout.py [--layers 28] [--prompts 16] [--group 8] [--rounds 3]

Prompts have 64 to 256 tokens, each with a group of completions drawn at temperature 1. A completion ends with
one id, biased to occur about once in 64 tokens, but not before the 32nd token, and after 128 tokens at the
latest, so lengths vary fourfold. The output is what a policy-gradient loss needs: ids, masks, and the model's
log-probs.

transformers repeats each prompt for its group in one batch, generates until the last row ends, and computes
the log-probs in a second forward over the padded rows, in batches of eight, with logits only for the
completions. Verbatim returns both from one call. They run the same module in one process and take turns;
figures are medians over the rounds, and only tokens up to the end of a row count. The limit is the time to
read the weights once in each of Verbatim's forwards, at the measured bandwidth; it includes neither K and V
nor arithmetic.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
import warnings
from typing import Any

import torch
from decode import WIDTH, read_bandwidth
from throughput import TINY, make_model
from transformers import LogitsProcessorList

from verbatim import LLM, SamplingParams, rl

PROMPT, RESPONSE = (64, 256), (32, 128)  # tokens, both ends included
END, ENDS_ONCE_IN = 7, 64  # an id, and tokens
SCORED_ROWS = 8  # rows per forward for log-probs


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*PROMPT, count).round().int().tolist()
    return [torch.randint(0, vocab_size, (n,), generator=noise).tolist() for n in lengths]


def bias_for(vocab_size: int) -> float:
    """Return the bias with which one of equally likely ids is drawn once in `ENDS_ONCE_IN` tokens."""
    return math.log(vocab_size / ENDS_ONCE_IN)


def run_verbatim(llm: LLM, prompts: list[list[int]], end: int, group: int) -> Any:
    params = SamplingParams(
        max_tokens=RESPONSE[1],
        min_tokens=RESPONSE[0],
        ignore_eos=True,
        stop_token_ids=[end],
        logit_bias={end: bias_for(llm.info()["vocab_size"])},
    )
    start = time.perf_counter()
    result = rl.rollout(llm, prompts, params, group_size=group)
    return time.perf_counter() - start, result.response_lengths.flatten().tolist(), result


def run_transformers(model: Any, prompts: list[list[int]], end: int, group: int) -> Any:
    bias = bias_for(model.config.vocab_size)

    def biased(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, end] += bias
        return scores

    start = time.perf_counter()
    width = max(map(len, prompts))
    rows = [prompt for prompt in prompts for _ in range(group)]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        sequences = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=RESPONSE[0],
            max_new_tokens=RESPONSE[1],
            eos_token_id=end,
            logits_processor=LogitsProcessorList([biased]),
            pad_token_id=0,
        )
        generated = time.perf_counter() - start
        response = sequences[:, width:]
        is_end = (response == end).long()
        lengths = ((is_end.cumsum(1) - is_end) == 0).sum(1)
        is_response = torch.arange(response.shape[1]) < lengths[:, None]
        whole = torch.cat([mask, is_response.long()], dim=1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)
        pieces = []
        for first in range(0, len(sequences), SCORED_ROWS):
            part = slice(first, first + SCORED_ROWS)
            logits = model(
                input_ids=sequences[part],
                attention_mask=whole[part],
                position_ids=positions[part],
                logits_to_keep=response.shape[1] + 1,
                use_cache=False,
            ).logits[:, :-1]
            chosen = response[part, :, None]
            pieces.append(logits.float().log_softmax(-1).gather(-1, chosen)[..., 0])
        torch.cat(pieces).masked_fill(~is_response, 0)
    return time.perf_counter() - start, lengths.tolist(), generated


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that it runs")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    width = TINY if options.tiny else {**WIDTH, "num_hidden_layers": options.layers}
    model = make_model(width, torch.bfloat16)
    vocab_size = model.config.vocab_size
    prompts = make_prompts(options.prompts, vocab_size)
    bandwidth = read_bandwidth()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"{bandwidth / 1e9:.1f} GB/s; {model.config.num_hidden_layers} layers, "
        f"{options.prompts} prompts x {options.group}"
    )
    ours, theirs, fractions, shares = [], [], [], []
    weights = sum(p.nbytes for p in model.parameters())
    with LLM(model) as llm:
        for number in range(options.rounds):
            before = llm.stats()["forwards"]
            seconds, lengths, _ = run_verbatim(llm, prompts, END, options.group)
            forwards = llm.stats()["forwards"] - before
            ours.append(sum(lengths) / seconds)
            fractions.append(forwards * weights / bandwidth / seconds)
            print(
                f"round {number}: verbatim     {ours[-1]:7.1f} tokens/s  ({seconds:6.1f} s, {sum(lengths)} "
                f"tokens, rows of {min(lengths)} to {max(lengths)}, {forwards} forwards)",
                flush=True,
            )
            seconds, lengths, generated = run_transformers(model, prompts, END, options.group)
            theirs.append(sum(lengths) / seconds)
            shares.append(generated / seconds)
            print(
                f"         transformers {theirs[-1]:7.1f} tokens/s  ({seconds:6.1f} s, {sum(lengths)} "
                f"tokens, rows of {min(lengths)} to {max(lengths)}, {generated:.1f} s of them generating)",
                flush=True,
            )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        f"median: verbatim {statistics.median(ours):.1f}, transformers {statistics.median(theirs):.1f}, "
        f"ratio {statistics.median(ratios):.2f} (against its generation alone "
        f"{statistics.median(r * s for r, s in zip(ratios, shares, strict=True)):.2f}); "
        f"{statistics.median(fractions):.0%} of the limit"
    )


if __name__ == "__main__":
    main()
