"""`ChannelReader`: splits the output of gpt-oss, messages with a header that names their channel.

The channel `analysis` is reasoning, `final` is text, and a message of `commentary` is a call if it is
addressed to a function, or else text before calls.
"""

from __future__ import annotations

import re

from verbatim.serve.formats import CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START
from verbatim.serve.marks import Dropped, overlap
from verbatim.serve.reader import Part, Reader, Reasoning
from verbatim.serve.tools import ToolUse

_ENDS = [mark for mark in HARMONY if mark not in (MESSAGE, CONSTRAIN)]
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(r"(?:<\|start\|>|<\|channel\|>| to=)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


class ChannelReader(Reader):
    """A reader of gpt-oss' messages. Text without a header is the answer."""

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
        calls = self._use.calls(self._use.format.head.replace("NAME", name) + body.strip())
        return header + MESSAGE + body if calls is None else calls[0]
