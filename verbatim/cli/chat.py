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
    given,
    seeded,
    takes,
)
from verbatim.cli.placing import CLUSTER, OFFLOAD, opened, placement_of
from verbatim.cli.terminal import (
    WrongUsage,
    end_line,
    interruptible,
    note,
    one_line,
)
from verbatim.errors import EngineClosed, InvalidRequest, PromptTooLong, VerbatimError
from verbatim.files import MAX_TEXT_BYTES
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.core import Result
    from verbatim.llm import LLM

HELP = """/clear  clear the conversation
/exit   quit (also Ctrl-D)
/help   list the commands
Ctrl-C ends an answer and keeps the part already generated; at the prompt it quits."""


@takes(*SAMPLING, *MODEL, *OFFLOAD, *CLUSTER, show_defaults=False, positional_model=True)
def chat(
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System message.")
    ] = None,
    **values: Any,
) -> None:
    """Chat with a model. Sampling defaults come from the model's generation_config.json."""
    fields = given(values, SAMPLING)
    SamplingParams(**fields)  # reject invalid options before a model is opened
    with opened(values, placement_of(values)) as llm:
        transcript = Transcript(llm, _params(llm, fields), system)
        note(f"{_described(transcript.params)}\n/help lists the commands")
        for line in _lines():
            if not transcript.take(line):
                break


def _params(llm: LLM, fields: dict[str, Any]) -> SamplingParams:
    """Return the model's default sampling, overridden by the user's options."""
    return llm.default_params().replace(**({"max_tokens": DEFAULT_MAX_TOKENS} | fields))


def _described(params: SamplingParams) -> str:
    """Describe the sampling in effect: every field that is not at its default."""
    always = {name: getattr(params, name) for name in ("temperature", "max_tokens")}
    shown = (f"{name}={value!r:.60}" for name, value in (always | params.changed()).items())
    return "sampling (the model's defaults and your options): " + ", ".join(shown)


class Transcript:
    """The turns so far. A failed turn does not change them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.system)

    def take(self, line: str) -> bool:
        """Handle one line of input; return False to end the conversation."""
        text = line.strip()
        if text == "/exit":
            return False
        if text == "/clear":
            self.messages = list(self.system)
            note("conversation cleared")
        elif text == "/help":
            note(HELP)
        elif text.startswith("/") and text[1:].isalpha():
            note(f"unknown command {text}\n{HELP}")
        elif text:
            self.turn(text)
        return True

    def turn(self, text: str) -> None:
        """Send one message, print the answer as it is generated, and append both."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self.answer(messages)
        except EngineClosed:
            raise
        except PromptTooLong as error:
            note(f"{one_line(error)}\nthis turn was dropped; /clear clears the conversation")
        except VerbatimError as error:
            note(f"{one_line(error)}\nthis turn was dropped")
        else:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Stream one answer to stdout; Ctrl-C ends it early."""
        answer = ""
        result: Result | None = None
        params = seeded(self.params)
        stream = self.llm.chat_stream(messages, params)
        try:
            with interruptible(stream) as deltas:
                for delta in deltas:
                    answer += delta.text
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    result = delta.result or result
        except (KeyboardInterrupt, VerbatimError):
            end_line(answer)
            raise
        sys.stdout.write("\n")
        sys.stdout.flush()
        note(f"({_ended(result)}seed {params.seed})")
        return answer


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
