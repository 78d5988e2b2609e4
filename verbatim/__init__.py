"""Verbatim: text generation from any causal language model, the same tokens everywhere."""

from __future__ import annotations

from verbatim._version import __version__

# Without `typing`, the command handles Ctrl-C some milliseconds earlier.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from verbatim.core import Completion, Delta, FinishReason, Result
    from verbatim.engine.lockstep import run_together
    from verbatim.errors import (
        EngineClosed,
        InvalidRequest,
        ModelError,
        NotSupported,
        OutOfBlocks,
        PromptTooLong,
        QueueFull,
        RequestFailed,
        SessionBusy,
        StageFailed,
        TierFailed,
        UnsupportedModel,
        VerbatimError,
    )
    from verbatim.llm import LLM
    from verbatim.model.kempner.config import KempnerConfig
    from verbatim.model.quantization import Quantization
    from verbatim.params import SamplingParams
    from verbatim.placement.distributed.choice import (
        Cluster,
        ExpertParallel,
        PipelineParallel,
        TensorParallel,
    )
    from verbatim.placement.offload.choice import Offload
    from verbatim.sampling.sampler import sample
    from verbatim.session import Session
    from verbatim.tensors import generate, open_forward

__all__ = [
    "LLM",
    "Cluster",
    "Completion",
    "Delta",
    "EngineClosed",
    "ExpertParallel",
    "FinishReason",
    "InvalidRequest",
    "KempnerConfig",
    "ModelError",
    "NotSupported",
    "Offload",
    "OutOfBlocks",
    "PipelineParallel",
    "PromptTooLong",
    "Quantization",
    "QueueFull",
    "RequestFailed",
    "Result",
    "SamplingParams",
    "Session",
    "SessionBusy",
    "StageFailed",
    "TensorParallel",
    "TierFailed",
    "UnsupportedModel",
    "VerbatimError",
    "__version__",
    "generate",
    "open_forward",
    "run_together",
    "sample",
]

# The module of each public name. Names are imported on first use, so that `verbatim --help` does not wait
# for torch.
_HOMES = {
    **dict.fromkeys(__all__, "verbatim.errors"),  # the names that are not below
    "LLM": "verbatim.llm",
    "SamplingParams": "verbatim.params",
    "Cluster": "verbatim.placement.distributed.choice",
    "Offload": "verbatim.placement.offload.choice",
    "TensorParallel": "verbatim.placement.distributed.choice",
    "ExpertParallel": "verbatim.placement.distributed.choice",
    "PipelineParallel": "verbatim.placement.distributed.choice",
    "Quantization": "verbatim.model.quantization",
    "Session": "verbatim.session",
    "sample": "verbatim.sampling.sampler",
    "KempnerConfig": "verbatim.model.kempner.config",
    "run_together": "verbatim.engine.lockstep",
    **dict.fromkeys(("generate", "open_forward"), "verbatim.tensors"),
    **dict.fromkeys(("Completion", "Delta", "FinishReason", "Result"), "verbatim.core"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'verbatim' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
