"""What stands where transformers would hand out a cache."""

from __future__ import annotations


class RemotePastKeyValues:
    """A count of tokens in place of K and V, which stay where they were computed.

    It comes with `return_dict_in_generate`. To go on from there, use a session.

    Args:
        num_tokens: columns so far, given and made.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Tokens so far, the same in every layer."""
        return self._num_tokens

    def get_max_length(self) -> int | None:
        """None: how long it may become is up to the session."""
        return None

    def update_seen(self, new_seen: int) -> None:
        """Count more tokens."""
        self._num_tokens += new_seen

    def __repr__(self) -> str:
        return f"RemotePastKeyValues({self._num_tokens})"
