"""`verbatim chat`: a conversation, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.options import (
    DEFAULT_MAX_TOKENS,
    MODEL,
    SAMPLING,
    given_options,
    seeded,
    with_options,
)
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened_llm, placement_of
from verbatim.cli.terminal import WrongUsage, note, one_line, read_stream
from verbatim.common.files import MAX_TEXT_BYTES
from verbatim.errors import EngineClosed, InvalidRequest, PromptTooLong, VerbatimError
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.api.llm import LLM
    from verbatim.core import Result

HELP = """/clear  clear the conversation
/exit   quit (also Ctrl-D)
/help   list the commands
Ctrl-C ends an answer and keeps the part already generated; at the prompt it quits."""


@with_options(*SAMPLING, *MODEL, *OFFLOAD, *CLUSTER, show_defaults=False, positional_model=True)
def chat(
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None,
    **values: Any,
) -> None:
    """Chat with a model. Sampling defaults come from the model's generation_config.json."""
    fields = given_options(values, SAMPLING)
    SamplingParams(**fields)  # reject invalid options before a model is opened
    begin = [] if system is None else [{"role": "system", "content": system}]
    with opened_llm(values, placement_of(values)) as llm:
        params = llm.default_params().replace(**({"max_tokens": DEFAULT_MAX_TOKENS} | fields))
        # The temperature, max_tokens, and the fields that differ from their defaults.
        always = {name: getattr(params, name) for name in ("temperature", "max_tokens")}
        shown = (f"{name}={value!r:.60}" for name, value in (always | params.changed()).items())
        note(f"sampling (the model's defaults and your options): {', '.join(shown)}")
        note("/help lists the commands")
        messages = begin
        for line in _lines():
            text = line.strip()
            if text == "/exit":
                break
            if text == "/clear":
                messages = begin
                note("conversation cleared")
            elif text == "/help":
                note(HELP)
            elif text.startswith("/") and text[1:].isalpha():
                note(f"unknown command {text}\n{HELP}")
            elif text:
                messages = _turn(llm, params, messages, text)


def _turn(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], text: str
) -> list[dict[str, str]]:
    """Print the answer to a message as it is generated; return the conversation with both.

    Ctrl-C ends the answer early. A turn that fails is not part of the conversation.
    """
    conversation, params = [*messages, {"role": "user", "content": text}], seeded(params)
    try:
        texts, _, result = read_stream(llm.chat_stream(conversation, params), live=True)
    except EngineClosed:
        raise
    except VerbatimError as error:
        hint = "; /clear clears the conversation" if isinstance(error, PromptTooLong) else ""
        note(f"{one_line(error)}\nthis turn was dropped{hint}")
        return messages
    sys.stdout.write("\n")
    sys.stdout.flush()
    if result is None and not texts[0]:
        note("(interrupted before the first token; this turn was dropped)")
        return messages
    note(f"({_ended(result)}seed {params.seed})")
    return [*conversation, {"role": "assistant", "content": texts[0]}]


def _ended(result: Result | None) -> str:
    """Describe an answer that was interrupted, cut or timed out; "" for a stop."""
    if result is None:
        return "interrupted, "
    output = result.outputs[0]
    how = {"length": "cut", "timeout": "out of time"}.get(output.finish_reason.value)
    return "" if how is None else f"{how} after {len(output.token_ids)} tokens, "


def _lines() -> Iterator[str]:
    """Yield the lines typed on a terminal or piped in."""
    if sys.stdin is None:
        raise WrongUsage("stdin is closed: chat reads its turns from it")
    if not sys.stdin.isatty():
        lines = iter(lambda: sys.stdin.buffer.readline(MAX_TEXT_BYTES + 1), b"")
        for number, raw in enumerate(lines, start=1):
            if len(raw) > MAX_TEXT_BYTES:
                raise InvalidRequest(f"stdin: line {number} is larger than {MAX_TEXT_BYTES} bytes")
            try:
                yield raw.decode()
            except UnicodeDecodeError:
                raise InvalidRequest(f"stdin is not UTF-8 text: line {number}") from None
        return
    try:
        import readline  # noqa: F401  (gives `input` history and editing)
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            note("")
            return
        except UnicodeDecodeError:
            note("verbatim: this line is not UTF-8 text")
