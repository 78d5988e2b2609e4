"""`verbatim chat`: a conversation, turn by turn."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verbatim.cli.offload import OFFLOAD, tell_stats
from verbatim.cli.options import (
    DEFAULT_MAX_TOKENS,
    MODEL,
    SAMPLING,
    given,
    open_llm,
    seeded,
    takes,
)
from verbatim.cli.placing import CLUSTER, placement_of, tell_placement
from verbatim.cli.terminal import WrongUsage, command, ending, interruptible, note, one_line
from verbatim.errors import EngineClosed, InvalidRequest, PromptTooLong, VerbatimError
from verbatim.params import SamplingParams

if TYPE_CHECKING:
    from verbatim.core import Result
    from verbatim.llm import LLM

HELP = """/clear  forget the conversation
/exit   leave, as Ctrl-D does
/help   this list
Ctrl-C ends an answer and keeps what there is of it; at the prompt it leaves."""


@command
@takes(*SAMPLING, *MODEL, *OFFLOAD, *CLUSTER, show_defaults=False)
def chat(
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="Instructions for the model.")
    ] = None,
    **values: Any,
) -> None:
    """Talk with a model. What you leave out comes from the model's own generation config."""
    fields = given(values, SAMPLING)
    SamplingParams(**fields)  # refuse what is wrong before a model is opened
    placement = placement_of(values)
    with open_llm(values, placement) as llm:
        tell_placement(llm, placement)
        conversation = Conversation(llm, _params(llm, fields), system)
        note(f"{_described(conversation.params)}\n/help lists the commands")
        for line in _lines():
            if not conversation.take(line):
                break
        tell_stats(llm, values)


def _params(llm: LLM, fields: dict[str, Any]) -> SamplingParams:
    """The model's own defaults with what the user gave."""
    return llm.default_params().replace(**({"max_tokens": DEFAULT_MAX_TOKENS} | fields))


def _described(params: SamplingParams) -> str:
    """What differs from the plain distribution, so that nobody has to guess."""
    plain = SamplingParams()
    always = ("temperature", "max_tokens")
    shown = [
        f"{field.name}={_short(repr(getattr(params, field.name)))}"
        for field in dataclasses.fields(params)
        if field.name in always or getattr(params, field.name) != getattr(plain, field.name)
    ]
    return "sampling (the model's defaults and your options): " + ", ".join(shown)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


class Conversation:
    """The turns so far. A turn that fails leaves them as they were."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.system)

    def take(self, line: str) -> bool:
        """Act on one line of the user; False ends the conversation."""
        text = line.strip()
        if text == "/exit":
            return False
        if text == "/clear":
            self.messages = list(self.system)
            note("the conversation is forgotten")
        elif text == "/help":
            note(HELP)
        elif text.startswith("/") and text[1:].isalpha():
            note(f"no command {text}\n{HELP}")
        elif text:
            self.turn(text)
        return True

    def turn(self, text: str) -> None:
        """Ask, print the answer as it comes, and remember both."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self.answer(asked)
        except EngineClosed:
            raise
        except PromptTooLong as error:
            note(f"{one_line(error)}\nthis turn was left out; /clear forgets the conversation")
        except VerbatimError as error:
            note(f"{one_line(error)}\nthis turn was left out")
        else:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Stream one answer to stdout; Ctrl-C ends it early."""
        answer = ""
        result: Result | None = None
        params = seeded(self.params)
        stream = self.llm.chat_stream(messages, params)
        with interruptible() as interrupt, ending(stream) as deltas:
            for delta in deltas:
                answer += delta.text
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                result = delta.result or result
                if interrupt.pressed:
                    break
        sys.stdout.write("\n")
        sys.stdout.flush()
        note(f"({_ended(result)}seed {params.seed})")
        return answer


def _ended(result: Result | None) -> str:
    """What there is to say if an answer did not end by itself; a stop needs no words."""
    if result is None:
        return "interrupted, "
    output = result.outputs[0]
    how = {"length": "cut", "timeout": "out of time"}.get(output.finish_reason.value)
    return "" if how is None else f"{how} after {len(output.token_ids)} tokens, "


def _lines() -> Iterator[str]:
    """What the user types, or what is piped in, line by line."""
    if sys.stdin is None:
        raise WrongUsage("stdin is closed: there is nothing to talk with")
    if not sys.stdin.isatty():
        for number, raw in enumerate(sys.stdin.buffer, start=1):
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
