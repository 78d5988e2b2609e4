"""The acceptance rate of draft tokens: with shared noise, with independent noise, and its upper limit.

    python benchmarks/draft_acceptance.py [--draws 100000] [--plot docs/images/draft_acceptance.png]

A draft from distribution q is accepted if it equals the model's draw from p. With the same noise for both
(Gumbel coupling: Daliri, Musco and Suresh 2024), its probability is at least (1 - TV) / (1 + TV), where TV is
half the sum of |p - q|. With independent noise it is the sum of p * q. No scheme that preserves p exceeds the
sum of min(p, q), which is 1 - TV; rejection sampling reaches it, but changes the output.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verbatim import SamplingParams
from verbatim.batch import SamplePlan, SampleRow
from verbatim.sampling.sampler import sample_rows

VOCAB = 64
ROWS = 5_000  # drawn at once
PLAIN = SamplingParams()


@dataclass(frozen=True, eq=False)
class Pair:
    """Logits of the model and of its drafter, [V] each."""

    name: str
    model: Tensor
    drafter: Tensor

    @property
    def p(self) -> Tensor:
        return self.model.double().softmax(0)

    @property
    def q(self) -> Tensor:
        return self.drafter.double().softmax(0)

    @property
    def distance(self) -> float:
        """Total variation distance of p and q."""
        return float((self.p - self.q).abs().sum() / 2)

    @property
    def best(self) -> float:
        return float(torch.minimum(self.p, self.q).sum())

    @property
    def bound(self) -> float:
        return (1 - self.distance) / (1 + self.distance)

    @property
    def unshared(self) -> float:
        return float((self.p * self.q).sum())

    @property
    def shared(self) -> float:
        """Exact rate with shared noise: the sum over i of 1 / sum over j of max(pj / pi, qj / qi).

        With E exponential, argmax(log p + Gumbel) is argmin(E / p). Both argmins are i where every other
        E[j] is at least E[i] times that maximum.
        """
        p, q = self.p, self.q
        ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
        return float((1 / ratios.sum(1)).sum())

    def measured(self, draws: int, *, shared: bool = True) -> float:
        """Return the share of `draws` in which the engine's sampler draws the same id from both."""
        same = 0
        for start in range(0, draws, ROWS):
            count = min(ROWS, draws - start)
            same += sum(
                a == b
                for a, b in zip(
                    _drawn(self.model, 1, start, count),
                    _drawn(self.drafter, 1 if shared else 2, start, count),
                    strict=True,
                )
            )
        return same / draws


def _drawn(logits: Tensor, seed: int, start: int, count: int) -> list[int]:
    rows = [SampleRow(PLAIN, seed, 0, start + i) for i in range(count)]
    return [draw.id for draw in sample_rows(logits[None], SamplePlan(rows, [0] * count))]


def pairs(vocab_size: int = VOCAB) -> list[Pair]:
    """Return peaked and flat pairs, other temperatures, drafters with errors, and unrelated pairs."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(vocab_size, generator=generator)

    model, flat, peaked = normal(2.0), normal(0.3), normal(3.0)
    errors = (0.25, 0.5, 1.0, 2.0)
    return [
        Pair("itself", model, model),
        Pair("temperature 1 and 1.5", model, model / 1.5),
        Pair("temperature 1 and 0.5", model, model / 0.5),
        Pair("temperature 0.5 and 1.5", model / 0.5, model / 1.5),
        *[Pair(f"logits off by {error}", model, model + normal(error)) for error in errors],
        Pair("two flat ones", flat, normal(0.3)),
        Pair("two peaked ones, logits off by 1.5", peaked, peaked + normal(1.5)),
        Pair("peaked and flat", peaked, flat),
        Pair("two strangers", model, normal(2.0)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--plot", type=Path, help="where to draw it; needs matplotlib")
    args = parser.parse_args()
    print(f"{VOCAB} tokens, {args.draws:,} draws of each pair\n")
    print(
        "| model and drafter | TV | own noise: sum of pq | bound | shared noise | exactly | limit |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    measured = {}
    for pair in pairs():
        measured[pair] = pair.measured(args.draws)
        numbers = (pair.distance, pair.unshared, pair.bound, measured[pair], pair.shared, pair.best)
        print(f"| {pair.name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
    if args.plot is not None:
        plot(measured, args.plot)


def plot(measured: dict[Pair, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    distances = torch.linspace(0, 1, 101)
    axes.plot(distances, 1 - distances, label="limit: sum of min(p, q)", linestyle="--")
    bound = (1 - distances) / (1 + distances)
    axes.plot(distances, bound, label="bound: (1 - TV) / (1 + TV)", linestyle=":")
    distance = [pair.distance for pair in measured]
    axes.plot(distance, list(measured.values()), "o", label="shared noise, measured")
    axes.plot(distance, [pair.unshared for pair in measured], "x", label="own noise: sum of pq")
    axes.set(xlabel="TV of model and drafter", ylabel="accepted drafts", ylim=(0, 1.05))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
