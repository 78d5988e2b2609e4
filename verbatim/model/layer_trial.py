"""Trials of layers in one forward of the model: whether they can be fused.

A trial runs on a twin of a layer (`twin.py`), and its verdict holds for all layers that are built alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
from verbatim.model.differential import differential_check, noise
from verbatim.model.flat import FlatContext, contents_of, noise_store
from verbatim.model.layer import FusedLayer, Returns, argument_names, as_returned
from verbatim.model.layer_parts import (
    LayerParts,
    Residual,
    Rotation,
    Shape,
    mixer_in,
    record,
    same_numbers,
    take_apart,
)
from verbatim.model.lora import shape_of
from verbatim.model.patching import forward_of, gate_of, replaced_forwards
from verbatim.model.spec import ModelSpec
from verbatim.model.structs import NotFusable, why_not
from verbatim.model.twin import Hidden, structure_of, twin_of

SPANS = {0: (0, 2), 1: (8, 11)}  # positions of a trial's tokens, by sequence
_LARGE = 1024.0  # factor of the weights of norms, or of rows, in a second trial
_MOST_SPREAD = 512  # as MOST_SPREAD of kernels/elementwise.h
_ROTATIONS = (*[r for r in Rotation if r], Rotation.UNTURNED)


Attended = tuple[Tensor, Tensor, Tensor, AttentionOptions]  # queries, keys, values


class AroundLayers(FlatContext):
    """The forward context of a model with trials in its layers, in which no states are kept.

    Those of all layers would take much memory; the trial of a layer has its own.
    """

    def update_state(self, shape: StateShape, update: Update) -> Tensor:
        self.next_states(1)
        return shape.update_first_rows(update, len(self.rows), self.rows.device)


class TrialContext(FlatContext):
    """The forward context of one layer, which also records its calls of attention."""

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
            raise NotFusable("it attends and keeps a state, too")
        return super().update_state(shape, update)


# Returns the layer of the CPU kernels, or the new forward of a layer on a GPU.
Build = Callable[[LayerParts], FusedLayer | Callable[..., Any]]


class LayerCall(NamedTuple):
    """One call of a layer in the forward of a model with probes."""

    probe: LayerProbe
    hidden: Tensor
    arguments: dict[str, Any]
    made: Tensor


class LayerProbe:
    """Replaces a layer, or an attention or an MLP, for one forward, to find out whether it can be fused.

    Of layers that are built and called alike the first one is tried, and the others are fused as it is.

    Attributes:
        layer, plain, is_part: the arguments.
        gate: provides the layer's weights, which are elsewhere; None: they stay where they are.
        tried: the probe of the layer that was tried for it; None: it was not called.
        parts: of the twin, if this layer was tried, as all that follows.
        kwargs: its arguments by name, beside hidden states.
        rows: hidden states `[1, T, H]` that `run` gives it.
        returns: as of `FusedLayer`.
        expected: of the twin's own forward, as of `run`.
        attended: the calls of attention in the last `run`.
        shared, reads: as of `Shape`, and whether keys and values are those of another layer.

    Args:
        attention: the module in it that attends or keeps states; None: it is an MLP.
        spec: of the model.
        fuse: returns how layers like the probe's are fused; raises NotFusable.
        calls: where the probes of all layers note their calls.
        alike: the probes of all layers that were tried.
        plain: the forward that serves where the kernels don't.
        is_part: it is in a layer that has a probe, too.

    Raises:
        NotFusable: it can't.
    """

    parts: LayerParts
    expected: list[Tensor]
    attended: list[Attended]
    shared: tuple[str, Any] | None
    reads: bool
    _build: Build

    def __init__(
        self,
        layer: nn.Module,
        attention: nn.Module | None,
        spec: ModelSpec,
        fuse: Callable[[LayerProbe], Build],
        calls: list[LayerCall],
        alike: dict[Any, LayerProbe],
        plain: Callable[..., Any],
        is_part: bool,
    ) -> None:
        self.gate = gate_of(layer)
        if any("forward" in part.__dict__ and gate_of(part) is None for part in layer.modules()):
            raise NotFusable("the forward of a part of it was replaced by its owner")
        self.layer, self._attention, self._fuse = layer, attention, fuse
        self._calls, self._alike = calls, alike
        self.returns: Returns = None
        self.plain, self.is_part, self._names = plain, is_part, argument_names(layer)
        mixer = None if attention is None else mixer_in(attention)
        self._num_states = 0 if mixer is None else mixer.kind.num_states
        self._attending = [m for m in layer.modules() if (id(m), 0) in spec.slots]
        self._shapes = [spec.layers[spec.slots[id(m), 0]] for m in self._attending]
        self._states, self._dtype = spec.states, spec.dtype
        self._structure = structure_of(layer)
        self.tried: LayerProbe | None = None
        self._reason = ""  # why layers like it can't be fused
        self._needs_place = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context: Any = active_context()
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden_states = given.pop(self._names[0], None)
        if not isinstance(hidden_states, Tensor) or len(args) > len(self._names):
            self.tried, self._reason = self, "its forward does not name what it is handed"
            return self._run_plain(*args, **kwargs)
        if self.tried is None:
            self.kwargs = given
            first = context.next_states(0)
            self._states = self._states[first : first + self._num_states]
            # Probes keep their arguments, so that no other has the same id.
            called = [*given], [*map(id, tree_leaves(given))], self._attention is None
            kept = self._shapes, self._states, hidden_states.shape, hidden_states.dtype
            self.tried = self._alike.setdefault((self._structure, repr((called, kept))), self)
            if self.tried is self:
                self._try_out(hidden_states, place := Hidden())
                self._needs_place |= place.was_read
            if self.tried._needs_place:
                self.tried = self
                self._try_out(hidden_states, None)
        like = hidden_states if self.tried._reason else self.tried.expected[-1]
        made = noise(tuple(like.shape), like.dtype, seed=len(self._calls) + 1).to(like.device)
        self._calls.append(LayerCall(self, hidden_states.clone(), given, made))
        if self.tried._reason or any(self.tried.returns or ()):  # only its own forward has the keys
            return self._run_plain(*args, **kwargs)
        context.next_states(self._num_states)
        # In memory of its own, so it shows what the model makes of it.
        return as_returned(made.clone(), self.tried.returns)

    def _with_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.gate is None else self.gate.open()

    def _run_plain(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_weights():
            return self.plain(*args, **kwargs)

    def _try_out(self, hidden_states: Tensor, place: Hidden | None) -> None:
        """Try the layer out by a twin.

        Args:
            place: of the twin in the model; None: the layer's. One whose place is hidden may need it.
        """
        self._reason = ""
        try:
            with self._with_weights():
                self._inspect(hidden_states, place)
                self._build = self._fuse(self)
        except NotFusable as reason:
            self._reason = str(reason)
        except TierFailed:
            raise
        except Exception as error:  # of its own forward on random rows, say
            self._needs_place |= place is not None
            self._reason = f"in the trial: {why_not(error)}"

    def _inspect(self, hidden_states: Tensor, place: Hidden | None) -> None:
        """Run the twin's own forward on random rows, and find its parts."""
        x = noise(tuple(hidden_states.shape), hidden_states.dtype)
        rows = x.flatten(0, -2)
        rows *= torch.logspace(-2, 1, len(rows))[:, None].to(x.dtype)
        self.rows = x = x.to(hidden_states.device)
        self._twin = twin = twin_of(self.layer, place)
        twins = dict(zip(self.layer.modules(), twin.modules(), strict=True))
        self._slots = {(id(twins[part]), 0): i for i, part in enumerate(self._attending)}
        forwards = replaced_forwards(twin)
        for fields, forward in forwards:
            fields["forward"] = forward
        calls = record(twin)
        shared = {name: dict(v) for name, v in self.kwargs.items() if hasattr(v, "keys")}
        self.expected = self.run(forward_of(twin))
        self._find_shared(shared)
        for module in twin.modules():
            module.__dict__.pop("forward", None)
        attention = None if self._attention is None else twins[self._attention]
        self.parts = take_apart(twin, attention, calls, x, self.expected[-1])
        for fields, forward in forwards:
            fields["forward"] = forward

    def _find_shared(self, before: dict[str, dict[Any, Any]]) -> None:
        """Find out which keys and values are kept in its arguments.

        Args:
            before: what was in these before its forward.
        """
        self.shared, self.reads = None, False
        for name, then in before.items():
            for key, pair in self.kwargs[name].items():
                heads = pair if _is_pair(pair) and pair[0].ndim == 4 else ()
                kept = (k_or_v.transpose(1, 2) for k_or_v in heads)
                if heads and self.attended and all(map(same_numbers, kept, self.attended[0][1:3])):
                    if self.shared is not None:
                        raise NotFusable("its keys and values are kept in two places")
                    self.shared, self.reads = (name, key), then.get(key) is pair
                elif then.get(key) is not pair:
                    raise NotFusable("it hands something to other layers")

    def run(self, forward: Callable[..., Any], *, large: bool = False) -> list[Tensor]:
        """Run a forward of the twin on random rows, and on memory that begins the same each time.

        Args:
            large: norms make large rows, by weights that the twin has for itself; rows of a part are large.

        Returns:
            What is in memory then, followed by what it returned.
        """
        outer = active_context()
        assert isinstance(outer, FlatContext)
        # A store without K and V has no rows that kernels write to themselves.
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
                made = forward(rows, **self.kwargs)
        finally:
            for weight in weights:
                weight /= _LARGE
        self.attended, self.returns = context.attended, None
        if isinstance(made, tuple):
            made, *others = made
            if any(x is not None and not self.has_chosen(x) for x in others):
                raise NotFusable("it returns more than hidden states")
            self.returns = tuple(x is not None for x in others)
        if not isinstance(made, Tensor):
            raise NotFusable("it returns no hidden states")
        return [*contents_of(store), made]

    def has_chosen(self, x: Any) -> bool:
        """Return whether something is the keys that an indexer has chosen in the last `run`."""
        keys = self.attended[0][3].chosen if self.attended else None
        return keys is not None and isinstance(x, Tensor) and same_numbers(x, keys)

    def fused(self, failure: str) -> FusedLayer | Callable[..., Any]:
        """Return the layer of the CPU kernels, or its new forward on a GPU.

        Args:
            failure: of the model's forward with probes; "": none.

        Raises:
            NotFusable: it has none.
        """
        tried = self.tried
        reason = failure if tried is None else tried._reason or failure
        if tried is None or reason:
            raise NotFusable(reason or "it was not called in the trial")
        own = zip(map(id, tried._twin.modules()), self.layer.modules(), strict=True)
        return tried._build(tried.parts.of(dict(own)))


def fuse(probe: LayerProbe) -> Build:
    """Return how layers like the probe's are run by the CPU kernels with the bits of their own forward.

    Raises:
        NotFusable: they can't be.
    """
    own, arguments = probe.parts, frozenset(probe.kwargs)
    dtype, returns = probe.expected[-1].dtype, probe.returns
    # An own forward that clamps what it is given or makes differs only where numbers are large.
    expected = [probe.expected, probe.run(forward_of(own.layer), large=True)]
    bodies = [replace(own, mixture=mixture) for mixture in own.mixtures]
    if own.gates or own.mlp is None:
        bodies.append(own)
    if own.mlp not in (None, own.layer):
        bodies.append(replace(own, gates=[], down=None))
    if own.factor is not None:  # or a number that no forward reads
        bodies += [replace(parts, factor=None) for parts in bodies]
    why = ""
    for shape in _shapes(own, probe):
        build = partial(FusedLayer, shape=shape, arguments=arguments, returns=returns, dtype=dtype)
        for parts in bodies:
            try:
                _check_weights(parts)
                layer = build(parts)
                layer.prepare()
                ours = layer.forward(_refuse)
            except NotFusable as reason:
                why = why or str(reason)
                continue
            found = differential_check(
                lambda large, ours=ours: probe.run(ours, large=large),  # type: ignore[misc]
                expected.__getitem__,
                (False, True),
            )
            if found is None:
                probe.parts = parts
                return build
            if own.mixer is not None:
                why = "what it computes is not what the kernels compute"
            elif found.case:
                why = "what it makes of large numbers is not what the kernels make"
            elif found.place == len(expected[0]) - 1:
                why = "its queries or what it makes of its attention is not what the kernels make"
                if parts.gates and parts.factor is None:
                    break  # an MLP that was taken apart is not at fault
            else:
                why = why or "its keys and values are not what the kernels make"
                break
    raise NotFusable(why)


def _check_weights(own: LayerParts) -> None:
    """Raise NotFusable if attention or a dense MLP has a weight that no part of it has.

    Today's forward may not use it, as one of a LoRA that is merged, and tomorrow's may.
    """
    if own.mixer is not None:
        return
    parts: list[Any] = [*own.inputs, *own.latent, own.output, *own.gates, own.down, own.indexer]
    parts += [norm.module for norm in own.norms.values()]
    known = {id(p) for part in parts if part is not None for p in part.parameters()}
    known.add(id(own.attention._parameters.get("sinks")))
    for whole in (own.attention if own.inputs else None, own.mlp if own.gates else None):
        for name, parameter in () if whole is None else whole.named_parameters():
            if id(parameter) not in known:
                raise NotFusable(f"it has a weight beside those of its parts: {name}")


def _shapes(own: LayerParts, probe: LayerProbe) -> Iterator[Shape]:
    """Yield the possible shapes of attention of a layer whose own forward has attended so."""
    if own.mixer is not None or not own.inputs:
        sizes_of = (0, 0, 0, 0) if own.mixer is None else own.mixer.sizes
        yield Shape(*sizes_of, Rotation.UNTURNED, AttentionOptions(scale=1.0), sinks=False)
        return
    if not probe.attended:
        raise NotFusable("it does not attend")
    ((q, k, v, options),) = probe.attended
    columns = [(shape_of(module) or (0,))[0] for module in own.inputs]
    gates = columns[-1] if len(columns) == (3 if own.latent else 4) else 0
    if len(columns) == 3 and not own.latent and columns[0] == 2 * q.shape[1] * q.shape[2]:
        gates = columns[0] // 2
    if gates not in (0, q.shape[1], q.shape[1] * v.shape[2]):
        raise NotFusable(f"it has {gates} gates, and not one for each head or each of its elements")
    config: Any = getattr(own.attention, "config", None)
    shape = Shape(
        heads=q.shape[1],
        kv_heads=0 if probe.reads else k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        rotation=Rotation.UNTURNED,
        options=replace(options, sinks=None, chosen=None),
        sinks=options.sinks is not None,
        gates=gates,
        clip=float(getattr(own.attention, "clip_qkv", getattr(config, "clip_qkv", None)) or 0.0),
        shared=probe.shared,
    )
    scaling = own.attention.__dict__.get("scaling")
    if options.scale == 1.0 and isinstance(scaling, float):
        shape = replace(shape, q_scale=scaling)
    if own.indexer is None and options.chosen is not None:
        given = next((name for name, x in probe.kwargs.items() if probe.has_chosen(x)), None)
        shape = replace(shape, chosen_in=given)
    chooses = own.indexer is not None or shape.chosen_in is not None
    if options.records is not None or (options.chosen is not None) != chooses:
        raise NotFusable("an indexer chooses the keys that it attends to")
    layouts = (False, True) if len(own.inputs) == 1 and shape.kv_heads > 1 else (False,)
    orders = (False, True) if "of_queries" in own.norms else (False,)
    turned = shape.head_dim
    if own.latent:
        sizes = [shape_of(m) or (0, 0) for m in (own.inputs[1], own.latent[-1])]
        turned = sizes[0][0] - sizes[1][1]
    embeddings: Any = probe.kwargs.get("position_embeddings")
    if _is_pair(embeddings):  # at position 0 all sines are 0
        shape = replace(shape, sin_first=not embeddings[0].flatten(0, -2)[0].any())
    for rotation, grouped, first in itertools.product(_ROTATIONS, layouts, orders):
        if _angles_fit(embeddings, rotation, turned):
            yield replace(shape, rotation=rotation, grouped=grouped, turned_first=first)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotFusable("it is called in ways, or in a dtype, that the kernels don't know")


def _angles_fit(embeddings: Any, rotation: Rotation, turned: int) -> bool:
    if rotation is Rotation.UNTURNED:
        return True
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        return rotation is Rotation.NEIGHBOURS_ONCE and 2 * embeddings.shape[-1] <= turned
    if not _is_pair(embeddings):
        return False
    width: int = embeddings[0].shape[-1]
    if rotation in (Rotation.ONCE, Rotation.NEIGHBOURS_ONCE):
        return 2 * width <= turned
    most = min(turned, _MOST_SPREAD) if rotation is Rotation.SPREAD else turned
    return width <= most and width % 2 == 0


def _is_pair(embeddings: Any) -> bool:
    is_pair = isinstance(embeddings, tuple) and len(embeddings) == 2
    return is_pair and all(isinstance(x, Tensor) for x in embeddings)
