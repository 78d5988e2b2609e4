"""Train the storyteller by TRL's `GRPOTrainer`, with completions by `rl.rollout_func`.

    pip install 'torch>=2.11,<2.14' && pip install trl .
    python benchmarks/clients/trl_grpo.py [--steps 20] [--temperature 1.0]

The reward of a story is a quarter for each mention of a word, up to 1. After each rollout, before the first
update from it, its log-probs are compared with `rl.score` under the same weights, and with the module's own
forward.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from verbatim import rl, storyteller

PROMPTS = ["Once upon a time", "One morning", "In a small village", "Long ago"]


def main() -> None:
    options = parse()
    folder = storyteller.path()
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ratios: list[tuple[float, float]] = []
    seconds: list[float] = []
    tokens: list[int] = []

    def rollouts(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        begin = time.perf_counter()
        output = rl.rollout_func(prompts, trainer)
        seconds.append(time.perf_counter() - begin)
        tokens.append(sum(map(len, output["completion_ids"])))
        ratios.append(ratios_of(output, trainer.model, options.temperature))
        return output

    def reward(completions: list[str], **_: Any) -> list[float]:
        word = re.compile(rf"\b{options.word}\b", re.IGNORECASE)
        return [min(1.0, len(word.findall(text)) / 4) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps * options.iterations,
            per_device_train_batch_size=options.batch,
            num_generations=options.group,
            max_completion_length=options.max_tokens,
            temperature=options.temperature,
            learning_rate=5e-4,
            gradient_checkpointing=False,
            num_iterations=options.iterations,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=module,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * options.steps}),
            reward_funcs=reward,
            rollout_func=rollouts,
        )
        begin = time.perf_counter()
        trainer.train()
        total = time.perf_counter() - begin
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    few = max(1, len(rewards) // 4)
    print(
        f"\n{options.steps} rollouts and {trainer.state.global_step} updates in {total:.0f} s, "
        f"{sum(seconds):.1f} s of them in rollouts"
    )
    print(f"{sum(tokens)} tokens, {sum(tokens) / sum(seconds):.0f} tokens/s")
    print(
        f"reward: {mean(rewards[:few]):.3f} over the first {few} rollouts, "
        f"{mean(rewards[-few:]):.3f} over the last"
    )
    by_score, by_forward = (max(column) for column in zip(*ratios, strict=True))
    print(f"largest |ratio - 1| before a first update, of {len(ratios)} rollouts:")
    if options.temperature == 1:
        print(f"  by rl.score: {by_score:.2g}")
        assert by_score == 0
    print(f"  by the trainer's own forward: {by_forward:.2g}")


@torch.no_grad()
def ratios_of(output: dict[str, Any], module: Any, temperature: float) -> tuple[float, float]:
    """Return the largest |ratio - 1| of a rollout's tokens, by `score` and by the module's own forward."""
    by_score = by_forward = 0.0
    names = ("prompt_ids", "completion_ids", "logprobs")
    for prompt, completion, logprobs in zip(*(output[name] for name in names), strict=True):
        rows = torch.tensor([prompt + completion])
        sampled = torch.tensor(logprobs)
        new = slice(len(prompt), None)
        if temperature == 1:
            scores = rl.score(module, rows)[0, new]
            by_score = max(by_score, ((scores - sampled).exp() - 1).abs().max().item())
        logits = module(input_ids=rows).logits[0].float() / temperature
        theirs = logits.log_softmax(-1)[:-1].gather(1, rows[0, 1:, None])[new.start - 1 :, 0]
        by_forward = max(by_forward, ((theirs - sampled).exp() - 1).abs().max().item())
    return by_score, by_forward


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--word", default="she", help="what the stories are to mention")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--batch", type=int, default=8, help="completions of a step")
    parser.add_argument("--group", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--iterations", type=int, default=2, help="updates from each rollout")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
