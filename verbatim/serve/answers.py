"""`Answers`: the form of the answers of a conversation, as its chat template determines it."""

from __future__ import annotations

import json
import re
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
    is_harmony,
    reasoning_marks,
)
from verbatim.serve.marks import Marks, text_without
from verbatim.serve.reader import ChannelReader, Reader
from verbatim.serve.tools import ToolUse
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer


class Answers:
    """The form of the answers of a conversation: readers and grammars.

    Args:
        use: the callable tools.
        template: the chat template.

    Attributes:
        reasons: whether answers may have reasoning.
        shown_ids: the marks that are special tokens, which the text must have.
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
        """Read from the prompt's last characters whether the answer begins within reasoning."""
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

        Args:
            skips: special tokens other than marks are not in the texts.
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
            read = 0
            for token_id in output.token_ids:
                if read >= reader.num_reasoning:
                    break
                read += len(texts.push(token_id))
                total += 1
        return total

    def grammar(self, params: SamplingParams) -> str | None:
        """Return a grammar of reasoning and then the tools or the structure; None where none is needed."""
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
            answer = f"answer: %lark {{{value}\n}}\n"  # errors name its own lines
        if self._harmony:
            return self._channels(structure, answer)
        assert self._reasoning is not None
        begin, end = self._reasoning
        first = "thoughts" if self._opened else f"({self._marks.lark(begin)} thoughts)?"
        rules = f"thoughts: thought /\\n{{0,2}}/\n{self._marks.until('thought', end)}"
        return f"{answer}start: {first} answer\n{rules}"

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
            f'{answer}{start}note: {lark(CHANNEL)} ("analysis" | "commentary") {lark(MESSAGE)} NOTE '
            f'{lark("<|end|>")} {lark(START)} "assistant"\n{text_without("NOTE", HARMONY)}'
        )
