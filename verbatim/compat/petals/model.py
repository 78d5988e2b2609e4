"""The model classes, and `from_pretrained`."""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar, Self

import torch
from torch import nn

from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.loading import open_source
from verbatim.errors import EngineClosed, InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.tensors import engine_of


class DistributedModelForCausalLM(RemoteGenerationMixin):
    """A model, wherever it lives: any architecture that Verbatim runs.

    Attributes:
        config: the model's own, transformers'.
        generation_config: likewise; None where it has none. What it says counts in `generate`.
    """

    _model_type: ClassVar[str | None] = None  # the only one that is taken; None: any

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
        found = getattr(self.config, "model_type", None)
        if self._model_type is not None and found != self._model_type:
            raise InvalidRequest(
                f"{type(self).__name__} is for model_type {self._model_type!r}, and this is {found!r}; "
                "AutoDistributedModelForCausalLM takes any"
            )

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str | os.PathLike[str] | LLM | nn.Module | None, **options: Any
    ) -> Self:
        """Open a model.

        Args:
            model_name_or_path: a folder in Hugging Face's format, a hub id, or None for the model inside
                the package. Or what is open: an `LLM`, or a live transformers module; then there are no
                options.
            options: `initial_peers`, "host:port" of a cluster's head, or a list of that one: the model is
                spread over its machines. `stages`: into so many; without `initial_peers` on this machine.
                `placement`: any. With none of the three the model is in this process's memory.
                `torch_dtype` or `dtype`, `revision`; `request_timeout` (seconds) and `max_retries`, of a
                cluster; `low_cpu_mem_usage=True`. Others are `LLM`'s.

        Raises:
            InvalidRequest, NotSupported: an option that is not known or not done, by name; another
                architecture than the class is for.
            As `LLM` and the placement.
        """
        return cls._open(model_name_or_path, options)

    @classmethod
    def _open(cls, model: Any, options: dict[str, Any], *, auto: bool = False) -> Self:
        """
        Args:
            auto: the class is the architecture's, if it has one.
        """
        source, own = open_source(model, options)
        try:
            made = (_class_for(source) if auto else cls)(source)
        except BaseException:
            if own:
                source.close()  # type: ignore[operator]
            raise
        if own:
            made._end = weakref.finalize(made, source.close)  # type: ignore[arg-type]
        return made  # type: ignore[return-value]

    _end: Any = None  # closes an engine of its own

    @property
    def llm(self) -> LLM:  # type: ignore[override]
        """The engine: every other way to sample, streams, scores.

        Raises:
            EngineClosed: after `close`.
        """
        if self._closed:
            raise EngineClosed("this model was closed")
        return engine_of(self._source)

    @property
    def device(self) -> torch.device:
        """Where ids go in and out."""
        return torch.device("cpu")

    def eval(self) -> Self:
        """Itself: nothing is trained here."""
        return self

    def to(self, device: Any) -> Self:
        """Itself, for "cpu"; a model is where `from_pretrained` has put it.

        Raises:
            NotSupported: another device.
        """
        if str(device) != "cpu":
            raise NotSupported(
                f"to({device!r}): ids are on the CPU, and the model is where its placement says"
            )
        return self

    def close(self) -> None:
        """Close the engine that was opened here; an `LLM` or a module that was given stays as it is."""
        self._closed = True
        if self._end is not None:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DistributedLlamaForCausalLM(DistributedModelForCausalLM):
    """Llama alone."""

    _model_type = "llama"


class DistributedBloomForCausalLM(DistributedModelForCausalLM):
    """Bloom alone."""

    _model_type = "bloom"


class DistributedFalconForCausalLM(DistributedModelForCausalLM):
    """Falcon alone."""

    _model_type = "falcon"


class DistributedMixtralForCausalLM(DistributedModelForCausalLM):
    """Mixtral alone."""

    _model_type = "mixtral"


_CLASSES = (
    DistributedLlamaForCausalLM,
    DistributedBloomForCausalLM,
    DistributedFalconForCausalLM,
    DistributedMixtralForCausalLM,
)


class AutoDistributedModelForCausalLM:
    """Opens a model of any architecture."""

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | os.PathLike[str] | LLM | nn.Module | None,
        **options: Any,
    ) -> DistributedModelForCausalLM:
        """As `DistributedModelForCausalLM.from_pretrained`, as the class of the model's architecture."""
        return DistributedModelForCausalLM._open(model_name_or_path, options, auto=True)


def _class_for(source: LLM | nn.Module) -> type[DistributedModelForCausalLM]:
    config = source.engine.config if isinstance(source, LLM) else getattr(source, "config", None)
    found = getattr(config, "model_type", None)
    return next(
        (kind for kind in _CLASSES if kind._model_type == found), DistributedModelForCausalLM
    )
