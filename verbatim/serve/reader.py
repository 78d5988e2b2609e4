"""`Reader`: splits output into reasoning, text and calls while it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.serve.marks import Dropped, overlap
from verbatim.serve.tools import ParsedCall, ToolUse


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
            elif self._use.format.repeats:
                parts += self._repeated(self._use, last)
            else:
                parts += self._final(self._use, last)
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

    def _final(self, use: ToolUse, last: bool) -> list[Part]:
        """Return the text before calls that end the output, and at its end the calls."""
        self._skip_lines()
        mark = use.format.mark
        if use.format.bare:
            start = 0 if not self._begun and self._held.startswith(mark) else -1
            keep = 0
        else:
            start = self._held.find(mark)
            keep = overlap(self._held, mark)
        if start < 0:
            self._begun = self._begun or self._held != ""
            cut = len(self._held) - (0 if last else keep)
            return [self._take(cut if last else len(self._held[:cut].rstrip("\n")))]
        before = self._held[:start].rstrip("\n")
        if not last:
            return [self._take(len(before))]
        calls = use.calls(self._held[start:])
        if calls is None:
            return [self._take(len(self._held))]
        self._take(len(self._held))
        return [before, *calls]

    def _repeated(self, use: ToolUse, last: bool) -> list[Part]:
        """Return text and calls, which may follow each other."""
        parts: list[Part] = []
        mark, end_mark = use.format.mark, use.format.end
        while True:
            self._skip_lines()
            start = self._held.find(mark)
            if start < 0:
                # Line ends before a call also belong to the format.
                keep = 0 if last else overlap(self._held, mark)
                cut = len(self._held) - keep
                parts.append(self._take(cut if last else len(self._held[:cut].rstrip("\n"))))
                return parts
            # An argument may contain the end mark, so the calls are read up to where they end.
            found = None
            if self._held.find(end_mark, start) >= 0:
                found = use.calls_at(self._held, start)
            if found is None and not last:
                parts.append(self._take(len(self._held[:start].rstrip("\n"))))
                return parts
            if found is None:
                parts.append(self._take(start + len(mark)))
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
