"""Trials of layers in one forward of the model: whether they can be fused.

The trial runs on a twin of the layer, in which norms and biases are random, and matrices where they are
zero: weights that make no difference today may make one after the next training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import ZERO_STATE, Batch
from verbatim.errors import first_line
from verbatim.kernels.options import AnyOptions, AttentionOptions
from verbatim.kv.states import StateRows, StateShape, StateStore
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.context import Update, activate
from verbatim.model.direct import DirectRows
from verbatim.model.layer import FusedLayer, Trust, add_sinks
from verbatim.model.layer_parts import LayerParts, Rotation, Shape
from verbatim.model.mixers import mixer_of
from verbatim.model.mixture import MixtureParts, mixtures_of
from verbatim.model.norms import Norm
from verbatim.model.patching import replaced_forwards
from verbatim.model.structs import NotFusable

_MODEST = 64  # rows of a matrix that are looked at
_ROTATIONS = (Rotation.HALVES, Rotation.ONCE, Rotation.NEIGHBOURS, Rotation.UNTURNED)


class AttentionRecorder:
    """A forward context that records a layer's calls of attention and returns noise."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor, AttentionOptions]] = []
        self.positions = torch.empty(1, 0, dtype=torch.int64)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        assert isinstance(options, AttentionOptions)  # no layer with an indexer is fused
        self.seen.append((q, k, v, options))
        return noise((*q.shape[:2], v.shape[2]), q.dtype).to(q.device)

    def update_state(
        self, shape: StateShape, update: Update, rowwise: Callable[[], Tensor]
    ) -> Tensor:
        return rowwise()


class _StateRecorder(AttentionRecorder):
    """A forward context with states, for the recurrent operations of one layer over two sequences.

    Args:
        rows: of both together; the second one begins with a state.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        cut = rows // 2
        ends = torch.tensor([cut - 1, rows - 1], dtype=torch.int32)
        batch = Batch(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.arange(rows),
            query_starts=torch.tensor([0, cut, rows], dtype=torch.int32),
            context_lens=torch.tensor([cut, rows - cut], dtype=torch.int32),
            block_tables=torch.zeros(2, 1, dtype=torch.int32),
            logit_rows=torch.zeros(0, dtype=torch.int64),
            state_sources=torch.tensor([ZERO_STATE, 1], dtype=torch.int32),
            state_rows=ends,
            state_targets=torch.tensor([2, 3], dtype=torch.int32),
        )
        store = KVStore([LayerShape(1, 1, 1)], 1, 1, dtype, torch.device("cpu"))
        store.states = self._states = StateStore([], 4, torch.device("cpu"))
        self._rows = StateRows.of(batch)
        self.direct: DirectRows | None = DirectRows(store, batch, torch.arange(rows))

    @property
    def tensors(self) -> list[Tensor]:
        """The states."""
        return self._states.tensors

    def update_state(
        self, shape: StateShape, update: Update, rowwise: Callable[[], Tensor]
    ) -> Tensor:
        self.prepare([shape])
        return update(self.tensors[-1], self._rows)

    def prepare(self, shapes: list[StateShape]) -> None:
        """Add the states of these shapes, with noise in the slots."""
        for shape in shapes:
            state = noise((4, *shape.shape), shape.dtype, seed=len(self.tensors))
            state[ZERO_STATE] = 0
            self._states.shapes.append(shape)
            self.tensors.append(state)

    @property
    def shapes(self) -> list[StateShape]:
        return self._states.shapes

    def next_states(self, count: int) -> int:
        return 0


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random numbers, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class FusionTrial:
    """Replaces a layer for one forward, to find out whether it can be fused.

    Attributes:
        parts: of the layer.
        fused: its new forward, if it can.
        reason: why it can't.

    Args:
        called: where the trials put themselves as their layers are called.
    """

    def __init__(self, parts: LayerParts, called: list[FusionTrial]) -> None:
        self.parts, self._called = parts, called
        self.fused: Callable[..., Any] | None = None
        self.reason: str | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self.parts.layer
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
            return hidden_states  # the next layer's trial has rows of its own
        return type(layer).forward(layer, hidden_states, *args, **kwargs)

    def _fuse(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Return a forward with the bits of the layer's own; raise NotFusable if there is none."""
        raise NotImplementedError


class LayerTrial(FusionTrial):
    """A trial of a layer of the compiled kernels.

    Attributes:
        layer: the fused layer.

    Args:
        slot: what the layer stores for a token; None: it keeps states.
        trust: for `FusedLayer`.
    """

    def __init__(
        self, parts: LayerParts, called: list[FusionTrial], slot: LayerShape | None, trust: Trust
    ) -> None:
        super().__init__(parts, called)
        self._slot, self._trust = slot, trust
        self._mixtures = [*self._mixtures_of(parts), None]
        self.layer: FusedLayer | None = None

    @staticmethod
    def _mixtures_of(parts: LayerParts) -> list[MixtureParts]:
        """Return the form of its MLP; its own forward must be in place."""
        return [] if parts.gates else [*mixtures_of(parts.mlp)]

    def _fuse(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> Callable[..., Any]:
        self.layer = self._layer(hidden_states, kwargs)
        return self.layer.forward()

    def _layer(self, hidden_states: Tensor, kwargs: dict[str, Any]) -> FusedLayer:
        parts, arguments = self.parts, frozenset(kwargs)
        twin, twins = _twin_of(parts.layer)
        own = _in_twin(parts, twins)
        mixtures: list[MixtureParts | None] = [*self._mixtures_of(own), None]
        forwards = replaced_forwards(twin)
        for fields, forward in forwards:
            fields["forward"] = forward
        x = noise(tuple(hidden_states.shape), hidden_states.dtype)
        rows = x.flatten(0, -2)
        rows *= torch.logspace(-2, 1, len(rows))[:, None].to(x.dtype)
        call = partial(type(twin).forward, twin, x, **kwargs)
        if self._slot is None:
            return self._fuse_recurrent(own, mixtures, call, x, kwargs)
        expected, seen = watched(call)
        if not isinstance(expected, Tensor):
            raise NotFusable("it returns more than hidden states")
        q, k, v, options = seen
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
        if self._slot != LayerShape(shape.kv_heads, shape.head_dim, shape.value_dim):
            raise NotFusable("it does not always store the same")
        if options.alibi is not None or (shape.sinks and not _has_sinks(own.attention, options)):
            raise NotFusable("its attention has a bias of its own")
        for rotation in _ROTATIONS:
            if not _angles_fit(kwargs.get("position_embeddings"), rotation, shape.head_dim):
                continue
            shape = replace(shape, rotation=rotation)
            for number, mixture in enumerate(mixtures):
                try:
                    layer = FusedLayer(replace(own, mixture=mixture), shape, arguments, Trust())
                except NotFusable:
                    if mixture is None:
                        raise
                    continue
                made, ours = watched(partial(layer.forward(_refuse), x, **kwargs))
                if not all(bit_equal(a, b) for a, b in zip(ours[:3], seen[:3], strict=True)):
                    break
                if bit_equal(made, expected):
                    final = replace(parts, mixture=self._mixtures[number])
                    return FusedLayer(final, shape, arguments, self._trust)
            else:
                raise NotFusable("what it makes of its attention is not what the kernels make")
        raise NotFusable("its queries, keys and values are not what the kernels make")

    def _fuse_recurrent(
        self,
        own: LayerParts,
        mixtures: list[MixtureParts | None],
        call: Callable[[], Any],
        x: Tensor,
        kwargs: dict[str, Any],
    ) -> FusedLayer:
        arguments = frozenset(kwargs)
        assert own.mixer is not None
        shape = Shape(*own.mixer.sizes, Rotation.UNTURNED, AttentionOptions(scale=1.0), sinks=False)
        theirs = _StateRecorder(x.shape[1], x.dtype)
        theirs.direct = None
        with activate(theirs):
            expected = call()
        if not isinstance(expected, Tensor):
            raise NotFusable("it returns more than hidden states")
        for number, mixture in enumerate(mixtures):
            ours = _StateRecorder(x.shape[1], x.dtype)
            ours.prepare(theirs.shapes)
            try:
                layer = FusedLayer(replace(own, mixture=mixture), shape, arguments, Trust())
            except NotFusable:
                if mixture is None:
                    raise
                continue
            with activate(ours):
                made = layer.forward(_refuse)(x, **kwargs)
            states = zip(ours.tensors, theirs.tensors, strict=True)
            if bit_equal(made, expected) and all(bit_equal(a, b) for a, b in states):
                final = replace(self.parts, mixture=self._mixtures[number])
                return FusedLayer(final, shape, arguments, self._trust)
        raise NotFusable("what it computes is not what the kernels compute")


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


def watched(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of `call`, and its one call of attention."""
    watch = AttentionRecorder()
    with activate(watch):
        returned = call()
    if len(watch.seen) != 1:
        raise NotFusable(f"it attends {len(watch.seen)} times")
    return returned, watch.seen[0]


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, both float32 or bfloat16."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


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


def _in_twin(parts: LayerParts, twins: dict[int, nn.Module]) -> LayerParts:
    """Return the same parts of the twin."""

    def of(module: Any) -> Any:
        return None if module is None else twins[id(module)]

    return replace(
        parts,
        layer=of(parts.layer),
        attention=of(parts.attention),
        mlp=of(parts.mlp),
        inputs=[*map(of, parts.inputs)],
        output=of(parts.output),
        gates=[*map(of, parts.gates)],
        down=of(parts.down),
        norms={role: Norm(of(n.module), n.parts) for role, n in parts.norms.items()},
        mixer=None if parts.mixer is None else mixer_of(of(parts.attention)),
    )
