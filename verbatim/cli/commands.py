"""The `verbatim` command: one file per command.

Nothing here imports torch before a command has checked its options, so `verbatim --help` and a mistyped
option respond at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from verbatim._version import __version__
from verbatim.cli import batch, bench, chat, cluster, generate, info, plan, score, serve, verify

app = typer.Typer(
    name="verbatim",
    help="Generate text from any causal language model: the same tokens everywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(batch.batch)
app.command()(score.score)
app.command()(verify.verify)
app.command()(bench.bench)
app.command()(info.info)
app.command()(plan.plan)
app.add_typer(cluster.cluster)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verbatim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Generate text from any causal language model: the same tokens everywhere."""


def main() -> None:
    """Run the console script.

    The process exits as soon as its output is flushed: tearing torch down takes a second.
    """
    status = 0
    try:
        app(prog_name="verbatim")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except OSError as error:  # the help, on a full disk
        status = 1
        typer.echo(f"verbatim: can't write to stdout: {error.strerror or error}", err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            status = status or 1
    os._exit(status)
