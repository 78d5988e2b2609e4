"""Petals' models, `generate` and sessions on Verbatim's engine; see docs/coming-from/petals.md."""

from __future__ import annotations

from verbatim.compat.petals.call import RemotePastKeyValues
from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.model import (
    AutoDistributedModelForCausalLM,
    DistributedBloomForCausalLM,
    DistributedFalconForCausalLM,
    DistributedLlamaForCausalLM,
    DistributedMixtralForCausalLM,
    DistributedModelForCausalLM,
)
from verbatim.compat.petals.session import InferenceSession

__all__ = [
    "AutoDistributedModelForCausalLM",
    "DistributedBloomForCausalLM",
    "DistributedFalconForCausalLM",
    "DistributedLlamaForCausalLM",
    "DistributedMixtralForCausalLM",
    "DistributedModelForCausalLM",
    "InferenceSession",
    "RemoteGenerationMixin",
    "RemotePastKeyValues",
]
