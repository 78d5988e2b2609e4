"""`Reader`: splits output into reasoning, text and calls while it arrives; `ChannelReader`: gpt-oss'."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from verbatim.serve.formats import CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START, ParsedCall
from verbatim.serve.marks import overlap
from verbatim.serve.tools import ToolUse


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
        marks: around reasoning, which comes first; None without reasoning.
        opened: the output begins within reasoning.

    Attributes:
        num_calls: calls so far.
        num_reasoning: characters up to the end of the reasoning.
    """

    def __init__(
        self,
        use: ToolUse | None,
        marks: tuple[str, str] | None = None,
        *,
        opened: bool = False,
    ) -> None:
        self._use, self._marks = use, marks
        self._held, self._last = "", False  # the text to be read, and whether no more comes
        self._reasons = opened  # the text that is read is reasoning
        self._num_pushed = self.num_calls = self.num_reasoning = 0
        self._reading = self._read()

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text; return the final parts in order: non-empty texts and reasoning, and whole calls.

        Args:
            last: the output ends here. An incomplete call is returned as text.
        """
        self._held += text
        self._num_pushed += len(text)
        self._last = last
        read = iter(partial(next, self._reading, None), None)
        parts = [part for part in read if part not in ("", Reasoning(""))]
        if self._reasons:
            self._count_reasoning()
        self.num_calls += sum(isinstance(part, ParsedCall) for part in parts)
        return parts

    def _read(self) -> Iterator[Part | None]:
        """Yield the parts of the output, and None where more text is needed."""
        if self._marks is not None:
            yield from self._read_reasoning(*self._marks)
        if self._use is not None:
            yield from self._read_calls(self._use)
        while True:
            yield self._take(len(self._held))
            yield None

    def _read_reasoning(self, begin: str, end: str) -> Iterator[Part | None]:
        if not self._reasons:
            while begin.startswith(text := self._held.lstrip()) and text != begin:
                if self._last:
                    return
                yield None
            if not text.startswith(begin):
                return
            self._held, self._reasons = text[len(begin) :], True
        yield from self._skip_lines()
        while (at := self._held.find(end)) < 0:
            cut = self._held if self._last else self._without(end)
            yield Reasoning(self._take(len(cut)))
            yield None
        yield Reasoning(self._take(at).rstrip("\n"))
        self._take(len(end))
        self._count_reasoning()
        self._reasons = False
        yield from self._skip_lines()

    def _read_calls(self, use: ToolUse) -> Iterator[Part | None]:
        """Yield text and calls, which end the output or follow each other."""
        form, begun = use.format, False  # there was text
        while True:
            start = self._held.find(form.mark)
            if start < 0 or (form.bare and (begun or start > 0)):
                begun = begun or self._held != ""
                marks = () if form.bare else (form.mark,)
                yield self._take(len(self._held if self._last else self._without(*marks)))
                yield None
                continue
            found = None
            # An argument may contain the end mark, so the calls are read up to where they end.
            if self._last or (form.repeats and self._held.find(form.end, start) >= 0):
                found = form.parse(self._held, start, use.functions)
            if found is not None and (form.repeats or found[1] == len(self._held)):
                calls, end = found
                yield self._held[:start].rstrip("\n")
                yield from calls
                self._take(end)
                yield from self._skip_lines()
            elif self._last:
                begun = True
                yield self._take(start + len(form.mark) if form.repeats else len(self._held))
            else:
                yield self._take(len(self._held[:start].rstrip("\n")))
                yield None

    def _skip_lines(self) -> Iterator[None]:
        """Leave out line ends, which belong to the format, up to the next text."""
        while not (text := self._held.lstrip("\n")) and not self._last:
            self._held = text
            yield None
        self._held = text

    def _without(self, *marks: str) -> str:
        """Return the text that is not yet read, without the beginning of a mark and line ends before it."""
        keep = overlap(self._held, *marks) if marks else 0
        return self._held[: len(self._held) - keep].rstrip("\n")

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _count_reasoning(self) -> None:
        self.num_reasoning = self._num_pushed - len(self._held)


_ENDS = [mark for mark in HARMONY if mark not in (MESSAGE, CONSTRAIN)]
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(r"(?:<\|start\|>|<\|channel\|>| to=)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class ChannelReader(Reader):
    """A reader of gpt-oss' messages, each with a header that names its channel.

    The channel `analysis` is reasoning, `final` is text, and a message of `commentary` is a call if it is
    addressed to a function, or else text before calls. Text without a header is the answer.
    """

    def _read(self) -> Iterator[Part | None]:
        while True:
            if not self._held:
                yield None
                continue
            header = ""
            if _HEADER.match(self._held):
                while MESSAGE not in self._held and not self._last:
                    yield None
                header, _, self._held = self._held.partition(MESSAGE)
            elif not self._last and any(m.startswith(self._held) for m in (START, CHANNEL, " to=")):
                yield None
                continue
            self._reasons = f"{CHANNEL}analysis" in header and " to=" not in header
            calls = _RECIPIENT.search(header) if self._use is not None else None
            while (end := _ANY_END.search(self._held)) is None:
                if calls is None or self._last:
                    keep = 0 if self._last else overlap(self._held, *_ENDS)
                    yield self._part(header, calls, self._take(len(self._held) - keep))
                yield None
                while not self._held:
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
        found = self._use.format.parse(text, 0, self._use.functions)
        if found is None or found[1] < len(text):
            return header + MESSAGE + body
        return found[0][0]
