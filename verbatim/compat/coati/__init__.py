"""Coati's `generate` and its helper functions, on Verbatim's engine.

`docs/coming-from/coati.md` says what differs from the original, and why.
"""

from __future__ import annotations

from verbatim.compat.coati.generation import (
    _sample,
    _sample_streaming,
    generate,
    generate_streaming,
)
from verbatim.compat.coati.helpers import (
    _is_sequence_finished,
    _prepare_logits_processor,
    prepare_inputs_fn,
    update_model_kwargs_fn,
)

__all__ = [
    "_is_sequence_finished",
    "_prepare_logits_processor",
    "_sample",
    "_sample_streaming",
    "generate",
    "generate_streaming",
    "prepare_inputs_fn",
    "update_model_kwargs_fn",
]
