"""What a model's config says about its limits and its ends."""

from __future__ import annotations

from typing import Any

# Names under which configs keep the largest position plus one.
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)


def max_length_of(config: Any) -> tuple[int | None, str]:
    """The longest sequence the model may see, None for no limit, and where the number comes from.

    Rotary embeddings of type "dynamic" and "longrope" change with the longest sequence in the batch
    once it passes a length; up to there they are fixed, so that is the limit. For "longrope" it is the
    length of the original training, for "dynamic" `max_position_embeddings`.
    """
    text = config.get_text_config(decoder=True)
    limit, source = None, "no limit in the config"
    for field in _LENGTH_FIELDS:
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            limit, source = value, field
            break
    for rope in _rope_settings(text):
        kind = rope.get("rope_type", rope.get("type")) or ""
        if kind == "longrope" or "dynamic" in kind:
            fixed = getattr(text, "max_position_embeddings", None)
            if kind == "longrope":
                fixed = (
                    rope.get("original_max_position_embeddings")
                    or getattr(text, "original_max_position_embeddings", None)
                    or fixed
                )
            if fixed and (limit is None or fixed < limit):
                limit, source = int(fixed), f"original length of {kind} rotary embeddings"
    return limit, source


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """Every rotary setting: one dictionary, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


def eos_ids_of(generation_config: Any, config: Any) -> frozenset[int]:
    """End-of-sequence ids: of generation_config.json, else of the config."""
    for source in (generation_config, config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
