"""`verbatim generate`: complete one prompt."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.interrupts import EXIT_INTERRUPTED
from verbatim.cli.options import (
    ADAPTERS,
    DEFAULT_MAX_TOKENS,
    GENERATE_ONLY,
    MODEL,
    SAMPLING,
    adapters_of,
    given_options,
    pop_model,
    seeded,
    with_options,
)
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import WrongUsage, note, read_stream, write_json
from verbatim.common.files import read_file, read_stdin
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.api.llm import LLM
    from verbatim.core import Result


@with_options(*SAMPLING, *GENERATE_ONLY, *MODEL, ADAPTERS, *OFFLOAD, *CLUSTER)
def generate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT]", help="The text to complete, and the model."),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("--file", metavar="PATH", help="Read the prompt from a file; - is stdin."),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option("--ids", metavar="IDS", help='Token ids of the prompt, such as "5 17 9".'),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as one JSON object.")
    ] = False,
    **values: Any,
) -> None:
    """Complete one prompt: an argument, a file, token ids, or stdin.

    Text is written to stdout as it is generated. The last line, with counts and speed, goes to stderr.
    """
    prompts = pop_model(arguments or [], 1, values)
    files, texts_of_ids = [[] if value is None else [value] for value in (file, ids)]
    given_by = ["PROMPT"] * len(prompts) + ["--file"] * len(files) + ["--ids"] * len(texts_of_ids)
    if len(given_by) > 1:
        raise WrongUsage(f"give one prompt, not {' and '.join(given_by)}")
    (source,) = read_sources("prompt", prompts, files, texts_of_ids)
    fields = {"max_tokens": DEFAULT_MAX_TOKENS} | given_options(values, (*SAMPLING, *GENERATE_ONLY))
    for name in ("logprobs", "prompt_logprobs", "record_routing", "record_indices", "support"):
        if name in fields and not as_json:
            raise WrongUsage(f"--{name.replace('_', '-')} requires --json")
    fields["adapter"] = next(iter(adapters_of(values)), None)
    params = seeded(SamplingParams(**fields))
    with opened_llm(values, placement_of(values)) as llm:
        _run(llm, source, params, as_json)


def _run(llm: LLM, source: str | list[int], params: SamplingParams, as_json: bool) -> None:
    """Generate, write to stdout (streaming a single completion), and report on stderr."""
    live = params.n == 1 and not as_json
    start = time.perf_counter()
    texts, num_new, result = read_stream(llm.stream(source, params), live=live)
    seconds = time.perf_counter() - start

    if as_json:
        if result is not None:
            write_json(result)
    elif live:
        if not texts[0].endswith("\n"):
            sys.stdout.write("\n")
    else:
        shown = [texts[index] for index in sorted(texts)]
        if result is not None:  # a beam search may find fewer than n
            shown = [output.text for output in result.outputs]
        for number, text in enumerate(shown, start=1):
            sys.stdout.write(f"--- {number} of {len(shown)} ---\n{text}\n")
    sys.stdout.flush()
    note(_summary(result, params, num_new, seconds))
    if result is None:
        raise typer.Exit(EXIT_INTERRUPTED)


def _summary(result: Result | None, params: SamplingParams, num_new: int, seconds: float) -> str:
    speed = f"{_count(num_new, 'new token')} in {seconds:.2f} s ({num_new / seconds:.0f} tokens/s)"
    if result is None:
        return f"{speed}, seed {params.seed}, interrupted"
    finish = ", ".join(str(c.finish_reason.value) for c in result.outputs)
    prompt = _count(len(result.prompt_token_ids), "prompt token")
    drafts = result.metrics.draft
    if drafts.num_drafted:
        speed += f", {drafts.tokens_per_forward:.1f} tokens per forward"
    return f"{prompt}, {speed}, seed {params.seed}, finish: {finish}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def read_sources(
    what: str, texts: list[str], files: list[str], ids: list[str]
) -> list[str | list[int]]:
    """Return all inputs: texts, then files, then ids; stdin if there are none."""
    if files.count("-") > 1:
        raise WrongUsage("--file -: stdin can only be read once")
    sources: list[str | list[int]] = [
        *texts,
        *(_read(what, file) for file in files),
        *map(_parse_ids, ids),
    ]
    return sources or [_read(what, None)]


def _read(what: str, file: str | None) -> str:
    """Return the text of a file; of stdin for "-" and None."""
    if file is not None and file != "-":
        return read_file(file, file)
    if sys.stdin is None:
        raise WrongUsage(
            f"no {what}: stdin is closed; pass it as an argument, with --file or with --ids"
        )
    if file is None and sys.stdin.isatty():
        raise WrongUsage(f"no {what}: pass it as an argument, with --file or --ids, or pipe it in")
    return read_stdin()


def _parse_ids(text: str) -> list[int]:
    """Parse the token ids of a command line."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise WrongUsage(f'--ids {text!r}: must be integers, such as "5 17 9"') from None
