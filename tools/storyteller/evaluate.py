"""Measure a storyteller folder: held-out loss, draft acceptance, coherence, and samples to read.

Run it as `python tools/storyteller/evaluate.py verbatim/storyteller`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import check
import data
import network
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpModel

OPENINGS = (
    "Once upon a time",
    "Once upon a time, there was a",
    "One day",
    "In a small village",
    "A little fox",
    "Long ago, a brave girl named Mia",
    "There was an old baker",
    "It was a",
)
REQUESTS = (
    "Tell me a story about a fox and a kite.",
    "Tell a story about an owl",
    "Write a short story about a robot.",
    "Who are you?",
)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, MtpModel, PreTrainedTokenizerFast]:
    """The main model and its drafter, both as transformers reads them, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = main.config.num_hidden_layers
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{last}\."]
    return main, MtpModel.from_pretrained(main).float().eval(), tokenizer


@torch.no_grad()
def held_out(
    main: Qwen3ForCausalLM, mtp: MtpModel, tokenizer: PreTrainedTokenizerFast, batches: int
) -> tuple[float, float]:
    """Nats per token on rows that training never draws: main model, draft layer."""
    rows = [
        data.packed(f"held-out:{index}", tokenizer, rows=8, length=512) for index in range(batches)
    ]
    found = torch.stack([torch.stack(network.losses(main, mtp, batch)) for batch in rows])
    first, second = found.mean(0).tolist()
    return first, second


@torch.no_grad()
def acceptance(main: Qwen3ForCausalLM, mtp: MtpModel, ids: torch.Tensor, start: int) -> list[bool]:
    """For each token of a greedy completion `ids[start:]` but the first: was the draft equal to it?

    A position of the draft layer depends on earlier ones only, so one pass over the finished row
    gives exactly what drafting beside the decode loop would have given.
    """
    length = len(ids)
    batch = data.Batch(
        ids[None], torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None]
    )
    drafts = network.draft_logits(mtp, network.hidden_states(main, batch), batch)[0, :-1].argmax(-1)
    return (drafts[start - 1 :] == ids[start + 1 :]).tolist()


@torch.no_grad()
def complete(
    main: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 400,
) -> torch.Tensor:
    """Prompt and completion as one row of ids, by transformers' own generate."""
    sampling = {"do_sample": False, "temperature": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0}
    prompt = torch.tensor([ids])
    return main.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        **sampling,
    )[0]


def chat_ids(tokenizer: PreTrainedTokenizerFast, request: str) -> list[int]:
    messages = [{"role": "user", "content": request}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text)["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=12, help="held-out batches of 4096 ids")
    parser.add_argument("--samples", type=int, default=12, help="sampled stories for each opening")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, mtp, tokenizer = load(args.folder)

    first, second = held_out(model, mtp, tokenizer, args.batches)
    print(f"held-out loss {first:.4f} nats/token, draft layer {second:.4f}\n")

    accepted: list[bool] = []
    prompts = [list(tokenizer(text)["input_ids"]) for text in OPENINGS]
    for ids in prompts + [chat_ids(tokenizer, request) for request in REQUESTS]:
        row = complete(model, tokenizer, ids)
        accepted += acceptance(model, mtp, row, len(ids))
        print(f"GREEDY {tokenizer.decode(row)}\n")
    print(f"greedy draft acceptance {sum(accepted) / len(accepted):.3f} of {len(accepted)} ids\n")

    for temperature in (0.8, 1.0):
        good = ended = 0
        for ids in prompts:
            for _ in range(args.samples):
                row = complete(model, tokenizer, ids, temperature=temperature)
                text = tokenizer.decode(row, skip_special_tokens=True)
                found = check.problems(text)
                good += not found
                ended += int(row[-1]) == tokenizer.eos_token_id
                if found:
                    print(f"PROBLEM {found}: {text}\n")
            print(f"SAMPLED at {temperature}: {text}\n")
        total = args.samples * len(prompts)
        print(f"temperature {temperature}: {good} of {total} coherent, {ended} ended\n")


if __name__ == "__main__":
    main()
