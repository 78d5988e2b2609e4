"""Adapters for Hugging Face's and Megatron's tokenizers (`tokenize`, `detokenize`, `bos`, `eod`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from verbatim.compat.batches import accepts
from verbatim.errors import InvalidRequest
from verbatim.text.detokenizer import Detokenizer
from verbatim.text.tokenizer import Tokenizer


def is_megatron(tokenizer: Any) -> bool:
    """Return whether it is Megatron's kind, by `detokenize`; transformers has `tokenize`, too."""
    return hasattr(tokenizer, "detokenize")


def bos_of(tokenizer: Any) -> int | None:
    """Return the id that begins a text, or None."""
    return _id(tokenizer, "bos" if is_megatron(tokenizer) else "bos_token_id")


def eod_of(tokenizer: Any) -> int | None:
    """Return the id that ends a document, or None."""
    return _id(tokenizer, "eod" if is_megatron(tokenizer) else "eos_token_id")


def tokenize(tokenizer: Any, prompt: str, add_BOS: bool) -> list[int]:
    """Return the ids of a prompt, with exactly one leading `bos` or none.

    Raises:
        InvalidRequest: `add_BOS`, and the tokenizer has no `bos`.
    """
    bos = bos_of(tokenizer)
    if add_BOS and bos is None:
        raise InvalidRequest("add_BOS=True: the tokenizer has no bos")
    if is_megatron(tokenizer):
        ids = [int(i) for i in tokenizer.tokenize(prompt)]
    else:
        ids = Tokenizer(tokenizer).encode(prompt)
    first = next((place for place, i in enumerate(ids) if i != bos), len(ids))
    return ids[first:] if bos is None or not add_BOS else [bos, *ids[first:]]


def detokenize(
    tokenizer: Any, tokens: Sequence[int], remove_EOD: bool, skip_special_tokens: bool
) -> str:
    """Return the text of ids, without trailing `eod`s if `remove_EOD`."""
    ids, eod = list(tokens), eod_of(tokenizer)
    while remove_EOD and ids and ids[-1] == eod:
        ids.pop()
    if not is_megatron(tokenizer):
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
    if accepts(tokenizer.detokenize, ids, skip_special_tokens=True):
        return str(tokenizer.detokenize(ids, skip_special_tokens=skip_special_tokens))
    return str(tokenizer.detokenize(ids))


class Segments:
    """The text of each token of a completion; they join to the whole text.

    A character of several tokens belongs to the last of them.

    Args:
        prompt: ids before the completion.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.texts: list[str] = []
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_tail_ids=list(prompt)
        )

    def extend(self, tokens: Sequence[int], *, last: bool) -> None:
        """Append tokens; after the last ones, add the remaining text."""
        self.texts += [self._text.push(token) for token in tokens]
        if last and self.texts:
            self.texts[-1] += self._text.flush()


def wrap(tokenizer: Any) -> Tokenizer:
    """Return Verbatim's `Tokenizer` for either kind."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return Tokenizer(_MegatronAdapter(tokenizer) if is_megatron(tokenizer) else tokenizer)


class _MegatronAdapter:
    """Adapts Megatron's tokenizer to the transformers methods that Verbatim uses."""

    clean_up_tokenization_spaces = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = bos_of(tokenizer)
        self.eos_token_id = eod_of(tokenizer)
        self.all_special_ids = [i for i in (self.bos_token_id, self.eos_token_id) if i is not None]

    def __len__(self) -> int:
        return int(self._tokenizer.vocab_size)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(i) for i in self._tokenizer.tokenize(text)]}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode(self, ids: list[int], **_: Any) -> str:
        return detokenize(self._tokenizer, ids, remove_EOD=False, skip_special_tokens=False)


def _id(tokenizer: Any, name: str) -> int | None:
    try:  # Megatron's base class raises for a missing attribute
        value = operator.index(getattr(tokenizer, name))
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return value if value >= 0 else None
