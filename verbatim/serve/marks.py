"""The marks of a tokenizer: tokens with names in grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from verbatim.text.tokenizer import Tokenizer

ANYTHING = r"(.|\n)*"  # Lark's `.` matches no line end


class Marks:
    """The marks of a tokenizer, as text and in grammars.

    Attributes:
        special_ids: those that are special tokens, which are left out of the text by default.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._ids = {} if tokenizer is None else tokenizer.marks
        self.special_ids = frozenset[int]() if tokenizer is None else tokenizer.special_ids

    def within(self, text: str) -> Marks:
        """Return those in a text; a tokenizer may have thousands."""
        few = Marks(None)
        few._ids = {mark: i for mark, i in self._ids.items() if mark in text}
        few.special_ids = self.special_ids & {*few._ids.values()}
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


def overlap(text: str, *marks: str) -> int:
    """Return the number of last characters that may begin a mark."""
    tail = text[max(0, len(text) - max(map(len, marks)) + 1) :]
    begins = {mark[0] for mark in marks}
    for at, character in enumerate(tail):
        if character in begins and any(mark.startswith(tail[at:]) for mark in marks):
            return len(tail) - at
    return 0
