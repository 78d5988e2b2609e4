"""Checks that a draft model has the model's vocabulary."""

from __future__ import annotations

from typing import Any

from verbatim.errors import InvalidRequest

_MAX_PADDING = 1024  # maximum number of padding ids of a vocabulary


def num_embeddings(inner: Any, vocab_size: int) -> int:
    """Return the number of rows of a transformers model's embedding; `vocab_size` if it has none."""
    try:
        rows: int = inner.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        return vocab_size
    return rows


def check_same_ids(
    name: str, ours: Any, theirs: Any, vocab_size: int, draft_vocab_size: int
) -> None:
    """Check that the draft model `name` has the model's vocabulary.

    With both tokenizers, every id that is in both must be the same token. Without one of them, only the
    sizes are compared, which may differ by padding.

    Args:
        ours, theirs: transformers tokenizers of the model and of the draft model, or None.
        vocab_size, draft_vocab_size: widths of their logits.

    Raises:
        InvalidRequest: the vocabularies differ.
    """
    if ours is not None and theirs is not None:
        tokens = {i: token for token, i in ours.get_vocab().items()}
        others = {i: token for token, i in theirs.get_vocab().items()}
        differing = sorted(i for i in tokens.keys() & others.keys() if tokens[i] != others[i])
        if differing:
            i = differing[0]
            raise InvalidRequest(
                f"draft={name!r}: its tokenizer differs from the model's: id {i} is {others[i]!r} there and "
                f"{tokens[i]!r} here, and {len(differing)} ids of {len(tokens)} differ"
            )
    elif abs(vocab_size - draft_vocab_size) > _MAX_PADDING:
        raise InvalidRequest(
            f"draft={name!r}: its vocabulary has {draft_vocab_size} ids, and the model's has "
            f"{vocab_size}; without both tokenizers to compare, the sizes may differ by at most "
            f"{_MAX_PADDING} ids of padding"
        )
