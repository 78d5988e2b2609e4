"""The places where a model can be cut into parts, and the weights that each part needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from verbatim.errors import InvalidRequest, UnsupportedModel
from verbatim.model.decoder import register
from verbatim.model.loader import LoadedModel
from verbatim.model.packing import choose_packings
from verbatim.model.patching import exclusive
from verbatim.model.refusals import reason_to_refuse
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.outline import Beyond, Outline, OutlineRun, Returned, same

_ONE_LIST = "its layers are not in one list that is called once, from its first to its last"


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """The parameters outside of the layers, by where they are needed; one may be needed in several places.

    Attributes:
        before: what makes the hidden states that enter the first layer, such as the embedding.
        beside: what makes anything else that a layer is given, so that every part needs it.
        after: what turns the hidden states behind the last layer into logits, such as norm and head.
    """

    before: frozenset[nn.Parameter]
    beside: frozenset[nn.Parameter]
    after: frozenset[nn.Parameter]


class Split:
    """The places where a skeleton can be cut.

    It is found out by letting the model's own code run around layers that do nothing (`Outline`): what
    reaches a layer beside the hidden states of the layer before it must be there on every part.

    Args:
        skeleton: with placeholders for weights, as `open_skeleton` makes it; left as it is.

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
        outside: the parameters outside of the layers.
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
                self._look_around(outline, inner)
        except UnsupportedModel as reason:
            name = type(inner).__name__
            raise UnsupportedModel(
                f"{name} can't be cut into parts: {reason}"
            ) from reason.__cause__

    def _look_around(self, outline: Outline, inner: Any) -> None:
        plain, returned = outline.plain, outline.returned
        self.running = [entry.index for entry in plain.entries]
        if self.running != sorted(set(self.running)):
            raise UnsupportedModel(_ONE_LIST)
        assert returned is not None
        self.returned: Returned = returned
        self.vocab_size = outline.vocab_size
        self.num_layers = len(self.running)
        entered = plain.entries[-1].hidden
        assert plain.logits is not None
        rows = plain.logits.shape[:-1]
        # Where a model carries several streams, they stand in front of the rows or behind them.
        outer = [n for n in (entered.dim() - 3, 0) if n >= 0 and entered.shape[n : n + 2] == rows]
        if not outer:
            raise UnsupportedModel(f"its layers are given hidden states of shape {entered.shape}")
        self.outer_dims = outer[0]
        self.hidden_size = entered.numel() // rows.numel()
        self.hidden_dtype = entered.dtype
        self.layer_bytes = [self._nbytes(self.layers[i].parameters()) for i in self.running]
        self.outside = _outside(outline)
        self.blocked = _blocked_by_objects(plain, inner) | _blocked_by_flows(outline, inner)
        made = [returned.made_up(entry.index, lost=False) for entry in plain.entries]
        self.direct = {
            i + 1
            for i, entry in enumerate(plain.entries[1:])
            if same(entry.hidden, made[i][0] if returned.rest is not None else made[i])
        }
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
        self, first: int, end: int, *, embeds: bool = False, exits: bool = False
    ) -> list[nn.Parameter]:
        """Return the parameters of the skeleton that the part needs, tied ones once.

        Args:
            embeds: those of the embedding in any case.
            exits: those behind the last layer in any case.
        """
        wanted = set(self.outside.beside)
        if embeds:
            wanted |= self.embedding
        if first == 0:
            wanted |= self.outside.before
        if exits or end == self.num_layers:
            wanted |= self.outside.after
        for index in self.running[first:end]:
            wanted |= set(self.layers[index].parameters())
        return [p for p in self.skeleton.module.parameters() if p in wanted]

    @property
    def embedding(self) -> frozenset[nn.Parameter]:
        """Parameters of the module that embeds ids."""
        inner: Any = inner_model(self.skeleton.module)
        return frozenset(inner.get_input_embeddings().parameters())

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding on the last part; 0 if the part has it anyway."""
        return self._nbytes(self.embedding - self.outside.after - self.outside.beside)

    def _nbytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return what parameters take in memory, quantized as they will be."""
        return sum(
            self._packings[p].nbytes if p in self._packings else p.nbytes for p in parameters
        )

    @property
    def outside_bytes(self) -> tuple[int, int, int]:
        """Weights outside of the layers that the first part, the last part and every part hold; the
        first and the last part hold what every part holds besides.
        """
        outside = self.outside
        return (
            self._nbytes(outside.before - outside.beside),
            self._nbytes(outside.after - outside.beside),
            self._nbytes(outside.beside),
        )


def _outline(module: nn.Module, inner: Any) -> tuple[nn.ModuleList, Outline]:
    """Return the list of layers, and the outline of the model around it."""
    reason = UnsupportedModel("it has no list of layers")
    for layers in _candidates(inner):
        try:
            outline = Outline(module, layers)
        except Beyond as error:  # the layers of an image encoder, or one of several lists
            reason = error
            continue
        return layers, outline
    raise reason


def _candidates(inner: Any) -> list[nn.ModuleList]:
    """Return lists of modules that are in no other list: the decoder's first, the largest first."""
    found: dict[int, nn.ModuleList] = {}

    def lists_in(module: nn.Module) -> list[nn.ModuleList]:
        lists: list[nn.ModuleList] = []
        for child in module.children():
            lists += [child] if isinstance(child, nn.ModuleList) else lists_in(child)
        return sorted(lists, key=lambda one: -sum(p.nbytes for p in one.parameters()))

    try:
        decoder = inner.get_decoder()
    except (AttributeError, NotImplementedError):
        decoder = inner
    for module in (decoder, inner):
        for one in lists_in(module) if isinstance(module, nn.Module) else ():
            found.setdefault(id(one), one)
    return list(found.values())


def _outside(outline: Outline) -> Outside:
    """Find where each parameter has an effect, by setting half of them to NaN at a time."""
    before: set[nn.Parameter] = set()
    beside: set[nn.Parameter] = set()
    after: set[nn.Parameter] = set(outline.head_parameters)

    def search(parameters: list[nn.Parameter]) -> None:
        if not parameters:
            return
        changes = _changes(outline.plain, outline.run(lost=parameters))
        if not changes:
            return
        if len(parameters) > 1:
            half = len(parameters) // 2
            search(parameters[:half])
            search(parameters[half:])
            return
        if (0, "hidden") in changes:
            before.update(parameters)
        if changes & {(i, "beside") for i in range(len(outline.plain.entries))} or any(
            i > 0 and what == "hidden" for i, what in changes
        ):
            beside.update(parameters)
        if (len(outline.plain.entries), "logits") in changes:
            after.update(parameters)

    search(outline.outside)
    return Outside(frozenset(before), frozenset(beside), frozenset(after))


def _changes(plain: OutlineRun, other: OutlineRun) -> set[tuple[int, str]]:
    """Return (index of the call, argument) that differ; the logits come after the last call."""
    if [e.index for e in other.entries] != [e.index for e in plain.entries]:
        raise UnsupportedModel("which of its layers run depends on numbers")
    found: set[tuple[int, str]] = set()
    for i, (a, b) in enumerate(zip(plain.entries, other.entries, strict=True)):
        if not same(a.hidden, b.hidden):
            found.add((i, "hidden"))
        if len(a.beside) != len(b.beside) or not all(map(same, a.beside, b.beside)):
            found.add((i, "beside"))
    assert plain.logits is not None and other.logits is not None
    if not same(plain.logits, other.logits):
        found.add((len(plain.entries), "logits"))
    return found


def _blocked_by_flows(outline: Outline, inner: Any) -> dict[int, str]:
    """Return cuts across which more than the hidden states of one layer would be needed."""
    count, blocked = len(outline.plain.entries), {}
    # A layer with an indexer of its own is handed what the layer before chose, and makes no use of it.
    indexers = getattr(inner.config.get_text_config(decoder=True), "indexer_types", None) or ()
    choosing = {i for i, kind in enumerate(indexers) if kind == "full"}
    for i, entry in enumerate(outline.plain.entries):
        allowed = {(i + 1, "hidden") if i + 1 < count else (count, "logits")}
        changes = _changes(outline.plain, outline.run(lost_layer=entry.index))
        if i + 1 in choosing:
            allowed.add((i + 1, "beside"))
        for reached, what in changes - allowed:
            for cut in range(i + 1, min(reached, count - 1) + 1):
                blocked[cut] = (
                    f"what layer {i} makes is needed behind layer {reached - 1} as well"
                    if what != "beside"
                    else f"layer {reached} is given more of layer {i} than its hidden states"
                )
    return blocked


def _blocked_by_objects(plain: OutlineRun, inner: Any) -> dict[int, str]:
    """Return cuts across which layers share keys and values, or unknown objects."""
    count = len(plain.entries)
    names = {name for entry in plain.entries for name in entry.objects}
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
