"""Verbatim: text generation from any causal language model, the same tokens everywhere."""

from __future__ import annotations

from verbatim._version import __version__ as __version__

# Not imported from `typing`, so that the command handles Ctrl-C some milliseconds earlier.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from verbatim.api.llm import LLM as LLM
    from verbatim.api.session import Session as Session
    from verbatim.api.tensors import generate as generate
    from verbatim.api.tensors import open_forward as open_forward
    from verbatim.core import Completion as Completion
    from verbatim.core import Delta as Delta
    from verbatim.core import FinishReason as FinishReason
    from verbatim.core import Result as Result
    from verbatim.engine.lockstep import run_together as run_together
    from verbatim.errors import EngineClosed as EngineClosed
    from verbatim.errors import InvalidRequest as InvalidRequest
    from verbatim.errors import ModelError as ModelError
    from verbatim.errors import NotSupported as NotSupported
    from verbatim.errors import OutOfBlocks as OutOfBlocks
    from verbatim.errors import PromptTooLong as PromptTooLong
    from verbatim.errors import QueueFull as QueueFull
    from verbatim.errors import RequestFailed as RequestFailed
    from verbatim.errors import SessionBusy as SessionBusy
    from verbatim.errors import StageFailed as StageFailed
    from verbatim.errors import TierFailed as TierFailed
    from verbatim.errors import UnsupportedModel as UnsupportedModel
    from verbatim.errors import VerbatimError as VerbatimError
    from verbatim.model.kempner.config import KempnerConfig as KempnerConfig
    from verbatim.params import SamplingParams as SamplingParams
    from verbatim.placement.distributed.choice import Cluster as Cluster
    from verbatim.placement.distributed.choice import ExpertParallel as ExpertParallel
    from verbatim.placement.distributed.choice import PipelineParallel as PipelineParallel
    from verbatim.placement.distributed.choice import TensorParallel as TensorParallel
    from verbatim.placement.offload.choice import Offload as Offload
    from verbatim.quantization.formats import Quantization as Quantization
    from verbatim.sampling.sampler import sample as sample

# The public names of each module, imported on first use: `verbatim --help` must not wait for torch.
_HOMES = {
    "verbatim.core": "Completion Delta FinishReason Result",
    "verbatim.engine.lockstep": "run_together",
    "verbatim.errors": "EngineClosed InvalidRequest ModelError NotSupported OutOfBlocks PromptTooLong "
    "QueueFull RequestFailed SessionBusy StageFailed TierFailed UnsupportedModel VerbatimError",
    "verbatim.api.llm": "LLM",
    "verbatim.model.kempner.config": "KempnerConfig",
    "verbatim.quantization.formats": "Quantization",
    "verbatim.params": "SamplingParams",
    "verbatim.placement.distributed.choice": "Cluster ExpertParallel PipelineParallel TensorParallel",
    "verbatim.placement.offload.choice": "Offload",
    "verbatim.sampling.sampler": "sample",
    "verbatim.api.session": "Session",
    "verbatim.api.tensors": "generate open_forward",
}
__all__ = sorted(["__version__", *" ".join(_HOMES.values()).split()])


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module 'verbatim' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
