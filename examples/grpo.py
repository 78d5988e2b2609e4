"""Teach the storyteller to mention a word: a complete GRPO run on a CPU, in a few minutes.

    python examples/grpo.py [--word boat] [--steps 30] [--plot grpo.png]

Group relative policy optimisation (Shao et al. 2024): each prompt gets a group of stories, and the advantage
of a story is its reward relative to the mean of its group. The reward is 1 if the story mentions the word
and ends by itself.

The stories are sampled from the module that is being trained: there is no copy of the weights and no second
model, and the log-probs are the trainer's. The ratio of the trainer's probabilities to the rollout's is
printed before the first update. With `score` it is exactly 1, and so it is for log-probs with gradients that
are given these scores. With only the module's own forward it is off by the rounding of float32.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from verbatim import LLM, Result, SamplingParams, rl

PROMPTS = ["Once upon a time", "One morning", "In a small village", "Long ago"]
CLIP = 0.2  # the ratio is clipped to 1 - CLIP and 1 + CLIP


@dataclass
class Step:
    """Metrics of one training step."""

    reward: float
    mentioned: float  # share of the stories that mention the word
    ended: float  # share of the stories that ended by themselves
    length: float  # mean number of tokens
    rollout_s: float
    update_s: float


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    module, tokenizer = open_storyteller()
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, weight_decay=0.0)
    params = SamplingParams(max_tokens=options.max_tokens)
    steps = []
    with LLM(module, tokenizer=tokenizer) as llm:
        for number in range(options.steps):
            start = time.perf_counter()
            stories = rl.rollout(llm, PROMPTS, params, group_size=options.group_size)
            rewards = torch.tensor([judge(result, options.word) for result in stories.results])
            middle = time.perf_counter()
            if number == 0:
                print_ratios(llm, module, stories)
            update(llm, module, optimizer, stories, advantages(rewards), options.epochs)
            step = Step(
                reward=rewards.mean().item(),
                mentioned=share(stories, lambda text: mentions(text, options.word)),
                ended=1 - stories.truncated.float().mean().item(),
                length=stories.response_lengths.float().mean().item(),
                rollout_s=middle - start,
                update_s=time.perf_counter() - middle,
            )
            steps.append(step)
            print(
                f"step {number:3}  reward {step.reward:.2f}  mentions {step.mentioned:.2f}  "
                f"ends {step.ended:.2f}  tokens {step.length:5.0f}  "
                f"rollout {step.rollout_s:4.1f} s  update {step.update_s:4.1f} s",
                flush=True,
            )
        print("\n" + llm.generate("Once upon a time", params)[0].outputs[0].text.strip())
    few = max(1, len(steps) // 5)
    first, last = (sum(s.reward for s in part) / few for part in (steps[:few], steps[-few:]))
    print(f"\nreward: {first:.2f} over the first {few} steps, {last:.2f} over the last {few}")
    if options.plot is not None:
        plot(steps, options.word, options.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--word", default="boat", help="what the stories are to mention")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group-size", type=int, default=16, help="stories for each prompt")
    parser.add_argument("--epochs", type=int, default=2, help="updates from one set of stories")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write the curve here; needs matplotlib")
    return parser.parse_args()


def open_storyteller() -> tuple[nn.Module, object]:
    """Return the model inside the package as a module in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from verbatim import storyteller

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = storyteller.path()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return module, AutoTokenizer.from_pretrained(folder)


def mentions(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def judge(result: Result, word: str) -> list[float]:
    """Return the reward of each story of a group."""
    return [
        float(mentions(story.text, word) and story.finish_reason == "stop")
        for story in result.outputs
    ]


def share(stories: rl.Rollout, holds: Callable[[str], bool]) -> float:
    texts = [story.text for result in stories.results for story in result.outputs]
    return sum(map(holds, texts)) / len(texts)


def advantages(rewards: Tensor) -> Tensor:
    """Return the advantages within each group, `[B, G]`; 0 if all its rewards are equal."""
    return (rewards - rewards.mean(1, keepdim=True)) / (
        rewards.std(1, keepdim=True, correction=0) + 1e-4
    )


def print_ratios(llm: LLM, module: nn.Module, stories: rl.Rollout) -> None:
    """Print how far the trainer's probabilities are from the rollout's, before any update."""
    rows = stories.sequences, stories.attention_mask
    scores = rl.score(llm, *rows)
    logprobs = {
        "score": scores,
        "with gradients, given the scores": rl.logprobs(module, *rows, scores=scores).detach(),
        "with gradients, by the module's own forward": rl.logprobs(module, *rows).detach(),
    }
    print("largest |ratio - 1| of trainer to rollout, before the first update:")
    for name, values in logprobs.items():
        ratio = (stories.of_responses(values) - stories.logprobs).exp()
        print(f"  {name}: {(ratio - 1).abs().max().item():.2g}")


def update(
    llm: LLM,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    stories: rl.Rollout,
    advantage: Tensor,
    epochs: int,
) -> None:
    """Run `epochs` steps of the clipped policy gradient, averaged over all tokens."""
    if not advantage.any():  # all rewards of each group are equal
        return
    rows, gain = (stories.sequences, stories.attention_mask), advantage[..., None]
    for _ in range(epochs):
        live = rl.logprobs(module, *rows, scores=rl.score(llm, *rows))
        ratio = (stories.of_responses(live) - stories.logprobs).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * gain, clipped * gain)[stories.action_mask].mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def plot(steps: list[Step], word: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot([step.reward for step in steps], label="reward", linewidth=2)
    axes.plot([step.mentioned for step in steps], label=f'mentions "{word}"', linestyle="--")
    axes.plot([step.ended for step in steps], label="ends by itself", linestyle=":")
    axes.set(xlabel="step", ylabel="share of the stories", ylim=(0, 1.05))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
