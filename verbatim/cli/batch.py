"""`verbatim batch`: answer a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.interrupts import EXIT_INTERRUPTED
from verbatim.cli.options import MODEL, pop_model, with_options
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import EXIT_ERROR, WrongUsage, need_packages, note
from verbatim.errors import VerbatimError

if TYPE_CHECKING:
    from verbatim.serve.batch import BatchRun
    from verbatim.serve.records import Records

_PROGRESS_S = 30.0  # between progress lines, if stderr is not a terminal


@with_options(*MODEL, *OFFLOAD, *CLUSTER)
def batch(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] IN.jsonl OUT.jsonl",
            help="The model; the request file, with custom_id, method, url and body per line; the answer "
            "file, which is resumed if it exists.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Model name in the requests.")] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            help="Maximum requests read and not yet answered. Default: twice --max-sequences.",
            min=1,
        ),
    ] = None,
    **values: Any,
) -> None:
    """Answer a file of requests for /v1/completions, /v1/chat/completions or /v1/responses.

    Answers are written in order of completion, one per line. An interrupted run is resumed by the same
    command. The exit status is 1 if an answer in OUT is an error.
    """
    if len(arguments) < 2:
        raise WrongUsage("missing argument OUT.jsonl")
    source, target = pop_model(arguments, 2, values)
    if "-" in (source, target):
        raise WrongUsage("-: must be a regular file, so that a batch can be resumed")
    need_packages("batch", "prometheus_client", "pydantic", "starlette")
    from verbatim.serve.records import Records

    placement = placement_of(values)
    with Records(target, source) as records, opened_llm(values, placement) as llm:
        import asyncio

        from verbatim.serve.batch import BatchRun

        run = BatchRun(llm, records, name=name, in_flight=in_flight)
        current = run.service.name, run.service.fingerprint
        if records.first_identity not in (None, current):
            before = " with ".join(records.first_identity or ())
            note(f"{records.path} was started by {before}; resuming with {' with '.join(current)}")
        resume = "the same command resumes there"
        try:
            with _shown(run) as on_record:
                asyncio.run(run.run(on_record))
        except KeyboardInterrupt:
            note(f"verbatim: interrupted; {_count(records)} in {target}; {resume}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except VerbatimError as error:
            raise VerbatimError(f"{error}; {_count(records)} in {target}; {resume}") from error
    errors = f", {records.num_errors:,} of them errors" if records.num_errors else ""
    before = f" ({run.num_skipped:,} from earlier runs)" if run.num_skipped else ""
    speed = f"{run.num_tokens:,} tokens in {run.seconds:.2f} s ({_speed(run)})"
    note(f"{_count(records)} in {records.path}{errors}{before}; {speed}")
    if records.num_errors:
        raise typer.Exit(EXIT_ERROR)


def _count(records: Records) -> str:
    number = records.num_records
    return "1 line is" if number == 1 else f"{number:,} lines are"


def _speed(run: BatchRun) -> str:
    return f"{run.num_tokens / max(run.seconds, 1e-9):,.0f} tokens/s"


@contextmanager
def _shown(run: BatchRun) -> Iterator[Callable[[], object]]:
    """Show a progress bar on a terminal, or periodic lines elsewhere; yield the per-record callback."""
    from tqdm import tqdm

    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    form = f"{'{bar:20} ' * is_terminal}{{percentage:3.0f}}%: {{desc}}, {{remaining}} left"
    with tqdm(
        total=run.num_bytes,
        file=sys.stderr if is_terminal else io.StringIO(),
        leave=False,
        bar_format=form,
        mininterval=0.1 if is_terminal else _PROGRESS_S,
        miniters=0,  # otherwise tqdm adapts it to the lines of earlier runs
        smoothing=0,
    ) as bar:

        def advance() -> None:
            errors = run.records.num_errors
            parts = [f"{run.num_done + run.num_skipped:,} lines"]
            parts += [f"{errors:,} error{'' if errors == 1 else 's'}"] if errors else []
            bar.set_description_str(", ".join([*parts, _speed(run)]), refresh=False)
            bar.initial = run.bytes_skipped  # excluded from the speed
            if bar.update(run.bytes_done - bar.n) and not is_terminal:
                note(str(bar))

        yield advance
