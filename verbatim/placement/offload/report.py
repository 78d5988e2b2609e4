"""Reports of a plan with its prediction, and of predictions beside measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.batch import Batch
from verbatim.placement.offload.choice import TIERS, Offload, Percents
from verbatim.placement.offload.cost import Forecast, Load


def amount(nbytes: float) -> str:
    """Format bytes, such as "1.24 GB"."""
    return _in_units(nbytes, "bytes", "KB", "MB", "GB")


def duration(seconds: float) -> str:
    """Format seconds, such as "350 ms"."""
    return _in_units(seconds * 1e6, "us", "ms", "s")


def _in_units(value: float, *units: str) -> str:
    """Format an amount of the first unit in the largest that fits; each is a thousand of the one before."""
    *smaller, largest = units
    for unit in smaller:
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {largest}" if value < 999.5 else f"{value:,.0f} {largest}"


def shares(percents: Percents) -> str:
    """Format shares, such as "20% gpu, 50% cpu, 30% disk", without zeros."""
    named = zip(percents, TIERS, strict=True)
    return ", ".join(f"{share:.3g}% {tier}" for share, tier in named if share >= 0.05)


def sentences(forecast: Forecast, offload: Offload) -> tuple[str, ...]:
    """Explain a plan in sentences."""
    plan, prediction = forecast.plan, forecast.prediction
    step, tokens, text = prediction.decode, sum(plan.workload), []
    if offload.gpu is None and offload.cpu is None and plan.budget is not None:
        text.append(
            f"No budget was given, so it is 60% of the memory that is available, {amount(plan.budget)}."
        )
    if step.weight_bytes:
        experts = plan.memory.get("experts", 0)
        of_them = f", and {amount(experts)} hold the experts used most" if experts else ""
        text.append(
            f"Of {amount(forecast.shape.nbytes)} of weights, {amount(plan.memory.get('weights', 0))} stay in "
            f"memory{of_them}; {amount(step.weight_bytes)} are read in each step, once for all "
            f"{plan.block_size} sequences."
        )
    else:
        text.append("All weights that a step reads as a whole stay in memory.")
    if step.bus_s:
        text.append(
            f"{plan.weights[0]:.3g}% of the weights and {plan.kv[0]:.3g}% of K and V are on the "
            f"GPU; the others are copied to it in each step, in {duration(step.bus_s)}."
        )
    if plan.kv[2]:
        text.append(
            f"K and V of {prediction.sequences} sequences of {tokens} tokens take "
            f"{amount(plan.kv_bytes)}; {plan.kv[2]:.3g}% of their layers are on the disk, since "
            "sharing each read among more sequences gains more than this costs."
            if offload.kv is None
            else f"{plan.kv[2]:.3g}% of the layers of K and V are on the disk, as requested."
        )
    else:
        text.append(
            f"K and V of {prediction.sequences} sequences of {tokens} tokens fit into memory, which "
            f"holds {amount(plan.kv_bytes)} of them."
        )
    return tuple(text)


def plan_text(forecast: Forecast) -> str:
    """Format the plan, the prediction and the reasons for a terminal."""
    plan, prediction, step = forecast.plan, forecast.prediction, forecast.prediction.decode
    in_memory = [(f"  {kind}", amount(nbytes)) for kind, nbytes in plan.memory.items()]
    budget = "as much as it takes" if plan.budget is None else f"of {amount(plan.budget)}"
    rows = [
        ("weights", shares(plan.weights)),
        ("K and V", shares(plan.kv)),
        ("activations", shares(plan.activations)),
        ("sequences at once", f"{plan.batch_size} x {plan.micro_batches} micro-batches"),
        ("rows of a forward", f"{plan.max_batch_tokens}, {plan.micro_tokens} at once"),
        ("memory", f"{amount(plan.memory_bytes)} {budget}"),
        *in_memory,
        ("predicted", f"for {prediction.sequences} sequences at once"),
        ("  limited by", prediction.limit),
        ("  weights read in a step", amount(step.weight_bytes)),
        ("  K and V moved in a step", amount(step.kv_bytes)),
        ("  disk time of a step", duration(step.io_s)),
        *([("  bus time of a step", duration(step.bus_s))] if step.bus_s else []),
        ("  compute time of a step", duration(step.compute_s)),
        ("  step", duration(step.seconds + prediction.sample_s)),
        ("  prompts", duration(prediction.prefill_s)),
        ("  new tokens/s", f"{prediction.tokens_per_s:.3g}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), "", *plan.reasons])


def plan_line(forecast: Forecast) -> str:
    """Format the plan in one line."""
    plan, prediction = forecast.plan, forecast.prediction
    return (
        f"offload: weights {shares(plan.weights)}; K and V {shares(plan.kv)}; {plan.block_size} sequences "
        f"at once; {amount(plan.memory_bytes)} of memory; {prediction.tokens_per_s:.3g} tokens/s predicted, "
        f"limited by {prediction.limit}"
    )


@dataclass(slots=True)
class Measured:
    """Sums of the measurements of all forwards.

    Attributes:
        steps: sums over decode forwards (a single row per sequence), by name.
        prompts: sums over all other forwards, by name.
        sample_s: seconds of all sampling.
        tokens, draws: number of sampled tokens, and of sampling calls.
    """

    steps: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    sample_s: float = 0.0
    tokens: int = 0
    draws: int = 0

    def add_forward(
        self, batch: Batch, seconds: float, compute_s: float, weight_bytes: int
    ) -> None:
        """Add a forward, which has read `weight_bytes` bytes of weights."""
        kind = self.steps if batch.num_tokens == batch.num_sequences else self.prompts
        sums: dict[str, Any] = dict(
            forwards=1,
            seconds=seconds,
            compute_s=compute_s,
            weight_bytes=weight_bytes,
            sequences=batch.num_sequences,
            rows=batch.num_tokens,
            logit_rows=batch.logit_rows.shape[0],
            context=float(batch.positions.sum()) / max(1, batch.num_tokens) + 1,  # mean of the rows
        )
        kind.update(sums)

    def compare(self, forecast: Forecast, peaks: Mapping[str, int]) -> dict[str, Any]:
        """Return {"predicted", "actual"} by name; predictions are for forwards of average size.

        Args:
            peaks: peak bytes in memory, by kind.
        """
        facts: dict[str, tuple[float | None, float | None]] = {}
        total, predicted_total = self.sample_s, 0.0
        for name, sums in (("decode", self.steps), ("prompt", self.prompts)):
            n = sums["forwards"]
            if not n:
                continue
            mean = {field_name: value / n for field_name, value in sums.items()}
            sequences, rows, logits = (
                round(mean[key]) for key in ("sequences", "rows", "logit_rows")
            )
            step = forecast.step(Load(sequences, max(1, rows), mean["context"], logits))
            total += sums["seconds"]
            predicted_total += n * step.seconds
            facts[f"{name}_weights_bytes"] = step.weight_bytes, mean["weight_bytes"]
            facts[f"{name}_compute_s"] = step.compute_s, mean["compute_s"]
            facts[f"{name}_step_s"] = step.seconds, mean["seconds"]
            if step.weight_bytes:
                io_rate = step.weight_bytes / step.seconds
                facts[f"read_in_{name}_per_s"] = io_rate, mean["weight_bytes"] / mean["seconds"]
        if self.tokens:
            drawn_s = forecast.sample_s(self.tokens, self.draws)
            facts["sampling_s"] = drawn_s, self.sample_s
            facts["tokens_per_s"] = self.tokens / (predicted_total + drawn_s), self.tokens / total
        planned = forecast.plan.memory
        for kind, nbytes in peaks.items():
            if nbytes or planned.get(kind):
                facts[f"{kind}_bytes"] = planned.get(kind, 0), nbytes
        return {name: {"predicted": p, "actual": a} for name, (p, a) in facts.items()}


# By suffix of a fact's name: the format of its values, and the suffix of its label.
_UNITS: Mapping[str, tuple[Callable[[float], str], str]] = {
    "_per_s": ("{:.3g}".format, "/s"),
    "_bytes": (amount, ""),
    "_s": (duration, ""),
    "": ("{:.3g}".format, ""),
}


def comparison_table(facts: Mapping[str, Mapping[str, float | None]]) -> str:
    """Format predictions beside measurements, as one table.

    Args:
        facts: {"predicted", "actual"} by name, as in `Offloaded.stats`; the suffix of a name gives its unit.
    """
    rows: list[tuple[str, ...]] = [("", "predicted", "actual", "actual/predicted")]
    for name, values in facts.items():
        suffix = next(suffix for suffix in _UNITS if name.endswith(suffix))
        show, unit = _UNITS[suffix]
        if name.startswith("read_") and suffix == "_per_s":
            show = lambda value: f"{amount(value)}/s"  # noqa: E731
        predicted, actual = values["predicted"], values["actual"]
        ratio = "" if not predicted or actual is None else f"{actual / predicted:.2f}"
        cells = ("" if value is None else show(value) for value in (predicted, actual))
        rows.append((name.removesuffix(suffix).replace("_", " ") + unit, *cells, ratio))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([f"{name:<{first}}", *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    )
