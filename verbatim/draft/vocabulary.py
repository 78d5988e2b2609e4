"""Do two models mean the same by an id?"""

from __future__ import annotations

from typing import Any

from verbatim.errors import InvalidRequest

_MAX_PADDING = 1024  # ids that a vocabulary was padded with at most


def num_embeddings(inner: Any, vocab_size: int) -> int:
    """Ids that a transformers model can read: `vocab_size`, the width of its logits, or fewer."""
    try:
        rows: int = inner.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        return vocab_size
    return rows


def check_same_ids(
    name: str, ours: Any, theirs: Any, vocab_size: int, draft_vocab_size: int
) -> None:
    """Is the draft model called `name` of the same vocabulary as the model?

    Where both have a tokenizer, every id that both of them know must stand for the same; one may know ids
    that the other has not. Where one has none, there are only the sizes to go by: they may differ by padding.

    Args:
        ours, theirs: transformers tokenizers of the model and of the draft model, or None.
        vocab_size, draft_vocab_size: widths of their logits.

    Raises:
        InvalidRequest: it is of another one.
    """
    if ours is not None and theirs is not None:
        tokens = {i: token for token, i in ours.get_vocab().items()}
        others = {i: token for token, i in theirs.get_vocab().items()}
        differing = sorted(i for i in tokens.keys() & others.keys() if tokens[i] != others[i])
        if differing:
            i = differing[0]
            raise InvalidRequest(
                f"draft={name!r}: its tokenizer is another one; id {i} is {others[i]!r} there and "
                f"{tokens[i]!r} here, and {len(differing)} ids of {len(tokens)} differ"
            )
    elif abs(vocab_size - draft_vocab_size) > _MAX_PADDING:
        raise InvalidRequest(
            f"draft={name!r}: its vocabulary has {draft_vocab_size} ids, and the model's has "
            f"{vocab_size}; without a tokenizer of each to compare, they may differ by padding alone, "
            f"which is at most {_MAX_PADDING} ids"
        )
