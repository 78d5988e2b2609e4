"""The stand-in for transformers' cache in results."""

from __future__ import annotations


class RemotePastKeyValues:
    """A token count in place of K and V, which stay in the engine.

    Returned with `return_dict_in_generate`. To continue a sequence, use a session.

    Args:
        num_tokens: columns of prompt and completion.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Return the number of tokens, the same in every layer."""
        return self._num_tokens

    def get_max_length(self) -> int | None:
        """Return None: the session sets the limit."""
        return None

    def update_seen(self, new_seen: int) -> None:
        """Count more tokens."""
        self._num_tokens += new_seen

    def __repr__(self) -> str:
        return f"RemotePastKeyValues({self._num_tokens})"
