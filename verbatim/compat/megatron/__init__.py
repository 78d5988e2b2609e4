"""Megatron Core's `TextGenerationController` on Verbatim's engine.

docs/coming-from/megatron.md maps every name of the original.
"""

from __future__ import annotations

from verbatim.compat.megatron.context import DynamicInferenceContext
from verbatim.compat.megatron.controller import InferenceWrappedModel, TextGenerationController
from verbatim.compat.megatron.request import (
    DynamicInferenceRequest,
    InferenceRequest,
    SamplingParams,
    Status,
)
from verbatim.compat.megatron.static import AsyncStream

CommonInferenceParams = SamplingParams
AbstractModelInferenceWrapper = GPTInferenceWrapper = InferenceWrappedModel

__all__ = [
    "AbstractModelInferenceWrapper",
    "AsyncStream",
    "CommonInferenceParams",
    "DynamicInferenceContext",
    "DynamicInferenceRequest",
    "GPTInferenceWrapper",
    "InferenceRequest",
    "SamplingParams",
    "Status",
    "TextGenerationController",
]
