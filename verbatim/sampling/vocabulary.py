"""`Vocabulary`: a tokenizer for llguidance, which needs the bytes that each id adds to a text.

Pieces must be context-free, except at the beginning of a text.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer as Backend

from verbatim.errors import InvalidRequest
from verbatim.text.tokenizer import Tokenizer

_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")  # of decoders, besides ByteLevel


class Vocabulary:
    """The bytes that each id adds to a text; implements llguidance's TokenizerWrapper."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens: list[bytes] = [b""] * (vocab_size + 1)
        self.eos_token_id = vocab_size
        self.special_token_ids: list[int] = []

        self.num_words = -(-(vocab_size + 1) // 32)
        self.real_ids: list[int] = []
        self.never_first: list[int] = []
        self.greedy: Any = None
        self._backend = _backend(tokenizer)
        num_added = len(self._backend.get_added_tokens_decoder())
        marks = tokenizer.special_ids | {*tokenizer.marks.values()}
        decode = self._backend.decoder.decode
        for i in range(min(vocab_size, tokenizer.vocab_size + num_added + 1)):
            piece = tokenizer.piece(i)
            if piece is None:
                continue
            self.real_ids.append(i)
            if i in marks:
                self.special_token_ids.append(i)
                self.tokens[i] = piece.encode()
            elif (encoded := tokenizer.piece_bytes(piece)) is not None:
                self.tokens[i] = encoded
                is_text = not tokenizer.is_byte_level and encoded.isascii()
                if is_text and decode([piece]).encode() != encoded:
                    self.never_first.append(i)
            else:
                text = decode(["x", piece])[1:]
                self.tokens[i] = text.encode()
                if decode([piece]) != text:
                    self.never_first.append(i)
        self._special = frozenset(self.special_token_ids)
        if tokenizer.without_prefix is not None:
            self._backend = tokenizer.without_prefix
        else:  # a copy, as a call of `hf` may set truncation and padding
            self._backend = Backend.from_str(self._backend.to_str())
            self._backend.no_truncation()
            self._backend.no_padding()

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode `text` as within a completion; greedily by longest pieces if that does not round-trip."""
        text = text.decode() if isinstance(text, bytes) else text
        ids = list(self._backend.encode(text, add_special_tokens=False).ids)
        in_range = all(i < self.eos_token_id and i not in self._special for i in ids)
        if in_range and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        longest: list[int] = self.greedy(text)
        return longest

    def has_text(self, token_id: int) -> bool:
        return token_id not in self._special and self.tokens[token_id] != b""


def _backend(tokenizer: Tokenizer) -> Backend:
    """Return the tokenizers library's object; refuse tokenizers without context-free pieces."""
    name, steps = type(tokenizer.hf).__name__, tokenizer.decoder_steps
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if not isinstance(backend, Backend) or not steps:
        raise InvalidRequest(
            f"structured outputs need a fast tokenizer with a decoder; {name} is not one"
        )
    kinds = [step["type"] for step in steps]
    replaced = [step["pattern"].get("String", "") for step in steps if step["type"] == "Replace"]
    stripped = [step["stop"] for step in steps if step["type"] == "Strip"]
    plain = all(kind in _STEPS for kind in kinds) and all(len(text) == 1 for text in replaced)
    if tokenizer.cleans_up or not (tokenizer.is_byte_level or (plain and not any(stripped))):
        how = "cleans up spaces" if tokenizer.cleans_up else f"joins them by {', '.join(kinds)}"
        raise InvalidRequest(
            "structured outputs need a tokenizer with context-free pieces (byte-level or "
            f"SentencePiece); {name} {how}"
        )
    return backend
