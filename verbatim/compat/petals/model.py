"""The model classes, and `from_pretrained`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from verbatim.compat.batches import Opened, by_name
from verbatim.compat.petals.generation import RemoteGenerationMixin
from verbatim.compat.petals.session import InferenceSession
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM
from verbatim.placement.distributed.choice import Cluster

_SET_WHEN_OPENED = frozenset("bfloat16 cpu cuda double float half train".split())
_LLM_OPTIONS = frozenset(inspect.signature(LLM.__init__).parameters) - {"self", "model", "_weak"}
_REFUSED = by_name(
    {
        "there is no public swarm and no DHT: machines that trust each other make a cluster": (
            "dht_prefix allowed_servers blocked_servers"
        ),
        "how long a cluster waits is patience_s, step_timeout_s and max_restarts of Cluster": (
            "daemon_startup_timeout connect_timeout update_period min_backoff max_backoff ban_timeout "
            "max_pinged ping_timeout"
        ),
        "`verbatim cluster status` shows the stages": "show_route",
        "merge the adapter into the weights, or give the live module that holds it": "active_adapter",
        "nothing is trained through a cluster": "tuning_mode pre_seq_len",
        "the hub's own: run `hf auth login`, or set HF_TOKEN": "token use_auth_token",
        "the hub's own: set HF_HOME": "cache_dir",
        "the hub's own: empty its cache": "force_download",
        "the hub's own: set HF_HUB_OFFLINE=1, or give the folder": "local_files_only",
        "use placement=, such as Offload() or Cluster()": "device_map",
        "use quantization='int8' or 'int4', without a placement or with Offload()": (
            "load_in_8bit load_in_4bit quantization_config"
        ),
        "attention is the engine's own": "attn_implementation",
    }
)
_ALWAYS = {
    "low_cpu_mem_usage": "weights are read to where they stay",
    "use_server_to_server": "stages connect to each other",
}
_CLUSTER_OPTIONS = {"request_timeout": "step_timeout_s", "max_retries": "max_restarts"}
_ADDRESS = re.compile(r"[^\s/:]+:\d{1,5}")
# Petals' names of the parts of a model without its head, and those of transformers' families.
_PARTS = {
    "h": ("layers", "blocks"),
    "word_embeddings": ("embed_tokens",),
    "ln_f": ("norm", "final_layernorm"),
}


class _NotHere(NotSupported, AttributeError):
    """A part of the module that this process does not have, or must not change."""


class _Layers(Sequence[nn.Module]):
    """The layers of a model, with the sessions that pass hidden states through them."""

    def __init__(self, layers: Any, sessions: Callable[..., InferenceSession]) -> None:
        self._layers, self.inference_session = layers, sessions

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layers, name)


class _Body:
    """A transformers model without its head; some parts have Petals' names as well (`_PARTS`)."""

    def __init__(self, module: nn.Module, sessions: Callable[..., InferenceSession]) -> None:
        self._module, self._sessions = module, sessions

    def __getattr__(self, name: str) -> Any:
        names = (name, *_PARTS.get(name, ()))
        found = next((n for n in names if hasattr(self._module, n)), name)
        if found == "word_embeddings_layernorm" and not hasattr(self._module, found):
            return nn.Identity()  # of families without one, as in Petals
        part = getattr(self._module, found)
        return _Layers(part, self._sessions) if name == "h" else part


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
        """Open a model; as the class of its architecture, if this class is for any.

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
        model, opened_here = model_name_or_path, not isinstance(model_name_or_path, LLM | nn.Module)
        for name, value in options.items():
            if not opened_here and value is not None:
                raise InvalidRequest(
                    f"{name}={value!r}: the model is open already; options are for those that are opened here"
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

        For programs that need logits; it shares nothing with `generate`. All engines of this process wait.

        Raises:
            NotSupported: the whole unquantized module is not in this process.
        """
        self._whole("forward")
        return self.llm.engine.call_module("forward", *args, **kwargs)

    forward = __call__

    @property
    def transformer(self) -> Any:
        """The model without its head, with its layers as `h`; NotSupported as for a call."""
        return _Body(self._whole("transformer").base_model, self.inference_session)

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


AutoDistributedModelForCausalLM = DistributedModelForCausalLM
_CLASSES = {kind._model_type: kind for kind in DistributedModelForCausalLM.__subclasses__()}


def _open_llm(model: Any, options: Mapping[str, Any]) -> LLM:
    """Open an engine for a folder, a hub id or None.

    Args:
        options: Petals' and `LLM`'s; a value of None is ignored.

    Raises:
        InvalidRequest, NotSupported: an unknown or unsupported option.
        As `LLM` and the placement.
    """
    passed = {name: value for name, value in options.items() if value is not None}
    for name in passed:
        if name in _REFUSED and passed[name] is not False:
            raise NotSupported(f"{name}={passed[name]!r}: {_REFUSED[name]}")
    passed = {name: value for name, value in passed.items() if name not in _REFUSED}
    for name, why in _ALWAYS.items():
        if passed.pop(name, True) is not True:
            raise NotSupported(f"{name}: must be True; {why}")
    if "torch_dtype" in passed:
        if "dtype" in passed:
            raise InvalidRequest("torch_dtype and dtype are both given; they are the same thing")
        passed["dtype"] = passed.pop("torch_dtype")
    named = _CLUSTER_OPTIONS.items()
    cluster = {name: passed.pop(theirs) for theirs, name in named if theirs in passed}
    peers, stages = passed.pop("initial_peers", None), passed.pop("stages", None)
    for name in passed:
        if name not in _LLM_OPTIONS:
            raise InvalidRequest(
                f"{name} is not known; beside Petals' own options there are "
                f"{', '.join(sorted(_LLM_OPTIONS))}"
            )
    if peers is None and stages is None:
        for theirs, name in named:
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
    """Return the address of the cluster's head."""
    if peers is None:
        return None
    many = [peers] if isinstance(peers, str) else list(peers)
    if len(many) != 1 or not isinstance(many[0], str):
        raise InvalidRequest(
            f"initial_peers={peers!r}: must be one address, 'host:port', of the cluster's head"
        )
    if _ADDRESS.fullmatch(many[0]) is None:
        raise InvalidRequest(
            f"initial_peers={peers!r}: must be 'host:port', as `verbatim cluster start` prints it; there "
            "is no public swarm"
        )
    return many[0]
