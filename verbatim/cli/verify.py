"""`verbatim verify`: test bit-identical outputs for a model on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.options import ADAPTERS, MODEL, adapters_of, given_options, prepare, with_options
from verbatim.cli.terminal import EXIT_ERROR, note, write_json

if TYPE_CHECKING:
    from verbatim.verify import Report, Row

# The schedules set the other options themselves.
_OPTION_NAMES = (
    "model config revision trust_remote_code dtype device deterministic num_threads max_length kv_dtype "
    "quantization fused"
).split()
_OPTIONS = tuple(option for option in MODEL if option.name in _OPTION_NAMES)
_WIDTH = 150  # of the table, if stdout is not a terminal


@with_options(*_OPTIONS, ADAPTERS, positional_model=True)
def verify(
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the longest completions. Default: 16.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and draws.", min=0)] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only this schedule. Repeatable.", metavar="ROW"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **values: Any,
) -> None:
    """Run the same requests alone, batched, chunked, evicted and so on, and compare them bit for bit.

    Schedules: again, batched, reordered, prefix-hit, streamed, threads, chunked, evicted, drafted,
    unfused, int8-kv, offloaded, two-stages. The exit status is 1 if one differs or fails.
    """
    settings = given_options(values, _OPTIONS)
    if adapters := adapters_of(values):
        settings["adapters"] = adapters
    if tokens is not None:
        settings["tokens"] = tokens
    prepare()
    from transformers.utils import logging

    from verbatim import verify as package

    logging.disable_progress_bar()  # weights are loaded many times

    with _shown(
        package.NAMES if not only else [name for name in package.NAMES if name in only]
    ) as show:
        report = package.verify(
            settings.pop("model", None), seed=seed, only=only or None, on_row=show, **settings
        )
    if as_json:
        write_json(report.as_dict())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(EXIT_ERROR)


@contextmanager
def _shown(names: Any) -> Iterator[Callable[[Row], object]]:
    """Show the running schedule on a terminal's last line, and failed rows above it."""
    from rich.console import Console

    console, pending = Console(stderr=True), ["alone", *names]
    if not console.is_terminal:
        yield lambda row: None
        return
    with console.status("opening the model") as status:

        def show(row: Row) -> None:
            del pending[0]
            if row.status in ("differs", "failed"):
                console.print(f"{row.name} {row.status}", style="red", highlight=False)
            status.update(pending[0] if pending else "done")

        yield show


def _print(report: Report) -> None:
    """Print the table, the differences and the verdict."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(title=escape(f"{report.model}, {report.numerics_key}"), title_justify="left")
    for name in ("schedule", "tokens", "log-probs"):
        table.add_column(name, no_wrap=True)
    for name in ("largest", "compared", "forwards", "rows each", "at once"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("description", ratio=1)
    for row in report.rows:
        table.add_row(*(Text(cell, style=style) for cell, style in _cells(row)))
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=_WIDTH)
    console.print(table)
    for row in report.of("differs", "failed"):
        where = f" ({', '.join(row.differing)})" if row.differing else ""
        sys.stdout.write(f"{row.name}{where}: {row.first_difference or row.note}\n")
    sys.stdout.write(report.verdict() + "\n")
    sys.stdout.flush()
    if not report.ok and report.of("differs"):
        note("to reproduce a difference, use the same --seed and --only")


def _cells(row: Row) -> list[tuple[str, str]]:
    def word(equal: bool | None) -> tuple[str, str]:
        if equal is None:
            bad = row.status == "failed"
            return row.status, "bold red" if bad else "dim"
        return ("equal", "green") if equal else ("differ", "bold red")

    ran, largest = bool(row.forwards), row.largest_difference
    return [
        (row.name, "bold"),
        word(row.ids_equal),
        word(row.logprobs_equal) if row.logprobs_equal is not None else ("", ""),
        ("" if largest is None else f"{largest:.3g}", ""),
        (f"{row.num_tokens:,}" if row.num_tokens else "", ""),
        (f"{row.forwards:,}" if ran else "", ""),
        (f"{row.rows_per_forward:.1f}" if ran else "", ""),
        (str(row.sequences_at_once) if ran else "", ""),
        ("; ".join(filter(None, (row.what, row.note))), ""),
    ]
