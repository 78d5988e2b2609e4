"""`Reader`: splits output into reasoning, text and calls while it arrives; `ChannelReader`: gpt-oss'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.serve.formats import CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START, ParsedCall
from verbatim.serve.marks import Dropped, overlap
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
        dropped: special tokens that are no marks.

    Attributes:
        num_calls: calls so far.
        num_reasoning: characters up to the end of the reasoning, without dropped tokens.
    """

    def __init__(
        self,
        use: ToolUse | None,
        marks: tuple[str, str] | None = None,
        *,
        opened: bool = False,
        dropped: Dropped | None = None,
    ) -> None:
        self._use = use
        self._dropped = dropped
        self._split = ""  # may begin one of them
        self._marks = marks  # until the reasoning has ended
        self._reasons = opened
        self._held = ""
        self._begun = False  # there was text, or reasoning within it
        self._skips_lines = opened  # the next line ends belong to the format
        self._num_pushed = self.num_calls = self.num_reasoning = 0

    @property
    def may_reason(self) -> bool:
        """True until the reasoning has ended."""
        return self._marks is not None

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text; return the final parts in order: non-empty texts and reasoning, and whole calls.

        Args:
            last: the output ends here. An incomplete call is returned as text.
        """
        if self._dropped is not None:
            text, self._split = self._dropped.drop(self._split + text, last)
        self._held += text
        self._num_pushed += len(text)
        parts = [part for part in self._parts(last) if part not in ("", Reasoning(""))]
        self.num_calls += sum(isinstance(part, ParsedCall) for part in parts)
        return parts

    def _parts(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        if self._marks is not None:
            parts += self._reasoning(*self._marks, last)
            if self._reasons:
                self.num_reasoning = self._num_pushed - len(self._held)
        if self._marks is None:
            if self._use is None:
                self._skip_lines()
                parts.append(self._take(len(self._held)))
            else:
                parts += self._calls(self._use, last)
        return parts

    def _reasoning(self, begin: str, end: str, last: bool) -> list[Part]:
        if not self._reasons:
            text = self._held.lstrip()
            if begin.startswith(text) and text != begin and not last:
                return []
            if not text.startswith(begin):
                self._marks = None
                return []
            self._held, self._reasons, self._skips_lines = text[len(begin) :], True, True
        self._skip_lines()
        at = self._held.find(end)
        if at >= 0:
            part = Reasoning(self._held[:at].rstrip("\n"))
            self._take(at + len(end))
            self._marks, self._skips_lines = None, True
            return [part]
        keep = 0 if last else overlap(self._held, end)
        cut = self._held[: len(self._held) - keep]
        return [Reasoning(self._take(len(cut if last else cut.rstrip("\n"))))]

    def _calls(self, use: ToolUse, last: bool) -> list[Part]:
        """Return text and calls, which end the output or follow each other."""
        parts: list[Part] = []
        form = use.format
        while True:
            self._skip_lines()
            start = self._held.find(form.mark)
            if form.bare and (self._begun or start > 0):
                start = -1
            if start < 0:
                # Line ends before a call also belong to the format.
                keep = 0 if last or form.bare else overlap(self._held, form.mark)
                cut = len(self._held) - keep
                self._begun = self._begun or self._held != ""
                parts.append(self._take(cut if last else len(self._held[:cut].rstrip("\n"))))
                return parts
            found = None
            # An argument may contain the end mark, so the calls are read up to where they end.
            if last or (form.repeats and self._held.find(form.end, start) >= 0):
                found = form.parse(self._held, start, use.functions)
            if found is not None and not form.repeats and found[1] < len(self._held):
                found = None
            if found is None and not last:
                parts.append(self._take(len(self._held[:start].rstrip("\n"))))
                return parts
            if found is None:
                self._begun = True
                cut = start + len(form.mark) if form.repeats else len(self._held)
                parts.append(self._take(cut))
                continue
            calls, end = found
            parts += [self._held[:start].rstrip("\n"), *calls]
            self._take(end)
            self._skips_lines = True

    def _skip_lines(self) -> None:
        if self._skips_lines and self._held:
            self._held = self._held.lstrip("\n")
            self._skips_lines = not self._held

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


_ENDS = [mark for mark in HARMONY if mark not in (MESSAGE, CONSTRAIN)]
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(r"(?:<\|start\|>|<\|channel\|>| to=)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class ChannelReader(Reader):
    """A reader of gpt-oss' messages, each with a header that names its channel.

    The channel `analysis` is reasoning, `final` is text, and a message of `commentary` is a call if it is
    addressed to a function, or else text before calls. Text without a header is the answer.
    """

    def __init__(self, use: ToolUse | None, *, dropped: Dropped | None = None) -> None:
        super().__init__(use, dropped=dropped)
        self._header: str | None = None  # of the message that is read

    @property
    def may_reason(self) -> bool:
        return True

    def _parts(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            if self._header is None and not self._read_header(last):
                break
            header = self._header or ""
            reasons = f"{CHANNEL}analysis" in header and " to=" not in header
            calls = _RECIPIENT.search(header) if self._use is not None else None
            end = _ANY_END.search(self._held)
            if end is not None:
                body = self._take(end.start())
            elif calls is not None and not last:
                break
            else:
                body = self._take(len(self._held) - (0 if last else overlap(self._held, *_ENDS)))
            if calls is not None:
                parts.append(self._call(calls[1], header, body))
            else:
                parts.append(Reasoning(body) if reasons else body)
            if end is not None:
                self._header = None
                if end[0] not in (START, CHANNEL):
                    self._take(len(end[0]))
            if reasons:
                self.num_reasoning = self._num_pushed - len(self._held)
            if end is None:
                break
        return parts

    def _read_header(self, last: bool) -> bool:
        """Take the header of a message; return False if more text is needed."""
        if _HEADER.match(self._held):
            header, mark, rest = self._held.partition(MESSAGE)
            if not mark and not last:
                return False
            self._header, self._held = header, rest
            return True
        if not last and any(mark.startswith(self._held) for mark in (START, CHANNEL, " to=")):
            return False
        self._header = ""
        return True

    def _call(self, name: str, header: str, body: str) -> Part:
        """Return a call, or its text if it is incomplete."""
        assert self._use is not None
        text = self._use.format.head.replace("NAME", name) + body.strip()
        found = self._use.format.parse(text, 0, self._use.functions)
        if found is None or found[1] < len(text):
            return header + MESSAGE + body
        return found[0][0]
