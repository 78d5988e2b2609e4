"""The marks of a tokenizer: tokens with names in grammars, and those that are left out of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from verbatim.text.tokenizer import Tokenizer

ANYTHING = r"(.|\n)*"  # Lark's `.` matches no line end


class Marks:
    """The marks of a tokenizer, as text and in grammars.

    Attributes:
        special: those that are special tokens, which are left out of the text by default.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        backend = getattr(getattr(tokenizer, "hf", None), "backend_tokenizer", None)
        self._ids: dict[str, int] = {}
        self.special: frozenset[str] = frozenset()
        if tokenizer is None or backend is None or not hasattr(backend, "get_added_tokens_decoder"):
            return
        added = backend.get_added_tokens_decoder().items()
        special = tokenizer.special_ids
        self.special = frozenset(token.content for i, token in added if i in special)
        # Only these are not text to a grammar.
        self._ids = {
            token.content: i
            for i, token in added
            if i in special or re.fullmatch("<.+>", token.content)
        }

    def within(self, text: str) -> Marks:
        """Return those in a text; a tokenizer may have thousands."""
        few = Marks(None)
        few._ids = {mark: i for mark, i in self._ids.items() if mark in text}
        return few

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def lark(self, text: str) -> str:
        """Return an expression in Lark for a text with marks."""
        names = sorted(filter(text.__contains__, self._ids), key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        parts = [
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in split
            if part
        ]
        return " ".join(parts) or '""'

    def until(self, rule: str, mark: str, body: str = ANYTHING) -> str:
        """Return a rule in Lark: a text up to the first `mark`, and the mark.

        A reader sees only the text, so a mark that is a token may not be spelled either.

        Args:
            rule: its name, in lower case.
            body: a regular expression that the text matches.
        """
        if self.is_token(mark):
            text = rule.upper()
            return f"{rule}: {text} {self.lark(mark)}\n{text_without(text, [mark], body)}"
        return f"{rule}[lazy]: /{body}/ {self.lark(mark)}\n"


def text_without(rule: str, marks: Sequence[str], body: str = ANYTHING) -> str:
    """Return a rule in Lark, with a name in upper case: a text without some marks."""
    marked = "|".join(re.escape(mark).replace("/", r"\/") for mark in marks)
    return f"{rule}: /{body}/ & ~/{ANYTHING}({marked}){ANYTHING}/\n"


class Dropped:
    """Special tokens that are left out of a text."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._begins = {mark[0] for mark in marks}  # there may be thousands of marks

    def drop(self, text: str, last: bool) -> tuple[str, str]:
        """Return the text without the tokens, and its end if that may begin another one.

        A stop string that begins within a token divides it between two deltas of a stream.
        """
        text = self._pattern.sub("", text)
        may_begin = not last and not self._begins.isdisjoint(text)
        cut = len(text) - (overlap(text, *self._marks) if may_begin else 0)
        return text[:cut], text[cut:]


def overlap(text: str, *marks: str) -> int:
    """Return the number of last characters that may begin a mark."""
    tail = text[max(0, len(text) - max(map(len, marks)) + 1) :]
    begins = {mark[0] for mark in marks}
    for at, character in enumerate(tail):
        if character in begins and any(mark.startswith(tail[at:]) for mark in marks):
            return len(tail) - at
    return 0
