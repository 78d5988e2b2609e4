"""Early exit: drafting with a model's first layers and head, which share its parameters, K and V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from verbatim.batch import Batch
from verbatim.common.checks import optional_integer
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

    Needs no extra memory. Useful if these layers predict most tokens, as in models trained for early exit.

    Attributes:
        layers: number of first layers to use; None: a quarter of all, at least 1.

    Raises:
        InvalidRequest: `layers` is not an integer, or is below 1.
    """

    layers: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", optional_integer("layers", self.layers))


class EarlyExitLayers(DraftLayers):
    """Runs the first layers of a decoder's model, then its last norm and its head.

    These layers store the same K and V at the same slots as in the whole model. The module is not changed:
    the modules on the path to its layers are copied shallowly, with a shorter list of layers.

    Args:
        decoder: decoder of the whole model.
        layers: number of first layers; None: a quarter, at least 1.
        module: the whole model, if the decoder has only some of its layers; only those are used.

    Raises:
        InvalidRequest: `layers` is not below the number of the model's layers.
        UnsupportedModel: the model can't be cut; the message says why.
    """

    def __init__(
        self, decoder: Decoder, layers: int | None = None, module: nn.Module | None = None
    ) -> None:
        self._whole = decoder
        self._num_requested = layers
        self._module = module
        self._cut()

    def info(self) -> dict[str, int]:
        return {"early_exit_layers": self.num_layers}

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Return the decoder of the first layers, updated after edits of the module, and `store` itself.

        Raises:
            ModelChanged: the module was edited in a way that `Decoder.refresh` does not support.
        """
        self._whole.refresh()
        if self._whole.spec is not self._spec:
            self._cut()
        return self._first_layers_decoder, store

    def close(self) -> None:
        self._first_layers_decoder.close()
        self._module = None

    def _cut(self) -> None:
        module, spec = self._module or self._whole.raw_module, self._whole.spec
        name = type(inner_model(module)).__name__
        try:
            layers = _list_of_layers(module, spec)
            self.num_layers = _resolve_num_layers(self._num_requested, len(layers), name)
            if self._module is not None:  # fewer layers draft worse, but change no token
                num_held = sum(bool(layer._modules) for layer in layers)  # others are empty
                self.num_layers = min(self.num_layers, num_held)
            first_layers = _shallow_copy(layers)
            kept = list(layers._modules.items())[: self.num_layers]
            first_layers.__dict__["_modules"] = dict(kept)
            self._first_layers_decoder = self._whole.view(_replace(module, layers, first_layers))
            _check_prefix(
                self._first_layers_decoder.spec, spec, self.num_layers, whole=self._module is None
            )
        except UnsupportedModel as reason:
            raise UnsupportedModel(f"{name} can't exit early: {reason}") from reason.__cause__
        self._spec = spec


def _resolve_num_layers(requested: int | None, num_layers: int, name: str) -> int:
    if requested is None and num_layers > 1:
        return max(1, num_layers // 4)
    if requested is None or requested >= num_layers:
        setting = "" if requested is None else f"layers={requested}: "
        raise InvalidRequest(
            f"draft='early-exit': {setting}{name} has {num_layers} layers, so at most {num_layers - 1} "
            "of them can draft for all"
        )
    return requested


def _list_of_layers(module: nn.Module, spec: ModelSpec) -> nn.ModuleList:
    """Return the innermost `ModuleList` that contains all attention; the first one if nothing attends."""
    attending = {owner for owner, _ in spec.slots}
    lists = [
        candidate
        for candidate in module.modules()  # parents before children
        if isinstance(candidate, nn.ModuleList) and attending <= set(map(id, candidate.modules()))
    ]
    if not lists:
        raise UnsupportedModel("its layers are not in one list")
    return lists[-1 if attending else 0]


def copy_path(module: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """Return a copy of `module` and the modules on the path to `layers`, independent of later edits."""
    return _replace(module, layers, _shallow_copy(layers))


def _shallow_copy(module: Any) -> Any:
    """Return a shallow copy of a module, in which children can be replaced."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    # transformers sets this after adding hooks to the layers, if the config asks for hidden states. The
    # layers are shared, so the copy must not add the hooks again.
    copy.__dict__["_output_capturing_hooks_installed"] = True
    return copy


def _replace(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Return `module`, or a shallow copy with `new` in place of `old`."""
    if module is old:
        return new
    changed = {
        name: other
        for name, child in module._modules.items()
        if child is not None and (other := _replace(child, old, new)) is not child
    }
    if not changed:
        return module
    if "forward" in module.__dict__:
        raise UnsupportedModel(
            f"the forward of {type(module).__name__} was replaced by a function that uses all of "
            "its layers"
        )
    copy: nn.Module = _shallow_copy(module)
    copy._modules.update(changed)
    return copy


def _check_prefix(short: ModelSpec, long: ModelSpec, num_layers: int, *, whole: bool) -> None:
    """Raise UnsupportedModel unless the short model stores a prefix of the long one's K, V and states.

    `whole`: whether the long model has all layers and the head, not only the layers of this process.
    """
    count = len(short.layers)
    stored, all_stored = (len(spec.layers) + len(spec.states) for spec in (short, long))
    if stored > all_stored - whole:
        raise UnsupportedModel(
            f"its first {num_layers} layers make {stored} attention or recurrent calls, the whole "
            f"model {all_stored}"
        )
    if (
        any(long.slots.get(key) != layer for key, layer in short.slots.items())
        or short.layers != long.layers[:count]
        or short.states != long.states[: len(short.states)]
        or short.dtype != long.dtype
        or (whole and short.vocab_size != long.vocab_size)
    ):
        raise UnsupportedModel(
            f"the KV layout of its first {num_layers} layers is not a prefix of the model's"
        )


def open_draft_layers(
    draft: Mtp | EarlyExit | None,
    decoder: Decoder,
    loaded: LoadedModel,
    module: nn.Module | None = None,
) -> DraftLayers:
    """Return the draft layers in this process, without their KV stores.

    Arguments and errors are those of `EarlyExitLayers` and `open_mtp`.
    """
    if isinstance(draft, Mtp):
        return open_mtp(draft, decoder, loaded)
    return DraftLayers() if draft is None else EarlyExitLayers(decoder, draft.layers, module)
