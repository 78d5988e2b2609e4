"""What single tokens look like in an answer: their text, their bytes, their log-probs."""

from __future__ import annotations

import re
from typing import Any

from verbatim.core import TopLogprobs
from verbatim.serve.errors import Rows
from verbatim.text.detokenizer import Detokenizer, piece_bytes
from verbatim.text.tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI writes for a probability of zero, which JSON has no number for
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text and bytes of ids as they stand within a text; looked up once each.

    Without a tokenizer a token's text is "token_id:" and its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, tuple[str, bytes]] = {}
        self._behind: list[int] = []
        if tokenizer is not None:
            self._bytes = [step["type"] for step in tokenizer.decoder_steps] == ["ByteLevel"]
            self._behind = tokenizer.encode("a", special_tokens=False)[-1:]

    def text(self, token_id: int) -> str:
        """Its text; "bytes:" and the bytes in hexadecimal where they are part of a character."""
        return self._of(token_id)[0]

    def octets(self, token_id: int) -> list[int]:
        """Its bytes in UTF-8, which may be part of a character."""
        return list(self._of(token_id)[1])

    def _of(self, token_id: int) -> tuple[str, bytes]:
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> tuple[str, bytes]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"token_id:{token_id}", b""
        piece = tokenizer.piece(token_id)
        if piece is None:
            return "", b""
        byte = _BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            raw = bytes([int(byte[1], 16)])
        elif self._bytes and token_id not in tokenizer.special_ids:
            raw = piece_bytes(piece)
        else:
            joiner = Detokenizer(tokenizer, skip_special_tokens=False, prompt_tail_ids=self._behind)
            raw = (joiner.push(token_id) + joiner.flush()).encode()
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw

    # ---- the two ways in which OpenAI's endpoints write log-probs

    def legacy(
        self,
        ids: list[int],
        logprobs: list[float | None],
        top: list[TopLogprobs | None] | None,
        num_top: int,
        offset: int,
    ) -> dict[str, Any]:
        """As completions have them: four lists of one length. `offset`: characters before the first."""
        offsets = []
        for i in ids:
            offsets.append(offset)
            offset += len(self.text(i))
        entries = None
        if num_top:
            entries = Rows(
                lambda: (
                    None if best is None else self._by_text(best[:num_top], i, p)
                    for i, p, best in zip(ids, logprobs, top or [], strict=True)
                )
            )
        return {
            "tokens": [self.text(i) for i in ids],
            "token_logprobs": [None if p is None else _number(p) for p in logprobs],
            "top_logprobs": entries,
            "text_offset": offsets,
        }

    def _by_text(self, best: TopLogprobs, token_id: int, p: float | None) -> dict[str, float]:
        """By text, the likelier one where two ids have the same; the drawn token is always there."""
        entries = {self.text(i): _number(q) for i, q in best[::-1]}
        if p is not None:
            entries.setdefault(self.text(token_id), _number(p))
        return entries

    def of_chat(
        self,
        ids: list[int],
        logprobs: list[float],
        top: list[TopLogprobs] | None,
        num_top: int,
    ) -> Rows:
        """As chats have them: one entry a token."""
        return Rows(
            lambda: (
                self._entry(i, p)
                | {
                    "top_logprobs": [
                        self._entry(j, q) for j, q in (top[k][:num_top] if top else [])
                    ]
                }
                for k, (i, p) in enumerate(zip(ids, logprobs, strict=True))
            )
        )

    def _entry(self, token_id: int, p: float) -> dict[str, Any]:
        return {
            "token": self.text(token_id),
            "logprob": _number(p),
            "bytes": self.octets(token_id),
        }


def _number(p: float) -> float:
    return max(p, LEAST)
