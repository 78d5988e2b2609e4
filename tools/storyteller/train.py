"""Train the storyteller from nothing but the grammar, and write its model folder.

Run it as `python tools/storyteller/train.py --out verbatim/storyteller`.

Every batch is drawn from the seed and the step number, so a run that was stopped goes on from its
last checkpoint (`--resume`) as if nothing had happened.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import data
import lookup
import network
import tokenizer as tokenizers
import torch

HELD_OUT_BATCHES = 6


def arguments() -> argparse.Namespace:
    root = Path(__file__).parents[2]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=root / "verbatim" / "storyteller")
    parser.add_argument("--work", type=Path, default=Path("/tmp/storyteller"), help="checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000, help="length of the whole schedule")
    parser.add_argument("--until", type=int, help="stop early, at a step to resume from")
    parser.add_argument("--rows", type=int, default=4, help="rows of --length in a batch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-every", type=int, default=8, help="every n-th batch has long rows")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--mtp-weight", type=float, default=0.1, help="share of the draft loss")
    parser.add_argument("--recall", type=float, default=8.0, help="emphasis, see recall_weight")
    parser.add_argument("--lookup-at", type=int, default=750, help="step at which to help names")
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    return parser.parse_args()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup over 2 % of the steps (at least 50), then a cosine down to 2 % of the peak."""
    warmup = max(50, steps // 50)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def recall_weight(step: int, start: int, steps: int, peak: float) -> float:
    """What a recalled name, pronoun, kind or thing counts for beyond 1.

    It begins with the lookup head, at `start`, and falls from `peak` to 0 at 80 % of the steps.

    Names are few among the tokens and the gradient towards looking them up is weak; emphasis makes
    it strong. It ends early, for it also makes the model repeat a name where a new one should come.
    """
    progress = (step - start) / (0.8 * steps - start)
    return peak * (1 - progress) if 0 <= progress < 1 else 0.0


class Average:
    """A running average of the weights: what is measured and exported, at any moment of a run."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float = 0.99) -> None:
        self.parameters = parameters
        self.decay = decay
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange averages and weights; a second call puts them back."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(kept)


def optimizer_for(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Weight decay on matrices only; norms must stay free."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    args.work.mkdir(parents=True, exist_ok=True)

    tokenizer = tokenizers.train(args.vocab_size, seed=args.seed)
    settings = network.config(args.vocab_size, hidden=args.hidden, layers=args.layers)
    model, mtp = network.build(settings)
    model.to(device), mtp.to(device)
    parameters = network.parameters(model, mtp)
    print(f"{sum(p.numel() for p in parameters):,} parameters", flush=True)
    optimizer = optimizer_for(parameters)
    average = Average(parameters)

    def batch(step: int) -> data.Batch:
        name = f"train:{args.seed}:{step}"
        rows, length = args.rows, args.length
        if step % args.long_every == args.long_every - 1:
            count = max(1, rows * length // 2048)
            return data.long_rows(name, tokenizer, rows=count, length=2048).to(device)
        return data.packed(name, tokenizer, rows=rows, length=length).to(device)

    lexical = data.lexical_ids(tokenizer).to(device)

    def forward(rows: data.Batch, recall: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        weight = 1 + recall * rows.recalled(lexical) if recall else None
        with torch.autocast(device.type, torch.bfloat16, enabled=not args.float32):
            return network.losses(model, mtp, rows, weight)

    held_out = [
        data.packed(f"held-out:{index}", tokenizer, rows=8, length=512).to(device)
        for index in range(HELD_OUT_BATCHES)
    ]
    checkpoint, first = args.work / "checkpoint.pt", 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        mtp.load_state_dict(state["mtp"])
        optimizer.load_state_dict(state["optimizer"])
        average.values = state["average"]
        first = state["step"]

    started, tokens = time.perf_counter(), 0
    last = min(args.steps, args.until or args.steps)
    for step in range(first, last):
        if step == args.lookup_at:
            # Fits are small and on the CPU; moments that belong to other weights are forgotten.
            model.cpu(), mtp.cpu()
            lookup.louder_embeddings(model, mtp)
            names = [f"lookup:{args.seed}:{index}" for index in range(5)]
            lookup.install(
                model, tokenizer, [data.packed(n, tokenizer, rows=8, length=512) for n in names]
            )
            model.to(device), mtp.to(device)
            optimizer, average = optimizer_for(parameters), Average(parameters)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        rows = batch(step)
        main_loss, mtp_loss = forward(
            rows, recall_weight(step, args.lookup_at, args.steps, args.recall)
        )
        (main_loss + args.mtp_weight * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update(step)
        tokens += rows.ids.numel()
        if step % 25 == 0:
            rate = tokens / (time.perf_counter() - started)
            print(
                f"step {step} loss {main_loss.item():.4f} mtp {mtp_loss.item():.4f}"
                f" {rate:.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == last:
            state = {
                "model": model.state_dict(),
                "mtp": mtp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "average": average.values,
                "step": step + 1,
            }
            torch.save(state, checkpoint)
            average.swap()
            with torch.no_grad():
                found = torch.stack([torch.stack(forward(rows)) for rows in held_out]).mean(0)
            print(f"step {step + 1} held-out {found[0]:.4f} mtp {found[1]:.4f}", flush=True)
            network.export(args.out, model, mtp, tokenizer)
            average.swap()


if __name__ == "__main__":
    main()
