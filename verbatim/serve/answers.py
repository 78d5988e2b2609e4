"""`Answers`: parses and constrains the answers of a conversation according to its chat template.

`Reader` incrementally splits output into reasoning, text and calls; `ChannelReader` is for gpt-oss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verbatim.core import Result
from verbatim.params import SamplingParams
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.formats import (
    CHANNEL,
    CONSTRAIN,
    HARMONY,
    MESSAGE,
    START,
    ParsedCall,
    ToolUse,
    is_harmony,
    reasoning_marks,
)
from verbatim.serve.grammars import Marks, overlap, text_without
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its marks."""

    text: str


Part = str | Reasoning | ParsedCall  # a part of the model's output


def split_parts(parts: Sequence[Part]) -> tuple[str, str, list[ParsedCall]]:
    """Return the joined text, the joined reasoning, and the calls."""
    calls = [part for part in parts if isinstance(part, ParsedCall)]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return "".join(part for part in parts if isinstance(part, str)), reasoning, calls


class Reader:
    """Incrementally splits output into reasoning, text and calls.

    Args:
        marks: begin and end mark of reasoning, which comes first; None without reasoning.
        opened: whether the output begins inside reasoning.

    Attributes:
        num_calls: number of calls so far.
        num_reasoning: number of characters up to the end of the reasoning.
    """

    def __init__(
        self,
        use: ToolUse | None,
        marks: tuple[str, str] | None = None,
        *,
        opened: bool = False,
    ) -> None:
        self._use, self._marks = use, marks
        self._rest, self._last = "", False  # unread text, and whether it is the last
        self._reasons = opened  # whether the unread text is reasoning
        self._num_pushed = self.num_calls = self.num_reasoning = 0
        self._reading = self._read()

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text; return the new text and reasoning and the calls that are complete, in order.

        `last`: the output ends here, and an incomplete call is returned as text.
        """
        self._rest += text
        self._num_pushed += len(text)
        self._last = last
        new_parts = iter(partial(next, self._reading, None), None)
        parts = [part for part in new_parts if part not in ("", Reasoning(""))]
        if self._reasons:
            self._count_reasoning()
        self.num_calls += sum(isinstance(part, ParsedCall) for part in parts)
        return parts

    def _read(self) -> Iterator[Part | None]:
        """Yield the parts of the output, and None when more text is needed."""
        if self._marks is not None:
            yield from self._read_reasoning(*self._marks)
        if self._use is not None:
            yield from self._read_calls(self._use)
        while True:
            yield self._take(len(self._rest))
            yield None

    def _read_reasoning(self, begin: str, end: str) -> Iterator[Part | None]:
        if not self._reasons:
            while begin.startswith(text := self._rest.lstrip()) and text != begin:
                if self._last:
                    return
                yield None
            if not text.startswith(begin):
                return
            self._rest, self._reasons = text[len(begin) :], True
        yield from self._skip_lines()
        while (at := self._rest.find(end)) < 0:
            cut = self._rest if self._last else self._without(end)
            yield Reasoning(self._take(len(cut)))
            yield None
        yield Reasoning(self._take(at).rstrip("\n"))
        self._take(len(end))
        self._count_reasoning()
        self._reasons = False
        yield from self._skip_lines()

    def _read_calls(self, use: ToolUse) -> Iterator[Part | None]:
        """Yield text and calls. Calls end the output, unless the format repeats."""
        form, had_text = use.format, False
        while True:
            start = self._rest.find(form.mark)
            if start < 0 or (form.bare and (had_text or start > 0)):
                had_text = had_text or self._rest != ""
                marks = () if form.bare else (form.mark,)
                yield self._take(len(self._rest if self._last else self._without(*marks)))
                yield None
                continue
            parsed = None
            # An argument may contain the end mark, so only parsing tells where the calls end.
            if self._last or (form.repeats and self._rest.find(form.end, start) >= 0):
                parsed = form.parse(self._rest, start, use.functions)
            if parsed is not None and (form.repeats or parsed[1] == len(self._rest)):
                calls, end = parsed
                yield self._rest[:start].rstrip("\n")
                yield from calls
                self._take(end)
                yield from self._skip_lines()
            elif self._last:
                had_text = True
                yield self._take(start + len(form.mark) if form.repeats else len(self._rest))
            else:
                yield self._take(len(self._rest[:start].rstrip("\n")))
                yield None

    def _skip_lines(self) -> Iterator[None]:
        """Skip the line ends before the next text, which belong to the format."""
        while not (text := self._rest.lstrip("\n")) and not self._last:
            self._rest = text
            yield None
        self._rest = text

    def _without(self, *marks: str) -> str:
        """Return the unread text without a partial mark at its end, and without line ends before that."""
        keep = overlap(self._rest, *marks) if marks else 0
        return self._rest[: len(self._rest) - keep].rstrip("\n")

    def _take(self, length: int) -> str:
        text, self._rest = self._rest[:length], self._rest[length:]
        return text

    def _count_reasoning(self) -> None:
        self.num_reasoning = self._num_pushed - len(self._rest)


_ENDS = [mark for mark in HARMONY if mark not in (MESSAGE, CONSTRAIN)]
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(r"(?:<\|start\|>|<\|channel\|>| to=)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class ChannelReader(Reader):
    """A reader of gpt-oss' messages, each with a header that names its channel.

    The channel `analysis` is reasoning, and `final` is text. A message in `commentary` is a call if it is
    addressed to a function, and otherwise text before calls. Text without a header is the answer.
    """

    def _read(self) -> Iterator[Part | None]:
        while True:
            if not self._rest:
                yield None
                continue
            header = ""
            if _HEADER.match(self._rest):
                while MESSAGE not in self._rest and not self._last:
                    yield None
                header, _, self._rest = self._rest.partition(MESSAGE)
            elif not self._last and any(m.startswith(self._rest) for m in (START, CHANNEL, " to=")):
                yield None
                continue
            self._reasons = f"{CHANNEL}analysis" in header and " to=" not in header
            calls = _RECIPIENT.search(header) if self._use is not None else None
            while (end := _ANY_END.search(self._rest)) is None:
                if calls is None or self._last:
                    keep = 0 if self._last else overlap(self._rest, *_ENDS)
                    yield self._part(header, calls, self._take(len(self._rest) - keep))
                yield None
                while not self._rest and not self._last:
                    yield None
            yield self._part(header, calls, self._take(end.start()))
            if end[0] not in (START, CHANNEL):
                self._take(len(end[0]))
            if self._reasons:
                self._count_reasoning()
            self._reasons = False

    def _part(self, header: str, calls: re.Match[str] | None, body: str) -> Part:
        if calls is not None:
            return self._call(calls[1], header, body)
        return Reasoning(body) if self._reasons else body

    def _call(self, name: str, header: str, body: str) -> Part:
        """Return a call, or its text if it is incomplete."""
        assert self._use is not None
        text = self._use.format.head.replace("NAME", name) + body.strip()
        parsed = self._use.format.parse(text, 0, self._use.functions)
        if parsed is None or parsed[1] < len(text):
            return header + MESSAGE + body
        return parsed[0][0]


class Answers:
    """Readers and grammars for the answers of a conversation.

    Args:
        use: tools that may be called; None for none.
        template: the chat template, as text.

    Attributes:
        reasons: whether answers may contain reasoning.
        shown_ids: ids of the marks that are special tokens; they must stay in the text.
    """

    def __init__(self, use: ToolUse | None, template: str, marks: Marks) -> None:
        self.use = use
        self._harmony = is_harmony(template)
        self._reasoning = None if self._harmony else reasoning_marks(template)
        self.reasons = self._harmony or self._reasoning is not None
        self._opened = self._closed = False
        shown = "".join(HARMONY if self._harmony else self._reasoning or ())
        shown += "" if use is None else use.format.text
        self._marks = marks.within(shown)
        self.shown_ids = self._marks.special_ids

    def note_prompt(self, tail: str) -> None:
        """Detect from the end of the prompt whether the answer begins inside reasoning."""
        if self._reasoning is not None:
            begin, end = self._reasoning
            self._opened = tail.rstrip().endswith(begin)
            self._closed = tail.rstrip().endswith(end)

    def reader(self) -> Reader:
        """Return a reader of one completion."""
        if self._harmony:
            return ChannelReader(self.use)
        return Reader(self.use, self._reasoning, opened=self._opened)

    def num_reasoning_tokens(self, result: Result, tokenizer: Tokenizer, skips: bool) -> int:
        """Return the number of tokens of all completions up to the end of their reasoning.

        `skips`: whether special tokens other than marks are left out of the texts.
        """
        total = 0
        for output in result.outputs:
            reader = self.reader()
            reader.push(output.text, last=True)
            texts = Detokenizer(
                tokenizer,
                skip_special_tokens=skips,
                shown_ids=self.shown_ids,
                prompt_tail_ids=result.prompt_token_ids,
            )
            num_read = 0
            for token_id in output.token_ids:
                if num_read >= reader.num_reasoning:
                    break
                num_read += len(texts.push(token_id))
                total += 1
        return total

    def grammar(self, params: SamplingParams) -> str | None:
        """Return the grammar of reasoning, then tool calls or structured output; None if not needed."""
        structure = "tools" if self.use is not None else params.structure
        if structure is None or not self.reasons or self._closed:
            return None
        value: Any = getattr(params, structure, None)
        if self.use is not None:
            answer = self.use.grammar().replace("start: ", "answer: ", 1)
        elif structure == "json_schema":
            schema = json.loads(value)
            if isinstance(schema, dict):
                check_schema(schema)
            answer = f"answer: %json {json.dumps(schema)}\n"
        elif structure == "choice":
            answer = f"answer: {' | '.join(map(json.dumps, value))}\n"
        elif structure == "regex":
            pattern = re.sub(
                r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], value, flags=re.DOTALL
            )
            answer = f"answer: /{pattern}/\n"
        else:
            answer = f"answer: %lark {{{value}\n}}\n"  # errors report the lines of `value`
        if self._harmony:
            return self._channels(structure, answer)
        assert self._reasoning is not None
        begin, end = self._reasoning
        first = "thoughts" if self._opened else f"({self._marks.lark(begin)} thoughts)?"
        rules = f"thoughts: thought /\\n{{0,2}}/\n{self._marks.until('thought', end)}"
        return f"{answer}start: {first} answer\n{rules}"

    def _channels(self, structure: str, answer: str) -> str:
        """Return gpt-oss' grammar: reasoning, then the structure; with tools, also text before calls."""
        lark = self._marks.lark
        final, notes = f'{lark(CHANNEL)} "final"', '"analysis"'
        start = f"start: note* {final} {lark(MESSAGE)} answer\n"
        if structure == "json_schema":
            start = start.replace(lark(MESSAGE), f'(" " {lark(CONSTRAIN)} "json")? {lark(MESSAGE)}')
        elif structure == "tools":
            assert self.use is not None
            text = "" if self.use.required else f" | {final} {lark(MESSAGE)} NOTE"
            start, answer = f"start: note* (call{text})\n", self.use.call_rules()
            notes = '("analysis" | "commentary")'
        return (
            f"{answer}{start}note: {lark(CHANNEL)} {notes} {lark(MESSAGE)} NOTE "
            f'{lark("<|end|>")} {lark(START)} "assistant"\n{text_without("NOTE", HARMONY)}'
        )
