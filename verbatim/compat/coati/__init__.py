"""Coati's `generate` and its helpers on Verbatim's engine; for differences see docs/coming-from/coati.md."""

from __future__ import annotations

from verbatim.compat.coati.generation import (
    _is_sequence_finished,
    _prepare_logits_processor,
    _sample,
    _sample_streaming,
    generate,
    generate_streaming,
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
