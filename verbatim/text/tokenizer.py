"""`Tokenizer`: the engine's interface to a transformers tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from verbatim.common.files import hub_arguments
from verbatim.common.untrusted import check_tokenizer
from verbatim.errors import InvalidRequest, ModelError, VerbatimError, first_line

# The replacements of transformers' `clean_up_tokenization`, in order (a test compares the two).
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)

# The folder of a tokenizer has a file with one of these prefixes or suffixes.
_FILE_BEGINNINGS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_FILE_ENDINGS = (".model", ".tiktoken", ".vocab", ".bpe")
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


@contextmanager
def failures_as(kind: type[VerbatimError], message: str) -> Iterator[None]:
    """Convert exceptions of templates, tokenizers and file readers in this block to `kind`."""
    try:
        yield
    except VerbatimError:
        raise
    except BaseException as error:
        # A panic of Rust code is not an Exception, and its class can't be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message}: {first_line(error)}") from error


def check_unicode(text: str, what: str) -> None:
    """Raise InvalidRequest if `text` has an unpaired surrogate, which stands for a byte that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} is not Unicode: half a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}"
        ) from None


class Tokenizer:
    """A transformers tokenizer, fast or slow.

    Attributes:
        hf: the transformers tokenizer.
        special_ids: ids that `skip_special_tokens` omits.
        bos_id, eos_id: ids of the BOS and EOS tokens; None if the tokenizer has none.
        vocab_size: number of ids with a text. A model may have more logits.
        cleans_up: whether spaces before punctuation are removed from decoded text.

    Raises:
        ModelError: `hf` is not a transformers tokenizer.
    """

    def __init__(self, hf: Any) -> None:
        if not hasattr(hf, "decode") or not hasattr(hf, "all_special_ids"):
            raise ModelError(
                f"tokenizer={type(hf).__name__}: must be a transformers tokenizer "
                "(PreTrainedTokenizerFast wraps one of the tokenizers library)"
            )
        self.hf = hf
        backend = getattr(hf, "backend_tokenizer", None)
        self._fast = backend if hasattr(backend, "id_to_token") else None
        self.bos_id: int | None = hf.bos_token_id
        self.eos_id: int | None = hf.eos_token_id
        self.vocab_size: int = len(hf)
        self.special_ids = frozenset(hf.all_special_ids)
        if self._fast is not None:  # the backend skips all tokens added as special
            self.special_ids = frozenset(i for i, t in self._added.items() if t.special)
        self.cleans_up = self._cleans_up()
        self.byte_texts: dict[int, bytes] = {}  # cache for byte-level detokenizers
        self.piece_texts: dict[int, str] = {}  # cache for pieces with context-free text

    @classmethod
    def open(
        cls, path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """Open the tokenizer of a folder or of a hub id.

        Raises:
            ModelError: the tokenizer is missing, or its files can't be read.
        """
        folder = Path(path_or_id)
        if folder.is_dir() and not has_tokenizer_files(folder):
            names = sorted(file.name for file in folder.iterdir())
            listing = ", ".join(names[:8]) + ", ..." * (len(names) > 8) if names else "nothing"
            raise ModelError(
                f"{str(path_or_id)!r} has no tokenizer: none of tokenizer.json, "
                f"tokenizer_config.json, tokenizer.model or vocab.json is among its files ({listing})"
            )
        if folder.is_dir():
            check_tokenizer(folder)
        from transformers import AutoTokenizer

        with failures_as(ModelError, f"no tokenizer from {str(path_or_id)!r}"):
            options = {} if folder.is_dir() else hub_arguments(str(path_or_id), revision)
            hf = AutoTokenizer.from_pretrained(
                str(path_or_id), trust_remote_code=trust_remote_code, **options
            )
        return cls(hf)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode a prompt, with the special tokens that the tokenizer adds.

        Args:
            special_tokens: whether to add special tokens.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"{type(text).__name__} can't be tokenized: a string is needed")
        check_unicode(text, "the text")
        with failures_as(InvalidRequest, "the tokenizer fails on this text"):
            encoded = self.hf(
                text,
                add_special_tokens=special_tokens,
                truncation=False,
                padding=False,
                return_attention_mask=False,
                verbose=False,
            )
        return list(encoded["input_ids"])

    def encode_rest(self, text: str) -> list[int]:
        """Encode text that continues a sequence.

        No special tokens are added, nor the space that SentencePiece tokenizers add before a text. They also
        add one after each special token in the text, as in a whole prompt.
        """
        backend = self.without_prefix
        if backend is None or not isinstance(text, str):
            return self.encode(text, special_tokens=False)
        check_unicode(text, "the text")
        with failures_as(InvalidRequest, "the tokenizer fails on this text"):
            encoded = backend.encode(text, add_special_tokens=False)
        added = self._added
        for n, (i, (start, end)) in enumerate(zip(encoded.ids, encoded.offsets, strict=True)):
            # An unknown character has the id of <unk>, which is not in the text.
            if i in added and text[start:end].strip() == added[i].content.strip():
                return [*encoded.ids[:n], *self.encode(text[start:], special_tokens=False)]
        return list(encoded.ids)

    def encode_fragment(self, text: str) -> list[tuple[int, ...]]:
        """Return the encodings of `text` within a completion: at the start of a word, and inside a word.

        `bad_words` bans all of these encodings.

        Raises:
            InvalidRequest: the tokenizer has no ids for this text.
        """
        bare = text.lstrip(" ") or text
        spellings: dict[tuple[int, ...], None] = {}  # a set that keeps its order
        for variant in (bare, " " + bare):
            if ids := tuple(self.encode_rest(variant)):
                spellings[ids] = None
        if not spellings:
            raise InvalidRequest(f"{text!r} encodes to no tokens")
        return list(spellings)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids without a token are skipped."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = self.decode_plain([i for i in ids if i not in skipped and self.piece(i) is not None])
        return clean_up(text) if self.cleans_up else text

    def decode_plain(self, ids: list[int]) -> str:
        """Return the text of ids in the vocabulary, with special tokens and without clean-up."""
        text: str = self.hf.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token_id: int) -> str | None:
        """Return the vocabulary's entry for an id, or None."""
        if self._fast is not None:
            entry: str | None = self._fast.id_to_token(token_id)
            return entry
        if token_id > self._highest_id:
            return None  # some slow tokenizers would return the unknown token, or raise
        try:
            entry = self.hf.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, ValueError):
            return None
        return entry

    @cached_property
    def _added(self) -> dict[int, Any]:
        """The tokens added to a fast tokenizer's vocabulary, by id; empty for a slow one."""
        return {} if self._fast is None else dict(self._fast.get_added_tokens_decoder())

    @cached_property
    def without_prefix(self) -> Any:
        """A fast tokenizer's backend without the space that it adds to a text; None if it adds none."""
        backend, keys = self._fast, ("normalizer", "pre_tokenizer")
        parts = {key: _plain(getattr(backend, key, None)) for key in keys}
        changed = {key: _without_prefix(part) for key, part in parts.items()}
        if backend is None or changed == parts:
            return None
        whole = json.loads(backend.to_str()) | changed | {"truncation": None, "padding": None}
        return type(backend).from_str(json.dumps(whole))

    @cached_property
    def decoder_steps(self) -> list[dict[str, Any]]:
        """The decoder steps of a fast tokenizer, in the tokenizers library's format; else an empty list."""
        decoder = getattr(self._fast, "decoder", None)
        if decoder is None:
            return []
        step = json.loads(decoder.__getstate__())
        return step["decoders"] if step["type"] == "Sequence" else [step]

    @cached_property
    def marks(self) -> dict[str, int]:
        """Ids of the tokens that grammars may name: special tokens, and others in angle brackets."""
        return {
            token.content: i
            for i, token in self._added.items()
            if i in self.special_ids or re.fullmatch("<.+>", token.content)
        }

    @cached_property
    def is_byte_level(self) -> bool:
        """True if every piece encodes bytes."""
        return [step["type"] for step in self.decoder_steps] == ["ByteLevel"]

    def piece_bytes(self, piece: str) -> bytes | None:
        """Return the bytes that a piece encodes; None for a piece of text, which only the decoder can decode.

        A piece outside the alphabet of bytes (such as an added token) is encoded as UTF-8.
        """
        if self.is_byte_level:
            if self._byte_of_char.keys() >= set(piece):
                return bytes(map(self._byte_of_char.__getitem__, piece))
            return piece.encode()
        byte = _BYTE_PIECE.fullmatch(piece)
        falls_back = byte and any(step["type"] == "ByteFallback" for step in self.decoder_steps)
        return bytes([int(byte[1], 16)]) if byte and falls_back else None

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {char: byte for byte, char in bytes_to_unicode().items()}

    @cached_property
    def _highest_id(self) -> int:
        added = getattr(self.hf, "added_tokens_decoder", {})
        return max([self.vocab_size - 1, *map(int, added)])

    def _cleans_up(self) -> bool:
        """Return whether transformers cleans up decoded text: if configured, but for BPE only if forced."""
        if not getattr(self.hf, "clean_up_tokenization_spaces", False):
            return False
        force_option = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        bpe = self._fast is not None and type(self._fast.model).__name__ == "BPE"
        return not bpe or bool(getattr(self.hf, force_option, False))


def _plain(step: Any) -> Any:
    """Return a step of a fast tokenizer in the tokenizers library's format; None if it is in Python."""
    try:
        return None if step is None else json.loads(step.__getstate__())
    except Exception:  # the library raises no other type
        return None


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer, as `_plain` returns it, that adds no space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    for key in step.keys() & {"normalizers", "pretokenizers"}:
        parts = map(_without_prefix, step[key])
        step = step | {key: [part for part in parts if part is not None]}
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return step | {key: off[key] for key in step.keys() & off.keys()}


def has_tokenizer_files(folder: Path) -> bool:
    """Return whether the folder has a file of a tokenizer."""
    names = [file.name for file in folder.iterdir()]
    return any(n.startswith(_FILE_BEGINNINGS) or n.endswith(_FILE_ENDINGS) for n in names)


def clean_up(text: str) -> str:
    """Remove the spaces that a word-by-word tokenizer leaves before punctuation."""
    for old, new in CLEAN_UP:
        text = text.replace(old, new)
    return text
