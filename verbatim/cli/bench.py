"""`verbatim bench`: measure a model's speed, compared with other systems and the machine's limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.bench.converted import CONVERTED, installed
from verbatim.bench.plan import BenchPlan
from verbatim.cli.options import MODEL, Option, fields_of, given_options, numbers, with_options
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import WrongUsage, note
from verbatim.errors import InvalidRequest, ModelError
from verbatim.options import default_threads

if TYPE_CHECKING:
    from verbatim.api.llm import LLM
    from verbatim.bench.run import BenchReport

_WORKLOAD_PANEL, _PEERS_PANEL = "Workload", "Other systems"


WORKLOAD = (
    *fields_of(
        BenchPlan(),
        _WORKLOAD_PANEL,
        "rows contexts prefills",
        "N,N,...",
        read=numbers,
        what="integers of 1 or more, such as 1,8,32",
    ),
    *fields_of(BenchPlan(), _WORKLOAD_PANEL, "mixed rounds steps"),
)
OTHERS = (
    Option("peers", bool, _PEERS_PANEL, "Measure transformers on the same model.", default=True),
    Option("gguf", str, _PEERS_PANEL, "GGUF file of the same model, to measure llama.cpp.", "FILE"),
    Option(
        "openvino",
        str,
        _PEERS_PANEL,
        "optimum export of the same model, to measure OpenVINO.",
        "FOLDER",
    ),
)


@with_options(*WORKLOAD, *OTHERS, *MODEL, *OFFLOAD, *CLUSTER, positional_model=True)
def bench(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        str | None, typer.Option(help="Also write a chart: .png, .svg or .pdf.", metavar="FILE")
    ] = None,
    **values: Any,
) -> None:
    """Measure prefill, decode and a mixed workload, in turns with other systems.

    Compare ratios rather than speeds: other work on the machine slows all systems alike. The limit is the
    time to read weights and KV cache once, or to compute the matrix products, measured in the same turns.
    """
    try:
        plan = BenchPlan(**given_options(values, WORKLOAD))
    except InvalidRequest as error:
        raise WrongUsage(f"--{error}") from None
    _check(plan, plot, values)
    placement = placement_of(values)
    if values["max_sequences"] is None:
        values["max_sequences"] = max(plan.rows, default=1)
    with opened_llm(values, placement) as llm:
        report = _measure(llm, plan, values, placement is None and values["peers"] is not False)
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    if plot is not None:
        from verbatim.bench.run import plot as draw

        try:
            draw(report, Path(plot))
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"--plot {plot}: {error}") from None


def _check(plan: BenchPlan, plot: str | None, values: dict[str, Any]) -> None:
    """Reject options that would otherwise fail after minutes."""
    if not (plan.prefills or (plan.rows and plan.contexts) or plan.mixed):
        raise WrongUsage(
            "nothing to measure: no prefills, no rows with contexts, no mixed requests"
        )
    if plot is not None:
        if Path(plot).suffix not in (".png", ".svg", ".pdf"):
            raise WrongUsage(f"--plot {plot}: must end in .png, .svg or .pdf")
        if not Path(plot).parent.is_dir():
            raise WrongUsage(f"--plot {plot}: there is no such folder")
        if not installed("matplotlib"):
            raise WrongUsage("--plot needs matplotlib: pip install '.[bench]'")
    for kind in CONVERTED:
        option, path = f"--{kind.option}", values[kind.option]
        if path is not None and not installed(kind.package):
            raise WrongUsage(f"{option} {path}: the package {kind.package} is not installed")
        if path is not None and not Path(path).exists():
            raise WrongUsage(f"{option} {path}: there is no such file or folder")


def _measure(
    llm: LLM, plan: BenchPlan, settings: dict[str, Any], with_transformers: bool
) -> BenchReport:
    import torch

    from verbatim.bench.machine import LimitMeter, Needs
    from verbatim.bench.peers import Ours, Peer, Transformers
    from verbatim.bench.run import measure
    from verbatim.storyteller import path

    info = llm.info()
    dtype = getattr(torch, info["dtype"])
    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    peers, remarks = list[Peer](), list[str]()
    if with_transformers:
        names = ("revision", "trust_remote_code")
        options = {name: settings[name] for name in names if settings[name] is not None}
        try:
            peers.append(Transformers(settings["model"] or str(path()), dtype, **options))
        except ModelError as error:
            remarks.append(str(error))
    for kind in CONVERTED:
        if (file := settings[kind.option]) is not None:
            peers.append(kind(file, default_threads()))
        elif installed(kind.package):
            remarks.append(f"{kind.name} is installed: use --{kind.option} to measure it")
    facts = ("architecture", "dtype", "numerics_key", "instruction_set")
    note(f"{info['model']}: {', '.join(str(info[name]) for name in facts)}")
    needs = Needs.of(llm.engine.config, info)
    report = measure(
        plan, Ours(llm), peers, LimitMeter(dtype), needs, lambda what: note(f"measuring {what}")
    )
    report.remarks[:0] = remarks
    return report


def _print(report: BenchReport) -> None:
    from rich.console import Console
    from rich.table import Table

    ours, *others = report.systems
    table = Table(box=None, pad_edge=False)
    for head in ("", f"{ours}, tokens/s", "of the limit"):
        table.add_column(head, justify="left" if not head else "right")
    for name in others:
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    for cell in report.cells:
        share = cell.fraction(ours)
        entries = [_shown(cell.speed(ours)), "" if share is None else f"{share:.0%}"]
        for name in others:
            ratio = cell.ratio(name)
            entries += [_shown(cell.speed(name)), "" if ratio is None else f"{ratio:.2f}"]
        table.add_row(cell.name, *entries)
    console = Console()
    console.print(table)
    if report.limits:
        console.print(
            f"limit: memory reads {report.bandwidth / 1e9:.1f} GB/s, products run at "
            f"{report.flops / 1e12:.2f} TFLOP/s (medians of the run)",
            highlight=False,
        )
    if report.mixed is not None:
        count, tokens, seconds = report.mixed
        console.print(
            f"mixed: {count} requests, {tokens:,} new tokens in {seconds:.1f} s, "
            f"{tokens / seconds:,.0f} tokens/s",
            highlight=False,
        )
    for remark in report.remarks:
        console.print(remark, highlight=False, markup=False)


def _shown(speed: float | None) -> str:
    if speed is None:
        return ""
    return f"{speed:.1f}" if speed < 99.5 else f"{speed:,.0f}"
