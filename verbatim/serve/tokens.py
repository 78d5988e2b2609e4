"""The text, bytes and log-probs of single tokens in responses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import repeat
from typing import Any

from verbatim.core import Result, TopLogprobs
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # OpenAI's log-prob of probability zero, as JSON has no infinity


class TokenTexts:
    """Cached text and bytes of single token ids, as they appear within a text.

    Without a tokenizer, a token's text is "token_id:" and its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._text_and_bytes = cache(self._decode)
        self._context: list[int] = []
        if tokenizer is not None:
            self._context = tokenizer.encode("a", special_tokens=False)[-1:]

    def text(self, token_id: int) -> str:
        """Return the text of a token; "bytes:" and hexadecimal bytes for a part of a character."""
        return self._text_and_bytes(token_id)[0]

    def prompt_logprobs(self, result: Result) -> Iterator[Any] | None:
        """Return the log-probs of a prompt in vLLM's format; None if they were not requested.

        The rank of a token outside of the top N is N + 1.
        """
        logprobs = result.prompt_logprobs
        if logprobs is None:
            return None
        tops = result.prompt_top_logprobs or [None] * len(logprobs)
        return (
            None if p is None else self._ranked(i, p, top or [])
            for i, p, top in zip(result.prompt_token_ids, logprobs, tops, strict=True)
        )

    def _ranked(self, token_id: int, p: float, top: TopLogprobs) -> dict[str, dict[str, Any]]:
        entries = {
            str(i): {"logprob": _number(q), "rank": rank, "decoded_token": self.text(i)}
            for rank, (i, q) in enumerate(top, start=1)
        }
        last = {"logprob": _number(p), "rank": len(top) + 1, "decoded_token": self.text(token_id)}
        entries.setdefault(str(token_id), last)
        return entries

    def _decode(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"token_id:{token_id}", b""
        piece = tokenizer.piece(token_id)
        if piece is None:
            return "", b""
        raw = None if token_id in tokenizer.special_ids else tokenizer.piece_bytes(piece)
        if raw is None:
            joiner = Detokenizer(
                tokenizer, skip_special_tokens=False, prompt_tail_ids=self._context
            )
            raw = (joiner.push(token_id) + joiner.flush()).encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw

    # ---- the two formats of log-probs in OpenAI's endpoints

    def legacy(
        self,
        ids: list[int],
        logprobs: list[float | None],
        top: list[TopLogprobs | None] | None,
        num_top: int | None,
        offsets: list[int],
    ) -> dict[str, Any]:
        """Return log-probs in the format of completions; an offset below 0 is before the text.

        `num_top` likeliest tokens are returned besides the drawn one; None: no top log-probs.
        """
        entries = None
        if num_top is not None:
            entries = (
                None if p is None else self._by_text((best or [])[:num_top], i, p)
                for i, p, best in zip(ids, logprobs, top or repeat(None, len(ids)), strict=True)
            )
        return {
            "tokens": map(self.text, ids),
            "token_logprobs": (None if p is None else _number(p) for p in logprobs),
            "top_logprobs": entries,
            "text_offset": (max(0, offset) for offset in offsets),
        }

    def length(self, token_id: int) -> int:
        """Return the number of characters that begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self._text_and_bytes(token_id)[1])

    def _by_text(self, best: TopLogprobs, token_id: int, p: float) -> dict[str, float]:
        """Return log-probs by text, always with the drawn token. For equal texts, the likelier id counts."""
        entries = {self.text(i): _number(q) for i, q in best[::-1]}
        entries.setdefault(self.text(token_id), _number(p))
        return entries

    def of_chat(
        self,
        ids: list[int],
        logprobs: list[float],
        top: list[TopLogprobs] | None,
        num_top: int,
    ) -> Iterator[dict[str, Any]]:
        """Return log-probs in the format of chats: one entry per token."""
        return (
            self._entry(i, p) | {"top_logprobs": [self._entry(j, q) for j, q in best[:num_top]]}
            for i, p, best in zip(ids, logprobs, top or repeat((), len(ids)), strict=True)
        )

    def _entry(self, token_id: int, p: float) -> dict[str, Any]:
        text, raw = self._text_and_bytes(token_id)  # the bytes may be part of a character
        return {"token": text, "logprob": _number(p), "bytes": list(raw)}


def _number(p: float) -> float:
    return max(p, MIN_LOGPROB)
