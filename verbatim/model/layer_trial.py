"""Trials that decide whether a model's layers can be fused, run within one forward of the model.

A trial runs on a twin of a layer (`twin.py`); its result holds for all layers with the same structure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from verbatim.errors import TierFailed
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateShape, Update
from verbatim.kv.store import LayerShape
from verbatim.model.context import activate, active_context
from verbatim.model.differential import all_bit_equal, bit_equal, noise
from verbatim.model.flat import FlatContext, contents_of, noise_store
from verbatim.model.layer import FusedLayer, Returns, argument_names, as_returned
from verbatim.model.layer_parts import (
    LayerParts,
    Residual,
    Rotation,
    Shape,
    find_parts,
    record,
    same_numbers,
)
from verbatim.model.lora import shape_of
from verbatim.model.mixers import mixer_of
from verbatim.model.patching import forward_of, gate_of, has_own_forward, replaced_forwards
from verbatim.model.spec import ModelSpec
from verbatim.model.structs import NotFusable, why_not
from verbatim.model.twin import Hidden, structure_of, twin_of

SPANS = {0: (0, 2), 1: (8, 11)}  # positions of a trial's tokens, by sequence
_LARGE = 1024.0  # factor of the weights of norms, or of rows, in a second trial
_MAX_SPREAD = 512  # as MOST_SPREAD of kernels/elementwise.h
_ROTATIONS = (*[r for r in Rotation if r], Rotation.UNTURNED)


Attended = tuple[Tensor, Tensor, Tensor, AttentionOptions]  # queries, keys, values


class AroundLayers(FlatContext):
    """The forward context of a model with probes in place of layers, without recurrent states.

    The states of all layers would take much memory, and each trial has its own.
    """

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        self.next_states(1)
        return shape.update_first_rows(update, len(self.rows), self.rows.device)


class TrialContext(FlatContext):
    """The forward context of one layer, which also records its attention calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attended: list[Attended] = []

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        if not isinstance(options, AttentionOptions):
            return super().attend(module, q, k, v, options)
        self.attended.append((q, k, v, options))
        if len(self.attended) > 1:
            raise NotFusable("it attends more than once")
        return super().attend(module, q, k, v, options)

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        if self._store.states is None:
            raise NotFusable("it has both attention and a recurrent state")
        return super().update_state(shape, update)


# Builds the fused layer for the CPU kernels, or the fused forward on a GPU.
Build = Callable[[LayerParts], FusedLayer | Callable[..., Any]]


class LayerCall(NamedTuple):
    """One call of a layer in the forward of a model with probes."""

    probe: LayerProbe
    hidden: Tensor
    arguments: dict[str, Any]
    output: Tensor


@dataclass(eq=False)
class LayerProbe:
    """Replaces a layer, attention or MLP for one forward, to find out whether it can be fused.

    Only the first of the layers with the same structure and arguments is tried.

    Attributes:
        attention: the submodule that attends or has recurrent states; None: the layer is an MLP.
        spec: the model's spec.
        fuse: returns the function that builds fused layers of a trial's structure; raises NotFusable.
        calls: list to which the probes of all layers append their calls.
        trials: the trials by structure; shared by all probes.
        plain: the layer's forward without fusing.
        is_part: whether it is a submodule of a layer that also has a probe.
        kwargs: the layer's arguments by name, besides hidden states, in its first call.
        gate: the gate that provides the layer's weights; None: they are always in memory.
        attending: the layer's submodules that attend.

    Raises:
        NotFusable: the layer can't be tried.
    """

    layer: nn.Module
    attention: nn.Module | None
    spec: ModelSpec
    fuse: Callable[[LayerTrial], Build]
    calls: list[LayerCall]
    trials: dict[Any, LayerTrial]
    plain: Callable[..., Any]
    is_part: bool
    kwargs: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.gate = gate_of(self.layer)
        if has_own_forward(self.layer):
            raise NotFusable("the forward of one of its modules was replaced")
        self._names = argument_names(self.layer)
        mixer = None if self.attention is None else mixer_of(self.attention)
        self._num_states = 0 if mixer is None else mixer.kind.num_states
        self.attending = [m for m in self.layer.modules() if (id(m), 0) in self.spec.slots]
        self._structure = structure_of(self.layer)
        self._trial: LayerTrial | None = None
        self._reason = ""  # why it can't be tried

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Any = active_context()
        named = dict(zip(self._names, args, strict=False)) | kwargs
        hidden_states = named.pop(self._names[0], None)
        if not isinstance(hidden_states, Tensor) or len(args) > len(self._names):
            self._reason = "its forward takes unnamed positional arguments, or no tensor first"
            return self._run_plain(*args, **kwargs)
        if self._trial is None:
            self.kwargs = named
            first = context.next_states(0)
            self._trial = self._try_out(
                hidden_states, self.spec.states[first : first + self._num_states]
            )
        trial = self._trial
        like = hidden_states if trial.reason else trial.expected[-1]
        output = noise(tuple(like.shape), like.dtype, seed=len(self.calls) + 1).to(like.device)
        self.calls.append(LayerCall(self, hidden_states.clone(), named, output))
        if trial.reason or any(trial.returns or ()):  # keys come from its own forward
            return self._run_plain(*args, **kwargs)
        context.next_states(self._num_states)
        # A copy, as the model may edit it in place, which `WholeModel.check` must notice.
        return as_returned(output.clone(), trial.returns)

    def _try_out(self, hidden: Tensor, states: list[StateShape]) -> LayerTrial:
        """Return the trial of the layer's structure, or its own if that depends on the layer's index."""
        # Probes hold their arguments, so that ids stay unique.
        arguments = [*self.kwargs], [*map(id, tree_leaves(self.kwargs))], self.attention is None
        shapes = [self.spec.layers[self.spec.slots[id(m), 0]] for m in self.attending]
        signature = repr((arguments, shapes, states, hidden.shape, hidden.dtype))
        trial = self.trials.get((self._structure, signature))
        if trial is None:
            trial = LayerTrial(self, shapes, states, hidden, Hidden())
            self.trials[self._structure, signature] = trial
        return LayerTrial(self, shapes, states, hidden, None) if trial.needs_index else trial

    def open_weights(self) -> AbstractContextManager[None]:
        """Provide the layer's weights within the block."""
        return nullcontext() if self.gate is None else self.gate.open()

    def _run_plain(self, *args: Any, **kwargs: Any) -> Any:
        with self.open_weights():
            return self.plain(*args, **kwargs)

    def fused(self, failure: str) -> FusedLayer | Callable[..., Any]:
        """Return the fused layer on the CPU, or its new forward on a GPU.

        Args:
            failure: the error of the model's forward with probes, or "".

        Raises:
            NotFusable: the layer can't be fused.
        """
        trial = self._trial
        reason = self._reason or (trial.reason if trial else "") or failure
        if trial is None or reason:
            raise NotFusable(reason or "it was not called in the trial")
        twins = zip(map(id, trial.parts.layer.modules()), self.layer.modules(), strict=True)
        return trial.build(trial.parts.of(dict(twins)))


class LayerTrial:
    """A trial: runs the forwards of a layer's twin and of fused layers on the same random hidden states.

    Attributes:
        parts: the twin's parts.
        kwargs: as in `LayerProbe`.
        rows: hidden states `[1, T, H]`, the input in `run`.
        returns: as in `FusedLayer`.
        expected: the result of `run` for the twin's own forward.
        attended: the attention calls in the last `run`.
        shared: as in `Shape`.
        reads_shared: whether keys and values come from another layer.
        build: builds fused layers of the twin's structure.
        reason: why they can't be built, or "".
        needs_index: whether the result holds only for layers with the twin's index.

    Args:
        probe: the probe of the layer.
        shapes, states: shapes of its K and V, and of its states.
        hidden_states: hidden states with the shape, dtype and device of `rows`.
        place: placeholder for the twin's layer index, which notes reads; None: the layer's own index.
    """

    parts: LayerParts
    expected: list[Tensor]
    attended: list[Attended]
    shared: tuple[str, Any] | None
    reads_shared: bool
    build: Build

    def __init__(
        self,
        probe: LayerProbe,
        shapes: list[LayerShape],
        states: list[StateShape],
        hidden_states: Tensor,
        place: Hidden | None,
    ) -> None:
        self.kwargs, self._dtype = probe.kwargs, probe.spec.dtype
        self._shapes, self._states = shapes, states
        self.returns: Returns = None
        self.reason, self.needs_index = "", False
        try:
            with probe.open_weights():
                self._inspect(probe, hidden_states, place)
                self.build = probe.fuse(self)
        except NotFusable as reason:
            self.reason = str(reason)
        except TierFailed:
            raise
        except Exception as error:  # such as an error of its own forward on random rows
            self.needs_index = place is not None
            self.reason = f"in the trial: {why_not(error)}"
        self.needs_index |= place is not None and place.was_read

    def _inspect(self, probe: LayerProbe, hidden_states: Tensor, place: Hidden | None) -> None:
        """Run the twin's own forward on random hidden states, and find its parts."""
        x = noise(tuple(hidden_states.shape), hidden_states.dtype)
        rows = x.flatten(0, -2)
        rows *= torch.logspace(-2, 1, len(rows))[:, None].to(x.dtype)
        self.rows = x = x.to(hidden_states.device)
        twin = twin_of(probe.layer, place)
        twins = dict(zip(probe.layer.modules(), twin.modules(), strict=True))
        self._slots = {(id(twins[part]), 0): i for i, part in enumerate(probe.attending)}
        forwards = replaced_forwards(twin)
        for fields, forward in forwards:
            fields["forward"] = forward
        calls = record(twin)
        shared = {name: dict(v) for name, v in self.kwargs.items() if hasattr(v, "keys")}
        self.expected = self.run(forward_of(twin))
        self._find_shared(shared)
        for module in twin.modules():
            module.__dict__.pop("forward", None)
        attention = None if probe.attention is None else twins[probe.attention]
        vectors = next((k for _, k, v, _ in self.attended if v is k), None)
        self.parts = find_parts(twin, attention, calls, x, self.expected[-1], vectors)
        for fields, forward in forwards:
            fields["forward"] = forward

    def _find_shared(self, before: dict[str, dict[Any, Any]]) -> None:
        """Determine whether the layer shares keys and values with others through its mapping arguments.

        `before`: their contents before the layer's forward.
        """
        self.shared, self.reads_shared = None, False
        for name, previous in before.items():
            for key, pair in self.kwargs[name].items():
                heads = pair if _is_pair(pair) and pair[0].ndim == 4 else ()
                expected = (k_or_v.transpose(1, 2) for k_or_v in heads)
                if (
                    heads
                    and self.attended
                    and all(map(same_numbers, expected, self.attended[0][1:3]))
                ):
                    if self.shared is not None:
                        raise NotFusable("its keys and values are stored in two places")
                    self.shared, self.reads_shared = (name, key), previous.get(key) is pair
                elif previous.get(key) is not pair:
                    raise NotFusable("it passes data to other layers through its arguments")

    def run(self, forward: Callable[..., Any], *, large: bool = False) -> list[Tensor]:
        """Run a forward of the twin on `rows`, with a new KV store that always has the same contents.

        Args:
            large: whether to scale up the weights of the twin's norms, or the rows for a part of a layer.

        Returns:
            The contents of the store, followed by the hidden states that the forward returned.
        """
        outer = active_context()
        assert isinstance(outer, FlatContext)
        # The kernels write to the store themselves only if it has K and V.
        shapes = self._shapes or [LayerShape(1, 1, 1)]
        store = noise_store(shapes, self._states, self._dtype, self.rows.device)
        context = TrialContext(self._slots, outer.batch, store, rows=outer.rows)
        norms = self.parts.norms.values() if large else ()
        rows = self.rows.clone()
        if large and self.parts.residual is Residual.PART:
            rows *= _LARGE
        weights = {id(w): w.data for norm in norms if (w := norm.weight) is not None}.values()
        for weight in weights:
            weight *= _LARGE
        try:
            with activate(context):
                result = forward(rows, **self.kwargs)
        finally:
            for weight in weights:
                weight /= _LARGE
        self.attended, self.returns = context.attended, None
        if isinstance(result, tuple):
            result, *others = result
            if any(x is not None and not self.has_chosen(x) for x in others):
                raise NotFusable("it returns more than hidden states")
            self.returns = tuple(x is not None for x in others)
        if not isinstance(result, Tensor):
            raise NotFusable("it returns no hidden states")
        return [*contents_of(store), result]

    def has_chosen(self, x: Any) -> bool:
        """Return whether `x` is the keys that an indexer chose in the last `run`."""
        keys = self.attended[0][3].chosen if self.attended else None
        return keys is not None and isinstance(x, Tensor) and same_numbers(x, keys)


def fuse(trial: LayerTrial) -> Build:
    """Return a builder of fused layers for the trial's structure; raise NotFusable if there are none."""
    original, arguments = trial.parts, frozenset(trial.kwargs)
    dtype, returns = trial.expected[-1].dtype, trial.returns
    # A forward that clamps values differs only if they are large.
    expected = [trial.expected, trial.run(forward_of(original.layer), large=True)]
    bodies = [replace(original, mixture=mixture) for mixture in original.mixtures]
    if original.gates or original.mlp is None:
        bodies.append(original)
    if original.mlp not in (None, original.layer):
        bodies.append(replace(original, gates=[], down=None))
    if original.factor is not None:  # the buffer may be unused
        bodies += [replace(parts, factor=None) for parts in bodies]
    why = ""
    for shape in _shapes(original, trial):
        build = partial(FusedLayer, shape=shape, arguments=arguments, returns=returns, dtype=dtype)
        for parts in bodies:
            try:
                owners = [parts.attention] * bool(parts.inputs) + [parts.mlp] * bool(parts.gates)
                unknown = [] if parts.mixer else parts.unknown_weights(*owners)
                if unknown:
                    raise NotFusable(f"it has a weight outside of its known parts: {unknown[0]}")
                layer = build(parts)
                layer.prepare()
                ours = layer.forward(_refuse)
            except NotFusable as reason:
                why = why or str(reason)
                continue
            *same_stores, same_output = map(bit_equal, trial.run(ours), expected[0])
            same = same_output and all(same_stores)
            if same and all_bit_equal(trial.run(ours, large=True), expected[1]):
                trial.parts = parts
                return build
            if original.mixer is not None:
                why = "its results differ from the kernels'"
            elif same:
                why = "its results for large values differ from the kernels'"
            elif all(same_stores):
                why = "its queries or its attention output differ from the kernels'"
                if parts.gates and parts.factor is None:
                    break  # the MLP is not the cause
            else:
                why = why or "its keys and values differ from the kernels'"
                break
    raise NotFusable(why)


def _shapes(parts: LayerParts, trial: LayerTrial) -> Iterator[Shape]:
    """Yield the possible shapes of a layer's attention, given the attention call of its own forward."""
    if parts.mixer is not None or not parts.inputs:
        sizes_of = (0, 0, 0, 0) if parts.mixer is None else parts.mixer.sizes
        yield Shape(*sizes_of, Rotation.UNTURNED, AttentionOptions(scale=1.0), sinks=False)
        return
    if not trial.attended:
        raise NotFusable("it does not attend")
    ((q, k, v, options),) = trial.attended
    columns = [(shape_of(module) or (0,))[0] for module in parts.inputs]
    gates = columns[-1] if len(columns) == (3 if parts.latent else 4) else 0
    if len(columns) == 3 and not parts.latent and columns[0] == 2 * q.shape[1] * q.shape[2]:
        gates = columns[0] // 2
    attention: Any = parts.attention
    own_value = attention.v_head_dim if v is k else v.shape[2]
    if gates not in (0, q.shape[1], q.shape[1] * own_value):
        raise NotFusable(f"it has {gates} gates, not one per head or per element of a head")
    config: Any = getattr(parts.attention, "config", None)
    shape = Shape(
        heads=q.shape[1],
        kv_heads=0 if trial.reads_shared else k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        rotation=Rotation.UNTURNED,
        options=replace(options, sinks=None, chosen=None),
        sinks=options.sinks is not None,
        gates=gates,
        clip=float(getattr(parts.attention, "clip_qkv", getattr(config, "clip_qkv", None)) or 0.0),
        shared=trial.shared,
        absorbed=attention.qk_nope_head_dim if v is k else 0,
        own_value=own_value,
    )
    scaling = parts.attention.__dict__.get("scaling")
    if options.scale == 1.0 and isinstance(scaling, float):
        shape = replace(shape, q_scale=scaling)
    if parts.indexer is None and options.chosen is not None:
        argument = next((name for name, x in trial.kwargs.items() if trial.has_chosen(x)), None)
        shape = replace(shape, chosen_keys_argument=argument)
    chooses = parts.indexer is not None or shape.chosen_keys_argument is not None
    if options.records is not None or (options.chosen is not None) != chooses:
        raise NotFusable("an indexer selects the keys that it attends to")
    layouts = (False, True) if len(parts.inputs) == 1 and shape.kv_heads > 1 else (False,)
    orders = (False, True) if "of_queries" in parts.norms else (False,)
    rotary_width = shape.head_dim
    if parts.latent:
        sizes = [shape_of(m) or (0, 0) for m in (parts.inputs[1], parts.latent[-1])]
        rotary_width = sizes[0][0] - sizes[1][1]
    embeddings: Any = trial.kwargs.get("position_embeddings")
    if _is_pair(embeddings):  # at position 0 all of sin is 0
        shape = replace(shape, sin_first=not embeddings[0].flatten(0, -2)[0].any())
    for rotation, grouped, first in itertools.product(_ROTATIONS, layouts, orders):
        if _angles_fit(embeddings, rotation, rotary_width):
            yield replace(shape, rotation=rotation, grouped=grouped, rotated_first=first)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotFusable("it is called with arguments or a dtype that the kernels don't support")


def _angles_fit(embeddings: Any, rotation: Rotation, rotary_width: int) -> bool:
    if rotation is Rotation.UNTURNED:
        return True
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        return rotation is Rotation.NEIGHBOURS_ONCE and 2 * embeddings.shape[-1] <= rotary_width
    if not _is_pair(embeddings):
        return False
    width: int = embeddings[0].shape[-1]
    if rotation in (Rotation.ONCE, Rotation.NEIGHBOURS_ONCE):
        return 2 * width <= rotary_width
    max_width = min(rotary_width, _MAX_SPREAD) if rotation is Rotation.SPREAD else rotary_width
    return width <= max_width and width % 2 == 0


def _is_pair(embeddings: Any) -> bool:
    is_pair = isinstance(embeddings, tuple) and len(embeddings) == 2
    return is_pair and all(isinstance(x, Tensor) for x in embeddings)
