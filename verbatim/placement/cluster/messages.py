"""The objects that messages between processes carry, beside plain data and tensors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from verbatim.batch import (
    Adapter,
    Batch,
    Candidates,
    Choices,
    Draws,
    LowRank,
    SamplePlan,
    SampleRow,
    Support,
)
from verbatim.core import Completion, DraftStats, FinishReason, Metrics, Result
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape
from verbatim.model.loader import ModelSource
from verbatim.params import SamplingParams
from verbatim.placement.offload.choice import Offload
from verbatim.placement.options import EngineOptions


class Mark(NamedTuple):
    """The identity of a piece of work; later ones compare larger."""

    epoch: int  # raised whenever the stages are connected anew
    step: int
    part: int  # micro-batch of the step


# What a sampler asks of a request's parameters; the rest decides what the engine does around it.
_DRAWN_WITH = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "support",
)
# Of the options of an engine; the others are those of the head alone.
_OPENED_WITH = (
    *("kv_dtype", "kv_bytes", "block_size", "max_batch_tokens", "max_sequences", "max_waiting"),
    *("max_length", "prefix_cache", "num_threads", "default_batch_tokens", "prompt_rows"),
)
_WHOLE: tuple[Any, ...] = (
    *(Adapter, LowRank, Batch, SamplePlan, SampleRow, Draws, Candidates),
    *(Choices, LayerShape, StateShape, Result, Completion, Metrics, DraftStats),
    *(ModelSource, Offload),
)

# The fields of each class that are sent, and of which the receiver makes the object again.
FIELDS: dict[type, tuple[str, ...]] = {
    **{kind: tuple(field.name for field in fields(kind)) for kind in _WHOLE},
    Support: Support._fields,
    SamplingParams: _DRAWN_WITH,
    EngineOptions: _OPENED_WITH,
    FinishReason: ("value",),
}
