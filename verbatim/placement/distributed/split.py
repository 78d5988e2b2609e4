"""The places where a model can be cut into parts, and the weights that each part needs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verbatim.errors import InvalidRequest, UnsupportedModel
from verbatim.kernels.options import AnyOptions
from verbatim.model.adapters import adapter_for
from verbatim.model.decoder import register
from verbatim.model.early_exit import EarlyExit
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.packed import placeholder
from verbatim.model.packing import choose_packings
from verbatim.model.patching import exclusive, replaced_forwards
from verbatim.model.spec import InspectionContext, inner_model, inspect_forward, takes_positions
from verbatim.model.tree import Tree
from verbatim.model.trial import reason_to_refuse

_ONE_LIST = "its layers are not in one list that is called once, from its first to its last"
_PLAIN = (Tensor, bool, int, float, str, tuple, torch.dtype, torch.device, type(None))

Source = nn.Parameter | int  # what a tensor is computed from: a parameter, or the output of a layer


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
            memo[id(layer)] = shell = object.__new__(type(layer))
            shell.__dict__.update(layer.__dict__, _modules={}, _parameters={}, _buffers={})
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():  # tied ones come once, and stay tied
        own = nn.Parameter(placeholder(parameter), requires_grad=False)
        parameters[parameter] = memo[id(parameter)] = own
    for shared in (*module.buffers(), *Tree(module).configs):
        memo[id(shared)] = shared
    copied = copy.deepcopy(module, memo)
    return copied, memo[id(layers)], parameters


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among the arguments of a layer: the first one, positional or by name."""
    return args[0] if args else kwargs.get("hidden_states")


class _Flow(TorchDispatchMode):
    """Records which sources each tensor is computed from; tensors that share memory count as one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, set[Source]] = {}  # by address
        self._held: list[Tensor] = []  # so that no address is used again

    def mark(self, x: Tensor, sources: Collection[Source]) -> None:
        """Add sources of a tensor."""
        self._held.append(x)
        self._sources.setdefault(x.untyped_storage().data_ptr(), set()).update(sources)

    def of(self, values: Any) -> set[Source]:
        """Return the sources of all tensors in nested containers."""
        addresses = [
            x.untyped_storage().data_ptr() for x in tree_leaves(values) if isinstance(x, Tensor)
        ]
        return set().union(*(self._sources.get(address, ()) for address in addresses))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.__name__
        if "_like" in name or name.startswith("new_"):  # only a shape is taken over
            return made
        if sources := self.of((args, kwargs)):
            for x in tree_leaves(made):
                if isinstance(x, Tensor):
                    self.mark(x, sources)
        return made


@dataclass(slots=True)
class _Entry:
    """One call of a layer.

    Attributes:
        hidden: the hidden states that it is given.
        of_hidden: their sources.
        of_others: those of every other tensor that it is given.
        objects: names of the arguments that are neither tensors nor plain values, so that a layer may
            write to them for another one.
        direct: the hidden states are what the layer before returned, with nothing in between.
    """

    index: int
    hidden: Tensor
    of_hidden: set[Source]
    of_others: set[Source]
    objects: frozenset[str]
    direct: bool


class _Outline(InspectionContext):
    """A forward of a model in which layers compute nothing, so that everything around them shows.

    Attributes:
        entries: the calls of layers, in their order.
        rest: what stands behind the hidden states in the tuple or list that a layer returns; None where it
            returns them bare.
        of_logits: sources of the logits.
        vocab_size: width of the logits.

    Raises:
        UnsupportedModel: the forward fails, or the layers return something else than hidden states.
        Beyond: something else attends.
    """

    def __init__(self, module: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.entries: list[_Entry] = []
        self.rest: tuple[Any, ...] | None = None
        self._inside = False
        self._returned: Any = None  # by the last layer
        self._flow = _Flow()
        module, shells, copies = hollow_copy(module, layers, ())  # as it is on parts
        for parameter, own in copies.items():
            self._flow.mark(own, [parameter])
        inner = inner_model(module)
        pairs = enumerate(zip(shells, layers, strict=True))
        forwards = replaced_forwards(layers)  # others call kernels, which `_Flow` would not see
        for around in module.modules():
            if isinstance(around, nn.Embedding) or shells in around.modules():
                if (forward := adapter_for(around)) is not None:
                    forwards.append((around.__dict__, forward))
        forwards += [(x.__dict__, partial(self._enter, i, layer)) for i, (x, layer) in pairs]
        head = head_of(inner)
        weight = None if head is None else getattr(head, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            forwards.append((head.__dict__, partial(_no_head, len(weight))))
        with self._flow:
            logits, _ = inspect_forward(
                module, inner, self, positions=takes_positions(inner), forwards=forwards
            )
            if not takes_positions(inner) and self.needs_positions:
                self.entries.clear()  # as the inspection of a whole model does
                logits, _ = inspect_forward(module, inner, self, positions=True, forwards=forwards)
            self.of_logits = self._flow.of(logits)
        if head is not None:
            self.of_logits |= self._flow.of(list(head.parameters()))
        self.rows, self.vocab_size = logits.shape[:-1], logits.shape[-1]

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        if not self._inside:
            raise Beyond("what attends is not all in one list of layers")
        return super().attend(module, q, k, v, options)

    def _enter(self, index: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Record what a layer is given, and return hidden states that depend on it alone."""
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModel("its layers are not given hidden states as their first argument")
        named = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        # By kind of layer in some models: nothing writes to them.
        turns = named.pop("position_embeddings", None)
        others = [x for x in (*named.values(), turns) if x is not hidden]
        self.entries.append(
            _Entry(
                index,
                hidden,
                self._flow.of(hidden),
                self._flow.of(others),
                frozenset(name for name, x in named.items() if not isinstance(x, _PLAIN)),
                hidden is self._returned and hidden._version == 0,
            )
        )
        if len(self.entries) == 1:
            self._inside = True
            try:
                made = type(layer).forward(layer, *args, **kwargs)
            finally:
                self._inside = False
            several = isinstance(made, tuple | list) and len(made) > 0
            first = made[0] if several else made
            if not isinstance(first, Tensor) or first.shape != hidden.shape:
                raise UnsupportedModel(
                    "its layers don't return hidden states like those they are given"
                )
            self._form, self.rest = first, tuple(made[1:]) if several else None
        self._returned, *rest = (
            self._made_by(index, x) if isinstance(x, Tensor) else x
            for x in (self._form, *(self.rest or ()))
        )
        return self._returned if self.rest is None else (self._returned, *rest)

    def _made_by(self, index: int, like: Tensor) -> Tensor:
        made = torch.zeros_like(like)
        self._flow.mark(made, [index])
        return made


def _no_head(vocab_size: int, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return logits that depend on the same as those of a head, and take no memory."""
    return hidden.sum(-1, keepdim=True).expand(*hidden.shape[:-1], vocab_size)


class Split:
    """The places where a skeleton can be cut.

    It is found out by letting the model's own code run around layers that compute nothing, and recording
    what each tensor is computed from: what reaches a layer beside the hidden states of the layer before it
    must be there on every part.

    Args:
        skeleton: with placeholders for weights, as `open_files` makes it; left as it is.

    Attributes:
        skeleton: as given.
        layers: its list of layers.
        running: the indices in that list of the layers that run, in their order. Everything here counts
            layers in this order; nearly always it is the list's.
        num_layers: how many those are.
        layer_bytes: weights of each.
        cuts: the layers in front of which it may be cut, ascending, without 0.
        blocked: why it may not be cut in front of each of the others.
        direct: the layers that are given what the layer before returned, with nothing in between.
        before: parameters outside of the layers for the hidden states that enter the first one, such as the
            embedding.
        beside: those for anything else that a layer is given, so that every part needs them.
        after: those that turn the hidden states behind the last layer into logits, such as norm and head.
        rest: what a layer returns behind the hidden states in a tuple; None where it returns them bare.
        outer_dims: dimensions of hidden states in front of those of the batch.
        hidden_size: numbers that go from a layer to the next, for each token.
        hidden_dtype: of these.
        vocab_size: width of the logits.

    Raises:
        UnsupportedModel: it can't be cut anywhere; the message names it and the reason.
    """

    def __init__(self, skeleton: LoadedModel) -> None:
        register()
        inner = inner_model(skeleton.module)
        self.skeleton = skeleton
        kind = skeleton.quantization
        self._packings = {} if kind is None else choose_packings(skeleton.module, kind)
        try:
            reason = reason_to_refuse(inner)
            if reason is not None:
                raise UnsupportedModel(reason)
            with exclusive:
                self.layers, outline = _outline(skeleton.module, inner)
            self._describe(outline, inner)
        except UnsupportedModel as reason:
            name = type(inner).__name__
            raise UnsupportedModel(
                f"{name} can't be cut into parts: {reason}"
            ) from reason.__cause__

    def _describe(self, outline: _Outline, inner: Any) -> None:
        entries = outline.entries
        self.running = [entry.index for entry in entries]
        if not entries or self.running != sorted(set(self.running)):
            raise UnsupportedModel(_ONE_LIST)
        self.rest = outline.rest
        self.vocab_size = outline.vocab_size
        self.num_layers = len(self.running)
        entered, rows = entries[-1].hidden, outline.rows
        # Where a model carries several streams, they stand in front of the rows or behind them.
        outer = [n for n in (entered.dim() - 3, 0) if n >= 0 and entered.shape[n : n + 2] == rows]
        if not outer:
            raise UnsupportedModel(f"its layers are given hidden states of shape {entered.shape}")
        self.outer_dims = outer[0]
        self.hidden_size = entered.numel() // rows.numel()
        self.hidden_dtype = entered.dtype
        self.layer_bytes = [self._nbytes(self.layers[i].parameters()) for i in self.running]
        self.before = _parameters(entries[0].of_hidden)
        self.beside = _parameters(
            *(entry.of_others for entry in entries), *(entry.of_hidden for entry in entries[1:])
        )
        self.after = _parameters(outline.of_logits)
        self.blocked = _blocked_by_objects(entries, inner) | _blocked_by_flows(outline, inner)
        self.direct = {i for i, entry in enumerate(entries) if entry.direct}
        self.cuts = [cut for cut in range(1, self.num_layers) if cut not in self.blocked]

    def check(self, first: int, end: int) -> None:
        """Check that layers `first` to `end` (exclusive) can be a part.

        Raises:
            InvalidRequest: there are no such layers.
            UnsupportedModel: it can't be cut there; the message tells why.
        """
        if not 0 <= first < end <= self.num_layers:
            raise InvalidRequest(
                f"layers {first} to {end}: the model has {self.num_layers}, and a part one at least"
            )
        for cut in (first, end):
            if cut in self.blocked:
                raise UnsupportedModel(
                    f"{type(inner_model(self.skeleton.module)).__name__} can't be cut in front of layer "
                    f"{cut}: {self.blocked[cut]}; it can be in front of {self.cuts}"
                )

    def parameters(
        self, first: int, end: int, draft: Mtp | EarlyExit | None = None
    ) -> list[nn.Parameter]:
        """Return the parameters of the skeleton that the part needs, also to draft, tied ones once."""
        wanted = self._outside(draft, is_first=first == 0, is_last=end == self.num_layers)
        for index in self.running[first:end]:
            wanted |= set(self.layers[index].parameters())
        return [p for p in self.skeleton.module.parameters() if p in wanted]

    def _outside(
        self, draft: Mtp | EarlyExit | None, *, is_first: bool = False, is_last: bool = False
    ) -> set[nn.Parameter]:
        """Return the parameters outside of the layers that a part needs.

        MTP layers are behind the last layer, and need the embedding; the first layers exit early, and need
        what follows the last one.
        """
        wanted = set(self.beside)
        if is_first:
            wanted |= self.before
        if is_last or (is_first and isinstance(draft, EarlyExit)):
            wanted |= self.after
        if is_last and isinstance(draft, Mtp):
            inner: Any = inner_model(self.skeleton.module)
            wanted |= set(inner.get_input_embeddings().parameters())
        return wanted

    def passing(self, hidden: Tensor) -> Any:
        """Return the output of a layer that changes nothing."""
        if self.rest is None:
            return hidden
        return (hidden, *(None if isinstance(x, Tensor) else x for x in self.rest))

    def _nbytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return what parameters take in memory, quantized as they will be."""
        return sum(
            self._packings[p].nbytes if p in self._packings else p.nbytes for p in parameters
        )

    def outside_bytes(self, draft: Mtp | EarlyExit | None = None) -> tuple[int, int, int]:
        """Return the weights outside of the layers that the first part, the last part and every part hold;
        the first and the last part hold what every part holds besides.

        Args:
            draft: layers of the model that draft; of MTP layers the embedding counts, not their own weights.
        """
        return (
            self._nbytes(self._outside(draft, is_first=True) - self.beside),
            self._nbytes(self._outside(draft, is_last=True) - self.beside),
            self._nbytes(self.beside),
        )


def _outline(module: nn.Module, inner: Any) -> tuple[nn.ModuleList, _Outline]:
    """Return the list of layers, and a forward of the model around it."""
    reason = UnsupportedModel("it has no list of layers")
    for layers in _candidates(inner):
        try:
            outline = _Outline(module, layers)
        except Beyond as error:  # the layers of an image encoder, or one of several lists
            reason = error
            continue
        return layers, outline
    raise reason


def _candidates(module: nn.Module) -> list[nn.ModuleList]:
    """Return lists of modules that are in no other list, the largest first."""
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _candidates(child)
    return sorted(lists, key=lambda one: -sum(p.nbytes for p in one.parameters()))


def _parameters(*sources: set[Source]) -> frozenset[nn.Parameter]:
    return frozenset(x for x in set[Source]().union(*sources) if isinstance(x, nn.Parameter))


def _blocked_by_flows(outline: _Outline, inner: Any) -> dict[int, str]:
    """Return cuts across which more than the hidden states of one layer would be needed."""
    entries, blocked = outline.entries, dict[int, str]()
    place: dict[Source, int] = {entry.index: i for i, entry in enumerate(entries)}
    # A layer with an indexer of its own is handed what the layer before chose, and makes no use of it.
    indexers = getattr(inner.config.get_text_config(decoder=True), "indexer_types", None) or ()
    choosing = {i for i, kind in enumerate(indexers) if kind == "full"}

    def block(reached: int, sources: set[Source], why: str) -> None:
        for layer in sources & place.keys():
            first = place[layer] + 1
            reason = why.format(layer=place[layer], reached=reached, last=reached - 1)
            blocked.update(dict.fromkeys(range(first, min(reached, len(entries) - 1) + 1), reason))

    streams = [*(entry.of_hidden for entry in entries), outline.of_logits]
    for reached, sources in enumerate(streams):
        own = {entries[reached - 1].index} if reached else set[Source]()
        why = "what layer {layer} makes is needed behind layer {last} as well"
        block(reached, sources - own, why)
    for reached, entry in enumerate(entries):
        allowed = {entries[reached - 1].index} if reached in choosing and reached else set[Source]()
        why = "layer {reached} is given more of layer {layer} than its hidden states"
        block(reached, entry.of_others - allowed, why)
    return blocked


def _blocked_by_objects(entries: list[_Entry], inner: Any) -> dict[int, str]:
    """Return cuts across which layers share keys and values, or unknown objects."""
    count = len(entries)
    names = {name for entry in entries for name in entry.objects}
    if not names:
        return {}
    config = inner.config.get_text_config(decoder=True)
    modes, kinds = getattr(config, "kv_sharing_modes", None), getattr(config, "layer_types", None)
    if names != {"shared_kv_states"} or not modes or not kinds or len(modes) != count:
        listed = ", ".join(sorted(names))
        why = f"its layers may hand each other something in {listed}, which is not known here"
        return dict.fromkeys(range(1, count), why)
    blocked: dict[int, str] = {}
    for reader, (mode, kind) in enumerate(zip(modes, kinds, strict=True)):
        makers = [i for i in range(reader) if modes[i] == "store" and kinds[i] == kind]
        if mode == "reuse" and makers:
            why = f"layer {reader} reuses the keys and values of layer {makers[-1]}"
            blocked |= dict.fromkeys(range(makers[-1] + 1, reader + 1), why)
    return blocked
