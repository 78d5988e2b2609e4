"""A model's forward without its layers: the inputs of each layer, and the logits of invented outputs.

The outline is a copy of a model's module in which a layer's forward notes its arguments and returns made-up
hidden states at once. Everything around the layers is the model's own code, so a change of one weight
outside of them, or of what one layer returns, shows where it arrives. Weights outside of the layers
are small constants that take no memory, and the head is left out; a run takes milliseconds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AnyOptions
from verbatim.model.hidden import head_of
from verbatim.model.packed import placeholder
from verbatim.model.patching import configs_of
from verbatim.model.spec import InspectionContext, inner_model, inspect_forward, takes_positions

_WEIGHT = 1 / 64  # every weight outside of the layers
_PLAIN = (Tensor, bool, int, float, str, tuple, torch.dtype, torch.device, type(None))


class Beyond(UnsupportedModel):
    """An attention module outside of the list of layers."""


def hollow_copy(
    module: nn.Module, layers: nn.ModuleList, kept: Collection[int]
) -> tuple[nn.Module, nn.ModuleList, dict[nn.Parameter, nn.Parameter]]:
    """Copy a skeleton without sharing parameters, so that the copy can be filled on its own.

    Args:
        layers: somewhere in `module`.
        kept: the indices of those that are copied; each other one becomes a shell of the same class and
            with the same settings, which has no children and no parameters.

    Returns:
        The copy, its list of layers, and the placeholder that stands for each of the parameters.
    """
    memo: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        if index not in kept:
            memo[id(layer)] = _shell(layer)
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():  # tied ones come once, and stay tied
        own = nn.Parameter(placeholder(parameter), requires_grad=False)
        parameters[parameter] = memo[id(parameter)] = own
    for shared in (*module.buffers(), *configs_of(module)):
        memo[id(shared)] = shared
    copied = copy.deepcopy(module, memo)
    return copied, memo[id(layers)], parameters


def _shell(layer: nn.Module) -> nn.Module:
    shell: nn.Module = object.__new__(type(layer))
    shell.__dict__.update(layer.__dict__)
    shell.__dict__.update(_modules={}, _parameters={}, _buffers={})
    return shell


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among the arguments of a layer: the first one, positional or by name."""
    return args[0] if args else kwargs.get("hidden_states")


@dataclass(frozen=True, slots=True)
class Returned:
    """The form of the layers' outputs.

    Attributes:
        hidden: the hidden states, of a layer that was tried; their numbers mean nothing.
        rest: what stands behind them in a tuple or a list; None where a layer returns them bare.
    """

    hidden: Tensor
    rest: tuple[Any, ...] | None

    @classmethod
    def by(cls, made: Any, entered: Tensor) -> Returned:
        """Return the form of a layer's output for the hidden states `entered`."""
        several = isinstance(made, tuple | list) and len(made) > 0
        hidden = made[0] if several else made
        if not isinstance(hidden, Tensor) or hidden.shape != entered.shape:
            raise UnsupportedModel(
                "its layers don't return hidden states like those they are given"
            )
        return cls(hidden, tuple(made[1:]) if several else None)

    def passing(self, hidden: Tensor) -> Any:
        """Return the output of a layer that changes nothing."""
        if self.rest is None:
            return hidden
        return (hidden, *(None if isinstance(x, Tensor) else x for x in self.rest))

    def made_up(self, index: int, *, lost: bool) -> Any:
        """Return invented hidden states, different for each layer, or NaN."""
        generator = torch.Generator().manual_seed(index)
        hidden = torch.randn(self.hidden.shape, generator=generator).to(self.hidden.dtype)
        if lost:
            hidden = placeholder(hidden).clone()
        if self.rest is None:
            return hidden
        return (hidden, *(_other(x, lost) if isinstance(x, Tensor) else x for x in self.rest))


def _other(like: Tensor, lost: bool) -> Tensor:
    if not lost:
        return torch.zeros_like(like)
    return torch.full_like(like, torch.nan) if like.is_floating_point() else torch.ones_like(like)


@dataclass(slots=True)
class Entry:
    """One call of a layer.

    Attributes:
        beside: every tensor that it is given beside the hidden states.
        objects: names of the arguments that are neither tensors nor plain values, so that a layer may
            write to them for another one.
    """

    index: int
    hidden: Tensor
    beside: list[Tensor]
    objects: frozenset[str]


@dataclass(slots=True)
class OutlineRun:
    """One forward of the outline."""

    entries: list[Entry] = field(default_factory=list)
    logits: Tensor | None = None


class _OneLayerContext(InspectionContext):
    """A forward context that allows attention only in the layer under trial."""

    inside = False

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        if not self.inside:
            raise Beyond("what attends is not all in one list of layers")
        return super().attend(module, q, k, v, options)


class _NoHead(nn.Module):
    """A stand-in for the head: a batch of equal logits."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        # What flows into the head is to show, and nothing else of its width.
        return hidden.sum(-1, keepdim=True).expand(*hidden.shape[:-1], len(self.weight))


class Outline:
    """The outline of a skeleton.

    Args:
        module: of which every weight is a placeholder; it is left as it is.
        layers: its list of decoder layers.

    Attributes:
        outside: the parameters of `module` that are used outside of its layers, in its order.
        returned: what the layers return.
        plain: the run with nothing lost.
        vocab_size: width of the logits.
        takes_positions: its forward must be given `position_ids`.

    Raises:
        UnsupportedModel: its forward fails, or its layers return something else than hidden states.
        Beyond: something else attends.
    """

    def __init__(self, module: nn.Module, layers: nn.ModuleList) -> None:
        self._module, self._layers, copies = hollow_copy(module, layers, range(len(layers)))
        inner = inner_model(self._module)
        self.takes_positions = takes_positions(inner)
        within = {id(m) for m in layers.modules()}
        used = {p for m in module.modules() if id(m) not in within for p in m._parameters.values()}
        self.outside = [p for p in module.parameters() if p in used]
        self._copies = {p: copies[p] for p in self.outside}
        for parameter in self._copies.values():
            _fill(parameter)
        self._head = head_of(inner)
        self.head_parameters = _originals(self._head, copies)
        _put_in_place(self._module, self._head)
        self.returned: Returned | None = None
        self._lost: int | None = None
        for index, layer in enumerate(self._layers):
            layer.__dict__["forward"] = partial(self._enter, index, layer)
        self._context = _OneLayerContext()
        self._run = OutlineRun()
        self.plain = self._first_run(inner)
        assert self.plain.logits is not None
        self.vocab_size = self.plain.logits.shape[-1]

    def _first_run(self, inner: Any) -> OutlineRun:
        first = self.run()
        if not self.takes_positions and self._context.needs_positions:
            self.takes_positions = True  # as the inspection of a whole model does
            first = self.run()
        for layer in self._layers:  # they are not called any more
            layer._modules.clear()
        return first

    def run(self, lost: Iterable[nn.Parameter] = (), lost_layer: int | None = None) -> OutlineRun:
        """Run one forward with these parameters, and the output of that layer, set to NaN."""
        nothing = [self._copies[p] for p in lost]
        for parameter in nothing:
            parameter.data = placeholder(parameter)
        self._run, self._lost = OutlineRun(), lost_layer
        inner = inner_model(self._module)
        try:
            self._run.logits, _ = inspect_forward(
                self._module, inner, self._context, positions=self.takes_positions
            )
        finally:
            for parameter in nothing:
                _fill(parameter)
        return self._run

    def _enter(self, index: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModel("its layers are not given hidden states as their first argument")
        rest = (args[1:], {k: v for k, v in kwargs.items() if v is not hidden})
        beside = [x.as_subclass(Tensor).clone() for x in tree_leaves(rest) if isinstance(x, Tensor)]
        named = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        named.pop(
            "position_embeddings", None
        )  # by kind of layer in some models: nothing writes to them
        objects = frozenset(name for name, x in named.items() if not isinstance(x, _PLAIN))
        self._run.entries.append(Entry(index, hidden.clone(), beside, objects))
        if self.returned is None:
            self._context.inside = True
            try:
                made = type(layer).forward(layer, *args, **kwargs)
            finally:
                self._context.inside = False
            self.returned = Returned.by(made, hidden)
        return self.returned.made_up(index, lost=index == self._lost)


def _fill(parameter: nn.Parameter) -> None:
    weight = torch.full((), _WEIGHT, dtype=torch.float32).to(parameter.dtype)
    parameter.data = weight.expand(parameter.shape)


def _originals(
    head: nn.Module | None, copies: dict[nn.Parameter, nn.Parameter]
) -> frozenset[nn.Parameter]:
    """Return the parameters whose copies `head` holds."""
    held = set() if head is None else set(map(id, head.parameters()))
    return frozenset(p for p, own in copies.items() if id(own) in held)


def _put_in_place(module: nn.Module, head: nn.Module | None) -> None:
    """Replace a head that is a matrix by a stand-in."""
    weight = None if head is None else getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return
    stand_in = _NoHead(weight)
    for owner in list(module.modules()):
        for name, child in owner._modules.items():
            if child is head:
                owner._modules[name] = stand_in


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)
