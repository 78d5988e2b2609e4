"""The model classes, and `from_pretrained`."""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import nn

from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.loading import open_llm
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.tensors import engine_of


class DistributedModelForCausalLM(RemoteGenerationMixin):
    """A model of any architecture that Verbatim runs, with any placement.

    Attributes:
        config: the model's transformers config.
        generation_config: the model's, or None. `generate` takes its defaults from it.
    """

    _model_type: ClassVar[str | None] = None  # the only accepted one; None: any

    def __init__(self, model: LLM | nn.Module) -> None:
        """
        Args:
            model: an open `LLM`, or a live transformers module, for which one engine is kept.
        """
        self._source = model
        self._closed = False
        opened = self.llm.engine
        self.config: Any = opened.config
        self.generation_config: Any = opened.generation_config
        model_type = getattr(self.config, "model_type", None)
        if self._model_type is not None and model_type != self._model_type:
            raise InvalidRequest(
                f"{type(self).__name__} is for model_type {self._model_type!r}, and this is {model_type!r}; "
                "AutoDistributedModelForCausalLM takes any"
            )

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str | os.PathLike[str] | LLM | nn.Module | None, **options: Any
    ) -> Self:
        """Open a model.

        Args:
            model_name_or_path: a folder in Hugging Face's format, a hub id, or None for the model inside
                the package. Or an open `LLM`, or a live transformers module; then without
                options.
            options: `initial_peers`, "host:port" of a cluster's head, or a list of that one: the model is
                spread over its machines. `stages`: into so many; without `initial_peers` on this machine.
                `placement`: any. With none of the three the model is in this process's memory.
                `torch_dtype` or `dtype`, `revision`; `request_timeout` (seconds) and `max_retries`, of a
                cluster; `low_cpu_mem_usage=True`. Others are `LLM`'s.

        Raises:
            InvalidRequest, NotSupported: an unknown or unsupported option, by name; another
                architecture than the class is for.
            As `LLM` and the placement.
        """
        return _open(model_name_or_path, options, cls)

    _end: Any = None  # closes an engine opened here

    @property
    def llm(self) -> LLM:  # type: ignore[override]
        """The engine, with every sampling option, streams and scores.

        Raises:
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed("this model was closed")
        return engine_of(self._source)

    @property
    def device(self) -> torch.device:
        """The device of input and output ids."""
        return torch.device("cpu")

    def eval(self) -> Self:
        """Return self: there is no training mode."""
        return self

    def to(self, device: Any) -> Self:
        """Return self for "cpu"; the placement is set by `from_pretrained`.

        Raises:
            NotSupported: another device.
        """
        if str(device) != "cpu":
            raise NotSupported(
                f"to({device!r}): ids are on the CPU, and the model is where its placement says"
            )
        return self

    def close(self) -> None:
        """Close the engine if it was opened here; leave a given `LLM` or module open."""
        self._closed = True
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DistributedLlamaForCausalLM(DistributedModelForCausalLM):
    """A Llama model."""

    _model_type = "llama"


class DistributedBloomForCausalLM(DistributedModelForCausalLM):
    """A Bloom model."""

    _model_type = "bloom"


class DistributedFalconForCausalLM(DistributedModelForCausalLM):
    """A Falcon model."""

    _model_type = "falcon"


class DistributedMixtralForCausalLM(DistributedModelForCausalLM):
    """A Mixtral model."""

    _model_type = "mixtral"


class AutoDistributedModelForCausalLM:
    """Opens a model of any architecture."""

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str | os.PathLike[str] | LLM | nn.Module | None, **options: Any
    ) -> DistributedModelForCausalLM:
        """Open a model as the class of its architecture; see `DistributedModelForCausalLM`."""
        return _open(model_name_or_path, options, None)


_Model = TypeVar("_Model", bound=DistributedModelForCausalLM)
_CLASSES = (
    DistributedLlamaForCausalLM,
    DistributedBloomForCausalLM,
    DistributedFalconForCausalLM,
    DistributedMixtralForCausalLM,
)


def _open(model: Any, options: dict[str, Any], kind: type[_Model] | None) -> _Model:
    """Open a model as `kind`, by default as the class of its architecture."""
    opened_here = not isinstance(model, LLM | nn.Module)
    for name, value in options.items():
        if not opened_here and value is not None:
            raise InvalidRequest(
                f"{name}={value!r}: the model is open already; options are for those that are opened here"
            )
    source = open_llm(model, options) if opened_here else model
    try:
        config = (
            source.engine.config if isinstance(source, LLM) else getattr(source, "config", None)
        )
        model_type = getattr(config, "model_type", None)
        own = next(
            (k for k in _CLASSES if k._model_type == model_type), DistributedModelForCausalLM
        )
        opened: Any = (kind or own)(source)
    except BaseException:
        if opened_here:
            source.close()
        raise
    if opened_here:
        opened._end = weakref.finalize(opened, source.close)
    return cast("_Model", opened)
