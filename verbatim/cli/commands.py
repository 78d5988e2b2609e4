"""All commands, as one typer application.

No command imports torch before it has checked its options, so `verbatim --help` and a mistyped option
respond at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from verbatim._version import __version__
from verbatim.cli import batch, bench, chat, cluster, generate, info, plan, score, serve, verify
from verbatim.cli.interrupts import EXIT_BROKEN_PIPE
from verbatim.cli.terminal import note, reported


class _Commands(TyperGroup):
    """The commands, with their errors as one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


app = typer.Typer(
    name="verbatim",
    cls=_Commands,
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


def run() -> int:
    """Run the command line and return the exit status."""
    try:
        app(prog_name="verbatim")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's status is 1
            return EXIT_BROKEN_PIPE
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except OSError as error:  # the help, on a full disk
        note(f"verbatim: can't write to stdout: {error.strerror or error}")
        return 1
    return 0
