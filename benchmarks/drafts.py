"""Drafts, compared with plain decoding: the gain where they help, and the cost where they can't.

    python benchmarks/drafts.py [--rounds 5] [--only storyteller copy nothing]

Both engines of a pair run the same weights in one process and take turns, one request or batch each; the
figures are medians over the rounds. Before anything is timed, their outputs must be equal, bit for bit.
Without `num_draft_tokens` the length of drafts adapts, as it does by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from decode import WIDTH, make_model

from verbatim import LLM, SamplingParams
from verbatim.draft import DraftModel, EarlyExit

AIMS = {"storyteller": 1.4, "copy": 2.0, "nothing": 0.97}


@dataclass
class Case:
    """One workload, with and without drafts."""

    group: str
    name: str
    plain: LLM
    drafted: LLM
    prompts: list[Any]
    params: list[SamplingParams]

    def run(self, llm: LLM) -> tuple[list[Any], float]:
        """Return the outputs, and the seconds per new token after prefill."""
        begin = time.perf_counter()
        results = llm.generate(self.prompts, self.params)
        spent = time.perf_counter() - begin
        first = max(result.metrics.first_token_s for result in results)
        outs = [(c.token_ids, c.logprobs, c.sampled_logprobs) for r in results for c in r.outputs]
        return outs, (spent - first) / sum(len(ids) - 1 for ids, _, _ in outs)

    def measure(self, rounds: int) -> tuple[float, float, float]:
        """Return tokens per second with drafts, the ratio to plain decoding, and tokens per forward."""
        assert self.run(self.plain)[0] == self.run(self.drafted)[0], f"{self.name}: outputs differ"
        before = self.drafted.stats()["draft"]
        plain, drafted = [], []
        for number in range(rounds):
            for llm, times in ((self.plain, plain), (self.drafted, drafted))[
                :: 1 - 2 * (number % 2)
            ]:
                times.append(self.run(llm)[1])
        after = self.drafted.stats()["draft"]
        tokens, forwards = (after[name] - before[name] for name in ("tokens", "forwards"))
        ratios = [a / b for a, b in zip(plain, drafted, strict=True)]
        return 1 / statistics.median(drafted), statistics.median(ratios), tokens / forwards


def storyteller(open_: Callable[..., LLM]) -> Iterator[Case]:
    """Yield cases of the packaged model with its MTP layer."""
    plain = open_()
    stories = ["Once upon a time", "The fox was", "A small bird wanted"]
    for tokens in (None, 1, 2, 3):
        drafted = open_(draft="mtp", num_draft_tokens=tokens)
        for temperature in (0.0, 0.8):
            params = [
                SamplingParams(max_tokens=300, temperature=temperature, seed=7, ignore_eos=True)
            ]
            length = "adaptive" if tokens is None else f"K = {tokens}"
            name = f"storyteller, mtp, {length}, temperature {temperature}"
            yield Case(
                "storyteller" if tokens is None else "", name, plain, drafted, stories[:1], params
            )


def copier(layers: int) -> Any:
    """Return a model of Qwen3-0.6B's shape in which each token is followed by the next of its cycle.

    The layers add zero to the residual stream, at full cost. Each row of the head is the embedding of the
    token before, so that the successor's logit stands out; the factor sets how likely copying is.
    """
    module = make_model(torch.bfloat16, num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = module.model.embed_tokens.weight
        module.lm_head.weight.copy_(0.8 * embeddings[successors().argsort()])
    return module


def successors() -> torch.Tensor:
    """Return the successor of each token, in cycles of 256: `[V]`."""
    ids = torch.arange(WIDTH["vocab_size"])
    ends = (ids % 256 == 255) | (ids == len(ids) - 1)
    return torch.where(ends, ids // 256 * 256, ids + 1)


def copy(open_: Callable[..., LLM], layers: int) -> Iterator[Case]:
    """Yield cases in which the model repeats the prompt."""
    module = copier(layers)
    plain, drafted = open_(module), open_(module, draft="ngram")
    prompt = [*range(1024, 1280), *range(1024, 1040)]
    for temperature in (0.0, 0.8):
        params = [SamplingParams(max_tokens=128, temperature=temperature, seed=3)]
        name = f"copy of the prompt, ngram, temperature {temperature}"
        yield Case("copy", name, plain, drafted, [prompt], params)


def nothing(open_: Callable[..., LLM], layers: int) -> Iterator[Case]:
    """Yield cases in which no draft can be right, or drafts cost as much as they save."""
    story = open_()
    hot = SamplingParams(max_tokens=300, temperature=2.0, seed=7, ignore_eos=True)
    yield Case(
        "nothing", "storyteller, mtp, temperature 2.0", story, open_(draft="mtp"), ["Once"], [hot]
    )
    yield Case(
        "nothing",
        "storyteller, 1 of 5 layers, temperature 1.0",
        story,
        open_(draft=EarlyExit(1)),
        ["Once"],
        [hot.replace(temperature=1.0)],
    )
    prompts = [
        f"The {who}" for who in ("fox", "bird", "cat", "mouse", "bear", "frog", "owl", "dog")
    ]
    many = [
        SamplingParams(max_tokens=120, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(32)
    ]
    yield Case("nothing", "storyteller, mtp, 32 rows", story, open_(draft="mtp"), prompts * 4, many)
    module = make_model(torch.bfloat16, num_hidden_layers=layers)
    plain = open_(module)
    ids = torch.randint(1000, 150_000, (8, 64), generator=torch.Generator().manual_seed(1)).tolist()
    flat = SamplingParams(max_tokens=64, temperature=1.0, seed=5)
    for rows in (1, 8):
        yield Case(
            "nothing",
            f"random weights, ngram, {rows} row{'s' * (rows > 1)}",
            plain,
            open_(module, draft="ngram"),
            ids[:rows],
            [flat] * rows,
        )
    other = make_model(torch.bfloat16, num_hidden_layers=max(1, layers // 7), seed=1)
    yield Case(
        "nothing",
        "random weights, another random model of a seventh of the layers",
        plain,
        open_(module, draft=DraftModel(other)),
        ids[:1],
        [flat],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28, help="of Qwen3-0.6B's shape")
    parser.add_argument("--only", nargs="+", choices=[*AIMS], default=[*AIMS])
    args = parser.parse_args()
    groups: dict[str, Callable[[Callable[..., LLM]], Iterator[Case]]] = {
        "storyteller": storyteller,
        "copy": lambda open_: copy(open_, args.layers),
        "nothing": lambda open_: nothing(open_, args.layers),
    }
    print("| workload | tokens/s | times plain decoding | tokens a forward | aim |")
    print("| --- | --- | --- | --- | --- |")
    for group in args.only:
        with ExitStack() as stack:

            def open_(*model: Any, **options: Any) -> LLM:
                llm = LLM(*model, kv_memory="1GB", **options)
                return stack.enter_context(llm)

            for case in groups[group](open_):
                speed, ratio, per_forward = case.measure(args.rounds)
                aim = AIMS.get(case.group, "")
                print(
                    f"| {case.name} | {speed:.0f} | {ratio:.2f} | {per_forward:.2f} | {aim} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
