"""The model classes, and `from_pretrained`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from verbatim.api.llm import LLM
from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.session import InferenceSession
from verbatim.compat.shared import HasEngine, by_name
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.placement.distributed.choice import Cluster

_SET_WHEN_OPENED = frozenset("bfloat16 cpu cuda double float half train".split())
_LLM_OPTIONS = frozenset(inspect.signature(LLM.__init__).parameters) - {"self", "model", "_weak"}
_REFUSED = by_name(
    {
        "there is no public swarm and no DHT, only clusters of machines that trust each other": (
            "dht_prefix allowed_servers blocked_servers"
        ),
        "how long a cluster waits is patience_s, step_timeout_s and max_restarts of Cluster": (
            "daemon_startup_timeout connect_timeout update_period min_backoff max_backoff ban_timeout "
            "max_pinged ping_timeout"
        ),
        "`verbatim cluster status` shows the stages": "show_route",
        "merge the adapter into the weights, or give the live module that holds it": "active_adapter",
        "training is not supported": "tuning_mode pre_seq_len",
        "huggingface_hub handles it: run `hf auth login`, or set HF_TOKEN": "token use_auth_token",
        "huggingface_hub handles it: set HF_HOME": "cache_dir",
        "huggingface_hub handles it: empty its cache": "force_download",
        "huggingface_hub handles it: set HF_HUB_OFFLINE=1, or give the folder": "local_files_only",
        "use placement=, such as Offload() or Cluster()": "device_map",
        "use quantization='int8' or 'int4', without a placement or with Offload()": (
            "load_in_8bit load_in_4bit quantization_config"
        ),
        "the engine has its own attention": "attn_implementation",
    }
)
# Options that must be True, with the reason.
_REQUIRED_TRUE = {
    "low_cpu_mem_usage": "weights are always read directly to their final place",
    "use_server_to_server": "stages connect to each other",
}
_CLUSTER_OPTIONS = {"request_timeout": "step_timeout_s", "max_retries": "max_restarts"}
_ADDRESS = re.compile(r"[^\s/:]+:\d{1,5}")
# Petals' names of the parts of a model without its head, and their names in transformers.
_PARTS = {
    "h": ("layers", "blocks"),
    "word_embeddings": ("embed_tokens",),
    "ln_f": ("norm", "final_layernorm"),
}


class _NotAccessible(NotSupported, AttributeError):
    """An access to a part of the module that this process does not have, or must not change."""


class _Layers(Sequence[nn.Module]):
    """The layers of a model, with an `inference_session` that runs hidden states through them."""

    def __init__(self, layers: Any, sessions: Callable[..., InferenceSession]) -> None:
        self._layers, self.inference_session = layers, sessions

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)


class _Body:
    """A transformers model without its head; some parts also have Petals' names (`_PARTS`)."""

    def __init__(self, module: nn.Module, sessions: Callable[..., InferenceSession]) -> None:
        self._module, self._sessions = module, sessions

    def __getattr__(self, name: str) -> Any:
        names = (name, *_PARTS.get(name, ()))
        attribute = next((n for n in names if hasattr(self._module, n)), name)
        if attribute == "word_embeddings_layernorm" and not hasattr(self._module, attribute):
            return nn.Identity()  # for families without one, as in Petals
        part: Any = getattr(self._module, attribute)
        return _Layers(part, self._sessions) if name == "h" else part


class DistributedModelForCausalLM(HasEngine, RemoteGenerationMixin):  # type: ignore[override]
    """A model of any architecture that Verbatim runs, with any placement.

    Attributes:
        config: the model's transformers config.
        generation_config: the model's generation config, or None; it has the defaults of `generate`.
    """

    _model_type: ClassVar[str | None] = None  # the only accepted `model_type`; None accepts any

    def __init__(self, model: LLM | nn.Module) -> None:
        """
        Args:
            model: an open `LLM`, or a live transformers module, for which one engine is kept.
        """
        self._source = model
        engine = self.llm.engine
        self.config: Any = engine.config
        self.generation_config: Any = engine.generation_config
        model_type = getattr(self.config, "model_type", None)
        if self._model_type is not None and model_type != self._model_type:
            raise InvalidRequest(
                f"{type(self).__name__} is for model_type {self._model_type!r}, but this is "
                f"{model_type!r}; AutoDistributedModelForCausalLM takes any"
            )

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str | os.PathLike[str] | LLM | nn.Module | None, **options: Any
    ) -> Self:
        """Open a model. The generic class returns the subclass for its architecture, if there is one.

        Args:
            model_name_or_path: a folder in Hugging Face's format, a hub id, or None for the model inside
                the package. Or an open `LLM`, or a live transformers module, without options.
            options: `initial_peers`: "host:port" of a cluster's head, or a list of this one address, to split
                the model over the cluster's machines. `stages`: number of stages; without `initial_peers`,
                all run on this machine. `placement`: any placement. Without these three the model is in
                this process's memory. `torch_dtype` or `dtype`, `revision`; for a cluster `request_timeout`
                (seconds) and `max_retries`; `low_cpu_mem_usage=True`. Others are passed to `LLM`.

        Raises:
            InvalidRequest, NotSupported: an unknown or unsupported option, or an architecture that this
                class does not accept. Errors of `LLM` and of the placement are passed on.
        """
        model, opened_here = model_name_or_path, not isinstance(model_name_or_path, LLM | nn.Module)
        for name, value in options.items():
            if not opened_here and value is not None:
                raise InvalidRequest(
                    f"{name}={value!r}: the model is open already; options apply only to models "
                    "that this call opens"
                )
        source: Any = _open_llm(model, options) if opened_here else model
        try:
            config = getattr(source.engine if isinstance(source, LLM) else source, "config", None)
            kinds = _CLASSES if cls is DistributedModelForCausalLM else {}
            opened: Any = kinds.get(getattr(config, "model_type", None), cls)(source)
        except BaseException:
            if opened_here:
                source.close()
            raise
        if opened_here:
            opened._close_with(source)
        return cast(Self, opened)

    @property
    def device(self) -> torch.device:
        """The device of input and output ids."""
        return torch.device("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own forward on padded rows, and return its output.

        For programs that need logits. It shares no cache with `generate`; all engines of this process wait.

        Raises:
            NotSupported: this process does not have the whole unquantized module.
        """
        self._require_module("forward")
        return self.llm.engine.call_module("forward", *args, **kwargs)

    forward = __call__

    @property
    def transformer(self) -> Any:
        """The model without its head, with its layers as `h`; raises NotSupported, as `__call__`."""
        return _Body(self._require_module("transformer").base_model, self.inference_session)

    def __getattr__(self, name: str) -> Any:
        """Return a part of transformers' module: `lm_head`, `dtype`, `parameters` and so on.

        Raises:
            NotSupported: (an AttributeError) it is not in this process, or is fixed when a model is opened.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _SET_WHEN_OPENED:
            raise _NotAccessible(
                f"{name}(): device and dtype are set when a model is opened, with device= and "
                "torch_dtype= of from_pretrained, and training is not supported"
            )
        return getattr(self._require_module(name), name)

    def _require_module(self, name: str) -> Any:
        module = self._whole_module()
        if module is None:
            raise _NotAccessible(
                f"{name}: the weights are not whole in this process (stages, a placement or quantization); "
                "use generate, llm.score for log-probs, llm.info() for sizes, or open the model without them"
            )
        return module

    def eval(self) -> Self:
        """Return self: there is no training mode."""
        return self

    def to(self, device: Any) -> Self:
        """Return self for "cpu", else raise NotSupported: `from_pretrained` fixes the placement."""
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


AutoDistributedModelForCausalLM = DistributedModelForCausalLM
_CLASSES = {kind._model_type: kind for kind in DistributedModelForCausalLM.__subclasses__()}


def _open_llm(model: Any, options: Mapping[str, Any]) -> LLM:
    """Open an engine for a folder, a hub id or None; refuse unsupported options, and ignore None."""
    refused = {name: value for name, value in options.items() if name in _REFUSED}
    for name, value in refused.items():
        if value is not None and value is not False:
            raise NotSupported(f"{name}={value!r}: {_REFUSED[name]}")
    passed = {n: v for n, v in options.items() if v is not None and n not in refused}
    for name, why in _REQUIRED_TRUE.items():
        if passed.pop(name, True) is not True:
            raise NotSupported(f"{name}: must be True; {why}")
    if "torch_dtype" in passed:
        if "dtype" in passed:
            raise InvalidRequest("torch_dtype and dtype are both given; they are the same thing")
        passed["dtype"] = passed.pop("torch_dtype")
    cluster_options = _CLUSTER_OPTIONS.items()
    cluster = {name: passed.pop(theirs) for theirs, name in cluster_options if theirs in passed}
    peers, stages = passed.pop("initial_peers", None), passed.pop("stages", None)
    for name in passed:
        if name not in _LLM_OPTIONS:
            raise InvalidRequest(
                f"{name} is not known; options other than Petals' own are "
                f"{', '.join(sorted(_LLM_OPTIONS))}"
            )
    if peers is None and stages is None:
        for theirs, name in cluster_options:
            if name in cluster:
                raise InvalidRequest(
                    f"{theirs}={cluster[name]!r} is for a cluster: give initial_peers or stages, or "
                    f"placement=Cluster({name}=...)"
                )
        return LLM(model, **passed)
    if "placement" in passed:
        raise InvalidRequest(
            "placement with initial_peers or stages, which are a placement themselves: give "
            "placement=Cluster(address=..., stages=...)"
        )
    placement = Cluster(stages=stages, address=_address(peers), **cluster)
    return LLM(model, placement=placement, **passed)


def _address(peers: Any) -> str | None:
    """Return the cluster head's address from `initial_peers`."""
    if peers is None:
        return None
    addresses = [peers] if isinstance(peers, str) else list(peers)
    if len(addresses) != 1 or _ADDRESS.fullmatch(str(addresses[0])) is None:
        raise InvalidRequest(
            f"initial_peers={peers!r}: must be one address, 'host:port', of the cluster's head, as `verbatim "
            "cluster start` prints it; there is no public swarm"
        )
    return str(addresses[0])
