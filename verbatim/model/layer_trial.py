"""Trials of layers in one forward of the model: whether they can be fused.

The trial runs on a twin of the layer, in which norms and biases are random, and matrices where they are
zero: weights that make no difference today may make one after the next training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verbatim.errors import first_line
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateShape
from verbatim.kv.store import LayerShape
from verbatim.model.context import Update, activate, active_context
from verbatim.model.differential import differential_check, noise
from verbatim.model.flat import FlatContext, contents_of, noise_store
from verbatim.model.layer import FusedLayer, add_sinks
from verbatim.model.layer_parts import LayerParts, Rotation, Shape, take_apart
from verbatim.model.patching import replaced_forwards
from verbatim.model.spec import ModelSpec
from verbatim.model.structs import NotFusable

SPANS = {0: (0, 2), 1: (8, 11)}  # positions of a trial's tokens, by sequence
_MODEST = 64  # rows of a matrix that are looked at
_ROTATIONS = (Rotation.HALVES, Rotation.ONCE, Rotation.NEIGHBOURS, Rotation.UNTURNED)


Attended = tuple[Tensor, Tensor, Tensor, AttentionOptions]  # queries, keys, values


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
        self.attended: list[Attended] = []

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


# From a layer's parts, and what it is called with, to its fused forward; and the layer of the CPU kernels.
Fuse = Callable[
    [LayerParts, ModelSpec, Tensor, dict[str, Any]], tuple[Callable[..., Any], FusedLayer | None]
]


class LayerCall(NamedTuple):
    """One call of a layer in the forward of a model with probes."""

    probe: LayerProbe
    hidden: Tensor
    arguments: dict[str, Any]
    made: Tensor


class LayerProbe:
    """Replaces a layer for one forward, to find out whether it can be fused.

    Attributes:
        parts: of the layer.
        forward: its new forward, if it can.
        fused: the layer of the CPU kernels, if it is one.
        reason: why it can't.

    Args:
        spec: of the model.
        fuse: tries the layer out; raises NotFusable.
        calls: where the probes of all layers note their calls.
    """

    def __init__(
        self, parts: LayerParts, spec: ModelSpec, fuse: Fuse, calls: list[LayerCall]
    ) -> None:
        self.parts, self._spec, self._fuse, self._calls = parts, spec, fuse, calls
        self.forward: Callable[..., Any] | None = None
        self.fused: FusedLayer | None = None
        self.reason: str | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self.parts.layer
        context: Any = active_context()
        made = noise(tuple(hidden_states.shape), hidden_states.dtype, seed=len(self._calls) + 1)
        made = made.to(hidden_states.device)
        self._calls.append(LayerCall(self, hidden_states.clone(), kwargs, made))
        if self.forward is None and self.reason is None:
            try:
                if args:
                    raise NotFusable("it is handed more than hidden states by position")
                self.forward, self.fused = self._fuse(self.parts, self._spec, hidden_states, kwargs)
            except NotFusable as reason:
                self.reason = str(reason)
            except Exception as error:  # of its own forward on random rows, say
                self.reason = f"in the trial: {type(error).__name__}: {first_line(error)}"
        if self.forward is not None:
            context.next_states(self.parts.num_states)
            return made.clone()  # so it shows what the model makes of it
        return type(layer).forward(layer, hidden_states, *args, **kwargs)


def outcome(
    forward: Callable[..., Any],
    parts: LayerParts,
    spec: ModelSpec,
    kwargs: dict[str, Any],
    x: Tensor,
    attention: nn.Module | None = None,
) -> tuple[list[Tensor], list[Attended]]:
    """Run a forward of a layer on rows `x`, and on memory that begins the same each time.

    Args:
        attention: the twin of the module that it attends with; None: the module itself.

    Returns:
        What is in memory then, followed by what it returned; and its calls of attention.
    """
    outer = active_context()
    assert isinstance(outer, FlatContext)
    place = spec.slots.get((id(parts.attention), 0))
    first = outer.next_states(0)
    # A store without K and V has no rows that kernels write to themselves.
    layers = [LayerShape(1, 1, 1) if place is None else spec.layers[place]]
    states = spec.states[first : first + parts.num_states]
    store = noise_store(layers, states, spec.dtype, x.device)
    slots = {(id(attention or parts.attention), 0): 0}
    context = TrialContext(slots, outer.batch, store, rows=outer.rows)
    with activate(context):
        made = forward(x, **kwargs)
    if not isinstance(made, Tensor):
        raise NotFusable("it returns more than hidden states")
    return [*contents_of(store), made], context.attended


def fuse(
    parts: LayerParts, spec: ModelSpec, hidden_states: Tensor, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], FusedLayer]:
    """Return the layer of the CPU kernels that has the bits of a layer's own forward.

    Raises:
        NotFusable: there is none.
    """
    arguments = frozenset(kwargs)
    twin, twins = _twin_of(parts.layer)
    own = take_apart(twin, twins[id(parts.attention)])
    for fields, forward in replaced_forwards(twin):
        fields["forward"] = forward
    x = noise(tuple(hidden_states.shape), hidden_states.dtype)
    rows = x.flatten(0, -2)
    rows *= torch.logspace(-2, 1, len(rows))[:, None].to(x.dtype)

    def run(forward: Callable[..., Any]) -> tuple[list[Tensor], list[Attended]]:
        return outcome(forward, parts, spec, kwargs, x, own.attention)

    expected, attended = run(partial(type(twin).forward, twin))
    why = "its keys and values are not what the kernels make"
    made = "its queries or what it makes of its attention is not what the kernels make"
    if own.mixer is not None:
        why = made = "what it computes is not what the kernels compute"
    for shape in _shapes(own, attended, kwargs):
        for number, mixture in enumerate((*own.mixtures, None)):
            try:
                layer = FusedLayer(replace(own, mixture=mixture), shape, arguments)
            except NotFusable:
                if mixture is None:
                    raise
                continue
            ours = layer.forward(_refuse)
            found = differential_check(lambda f: run(f)[0], lambda _: expected, [ours])
            if found is None:
                fused = FusedLayer(
                    replace(parts, mixture=(*parts.mixtures, None)[number]), shape, arguments
                )
                return fused.forward(), fused
            if found.place < len(expected) - 1:
                break
            why = made
    raise NotFusable(why)


def _shapes(own: LayerParts, attended: list[Attended], kwargs: dict[str, Any]) -> Iterator[Shape]:
    """Yield the possible shapes of attention of a layer whose own forward has attended so."""
    if own.mixer is not None:
        options = AttentionOptions(scale=1.0)
        yield Shape(*own.mixer.sizes, Rotation.UNTURNED, options, sinks=False)
        return
    if not attended:
        raise NotFusable("it does not attend")
    ((q, k, v, options),) = attended
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
