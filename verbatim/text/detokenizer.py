"""`Detokenizer`: incremental detokenization, without incomplete characters.

The returned texts join to `Tokenizer.decode` of all ids, at a constant cost per token. There are three
kinds of tokenizers:

- byte-level tokenizers (GPT-2, Llama 3, Qwen): every piece encodes bytes, and UTF-8 is decoded as they
  arrive;
- tokenizers with byte fallback (Llama 2, Gemma): a run of byte pieces is either all valid UTF-8, or the
  decoder returns one replacement character for *each* of its bytes. So the text of a run is known only
  at its end; until then it is `pending`;
- all others (WordPiece, Metaspace, tokenizers written in Python): a token is decoded after the last few
  tokens, and adds the difference.

`tokenizers.decoders.DecodeStream` is not used: its cost grows with the number of invalid bytes in a
row (0.4 ms per token after 4,000 of them), and it fails when a run of byte pieces becomes invalid.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Any, Self

from verbatim.text.tokenizer import CLEAN_UP, Tokenizer

REPLACEMENT = "\ufffd"
_MAX_OPEN = 8  # maximum tokens held back for an incomplete character, which has at most 4 bytes


class Detokenizer:
    """Detokenizes one completion, token by token.

    Ids without a token (a model may have more logits than its tokenizer has pieces) have no text. `flush`
    returns an incomplete character at the end as the tokenizer decodes it.

    Args:
        skip_special_tokens: whether to leave out special tokens, except `shown_ids`.
        prompt_tail_ids: the prompt, or its last ids. Only the last one with a text is used, to decide
            whether the completion begins a text (some decoders then drop a leading space). A character
            that is incomplete in the prompt is not completed, as only the completion's ids are decoded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        self._piece = tokenizer.piece
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._joiner: _ByteLevel | _TextPieces  # `push` and `flush` return final text
        if tokenizer.is_byte_level:
            self._joiner = _ByteLevel(tokenizer)
        else:
            texts = (i for i in reversed(prompt_tail_ids) if i not in self._skipped)
            last = next((i for i in texts if self._piece(i) is not None), None)
            self._joiner = _TextPieces(tokenizer, [] if last is None else [last])
        self._cleaners = [_Replacer(*pair) for pair in CLEAN_UP] if tokenizer.cleans_up else []

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that has become final."""
        if token_id in self._skipped:
            return ""
        piece = self._piece(token_id)
        if piece is None:
            return ""
        text = self._joiner.push(token_id, piece)
        for cleaner in self._cleaners:
            text = cleaner.push(text)
        return text

    @property
    def pending(self) -> str:
        """The complete characters that are not final yet."""
        text = self._joiner.pending
        for cleaner in self._cleaners:
            text = cleaner.last(text)
        return text

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        text = self._joiner.flush()
        for cleaner in self._cleaners:
            text = cleaner.last(text)
            cleaner.held = ""
        return text

    def fork(self) -> Self:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._joiner = self._joiner.fork()
        fork._cleaners = [copy.copy(cleaner) for cleaner in self._cleaners]
        return fork


class _ByteLevel:
    """Joins pieces that encode bytes."""

    pending = ""  # a complete character is always final

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._bytes = tokenizer, tokenizer.byte_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, piece: str) -> str:
        text = self._bytes.get(token_id)
        if text is None:
            text = self._bytes[token_id] = self._tokenizer.piece_bytes(piece) or b""
        return self._decoder.decode(text)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> Self:
        fork = copy.copy(self)
        fork._decoder = copy.copy(self._decoder)
        return fork


class _TextPieces:
    """Joins pieces of text, each decoded after a few preceding pieces."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode, self._bytes_of = tokenizer.decode_plain, tokenizer.piece_bytes
        self._context = context  # ids with text already returned
        self._open: list[int] = []  # ids with a text that may end in an incomplete character
        self._open_text = ""
        self._run: _ByteRun | None = None
        self._texts = tokenizer.piece_texts
        self._is_local = bool(tokenizer.decoder_steps) and all(
            map(_is_local, tokenizer.decoder_steps)
        )
        kinds = [step["type"] for step in tokenizer.decoder_steps]
        later = kinds[kinds.index("ByteFallback") + 1 :] if "ByteFallback" in kinds else None
        self._has_bytes = later in ([], ["Fuse"], ["Fuse", "Strip"])
        self._strip = tokenizer.decoder_steps[-1]["start"] if later == ["Fuse", "Strip"] else 0

    @property
    def pending(self) -> str:
        return self._run.text if self._run else self._open_text.rstrip(REPLACEMENT)

    def push(self, token_id: int, piece: str) -> str:
        byte = self._bytes_of(piece) if self._has_bytes else None
        if byte is not None:
            done = self._close_open()
            if self._run is None:
                self._run = _ByteRun(0 if self._context else self._strip)
            self._context = [token_id]
            return done + self._run.push(byte[0])
        done = self._close_run()
        self._open.append(token_id)
        self._open_text = self._added_text(self._context, self._open)
        if self._open_text and not self._open_text.endswith(REPLACEMENT):
            return done + self._close_open()
        return done + (self._close_first() if len(self._open) > _MAX_OPEN else "")

    def flush(self) -> str:
        return self._close_run() + self._close_open()

    def fork(self) -> Self:
        fork = copy.copy(self)
        fork._context, fork._open = self._context.copy(), self._open.copy()
        fork._run = self._run.fork() if self._run else None
        return fork

    def _added_text(self, before: list[int], ids: list[int]) -> str:
        """Return the text that `ids` add after `before`."""
        if not before:
            return self._decode(ids)
        is_local = self._is_local and len(ids) == 1
        text = self._texts.get(ids[0]) if is_local else None
        if text is None:
            text = self._decode(before + ids)[len(self._decode(before)) :]
            if is_local:
                self._texts[ids[0]] = text
        return text

    def _close_run(self) -> str:
        run, self._run = self._run, None
        return run.close() if run else ""

    def _close_open(self) -> str:
        text = self._open_text
        if self._open:
            self._context, self._open, self._open_text = self._open, [], ""
        return text

    def _close_first(self) -> str:
        """Return the text of the leading ids that are not part of the incomplete character."""
        for count in range(1, len(self._open)):
            first, rest = self._open[:count], self._open[count:]
            text = self._added_text(self._context, first)
            if text + self._decode(rest) == self._open_text:
                self._context, self._open = first, rest
                self._open_text = self._open_text[len(text) :]
                return text
        return self._close_open()


def _is_local(step: dict[str, Any]) -> bool:
    """Return whether, with this decoder step, a piece adds the same text after any other piece."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    return step["type"] in ("ByteFallback", "Fuse", "Metaspace", "Strip", "WordPiece")


class _ByteRun:
    """A run of byte pieces: valid UTF-8 as a whole, or one replacement character per byte."""

    def __init__(self, strip: int) -> None:
        self.text = ""  # complete characters so far; empty once the run is invalid
        self._strip = strip  # leading spaces that the decoder drops at the start of a text
        self._num_bytes = 0
        self._valid = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, byte: int) -> str:
        self._num_bytes += 1
        if not self._valid:
            return REPLACEMENT
        try:
            char = self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self.text, self._valid = "", False
            return REPLACEMENT * self._num_bytes
        if char == " " and not self.text and self._num_bytes <= self._strip:
            return ""
        self.text += char
        return ""

    def close(self) -> str:
        incomplete = self._valid and self._decoder.getstate()[0]
        return REPLACEMENT * self._num_bytes if incomplete else self.text

    def fork(self) -> Self:
        fork = copy.copy(self)
        fork._decoder = copy.copy(self._decoder)
        return fork


class _Replacer:
    """Incremental `str.replace`."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self.held = ""  # the end of the text, if a match may begin there

    def push(self, text: str) -> str:
        *whole, rest = (self.held + text).split(self._old)
        size = min(len(self._old) - 1, len(rest))
        while not self._old.startswith(rest[len(rest) - size :]):
            size -= 1
        self.held = rest[len(rest) - size :]
        return self._new.join([*whole, rest[: len(rest) - size]])

    def last(self, text: str) -> str:
        """Return the rest of the text, with `text` as its end."""
        return (self.held + text).replace(self._old, self._new)
