"""The model classes, and `from_pretrained`."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import nn

from verbatim.compat.opened import Opened
from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.loading import open_llm
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.placement.actor import run_alone

_SET_WHEN_OPENED = frozenset("bfloat16 cpu cuda double float half train".split())
_LAYERS = ("h", "layers", "blocks")  # names of the list of layers


class _NotHere(NotSupported, AttributeError):
    """A part of the module that this process does not have, or must not change."""


class _Body:
    """A transformers model without its head; `h` is the list of its layers, as Petals calls it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        names = _LAYERS if name == "h" else (name,)
        found = next((n for n in names if hasattr(self._module, n)), name)
        return getattr(self._module, found)


class DistributedModelForCausalLM(Opened, RemoteGenerationMixin):  # type: ignore[override]
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

    @property
    def device(self) -> torch.device:
        """The device of input and output ids."""
        return torch.device("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own forward on padded rows, and return its output.

        For programs that need logits; it shares nothing with `generate`. All engines of this process wait.

        Raises:
            NotSupported: the whole unquantized module is not in this process.
        """
        return run_alone(self._whole("forward"), "forward", *args, **kwargs)

    forward = __call__

    @property
    def transformer(self) -> Any:
        """The model without its head, with its layers as `h`; NotSupported as for a call."""
        return _Body(self._whole("transformer").base_model)

    def __getattr__(self, name: str) -> Any:
        """Return a part of transformers' module: `lm_head`, `dtype`, `parameters` and so on.

        Raises:
            NotSupported: (an AttributeError) it is not in this process, or is set when a model is opened.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _SET_WHEN_OPENED:
            raise _NotHere(
                f"{name}(): device and dtype are set when a model is opened, with device= and torch_dtype= "
                "of from_pretrained, and nothing is trained here"
            )
        return getattr(self._whole(name), name)

    def _whole(self, name: str) -> Any:
        module = self._own_module()
        if module is None:
            raise _NotHere(
                f"{name}: the weights are not whole in this process (stages, a placement or quantization); "
                "use generate, llm.score for log-probs, llm.info() for sizes, or open the model without them"
            )
        return module

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
        opened._close_with(source)
    return cast("_Model", opened)
