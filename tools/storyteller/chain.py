"""Teaches the storyteller's draft layer to follow itself, so that several tokens can be drafted with it.

    python tools/storyteller/chain.py verbatim/storyteller --out verbatim/storyteller

Training (`train.py`) shows the layer hidden states of the main model alone. Drafting more than one token
feeds it its own output, with keys and values of its own in between; this goes through the same steps, and
asks at each for the main model's whole distribution, since a draft stands as far as the two agree. The main
model stays as it is, bit for bit, so no story changes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path

import data
import network
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import MtpModel


def load(folder: Path) -> tuple[Qwen3ForCausalLM, MtpModel, PreTrainedTokenizerFast]:
    """The main model, its draft layer and the tokenizer, in float32."""
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = main.config.num_hidden_layers
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{last}\."]
    mtp = MtpModel.from_pretrained(main).float()
    return main.requires_grad_(False), mtp, AutoTokenizer.from_pretrained(folder)


def chained_logits(mtp: MtpModel, hidden: Tensor, batch: data.Batch, depth: int) -> list[Tensor]:
    """Logits `[B, L - d, V]` of the d-th token of a draft, for d = 1 to `depth`.

    Entry i of the d-th speaks about position i + d + 1: a draft that starts behind position i + 1 has the
    main model's hidden states up to i, and the tokens up to i + d.

    Args:
        hidden: `[B, L, H]` of the main model.
    """
    length = batch.ids.shape[1] - depth
    same = batch.mask()
    if same is None:
        same = torch.ones(length + depth, length + depth, dtype=torch.bool).tril()[None, None]
    own = torch.eye(length, dtype=torch.bool).expand(same.shape[0], 1, length, length)
    nobody = torch.zeros_like(own)
    before = same[:, :, :length, :length]  # slots of the main model's hidden states
    inputs, embeds, positions, logits = hidden[:, :length], [], [], []
    states = [inputs]
    for d in range(1, depth + 1):
        embeds.append(mtp.embed_tokens(batch.ids[:, d : d + length]))
        positions.append(batch.position[:, :length] + d)
        # The first rows see those before them; row i of each later depth sees the first rows up to i,
        # and row i of every depth up to its own.
        rows = [
            torch.cat([before, *[own if e <= f else nobody for e in range(2, d + 1)]], dim=-1)
            for f in range(1, d + 1)
        ]
        position = torch.cat(positions, dim=1)
        embedded = torch.cat(embeds, dim=1)
        mask, turns = torch.cat(rows, dim=-2), mtp.rotary_emb(embedded, position_ids=position)
        cache = None  # in place, as its name changed with transformers 5.24
        joined = torch.cat(states, dim=1)
        out = mtp.layers[0](embedded, joined, turns, mask, position, cache)[:, -length:]
        logits.append(mtp._project_to_logits(out))
        states.append(out)
    return logits


def losses(main: Qwen3ForCausalLM, mtp: MtpModel, batch: data.Batch, depth: int) -> list[Tensor]:
    """Cross-entropy in nats against the main model's own distribution, at each place of a draft."""
    with torch.no_grad():
        hidden = network.hidden_states(main, batch)
        wanted = log_softmax(main.lm_head(hidden), dim=-1).exp()
    found = []
    for d, logits in enumerate(chained_logits(mtp, hidden, batch, depth), start=1):
        length = logits.shape[1]
        inside = (batch.document[:, :length] == batch.document[:, d : d + length]) & (
            batch.document[:, :length] >= 0
        )
        each = cross_entropy(
            logits.flatten(0, 1), wanted[:, d : d + length].flatten(0, 1), reduction="none"
        )
        found.append((each * inside.flatten()).sum() / inside.sum())
    return found


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in 50 steps, then down to nothing along a cosine."""
    return peak * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--length", type=int, default=320)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    main_model, mtp, tokenizer = load(args.folder)
    parameters = list(mtp.layers.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
    begin = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        name = f"chain:{args.seed}:{step}"
        batch = data.packed(name, tokenizer, rows=args.rows, length=args.length)
        each = losses(main_model, mtp, batch, args.depth)
        torch.stack(each).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step + 1 == args.steps:
            shown = " ".join(f"{loss.item():.3f}" for loss in each)
            print(f"step {step} loss {shown} {time.perf_counter() - begin:.0f} s", flush=True)
        if step % 250 == 249 or step + 1 == args.steps:
            write(args.folder, args.out, main_model, mtp)


def write(source: Path, out: Path, main_model: Qwen3ForCausalLM, mtp: MtpModel) -> None:
    """The folder as it was, with the draft layer's tensors replaced."""
    from safetensors.torch import load_file, save_file

    if out.resolve() != source.resolve():
        shutil.copytree(source, out, dirs_exist_ok=True)
    stored = load_file(source / "model.safetensors")
    last = main_model.config.num_hidden_layers
    for name, value in network.tensors(main_model, mtp).items():
        if name.startswith(f"model.layers.{last}."):
            stored[name] = value
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
