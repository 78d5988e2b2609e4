"""Trials of layers in one forward of the model: whether they can be fused.

The trial runs on a twin of the layer, in which norms and biases are random, and matrices where they are
zero: weights that make no difference today may make one after the next training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import first_line
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape
from verbatim.model.context import Update, activate, active_context
from verbatim.model.differential import differential_check, noise
from verbatim.model.flat import FlatContext, contents_of, noise_store
from verbatim.model.layer import FusedLayer, Trust, add_sinks
from verbatim.model.layer_parts import LayerParts, Rotation, Shape, take_apart
from verbatim.model.mixture import MixtureParts, mixtures_of
from verbatim.model.patching import replaced_forwards
from verbatim.model.spec import ModelSpec
from verbatim.model.structs import NotFusable

SPANS = {0: (0, 2), 1: (8, 11)}  # positions of a trial's tokens, by sequence
_MODEST = 64  # rows of a matrix that are looked at
_ROTATIONS = (Rotation.HALVES, Rotation.ONCE, Rotation.NEIGHBOURS, Rotation.UNTURNED)


class AroundLayers(FlatContext):
    """The forward context of a model with trials in its layers, in which no states are kept.

    Those of all layers would take much memory; the trial of a layer has its own.
    """

    def update_state(
        self, shape: StateShape, update: Update, rowwise: Callable[[], Tensor]
    ) -> Tensor:
        self.next_states(1)
        return rowwise()


class TrialContext(FlatContext):
    """The forward context of one layer, which also records its calls of attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attended: list[tuple[Tensor, Tensor, Tensor, AttentionOptions]] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        if not isinstance(options, AttentionOptions):
            raise NotFusable("an indexer chooses the keys that it attends to")
        self.attended.append((q, k, v, options))
        if len(self.attended) > 1:
            raise NotFusable("it attends more than once")
        return super().attend(module, q, k, v, options)

    def update_state(
        self, shape: StateShape, update: Update, rowwise: Callable[[], Tensor]
    ) -> Tensor:
        if self._store.states is None:
            raise NotFusable("it attends and keeps a state, too")
        return super().update_state(shape, update, rowwise)


class FusionTrial:
    """Replaces a layer for one forward, to find out whether it can be fused.

    Attributes:
        parts: of the layer.
        fused: its new forward, if it can.
        reason: why it can't.
        attended: the calls of attention of the last forward that was tried.

    Args:
        spec: of the model.
        called: where the trials put themselves as their layers are called.
    """

    def __init__(self, parts: LayerParts, spec: ModelSpec, called: list[FusionTrial]) -> None:
        self.parts, self._spec, self._called = parts, spec, called
        self.fused: Callable[..., Any] | None = None
        self.reason: str | None = None
        self.attended: list[tuple[Tensor, Tensor, Tensor, AttentionOptions]] = []

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self.parts.layer
        context: Any = active_context()
        self._called.append(self)
        if self.fused is None and self.reason is None:
            try:
                if args:
                    raise NotFusable("it is handed more than hidden states by position")
                self.fused = self._fuse(hidden_states, kwargs)
            except NotFusable as reason:
                self.reason = str(reason)
            except Exception as error:  # of its own forward on random rows, say
                self.reason = f"in the trial: {type(error).__name__}: {first_line(error)}"
        if self.fused is not None:
            context.next_states(self.parts.num_states)
            return hidden_states  # the next layer's trial has rows of its own
        return type(layer).forward(layer, hidden_states, *args, **kwargs)

    def _fuse(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return a forward with the bits of the layer's own; raise NotFusable if there is none."""
        raise NotImplementedError

    def _outcome(
        self, forward: Callable[..., Any], attention: nn.Module, kwargs: dict[str, Any], x: Tensor
    ) -> list[Tensor]:
        """Run a forward of the layer on rows `x`, and on memory that begins the same each time.

        Args:
            attention: the module that it attends with, or a twin.

        Returns:
            What is in memory then, followed by what it returned. `attended` has its calls of attention.
        """
        spec, outer = self._spec, active_context()
        assert isinstance(outer, FlatContext)
        place = spec.slots.get((id(self.parts.attention), 0))
        first = outer.next_states(0)
        # A store without K and V has no rows that kernels write to themselves.
        layers = [LayerShape(1, 1, 1) if place is None else spec.layers[place]]
        states = spec.states[first : first + self.parts.num_states]
        store = noise_store(layers, states, spec.dtype, x.device)
        context = TrialContext({(id(attention), 0): 0}, outer.batch, store, rows=outer.rows)
        with activate(context):
            made = forward(x, **kwargs)
        if not isinstance(made, Tensor):
            raise NotFusable("it returns more than hidden states")
        self.attended = context.attended
        return [*contents_of(store), made]


class LayerTrial(FusionTrial):
    """A trial of a layer of the compiled kernels.

    Attributes:
        layer: the fused layer.

    Args:
        trust: for `FusedLayer`.
    """

    def __init__(
        self, parts: LayerParts, spec: ModelSpec, called: list[FusionTrial], trust: Trust
    ) -> None:
        super().__init__(parts, spec, called)
        self._trust = trust
        self._mixtures = self._mixtures_of(parts)
        self.layer: FusedLayer | None = None

    @staticmethod
    def _mixtures_of(parts: LayerParts) -> list[MixtureParts | None]:
        """Return the possible forms of its MLP, at last None; its own forward must be in place."""
        return [None] if parts.gates else [*mixtures_of(parts.mlp), None]

    def _fuse(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Callable[..., Any]:
        self.layer = self._layer(hidden_states, kwargs)
        return self.layer.forward()

    def _layer(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> FusedLayer:
        arguments = frozenset(kwargs)
        twin, twins = _twin_of(self.parts.layer)
        own = take_apart(twin, twins[id(self.parts.attention)])
        mixtures = self._mixtures_of(own)
        for fields, forward in replaced_forwards(twin):
            fields["forward"] = forward
        x = noise(tuple(hidden_states.shape), hidden_states.dtype)
        rows = x.flatten(0, -2)
        rows *= torch.logspace(-2, 1, len(rows))[:, None].to(x.dtype)
        expected = self._outcome(partial(type(twin).forward, twin), own.attention, kwargs, x)
        why = "its keys and values are not what the kernels make"
        made = "its queries or what it makes of its attention is not what the kernels make"
        if own.mixer is not None:
            why = made = "what it computes is not what the kernels compute"
        for shape in self._shapes(own, kwargs):
            for number, mixture in enumerate(mixtures):
                try:
                    layer = FusedLayer(replace(own, mixture=mixture), shape, arguments, Trust())
                except NotFusable:
                    if mixture is None:
                        raise
                    continue
                ours = partial(self._outcome, layer.forward(_refuse), own.attention, kwargs)
                found = differential_check(ours, lambda _: expected, [x])
                if found is None:
                    final = replace(self.parts, mixture=self._mixtures[number])
                    return FusedLayer(final, shape, arguments, self._trust)
                if found.place < len(expected) - 1:
                    break
                why = made
        raise NotFusable(why)

    def _shapes(self, own: LayerParts, kwargs: dict[str, Any]) -> Iterator[Shape]:
        """Yield the possible shapes of attention, after its own forward was run."""
        if own.mixer is not None:
            options = AttentionOptions(scale=1.0)
            yield Shape(*own.mixer.sizes, Rotation.UNTURNED, options, sinks=False)
            return
        if not self.attended:
            raise NotFusable("it does not attend")
        ((q, k, v, options),) = self.attended
        shape = Shape(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            rotation=Rotation.UNTURNED,
            options=replace(options, sinks=None),
            sinks=options.sinks is not None,
            gated=len(own.inputs) == 3 and _columns(own.inputs[0]) == 2 * q.shape[1] * q.shape[2],
        )
        if options.alibi is not None or (shape.sinks and not _has_sinks(own.attention, options)):
            raise NotFusable("its attention has a bias of its own")
        for rotation in _ROTATIONS:
            if _angles_fit(kwargs.get("position_embeddings"), rotation, shape.head_dim):
                yield replace(shape, rotation=rotation)


def _columns(linear: Any) -> int:
    return linear.out_features  # type: ignore[no-any-return]


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotFusable("it is called in ways, or in a dtype, that the kernels don't know")


def _angles_fit(embeddings: Any, rotation: Rotation, head_dim: int) -> bool:
    if rotation is Rotation.UNTURNED:
        return True
    if not isinstance(embeddings, tuple) or len(embeddings) != 2:
        return False
    width: int = embeddings[0].shape[-1]
    if rotation is Rotation.ONCE:
        return 2 * width <= head_dim
    return width <= head_dim and width % 2 == 0


def _has_sinks(attention: nn.Module, options: AttentionOptions) -> bool:
    if attention._parameters.get("sinks") is None:
        return False
    now = add_sinks(options, attention).sinks
    return now is not None and options.sinks is not None and torch.equal(now, options.sinks)


def _twin_of(layer: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Return a copy of a layer with random weights where its own would hide errors (zeros, all ones), and
    the copy of each of its parts.

    Nothing of the layer itself is changed, and its large matrices are shared.
    """
    twins: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter | None] = {id(None): None}

    def of(module: nn.Module) -> nn.Module:
        if id(module) in twins:
            return twins[id(module)]
        twin = twins[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        twin.__dict__.pop("forward", None)  # ours, which would run the layer's own
        twin.__dict__["_parameters"] = own = dict(module._parameters)
        for name, parameter in own.items():
            if id(parameter) not in parameters:
                parameters[id(parameter)] = _telling(parameter, len(parameters))
            own[name] = parameters[id(parameter)]
        twin.__dict__["_modules"] = {
            name: None if child is None else of(child) for name, child in module._modules.items()
        }
        return twin

    return of(layer), twins


def _telling(parameter: Any, seed: int) -> Any:
    """Return `parameter`, or a random one if its values would hide errors."""
    if not parameter.is_floating_point() or not parameter.is_cpu:
        return parameter
    if parameter.ndim == 1:
        return nn.Parameter(noise(tuple(parameter.shape), parameter.dtype, seed), False)
    if parameter.ndim != 2:
        return parameter
    some = parameter[:_MODEST]
    if some.isfinite().all() and int(some.count_nonzero()) * 2 > some.numel():
        return parameter
    filled = noise(tuple(parameter.shape), parameter.dtype, seed)
    return nn.Parameter(filled / math.sqrt(max(1, parameter.shape[1])), False)
