"""`Answers`: the form of the answers of a conversation, as its chat template determines it."""

from __future__ import annotations

import json
import re
from typing import Any

from verbatim.core import Result
from verbatim.errors import NotSupported
from verbatim.sampling.json_schema import check_schema
from verbatim.serve.formats import (
    CHANNEL,
    CONSTRAIN,
    HARMONY,
    MESSAGE,
    START,
    is_harmony,
    reasoning_marks,
)
from verbatim.serve.marks import Dropped, Marks, text_without
from verbatim.serve.reader import ChannelReader, Reader
from verbatim.serve.tools import ToolUse
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer


class Answers:
    """The form of the answers of a conversation: readers and grammars.

    Args:
        use: the callable tools.
        template: the chat template.
        keeps_special: all special tokens are in the text, also those that are no marks.

    Attributes:
        reasons: whether answers may have reasoning.
        shows_special: whether marks are special tokens, which the text must then have.
    """

    def __init__(
        self, use: ToolUse | None, template: str, marks: Marks, keeps_special: bool = False
    ) -> None:
        self.use = use
        self._harmony = is_harmony(template)
        self._reasoning = None if self._harmony else reasoning_marks(template)
        self.reasons = self._harmony or self._reasoning is not None
        self._opened = self._closed = False
        shown = "".join(HARMONY if self._harmony else self._reasoning or ())
        shown += "" if use is None else use.format.text
        self._marks = marks.within(shown)
        self.shows_special = any(mark in shown for mark in marks.special)
        others = [mark for mark in marks.special if mark and mark not in shown]
        drops = self.shows_special and others and not keeps_special
        self._dropped = Dropped(others) if drops else None

    def note_prompt(self, tail: str) -> None:
        """Read from the prompt's last characters whether the answer begins within reasoning."""
        if self._reasoning is not None:
            begin, end = self._reasoning
            self._opened = tail.rstrip().endswith(begin)
            self._closed = tail.rstrip().endswith(end)

    def reader(self) -> Reader:
        """Return a reader of one completion."""
        if self._harmony:
            return ChannelReader(self.use, dropped=self._dropped)
        return Reader(self.use, self._reasoning, opened=self._opened, dropped=self._dropped)

    def num_reasoning_tokens(
        self, result: Result, tokenizer: Tokenizer, keeps_special: bool
    ) -> int:
        """Return the number of tokens of all completions up to the end of their reasoning."""
        total = 0
        for output in result.outputs:
            reader, count = self.reader(), 0
            texts = Detokenizer(
                tokenizer,
                skip_special_tokens=not keeps_special,
                prompt_tail_ids=result.prompt_token_ids,
            )
            for number, token_id in enumerate(output.token_ids, start=1):
                read = reader.num_reasoning
                reader.push(texts.push(token_id))
                count = number if reader.num_reasoning > read else count
                if not reader.may_reason:
                    break
            total += count
        return total

    def grammar(self, structure: str, value: Any) -> str | None:
        """Return a grammar of reasoning and then a structure; None for the structure alone.

        Args:
            structure: the name in `STRUCTURES`, or "tools".
            value: of the structure.
        """
        if not self.reasons or self._closed:
            return None
        if structure == "tools":
            assert self.use is not None
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
        elif self._opened or self._harmony:
            raise NotSupported(
                "grammar: the chat template begins the answer with reasoning, which the grammar leaves out; "
                "turn reasoning off with chat_template_kwargs"
            )
        else:
            return None
        if self._harmony:
            return self._channels(structure, answer)
        assert self._reasoning is not None
        begin, end = self._reasoning
        first = "thoughts" if self._opened else f"({self._marks.lark(begin)} thoughts)?"
        rules = f"thoughts: thought /\\n{{0,2}}/\n{self._marks.until('thought', end)}"
        return f"start: {first} answer\n{rules}{answer}"

    def _channels(self, structure: str, answer: str) -> str:
        """Return a grammar of messages of reasoning and comments, then one with the structure."""
        lark = self._marks.lark
        final = f'{lark(CHANNEL)} "final"'
        start = f"start: note* {final} {lark(MESSAGE)} answer\n"
        if structure == "json_schema":
            start = start.replace(lark(MESSAGE), f'(" " {lark(CONSTRAIN)} "json")? {lark(MESSAGE)}')
        elif structure == "tools":
            assert self.use is not None
            text = "" if self.use.required else f" | {final} {lark(MESSAGE)} NOTE"
            start, answer = f"start: note* (call{text})\n", self.use.call_rules()
        return (
            f'{start}note: {lark(CHANNEL)} ("analysis" | "commentary") {lark(MESSAGE)} NOTE '
            f'{lark("<|end|>")} {lark(START)} "assistant"\n{text_without("NOTE", HARMONY)}{answer}'
        )
