"""The `verbatim` command: one file a command.

Nothing here imports torch before a command has checked what it was given: `verbatim --help` and a
mistyped option answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from verbatim._version import __version__
from verbatim.cli import chat, generate, info

app = typer.Typer(
    name="verbatim",
    help="Generate text from any causal language model: the same words everywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(info.info)


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
    """Generate text from any causal language model: the same words everywhere."""


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="verbatim")
