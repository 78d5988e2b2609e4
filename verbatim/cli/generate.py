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
    given,
    seeded,
    take_model,
    takes,
)
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened, placement_of
from verbatim.cli.terminal import (
    WrongUsage,
    end_line,
    interruptible,
    note,
)
from verbatim.errors import VerbatimError
from verbatim.files import read_file, read_stdin
from verbatim.params import SamplingParams
from verbatim.plain import to_json

if TYPE_CHECKING:
    from verbatim.core import Result
    from verbatim.llm import LLM


@takes(*SAMPLING, *GENERATE_ONLY, *MODEL, ADAPTERS, *OFFLOAD, *CLUSTER)
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
    prompts = take_model(arguments or [], 1, values)
    source = _prompt(prompts[0] if prompts else None, file, ids)
    fields = {"max_tokens": DEFAULT_MAX_TOKENS} | given(values, (*SAMPLING, *GENERATE_ONLY))
    for name in ("logprobs", "prompt_logprobs", "record_routing", "record_indices", "support"):
        if name in fields and not as_json:
            raise WrongUsage(f"--{name.replace('_', '-')} requires --json")
    fields["adapter"] = next(iter(adapters_of(values)), None)
    params = seeded(SamplingParams(**fields))
    with opened(values, placement_of(values)) as llm:
        _run(llm, source, params, as_json)


def _run(llm: LLM, source: str | list[int], params: SamplingParams, as_json: bool) -> None:
    """Generate, write to stdout (streaming a single completion), and report on stderr."""
    texts = [""] * params.n
    counts = [0] * params.n
    result: Result | None = None
    live = params.n == 1 and not as_json
    start = time.perf_counter()
    try:
        # Beam search yields no delta before its end, and Ctrl-C must not wait for that.
        stream, at_once = llm.stream(source, params), params.num_beams > 1
        with interruptible(stream, at_once=at_once) as deltas:
            for delta in deltas:
                texts[delta.index] += delta.text
                counts[delta.index] += len(delta.token_ids)
                result = delta.result or result
                if live and delta.text:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
    except (KeyboardInterrupt, VerbatimError):
        end_line(texts[0] if live else "")
        raise
    seconds = time.perf_counter() - start

    if as_json:
        if result is not None:
            sys.stdout.write(to_json(result) + "\n")
    elif live:
        if not texts[0].endswith("\n"):
            sys.stdout.write("\n")
    else:
        if result is not None:  # a beam search may find fewer than n
            texts = [output.text for output in result.outputs]
        else:
            texts = [text for text, count in zip(texts, counts, strict=True) if count]
        for number, text in enumerate(texts, start=1):
            sys.stdout.write(f"--- {number} of {len(texts)} ---\n{text}\n")
    sys.stdout.flush()
    note(_summary(result, params, sum(counts), seconds))
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


def _prompt(prompt: str | None, file: str | None, ids: str | None) -> str | list[int]:
    """Return the prompt from the one source that was given."""
    sources = [
        name
        for name, value in (("PROMPT", prompt), ("--file", file), ("--ids", ids))
        if value is not None
    ]
    if len(sources) > 1:
        raise WrongUsage(f"give one prompt, not {' and '.join(sources)}")
    if prompt is not None:
        return prompt
    if ids is not None:
        return parse_ids(ids)
    return read_input("prompt", file)


def read_input(what: str, file: str | None) -> str:
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


def parse_ids(text: str) -> list[int]:
    """Parse the token ids of a command line."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise WrongUsage(f'--ids {text!r}: must be integers, such as "5 17 9"') from None
