"""The table as a page of the documentation."""

from __future__ import annotations

import datetime
from pathlib import Path

from benchmarks.peers.run import Run, device
from benchmarks.peers.table import markdown, rows_of


def write_markdown(run: Run, file: Path) -> None:
    """Write a page with device, date, versions, settings, table and remarks."""
    plan, shape = run.plan, run.shape
    experts = f", {shape.experts_per_token} of {shape.experts} experts a token"
    date = datetime.date.fromtimestamp(run.begun).isoformat()
    lines = [
        f"# Verbatim and its peers: {device()}, {date}",
        "",
        f"`python -m benchmarks.peers`: {shape.layers} layers of width {shape.hidden}"
        f"{experts if shape.experts > 1 else ''}, {shape.vocab:,} ids, "
        f"random weights; {plan.threads} threads, {plan.kv} KV, {plan.rounds} rounds, medians; tokens a "
        f"second. In the same run, this machine had {run.machine_line()}.",
        "",
        markdown(rows_of(run.measured, run.systems)),
        "",
        "The limit is the time to read weights and KV once, or to multiply, whichever is longer, "
        "by what the machine showed in the same rounds; of a layer's experts, as many as rows "
        "that choose at random. The goal of decode is 1.2 times the best peer or 90 % of the "
        "limit, the less of both; that of prefill is the best peer. Systems with 8-bit "
        "activations can exceed a limit that is measured in bf16.",
        "",
        *(f"- {name} {about['version']}: {about['settings']}" for name, about in run.about.items()),
        *(f"- {line.strip()}" for line in run.remarks),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
