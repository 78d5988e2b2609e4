"""A plan and its prediction as text, also compared with measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from verbatim.placement.offload.choice import Offload, Percents
from verbatim.placement.offload.cost import Forecast


def amount(nbytes: float) -> str:
    """Format bytes, such as "1.24 GB"."""
    for unit in ("bytes", "KB", "MB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} GB" if nbytes < 999.5 else f"{nbytes:,.0f} GB"


def duration(seconds: float) -> str:
    """Format seconds, such as "350 ms"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def shares(percents: Percents) -> str:
    """Format shares, such as "20 gpu, 50 cpu, 30 disk", without zeros."""
    named = zip(percents, ("gpu", "cpu", "disk"), strict=True)
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
            f"{plan.weights[0]:.3g}% of the weights and {plan.kv[0]:.3g}% of K and V lie on the GPU; the "
            f"others are copied to it in each step, in {duration(step.bus_s)}."
        )
    if plan.kv[2]:
        text.append(
            f"K and V of {prediction.sequences} sequences of {tokens} tokens take "
            f"{amount(plan.kv_bytes)}; {plan.kv[2]:.3g}% of their layers are on the disk, since more "
            "sequences that share each reading are worth more than that costs."
            if offload.kv is None
            else f"{plan.kv[2]:.3g}% of the layers of K and V are on the disk, as asked for."
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


# By the end of a fact's name: how its numbers are shown, and what its label ends with.
_UNITS: Mapping[str, tuple[Callable[[float], str], str]] = {
    "_per_s": ("{:.3g}".format, "/s"),
    "_bytes": (amount, ""),
    "_s": (duration, ""),
    "": ("{:.3g}".format, ""),
}


def compared(facts: Mapping[str, Mapping[str, float | None]]) -> str:
    """Format predictions beside measurements, as one table.

    Args:
        facts: as `Offloaded.stats` has them: name to {"predicted", "actual"}; the end of a name is its unit.
    """
    rows: list[tuple[str, ...]] = [("", "predicted", "actual", "actual/predicted")]
    for name, both in facts.items():
        end = next(end for end in _UNITS if name.endswith(end))
        show, unit = _UNITS[end]
        if name.startswith("read_") and end == "_per_s":
            show = lambda value: f"{amount(value)}/s"  # noqa: E731
        predicted, actual = both["predicted"], both["actual"]
        ratio = "" if not predicted or actual is None else f"{actual / predicted:.2f}"
        cells = ("" if value is None else show(value) for value in (predicted, actual))
        rows.append((name.removesuffix(end).replace("_", " ") + unit, *cells, ratio))
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([f"{name:<{first}}", *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    )
