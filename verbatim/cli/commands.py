"""All commands, as one typer application.

To respond at once to `verbatim --help` and mistyped options, a command is imported when it is called, and
imports torch only after it has checked its options.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from verbatim._version import __version__
from verbatim.cli.interrupts import EXIT_BROKEN_PIPE
from verbatim.cli.terminal import note, reporting_errors

# The first sentence of each command's help. A command is in the module of the same name.
COMMANDS = {
    "generate": "Complete one prompt: an argument, a file, token ids, or stdin.",
    "chat": "Chat with a model. Sampling defaults come from the model's generation_config.json.",
    "serve": "Serve a model: OpenAI's API, Verbatim's own endpoints, and a playground at /.",
    "batch": "Answer a file of requests for /v1/completions, /v1/chat/completions or /v1/responses.",
    "score": "Print the log-prob of each token given the tokens before it, at temperature 1, and the "
    "perplexity.",
    "verify": "Run the same requests alone, batched, chunked, evicted and so on, and compare them bit for "
    "bit.",
    "bench": "Measure prefill, decode and a mixed workload, in turns with other systems.",
    "info": "Show a model's size, numerics key and default sampling parameters.",
    "plan": "Show how a model larger than memory would run, without loading it.",
    "cluster": "Run a model over several machines (Ray starts the processes).",
}


class _Commands(TyperGroup):
    """Imports a command when it is called; reports an error as one line and an exit status."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        if stub is None or stub.name is None:
            return name, stub, rest
        command = getattr(import_module(f"verbatim.cli.{stub.name}"), stub.name)
        if not isinstance(command, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command()(command)
            command = single
        return name, get_command(command), rest

    def invoke(self, ctx: Any) -> Any:
        with reporting_errors():
            return super().invoke(ctx)


app = typer.Typer(
    name="verbatim",
    cls=_Commands,
    help="Generate text from any causal language model: the same tokens everywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


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
    except OSError as error:  # printing the help, for example on a full disk
        note(f"verbatim: can't write to stdout: {error.strerror or error}")
        return 1
    return 0
