"""Early exit: the first layers of a model, followed by its head, with shared parameters and K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from verbatim.batch import Batch
from verbatim.checks import optional_integer
from verbatim.errors import InvalidRequest, UnsupportedModel
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, open_mtp
from verbatim.model.spec import ModelSpec, inner_model


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Draft with the model's own first layers, followed by its own last norm and head.

    Needs no memory. Useful if those layers predict most tokens, as in models trained for early exit.

    Attributes:
        layers: number of first layers to use. None: a quarter of all, at least 1.

    Raises:
        InvalidRequest: `layers` is not an integer, or below 1.
    """

    layers: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", optional_integer("layers", self.layers))


class EarlyExitLayers(DraftLayers):
    """Runs the first layers of a decoder's model, then its last norm and its head.

    The first layers store the same K and V at the same slots as in the whole model. The module is not
    changed; only the modules on the path to its layers are copied shallowly, with a shorter list of layers.

    Args:
        decoder: decoder of the whole model.
        layers: number of first layers; None takes a quarter, at least 1.
        module: the whole model as its own forward runs it, where the decoder runs only some layers; no more
            than those are taken then.

    Raises:
        InvalidRequest: the model does not have more layers.
        UnsupportedModel: it can't be cut; the message has the reason.
    """

    def __init__(
        self, decoder: Decoder, layers: int | None = None, module: nn.Module | None = None
    ) -> None:
        self._whole = decoder
        self._wanted = layers
        self._module = module
        self._cut()

    def info(self) -> dict[str, int]:
        return {"early_exit_layers": self.num_layers}

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Return the decoder of the first layers, after edits of the module, and the whole model's `store`.

        Raises:
            ModelChanged: as the whole model's; other edits of a live module are followed.
        """
        self._whole.refresh()
        if self._whole.spec is not self._spec:
            self._cut()
        return self._short, store

    def close(self) -> None:
        self._short.close()
        self._module = None

    def _cut(self) -> None:
        module, spec = self._module or self._whole.held, self._whole.spec
        name = type(inner_model(module)).__name__
        try:
            layers = _list_of_layers(module, spec)
            self.num_layers = _resolve_num_layers(self._wanted, len(layers), name)
            if self._module is not None:  # fewer layers draft worse, and change no token
                held = sum(bool(layer._modules) for layer in layers)  # others are shells
                self.num_layers = min(self.num_layers, held)
            first = _twin(layers)
            kept = list(layers._modules.items())[: self.num_layers]
            first.__dict__["_modules"] = dict(kept)
            self._short = self._whole.view(_with(module, layers, first))
            _check_prefix(self._short.spec, spec, self.num_layers, whole=self._module is None)
        except UnsupportedModel as reason:
            raise UnsupportedModel(f"{name} can't exit early: {reason}") from reason.__cause__
        self._spec = spec


def _resolve_num_layers(wanted: int | None, num_layers: int, name: str) -> int:
    if wanted is None and num_layers > 1:
        return max(1, num_layers // 4)
    if wanted is None or wanted >= num_layers:
        given = "" if wanted is None else f"layers={wanted}: "
        raise InvalidRequest(
            f"draft='early-exit': {given}{name} has {num_layers} layers, so at most {num_layers - 1} "
            "of them can draft for all"
        )
    return wanted


def _list_of_layers(module: nn.Module, spec: ModelSpec) -> nn.ModuleList:
    """Return the innermost list of modules that contains all attention; without any, the first list."""
    attending = {owner for owner, _ in spec.slots}
    found = [
        candidate
        for candidate in module.modules()  # parents before children
        if isinstance(candidate, nn.ModuleList) and attending <= set(map(id, candidate.modules()))
    ]
    if not found:
        raise UnsupportedModel("its layers are not in one list")
    return found[-1 if attending else 0]


def copy_path(module: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Return a shallow copy of the modules on the path to `layers`: later changes of theirs are not seen."""
    return _with(module, layers, _twin(layers))


def _twin(module: Any) -> Any:
    """Return a shallow copy of a module, with replaceable children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    # transformers sets this once it has added its hooks to the layers, if a config asks for hidden
    # states. The layers are shared, and would get the hooks twice.
    twin.__dict__["_output_capturing_hooks_installed"] = True
    return twin


def _with(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Return `module`, or a shallow copy with `new` in place of `old`."""
    if module is old:
        return new
    changed = {
        name: other
        for name, child in module._modules.items()
        if child is not None and (other := _with(child, old, new)) is not child
    }
    if not changed:
        return module
    if "forward" in module.__dict__:
        raise UnsupportedModel(
            f"the forward of {type(module).__name__} was replaced by one that knows all of its layers"
        )
    twin: nn.Module = _twin(module)
    twin._modules.update(changed)
    return twin


def _check_prefix(short: ModelSpec, long: ModelSpec, num_layers: int, *, whole: bool) -> None:
    """Raise UnsupportedModel unless the short model stores a prefix of the long one's K, V and states.

    Args:
        whole: the long one has all layers and the head, not only as many layers as this process holds.
    """
    count = len(short.layers)
    stored, all_stored = (len(spec.layers) + len(spec.states) for spec in (short, long))
    if stored > all_stored - whole:
        raise UnsupportedModel(
            f"with {num_layers} layers in its list it attends or recurs {stored} times, and {all_stored} "
            "times with all of them"
        )
    if (
        any(long.slots.get(key) != layer for key, layer in short.slots.items())
        or short.layers != long.layers[:count]
        or short.states != long.states[: len(short.states)]
        or short.dtype != long.dtype
        or (whole and short.vocab_size != long.vocab_size)
    ):
        raise UnsupportedModel(
            f"what its first {num_layers} layers store is not the beginning of what all of them store"
        )


def open_draft_layers(
    draft: Mtp | EarlyExit | None,
    decoder: Decoder,
    loaded: LoadedModel,
    module: nn.Module | None = None,
) -> DraftLayers:
    """Open the layers of a model in this process that draft for it, without KV stores.

    Args:
        module: as of `EarlyExitLayers`.

    Raises:
        InvalidRequest, NotSupported, ModelError: it has none, or unsupported ones.
    """
    if isinstance(draft, Mtp):
        return open_mtp(draft, decoder, loaded)
    return DraftLayers() if draft is None else EarlyExitLayers(decoder, draft.layers, module)
