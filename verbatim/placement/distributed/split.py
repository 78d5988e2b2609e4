"""The places where a model can be cut into parts, and the weights that each part needs."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verbatim import kernels
from verbatim.errors import OutOfBlocks, UnsupportedModel
from verbatim.kernels.options import AnyOptions
from verbatim.model.context import head_of
from verbatim.model.early_exit import EarlyExit
from verbatim.model.fingerprint import Tree
from verbatim.model.loader import LoadedModel
from verbatim.model.masks import register
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.patching import exclusive, replaced_forwards
from verbatim.model.quantizable import choose_packings
from verbatim.model.quantized import placeholder
from verbatim.model.spec import InspectionContext, inner_model, inspect_forward, takes_positions
from verbatim.model.trial import reason_to_refuse

_ONE_LIST = "its layers are not in one list that is called once, from its first to its last"
_PLAIN = (Tensor, bool, int, float, str, tuple, torch.dtype, torch.device, type(None))

Range = tuple[int, int]  # layers: first, end (exclusive)
Source = nn.Parameter | int  # a parameter, or the output of a layer, by index


class AttentionOutsideLayers(UnsupportedModel):
    """Attention is called outside of the list of layers."""


def hollow_copy(
    module: nn.Module, layers: nn.ModuleList, kept: Collection[int]
) -> tuple[nn.Module, nn.ModuleList, dict[nn.Parameter, nn.Parameter]]:
    """Copy a skeleton and its placeholder parameters, so that weights can be read into the copy alone.

    Args:
        layers: the list of layers in `module`.
        kept: indices of the layers to copy. All others become shells: objects with the class and attributes
            of the layer, but without children and parameters.

    Returns:
        The copy, its list of layers, and the placeholder of each parameter.
    """
    memo: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        if index not in kept:
            memo[id(layer)] = shell = object.__new__(type(layer))
            shell.__dict__.update(layer.__dict__, _modules={}, _parameters={}, _buffers={})
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():  # tied ones are listed once, and stay tied
        clone = nn.Parameter(placeholder(parameter), requires_grad=False)
        parameters[parameter] = memo[id(parameter)] = clone
    for shared in (*module.buffers(), *Tree(module).configs):
        memo[id(shared)] = shared
    copied = copy.deepcopy(module, memo)
    return copied, memo[id(layers)], parameters


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states among a layer's arguments: the first positional one, or by name."""
    return args[0] if args else kwargs.get("hidden_states")


class _SourceMode(TorchDispatchMode):
    """Tracks the sources from which each tensor is computed, by storage: views share their sources."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, set[Source]] = {}  # by address of the storage
        self._held: list[Tensor] = []  # keeps tensors alive, so that no address is reused

    def mark(self, x: Tensor, sources: Collection[Source]) -> None:
        """Add sources to a tensor."""
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
        output = func(*args, **kwargs)
        name = func.__name__
        if "_like" in name or name.startswith("new_"):  # the values do not depend on the input
            return output
        if sources := self.of((args, kwargs)):
            for x in tree_leaves(output):
                if isinstance(x, Tensor):
                    self.mark(x, sources)
        return output


@dataclass(slots=True)
class _Entry:
    """One call of a layer."""

    index: int
    hidden: Tensor  # the input hidden states
    of_hidden: set[Source]  # the sources of `hidden`
    of_others: set[Source]  # the sources of all other input tensors
    # Names of arguments through which layers might exchange data: neither tensors nor plain values.
    objects: frozenset[str]
    direct: bool  # whether `hidden` is the unmodified output of the previous layer


class _Outline(InspectionContext):
    """A forward of a model with stubs in place of its layers, to trace the computation around them.

    Raises:
        UnsupportedModel: the forward fails, or the layers do not return hidden states.
        AttentionOutsideLayers: attention is called outside of the layers.
    """

    def __init__(self, module: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.entries: list[_Entry] = []  # the calls of layers, in order
        # The values after the hidden states in the tuple or list returned by a layer; None: no tuple.
        self.rest: tuple[Any, ...] | None = None
        self._inside = False
        self._returned: Any = None  # hidden states returned by the previous layer
        self._flow = _SourceMode()
        module, shells, copies = hollow_copy(module, layers, ())  # as for the parts
        for parameter, own in copies.items():
            self._flow.mark(own, [parameter])
        inner = inner_model(module)
        pairs = enumerate(zip(shells, layers, strict=True))
        forwards = replaced_forwards(layers) + replaced_forwards(module)
        forwards += [(x.__dict__, partial(self._enter, i, layer)) for i, (x, layer) in pairs]
        head = head_of(inner)
        weight = None if head is None else getattr(head, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:
            forwards.append((head.__dict__, partial(_no_head, len(weight))))
        with kernels.using("none"), self._flow:  # which sees only torch's operations
            logits, _ = inspect_forward(
                module, inner, self, positions=takes_positions(inner), forwards=forwards
            )
            if not takes_positions(inner) and self.needs_positions:
                self.entries.clear()  # the inspection of a whole model does the same
                logits, _ = inspect_forward(module, inner, self, positions=True, forwards=forwards)
            self.of_logits = self._flow.of(logits)  # the sources of the logits
        if head is not None:
            self.of_logits |= self._flow.of(list(head.parameters()))
        self.rows, self.vocab_size = logits.shape[:-1], logits.shape[-1]

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: AnyOptions
    ) -> Tensor:
        if not self._inside:
            raise AttentionOutsideLayers("attention is also called outside of the list of layers")
        return super().attend(module, q, k, v, options)

    def _enter(self, index: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Record the inputs of a layer, and return hidden states with that layer as their only source."""
        hidden = hidden_of(args, kwargs)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModel("its layers don't receive hidden states as their first argument")
        named = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        # Excluded from `objects`: in some models it is a dict by layer type, which layers only read.
        rotary = named.pop("position_embeddings", None)
        others = [x for x in (*named.values(), rotary) if x is not hidden]
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
                output = type(layer).forward(layer, *args, **kwargs)
            finally:
                self._inside = False
            is_tuple = isinstance(output, tuple | list) and len(output) > 0
            first = output[0] if is_tuple else output
            if not isinstance(first, Tensor) or first.shape != hidden.shape:
                raise UnsupportedModel(
                    "its layers don't return hidden states like those they receive"
                )
            self._hidden_like, self.rest = first, tuple(output[1:]) if is_tuple else None
        self._returned, *rest = (
            self._output_of(index, x) if isinstance(x, Tensor) else x
            for x in (self._hidden_like, *(self.rest or ()))
        )
        return self._returned if self.rest is None else (self._returned, *rest)

    def _output_of(self, index: int, like: Tensor) -> Tensor:
        output = torch.zeros_like(like)
        self._flow.mark(output, [index])
        return output


def _no_head(vocab_size: int, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return logits with the sources that a head's would have, expanded so that they take no memory."""
    return hidden.sum(-1, keepdim=True).expand(*hidden.shape[:-1], vocab_size)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The bytes of a model's layers, and the places where it can be cut."""

    layer_bytes: tuple[int, ...]  # of the weights of each layer
    outside: tuple[int, int]  # bytes of additional weights on the first and on the last stage
    shared_bytes: int  # of additional weights on every stage
    cuts: tuple[int, ...]  # layers before which the model can be cut
    spills: bool = False  # whether stages leave weights on disk that do not fit into memory

    def room(self, memory: float) -> float:
        """Return the maximum bytes of weights on a stage with `memory` bytes."""
        return math.inf if self.spills else memory

    def bytes_of(self, first: int, end: int) -> int:
        """Return the bytes of all weights on a stage with layers `first` to `end` (exclusive)."""
        nbytes = self.shared_bytes + sum(self.layer_bytes[first:end])
        last = end == len(self.layer_bytes)
        return nbytes + self.outside[0] * (first == 0) + self.outside[1] * last

    def divide(
        self, room: Sequence[float], speed: Sequence[float], part: Range | None = None
    ) -> list[Range]:
        """Return contiguous ranges of layers, one per stage, that minimize the time of the slowest stage.

        Args:
            room: maximum bytes of weights on each stage.
            speed: bytes of weights per second of each stage, or proportional values.
            part: the range of layers to divide; None: all.

        Raises:
            OutOfBlocks: no division fits.
        """
        first, end = part or (0, len(self.layer_bytes))
        cuts = [cut for cut in sorted(set(self.cuts)) if first < cut < end]
        pairs = itertools.combinations([first, *cuts, end], 2)
        sizes = {(begin, stop): self.bytes_of(begin, stop) for begin, stop in pairs}
        # By the end of the stages so far: the time of the slowest of them, and their ranges.
        best: dict[int, tuple[float, list[Range]]] = {first: (0.0, [])}
        for available, pace in zip(room, speed, strict=True):
            reached: dict[int, tuple[float, list[Range]]] = {}
            for (begin, stop), size in sizes.items():
                if begin in best and size <= available:
                    slowest, ranges = best[begin]
                    time = max(slowest, (size - self.shared_bytes) / pace)
                    if stop not in reached or time < reached[stop][0]:
                        reached[stop] = time, [*ranges, (begin, stop)]
            best = reached
        if end in best:
            return best[end][1]
        needed = self.bytes_of(first, end) - self.shared_bytes
        free = [int(available - self.shared_bytes) for available in room]
        raise OutOfBlocks(
            f"{end - first} layers of {needed} bytes in total, with {len(cuts)} places to "
            f"cut, can't be divided over {len(room)} stages with room for {free} bytes"
        )


class Split:
    """The places where a model can be cut into parts.

    To find them, the model's own code runs with stubs in place of its layers, and the sources of each tensor
    are traced. Every part needs the sources of its layers' inputs, except the previous layer's output.

    Args:
        skeleton: the model from `open_files`, with placeholders for its weights; unchanged.

    Raises:
        UnsupportedModel: the model can't be cut; the message names the model and the reason.
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
                # `layers` is the model's list of them.
                self.layers, outline = _outline(skeleton.module, inner)
            self._describe(outline, inner)
        except UnsupportedModel as reason:
            name = type(inner).__name__
            raise UnsupportedModel(
                f"{name} can't be cut into parts: {reason}"
            ) from reason.__cause__

    def _describe(self, outline: _Outline, inner: Any) -> None:
        entries = outline.entries
        # Indices in `layers` of those that run, in order, to which all other layer numbers here refer.
        self.running = [entry.index for entry in entries]
        if not entries or self.running != sorted(set(self.running)):
            raise UnsupportedModel(_ONE_LIST)
        self.rest = outline.rest
        self.vocab_size = outline.vocab_size
        self.num_layers = len(self.running)
        hidden, rows = entries[-1].hidden, outline.rows
        # Dimensions before the batch: that of several residual streams, if any, unless it follows the rows.
        outer = [n for n in (hidden.dim() - 3, 0) if n >= 0 and hidden.shape[n : n + 2] == rows]
        if not outer:
            raise UnsupportedModel(f"its layers receive hidden states of shape {hidden.shape}")
        self.outer_dims = outer[0]
        self.hidden_size = hidden.numel() // rows.numel()  # numbers per token between two layers
        self.hidden_dtype = hidden.dtype
        self.layer_bytes = [self._nbytes(self.layers[i].parameters()) for i in self.running]
        # Those that compute the first layer's hidden states, such as the embedding; the other inputs of all
        # layers, which every part needs; and logits from the last output, such as final norm and head.
        self.before = _parameters(entries[0].of_hidden)
        self.shared = _parameters(
            *(entry.of_others for entry in entries), *(entry.of_hidden for entry in entries[1:])
        )
        self.after = _parameters(outline.of_logits)
        blocked = _blocked_by_objects(entries, inner) | _blocked_by_flows(outline, inner)
        # Layers with the unmodified output of the previous layer as their input.
        self.direct = {i for i, entry in enumerate(entries) if entry.direct}
        # Layers before which the model can be cut, ascending, without 0.
        self.cuts = [cut for cut in range(1, self.num_layers) if cut not in blocked]

    def parameters(
        self, first: int, end: int, draft: Mtp | EarlyExit | None = None
    ) -> list[nn.Parameter]:
        """Return the parameters of the skeleton that a part needs, tied ones once.

        MTP layers run on the last part, and need the embedding; early exit runs on the first part, and needs
        the final norm and head.
        """
        is_first, is_last = first == 0, end == self.num_layers
        needed = set(self.shared)
        for index in self.running[first:end]:
            needed |= set(self.layers[index].parameters())
        if is_first:
            needed |= self.before
        if is_last or (is_first and isinstance(draft, EarlyExit)):
            needed |= self.after
        if is_last and isinstance(draft, Mtp):
            inner: Any = inner_model(self.skeleton.module)
            needed |= set(inner.get_input_embeddings().parameters())
        return [p for p in self.skeleton.module.parameters() if p in needed]

    def layer_output(self, hidden: Tensor) -> Any:
        """Return the output of a layer that leaves the hidden states unchanged."""
        if self.rest is None:
            return hidden
        return (hidden, *(None if isinstance(x, Tensor) else x for x in self.rest))

    def _nbytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of parameters in memory, after quantization."""
        return sum(
            self._packings[p].nbytes if p in self._packings else p.nbytes for p in parameters
        )

    def sizes(self, draft: Mtp | EarlyExit | None = None, *, spills: bool = False) -> LayerSizes:
        """Return the bytes of the layers and of all other weights, with those of MTP layers."""
        shared, end = self._nbytes(self.shared), self.num_layers
        first = self._nbytes(self.parameters(0, 0, draft)) - shared
        last = self._nbytes(self.parameters(end, end, draft)) - shared
        if isinstance(draft, Mtp):
            assert self.skeleton.folder is not None
            inner = inner_model(self.skeleton.module)
            last += mtp_size(inner, self.skeleton.folder, draft.beside)[1]
        return LayerSizes(tuple(self.layer_bytes), (first, last), shared, tuple(self.cuts), spills)


def _outline(module: nn.Module, inner: Any) -> tuple[nn.ModuleList, _Outline]:
    """Return the list of layers, and the trace of a forward of the model around it."""
    reason = UnsupportedModel("it has no list of layers")
    for layers in _candidates(inner):
        try:
            outline = _Outline(module, layers)
        except AttentionOutsideLayers as error:
            reason = error  # an image encoder's layers, or one of several lists
            continue
        return layers, outline
    raise reason


def _candidates(module: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of modules, largest first."""
    lists: list[nn.ModuleList] = []
    for child in module.children():
        lists += [child] if isinstance(child, nn.ModuleList) else _candidates(child)
    return sorted(lists, key=lambda one: -sum(p.nbytes for p in one.parameters()))


def _parameters(*sources: set[Source]) -> frozenset[nn.Parameter]:
    return frozenset(x for x in set[Source]().union(*sources) if isinstance(x, nn.Parameter))


def _blocked_by_flows(outline: _Outline, inner: Any) -> set[int]:
    """Return the cuts across which more than the output of one layer would be needed."""
    entries = outline.entries
    position: dict[Source, int] = {entry.index: i for i, entry in enumerate(entries)}
    config = inner.config.get_text_config(decoder=True)
    indexers = getattr(config, "indexer_types", None) or []
    kinds = getattr(config, "layer_types", None) or []
    blocked = set[int]()
    streams = [*(entry.of_hidden for entry in entries), outline.of_logits]
    for reached, sources in enumerate(streams):
        previous = {entries[reached - 1].index} if reached else set[Source]()
        others = set[Source]() if reached == len(entries) else entries[reached].of_others
        if reached < len(indexers) and indexers[reached] == "full":
            # It is passed the choice of the previous layer, but does not use it.
            others = others - previous
        elif reached < min(len(indexers), len(kinds)) and kinds[reached] != "linear_attention":
            source_layer = max(i for i in range(reached) if indexers[i] == "full")
            others = others | {entries[source_layer].index}
        for layer in (sources - previous | others) & position.keys():
            blocked.update(range(position[layer] + 1, reached + 1))
    return blocked


def _blocked_by_objects(entries: list[_Entry], inner: Any) -> set[int]:
    """Return the cuts across which layers share keys and values, or unknown objects."""
    count = len(entries)
    names = {name for entry in entries for name in entry.objects}
    if not names:
        return set()
    config = inner.config.get_text_config(decoder=True)
    modes, kinds = getattr(config, "kv_sharing_modes", None), getattr(config, "layer_types", None)
    if names != {"shared_kv_states"} or not modes or not kinds or len(modes) != count:
        return set(range(1, count))
    blocked, source_layers = set[int](), getattr(config, "kv_source_layers", None)
    for reader, (mode, kind) in enumerate(zip(modes, kinds, strict=True)):
        stores = [i for i in range(reader) if modes[i] == "store" and kinds[i] == kind]
        if (mode or "").startswith("reuse") and stores:
            source_layer = stores[-1] if source_layers is None else source_layers[reader]
            blocked.update(range(source_layer + 1, reader + 1))
    return blocked
