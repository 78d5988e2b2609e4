"""`Tokenizer`: the little that the engine asks of a transformers tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from verbatim.errors import InvalidRequest, ModelError, VerbatimError, first_line
from verbatim.untrusted import check_tokenizer

# What `clean_up_tokenization` of transformers replaces, in its order (a test holds the two equal).
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

# Some file of a tokenizer's folder has one of these beginnings or endings.
_FILE_BEGINNINGS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_FILE_ENDINGS = (".model", ".tiktoken", ".vocab", ".bpe")


@contextmanager
def failures_as(kind: type[VerbatimError], what: str) -> Iterator[None]:
    """Raise whatever templates, tokenizers and their many readers raise in this block as `kind`."""
    try:
        yield
    except VerbatimError:
        raise
    except BaseException as error:
        # A panic of Rust code is no Exception, and its class can't be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {first_line(error)}") from error


class Tokenizer:
    """A transformers tokenizer, fast or slow, with its rules settled when it is wrapped.

    Attributes:
        hf: the tokenizer itself.
        special_ids: what `skip_special_tokens` leaves out of the text.
        bos_id, eos_id: None where the tokenizer has none.
        vocab_size: how many ids have a text. A model may have more logits than that.
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
        if self._fast is not None:  # the backend skips what was added as special, named or not
            added = self._fast.get_added_tokens_decoder()
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.cleans_up = self._cleans_up()
        self.byte_texts: dict[int, bytes] = {}  # of the ids that byte-level detokenizers have met
        self.piece_texts: dict[int, str] = {}  # likewise, where a piece's text stands by itself

    @classmethod
    def open(
        cls, path_or_id: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> Tokenizer:
        """The tokenizer of a folder or of a hub id.

        Raises:
            ModelError: there is none, or its files can't be read.
        """
        folder = Path(path_or_id)
        if folder.is_dir() and not has_tokenizer_files(folder):
            names = sorted(file.name for file in folder.iterdir())
            held = ", ".join(names[:8]) + ", ..." * (len(names) > 8) if names else "nothing"
            raise ModelError(
                f"{str(path_or_id)!r} has no tokenizer: none of tokenizer.json, "
                f"tokenizer_config.json, tokenizer.model or vocab.json is among its files ({held})"
            )
        if folder.is_dir():
            check_tokenizer(folder)
        from transformers import AutoTokenizer

        with failures_as(ModelError, f"no tokenizer from {str(path_or_id)!r}"):
            hf = AutoTokenizer.from_pretrained(
                str(path_or_id), revision=revision, trust_remote_code=trust_remote_code
            )
        return cls(hf)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with what the tokenizer's own rule puts before it (and after it).

        Args:
            special_tokens: False leaves that away, for text that goes on with something.
        """
        return self._encode(text, add_special_tokens=special_tokens)

    def encode_fragment(self, text: str) -> list[tuple[int, ...]]:
        """The ways to spell `text` inside a completion: at the start of a word and within one.

        No special tokens are added. `bad_words` bans each of them.

        Raises:
            InvalidRequest: the tokenizer has no ids for this text.
        """
        bare = text.lstrip(" ") or text
        spellings: dict[tuple[int, ...], None] = {}  # a set that keeps its order
        for variant in (bare, " " + bare):
            if ids := tuple(self._encode(variant, add_special_tokens=False)):
                spellings[ids] = None
        if not spellings:
            raise InvalidRequest(f"{text!r} encodes to no tokens")
        return list(spellings)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that stand for no token have none."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = self.decode_plain([i for i in ids if i not in skipped and self.piece(i) is not None])
        return clean_up(text) if self.cleans_up else text

    def decode_plain(self, ids: list[int]) -> str:
        """The text of ids of the vocabulary, special tokens and spaces left as they are."""
        text: str = self.hf.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id, None where it has none."""
        if self._fast is not None:
            entry: str | None = self._fast.id_to_token(token_id)
            return entry
        if token_id > self._highest_id:
            return None  # some slow tokenizers would answer with their unknown token, or raise
        try:
            entry = self.hf.convert_ids_to_tokens(token_id)
        except (IndexError, KeyError, ValueError):
            return None
        return entry

    @cached_property
    def decoder_steps(self) -> list[dict[str, Any]]:
        """How a fast tokenizer joins its pieces, as the tokenizers library writes it; else empty."""
        decoder = getattr(self._fast, "decoder", None)
        if decoder is None:
            return []
        step = json.loads(decoder.__getstate__())
        return step["decoders"] if step["type"] == "Sequence" else [step]

    @cached_property
    def _highest_id(self) -> int:
        added = getattr(self.hf, "added_tokens_decoder", {})
        return max([self.vocab_size - 1, *map(int, added)])

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest(f"{type(text).__name__} can't be tokenized: a string is needed")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not Unicode: half a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}"
            ) from None
        with failures_as(InvalidRequest, "the tokenizer fails on this text"):
            encoded = self.hf(
                text,
                add_special_tokens=add_special_tokens,
                truncation=False,
                padding=False,
                return_attention_mask=False,
                verbose=False,
            )
        return list(encoded["input_ids"])

    def _cleans_up(self) -> bool:
        """As transformers decides it: on request, but for BPE only when forced."""
        if not getattr(self.hf, "clean_up_tokenization_spaces", False):
            return False
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        bpe = self._fast is not None and type(self._fast.model).__name__ == "BPE"
        return not bpe or bool(getattr(self.hf, forced, False))


def has_tokenizer_files(folder: Path) -> bool:
    """Is there any file that a tokenizer could be made from?"""
    names = [file.name for file in folder.iterdir()]
    return any(n.startswith(_FILE_BEGINNINGS) or n.endswith(_FILE_ENDINGS) for n in names)


def clean_up(text: str) -> str:
    """Remove the spaces that a word-by-word tokenizer leaves before punctuation."""
    for found, put in CLEAN_UP:
        text = text.replace(found, put)
    return text
