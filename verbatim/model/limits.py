"""Length limits and end-of-sequence ids of a model, from its config."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from verbatim.errors import ModelError

# Config fields with the number of positions.
_LENGTH_FIELDS = (
    "max_position_embeddings max_target_positions n_positions max_seq_len max_sequence_length "
    "seq_length n_ctx"
).split()
# Types of models with positions that start after the padding id.
_AFTER_PADDING = frozenset(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)


def max_length_of(config: Any) -> tuple[int | None, str]:
    """Return the maximum sequence length (None: unlimited) and the name of its source.

    Rotary embeddings of type "dynamic" and "longrope" depend on the longest sequence in the batch if it
    exceeds `max_position_embeddings`, or the original training length for "longrope" with different short
    and long factors. This is the limit.
    """
    text = config.get_text_config(decoder=True)
    limit, source = None, "no limit in the config"
    for field in _LENGTH_FIELDS:
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            limit, source = value, field
            break
    if limit is not None and text.model_type in _AFTER_PADDING:
        limit -= text.pad_token_id + 1
    for rope in _rope_settings(text):
        kind = rope.get("rope_type", rope.get("type")) or ""
        if "dynamic" in kind or (
            kind == "longrope" and rope.get("short_factor") != rope.get("long_factor")
        ):
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
    """Return the rotary settings: one dictionary, or one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


# Config fields with the placeholder ids for images, video and audio in prompts, and nested configs.
_PLACEHOLDERS = [f"{x}_token_{y}" for x in ("image", "video", "audio") for y in ("id", "index")]
_INNER = ("vision_config", "audio_config", "thinker_config")


def placeholders_of(config: Any) -> dict[int, str]:
    """Return the placeholder ids for images, video and audio in prompts, with the config field of each."""
    configs = [config, *(getattr(config, name, None) for name in _INNER)]
    fields = [(getattr(c, name, None), name) for c in configs for name in _PLACEHOLDERS]
    return {value: name for value, name in fields if type(value) is int}


def pad_id_of(configs: Iterable[Any], eos_ids: Iterable[int]) -> int:
    """Return the first pad id in `configs`, else the lowest end-of-sequence id, else 0."""
    ids = (getattr(config, "pad_token_id", None) for config in configs)
    ends = min((i for i in eos_ids if i >= 0), default=0)
    return next((i for i in ids if isinstance(i, int) and i >= 0), ends)


def eos_ids_of(*configs: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the first config with some; ModelError: they are no integers."""
    for source in configs:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids = value if isinstance(value, Collection) else [value]
            if not all(isinstance(i, int) for i in ids):
                raise ModelError(
                    f"eos_token_id={str(value)[:80]!r} of the model's config: must be an integer or a list"
                )
            return frozenset(ids)
    return frozenset()
