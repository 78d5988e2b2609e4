"""What forwards really took, beside what was predicted for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.batch import Batch
from verbatim.placement.offload.forecast import Forecast


@dataclass(slots=True)
class _Kind:
    """All forwards of one kind: sums."""

    count: int = 0
    seconds: float = 0.0
    compute_s: float = 0.0
    weight_bytes: int = 0
    sequences: int = 0
    rows: int = 0
    logit_rows: int = 0
    context: float = 0.0  # of a row on average, times forwards


@dataclass(slots=True)
class Measured:
    """Takes note of every forward.

    Attributes:
        steps: those with a single row of each sequence.
        prompts: all others.
        sample_s: of all draws.
        tokens, draws: tokens drawn, and the number of times that some were.
    """

    steps: _Kind = field(default_factory=_Kind)
    prompts: _Kind = field(default_factory=_Kind)
    sample_s: float = 0.0
    tokens: int = 0
    draws: int = 0

    def add_forward(
        self, batch: Batch, seconds: float, compute_s: float, weight_bytes: int
    ) -> None:
        """One more.

        Args:
            weight_bytes: that it read.
        """
        kind = self.steps if batch.num_tokens == batch.num_sequences else self.prompts
        kind.count += 1
        kind.seconds += seconds
        kind.compute_s += compute_s
        kind.weight_bytes += weight_bytes
        kind.sequences += batch.num_sequences
        kind.rows += batch.num_tokens
        kind.logit_rows += batch.logit_rows.shape[0]
        kind.context += float(batch.positions.sum()) / max(1, batch.num_tokens) + 1

    def beside(self, forecast: Forecast, peaks: Mapping[str, int]) -> dict[str, Any]:
        """Everything as {"predicted", "actual"}, predicted for what really ran: for as many sequences, of
        as many tokens, as the average forward had. None where nothing ran.

        Args:
            peaks: bytes in memory, by kind.
        """
        found: dict[str, dict[str, float | None]] = {}

        def note(name: str, predicted: float | None, actual: float | None) -> None:
            found[name] = {"predicted": predicted, "actual": actual}

        total = self.sample_s
        predicted_total = 0.0
        for name, kind in (("decode", self.steps), ("prompt", self.prompts)):
            if not kind.count:
                continue
            n = kind.count
            step = forecast.step(
                round(kind.sequences / n),
                max(1, round(kind.rows / n)),
                kind.context / n,
                round(kind.logit_rows / n),
            )
            total += kind.seconds
            predicted_total += n * step.seconds
            note(f"{name}_weights_bytes", step.weight_bytes, kind.weight_bytes / n)
            note(f"{name}_compute_s", step.compute_s, kind.compute_s / n)
            note(f"{name}_step_s", step.seconds, kind.seconds / n)
            if step.weight_bytes:
                io_rate = step.weight_bytes / step.seconds
                note(f"read_in_{name}_per_s", io_rate, kind.weight_bytes / kind.seconds)
        if self.tokens:
            drawn_s = self.tokens * forecast.shape.vocab * forecast.machine.sample_s
            drawn_s += self.draws * forecast.machine.unit_s
            note("sampling_s", drawn_s, self.sample_s)
            note("tokens_per_s", self.tokens / (predicted_total + drawn_s), self.tokens / total)
        planned = forecast.plan.memory
        for kind_name, nbytes in peaks.items():
            if nbytes or planned.get(kind_name):
                note(f"{kind_name}_bytes", planned.get(kind_name, 0), nbytes)
        return found
