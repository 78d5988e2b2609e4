"""Hugging Face's and Megatron's tokenizers (`tokenize`, `detokenize`, `bos`, `eod`) under one interface."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import dropwhile
from typing import Any

from verbatim.compat.batches import accepts
from verbatim.errors import InvalidRequest
from verbatim.text.tokenizer import Tokenizer


class _MegatronAdapter:
    """The transformers methods that Verbatim uses, of Megatron's kind of tokenizer."""

    clean_up_tokenization_spaces = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = (_id(tokenizer, name) for name in ("bos", "eod"))
        self.all_special_ids = [i for i in (self.bos_token_id, self.eos_token_id) if i is not None]

    def __len__(self) -> int:
        return int(self._tokenizer.vocab_size)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(i) for i in self._tokenizer.tokenize(text)]}

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.decode([token_id])

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids; `skip_special_tokens` is passed on if the tokenizer accepts it."""
        detokenize = self._tokenizer.detokenize
        if accepts(detokenize, ids, skip_special_tokens=True):
            return str(detokenize(ids, skip_special_tokens=skip_special_tokens))
        return str(detokenize(ids))


def adapted(tokenizer: Any) -> Any:
    """Return transformers' interface to a tokenizer; Megatron's kind is the one that has `detokenize`."""
    return _MegatronAdapter(tokenizer) if hasattr(tokenizer, "detokenize") else tokenizer


def wrap(tokenizer: Any) -> Tokenizer:
    """Return Verbatim's `Tokenizer` for either kind."""
    return tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(adapted(tokenizer))


def eod_of(tokenizer: Any) -> int | None:
    """Return the id that ends a document, or None."""
    return _id(adapted(tokenizer), "eos_token_id")


def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:
    """Return the ids of a prompt, with exactly one leading `bos` if `add_BOS`, else with none.

    Raises:
        InvalidRequest: `add_BOS`, and the tokenizer has no `bos`.
    """
    hf = adapted(tokenizer)
    bos = _id(hf, "bos_token_id")
    if add_BOS and bos is None:
        raise InvalidRequest("add_BOS=True: the tokenizer has no bos")
    ids = Tokenizer(hf).encode(prompt) if hf is tokenizer else hf(prompt)["input_ids"]
    rest = list(dropwhile(lambda i: i == bos, ids))
    return [bos, *rest] if add_BOS and bos is not None else rest


def detokenize(
    tokenizer: Any,
    tokens: Sequence[int],
    remove_EOD: bool = True,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of ids, without trailing `eod`s if `remove_EOD`.

    `skip_special_tokens` is passed on if the tokenizer accepts it.
    """
    ids, eod = list(tokens), eod_of(tokenizer)
    while remove_EOD and ids and ids[-1] == eod:
        ids.pop()
    return str(adapted(tokenizer).decode(ids, skip_special_tokens=skip_special_tokens))


def _id(tokenizer: Any, name: str) -> int | None:
    try:  # Megatron's base class raises for a missing attribute
        value = operator.index(getattr(tokenizer, name))
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return value if value >= 0 else None
