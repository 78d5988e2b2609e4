"""A whole model in one kernel call for all of its layers, between embedding and logits.

For models that look ids up, turn positions into angles, hand rows from layer to layer, norm them and
multiply them by their head, and do nothing else but scale embeddings and scale or cap logits. Most of what
transformers does around the layers prepares for masks and caches that a flat forward does not have: at one
row that takes as long as several layers.

The parts are found by their names. Whether there is nothing else is tried: the model's own forward runs
once with probes in its layers' places, and what it hands to each of them, and makes of the last one's rows,
must be what the lines here make, bit for bit.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verbatim.batch import Batch, SampleRow
from verbatim.kernels.functions import addresses, run, struct_of
from verbatim.kv.flat import HiddenStore
from verbatim.model.angles import Angles, AnglesStruct
from verbatim.model.differential import bit_equal, differential_check
from verbatim.model.elementwise import NormStruct
from verbatim.model.fingerprint import Fingerprint, numbers_of, tensors_of
from verbatim.model.flat import FlatContext
from verbatim.model.hidden import head_of
from verbatim.model.layer import FusedLayer
from verbatim.model.layer_trial import LayerCall
from verbatim.model.norms import find_norm
from verbatim.model.packed import PackedLinear
from verbatim.model.patching import forward_of
from verbatim.model.products import Matrix
from verbatim.model.spec import ModelSpec, OwnModel, inner_model
from verbatim.model.structs import NotFusable, address_of, matrix_of, norm_of
from verbatim.protocols import Forward
from verbatim.sampling import fast

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
# Multiplications of one call of the kernels, for which Ctrl-C waits: a second on two cores. Where there are
# more, the layers take long, and a call each costs nothing.
_MOST_WORK = 1 << 39


Way = Callable[[Tensor], Tensor]

# What a model makes of its embeddings or its logits with a number.
_WAYS: tuple[Callable[[float, Tensor], Tensor], ...] = (
    lambda number, x: x * number,
    lambda number, x: x / number,
    lambda number, x: torch.tanh(x / number) * number,
)


class Entry(NamedTuple):
    """The modules before the first layer: an embedding, and what joins it with a hidden state, or None."""

    embedding: nn.Embedding
    of_embedding: nn.Module | None = None  # norms
    of_hidden: nn.Module | None = None
    project: nn.Module | None = None
    hidden_first: bool = False  # in what `project` is given


class ModelPart(Protocol):
    """The ends of a module that has only some layers of a model, and runs these."""

    is_first: bool  # it begins with the embedding
    is_last: bool  # it ends with the norm and the head

    @property
    def entry(self) -> Entry | Callable[[Tensor], Tensor]:
        """The modules before its first layer; or, for trials, the function of made-up hidden states `[T, H]`
        of ids.
        """
        ...


@struct_of("entry")
class _EntryStruct(ctypes.Structure):
    """`Entry` of kernels/layer.cpp."""

    _fields_ = (
        ("table", _POINTER),
        ("hidden", _LONG),
        ("project", Matrix),
        ("of_embedding", NormStruct),
        ("of_hidden", NormStruct),
        ("hidden_first", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
    )


@struct_of("model")
class _Model(ctypes.Structure):
    """`Model` of kernels/layer.cpp."""

    _fields_ = (("layers", _POINTER), ("count", _LONG), ("norm", NormStruct), ("head", Matrix))


class WholeModel:
    """The forward of one model, layers in the order in which they are called.

    Args:
        module: a transformers model, not wrapped.
        spec: of it.
        layers: all of its layers, fused.
        part: it has no others, and perhaps no embedding or no head.

    Raises:
        NotFusable: it is of another kind; the message tells of which.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        layers: list[FusedLayer],
        part: ModelPart | None = None,
    ) -> None:
        inner = inner_model(module)
        if id(module) != id(inner):
            raise NotFusable("the model is wrapped")
        if not (spec.takes_positions and spec.takes_logit_rows):
            raise NotFusable("its forward has no position_ids and logits_to_keep")
        slots = [
            spec.slots[id(layer.parts.attention), 0]
            for layer in layers
            if not layer.parts.num_states
        ]
        if len(spec.states) != sum(layer.parts.num_states for layer in layers):
            raise NotFusable("states are kept elsewhere than in its layers")
        if slots != [*range(len(spec.layers))] or not all(x.is_whole for x in layers):
            raise NotFusable("parts of its layers are not in the kernels")
        experts = [x.experts for x in layers if x.experts is not None]
        if spec.routed.layers and tuple(map(id, experts)) != spec.routed_modules:
            raise NotFusable("its experts run in another order, or elsewhere than in its layers")
        body: Any = inner.get_decoder()
        if not all(
            type(m).__module__.startswith("transformers.models.") or isinstance(m, OwnModel)
            for m in (inner, body)
        ):
            raise NotFusable(
                "its code is not transformers' own, and may mind ids that no trial has"
            )
        embedding, head = inner.get_input_embeddings(), head_of(inner)
        children = [m for m in body._modules.values() if m is not None]
        self._norms = [m for m in children if find_norm(m) is not None]
        norm = self._norms[-1] if self._norms else None
        rotary = body._modules.get("rotary_emb")
        embeds = part is None or part.is_first
        ends = part is None or part.is_last
        if embeds and (not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None):
            raise NotFusable("its ids are not looked up in one table")
        turns = any(layer.turns for layer in layers)
        if head is None or norm is None or (turns and rotary is None):
            raise NotFusable(
                "it has no last norm of a known family, no head, or its angles are elsewhere"
            )
        owned = (body, embedding, rotary, norm, head, *children)
        for module in owned if part is not None else (inner, *owned):
            if module is not None and "forward" in module.__dict__:
                raise NotFusable("the forward of a part of it was replaced by its owner")
        last = find_norm(norm)
        assert last is not None
        self.dtype = layers[0].dtype
        self._layers, self._head, self._norm = layers, head, last
        self._ends = ends
        self._num_states = [layer.parts.num_states for layer in layers]
        self._embeds = embeds
        self._entry: Entry | None = None
        self._enter: Callable[[Tensor], Tensor] | None = None
        self._tables = [m for m in children if isinstance(m, nn.Embedding) and m is not embedding]
        self._positions: nn.Module | None = None  # of `_tables`, of what is added to embeddings
        self._behind: Callable[[Tensor], Tensor] = _unchanged
        values = {fields[name] for fields, name in numbers_of([inner, body])}
        self._numbers = [n for n in values if isinstance(n, float | int) and n not in (0, 1)]
        if not embeds:
            assert part is not None
            if isinstance(part.entry, Entry):
                self._entry = part.entry
            else:
                self._enter = part.entry
        else:
            self._enter, table = forward_of(embedding), embedding.weight
            if type(embedding) is nn.Embedding and table.dtype is self.dtype:
                self._entry = Entry(embedding) if table.is_contiguous() else None
        self._angles: list[Angles] = []
        config = getattr(getattr(body, "config", None), "__dict__", dict[str, Any]())
        layer_types = config.get("layer_types") or ()
        fits = len(layer_types) == len(layers)  # not in a part of a model
        self._layer_types = [*layer_types] if fits else [None] * len(layers)
        if turns and rotary is not None:
            kinds = rotary.__dict__.get("rope_type")
            self._angles = [
                Angles(rotary, forward_of(rotary), self.dtype, kind)
                for kind in (kinds if isinstance(kinds, dict) else [None])
            ]
        self._structs = (_POINTER * len(layers))(
            *(ctypes.addressof(layer.struct) for layer in layers)
        )
        # The embedding and the angles say themselves what they do at the moment.
        entered = [m for m in self._entry or () if isinstance(m, nn.Module)]
        owners = (inner, body, norm, head, rotary, *entered, *self._tables)
        classes = [type(m) for m in owners if m is not None]
        places = tensors_of([*([head, norm] if ends else ()), *entered])
        numbered = [*numbers_of([inner, body, norm, *entered]), (config, "layer_types")]
        self.fingerprint = Fingerprint(places, numbered, classes)
        numbers = sum(p.numel() for p in inner.parameters() if p.ndim < 3)
        numbers += sum(layer.parts.mixture.numbers for layer in layers if layer.parts.mixture)
        packed = [m for m in inner.modules() if isinstance(m, PackedLinear)]
        numbers += sum(math.prod(m.packing.shape) for m in packed)
        self._most_rows = max(1, _MOST_WORK // max(1, numbers))
        self._struct, self._entry_struct = _Model(), _EntryStruct()
        self._prepare()
        self.fingerprint.record_layouts()

    def _prepare(self) -> None:
        struct, layers = self._struct, self._structs
        struct.layers, struct.count = ctypes.addressof(layers), len(layers)
        if self._ends:
            struct.head = matrix_of(self._head, self.dtype)
            struct.norm = norm_of(self._norm, self.dtype, struct.head.depth, None)
        if self._entry is not None:
            self._prepare_entry(self._entry, self._entry_struct)

    def _prepare_entry(self, entry: Entry, struct: _EntryStruct) -> None:
        if type(entry.embedding) is not nn.Embedding:
            raise NotFusable("its ids are not looked up in one table")
        struct.table = address_of(entry.embedding.weight, self.dtype)
        struct.hidden, struct.is_bf16 = entry.embedding.embedding_dim, self.dtype is torch.bfloat16
        if entry.project is None:
            return
        assert entry.of_embedding is not None and entry.of_hidden is not None
        norms = find_norm(entry.of_embedding), find_norm(entry.of_hidden)
        if entry.embedding.num_embeddings < self._struct.head.cols:
            raise NotFusable("its table of embeddings has fewer ids than its head")
        if None in norms:
            raise NotFusable("its embedding or its hidden state has no RMS norm of a known family")
        struct.of_embedding, struct.of_hidden = (
            norm_of(norm, self.dtype, struct.hidden, None) for norm in norms
        )
        struct.project = matrix_of(entry.project, self.dtype)
        struct.hidden_first = entry.hidden_first
        if (struct.project.cols, struct.project.depth) != (struct.hidden, 2 * struct.hidden):
            raise NotFusable("its embedding and its hidden state are not of one width")

    def fits(self) -> bool:
        """Return whether nothing around the layers changed but perhaps the values of weights."""
        return self.fingerprint.fits(self._prepare)

    def forget(self) -> None:
        """Keep nothing from call to call."""
        for angles in self._angles:
            angles.forget()

    def run(
        self, context: FlatContext, body: HiddenStore | None = None, *, watched: bool
    ) -> Forward | None:
        """Run the rows of `context`; None where they are many, or K, V or dtypes are not the kernels'.

        Args:
            body: gets the hidden states of all rows.
            watched: the caller has the model, so nothing is kept that may have changed.
        """
        direct, batch = context.direct, context.batch
        if direct is None or direct.dtype is not self.dtype or direct.count > self._most_rows:
            return None
        if body is not None and body.tensors[0].dtype is not self.dtype:
            return None
        hidden = self._embed(batch, batch.entering)
        if hidden.dtype is not self.dtype or not hidden.is_contiguous():
            return None
        angles = self._angles_of(hidden, batch, watched=watched)
        if angles is None:
            return None
        count = len(batch.logit_rows) if self._ends else 0
        seen = hidden.new_empty(count, hidden.shape[-1])
        logits = hidden.new_empty(count, self._struct.head.cols)
        run(
            "vb_model",
            None,
            ctypes.addressof(self._struct),
            direct.address,
            direct.all_stores(self._num_states),
            hidden.data_ptr(),
            angles[0],
            *((None, None) if context.routing is None else context.routing.all_addresses()),
            batch.logit_rows.data_ptr(),
            count,
            seen.data_ptr(),
            logits.data_ptr(),
            None if body is None else body.tensors[0].data_ptr(),
        )
        if not self._ends:  # the rows leave, in the place of logits
            return Forward(hidden[0][batch.logit_rows], seen)
        return Forward(self._behind(logits), seen)

    def chain(
        self, context: FlatContext, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        """Draw tokens behind each sequence of `context` in one call; None where that is not possible.

        The module must not be edited.

        The first forward has the rows of `context`. Each later one has the token that was drawn last, and,
        where an entry joins the two, the hidden state that it was drawn from.

        Args:
            rows: of the first tokens.
            lengths: number of tokens of each sequence.

        Returns:
            So many ids each; from where none can be drawn, they are -1.
        """
        direct, batch = context.direct, context.batch
        if direct is None or direct.dtype is not self.dtype or direct.count > self._most_rows:
            return None
        if self._entry is None or any(self._num_states) or context.adapted:
            return None
        if self._behind is not _unchanged:
            return None
        if self._entry.embedding.num_embeddings < self._struct.head.cols:
            return None
        specs = fast.specs_of_chain(rows, self._struct.head.cols)
        entering, most = batch.entering, max(lengths)
        like = torch.empty(1, 1, self._entry_struct.hidden, dtype=self.dtype)
        angles = self._angles_of(like, batch, most, watched=False)
        if specs is None or angles is None or len(batch.logit_rows) != batch.num_sequences:
            return None
        if entering is not None and entering.dtype is not self.dtype:
            return None
        drawn = (ctypes.c_int32 * (len(lengths) * most))(*[-1] * (len(lengths) * most))
        run(
            "vb_chain",
            None,
            ctypes.addressof(self._struct),
            ctypes.addressof(self._entry_struct),
            direct.address,
            direct.all_stores(self._num_states),
            *addresses(batch.token_ids, entering),
            angles[0],
            len(angles[0]),
            batch.logit_rows.data_ptr(),
            specs,
            (ctypes.c_int32 * len(lengths))(*lengths),
            most,
            drawn,
        )
        return [drawn[s * most : s * most + n] for s, n in enumerate(lengths)]

    def _embed(self, batch: Batch, entering: Tensor | None) -> Tensor:
        """Return hidden states `[1, T, H]` in memory of their own: the kernels write to it.

        Args:
            entering: `Batch.entering`; None in trials, too.
        """
        token_ids = batch.token_ids[None]
        if self._enter is not None:
            found: Tensor = self._enter(token_ids) if entering is None else entering.clone()
            found = found.reshape(1, token_ids.shape[1], -1)
            return found if self._positions is None else found + self._added(self._positions, batch)
        assert entering is None or entering.dtype is self.dtype
        rows, struct = token_ids.shape[1], self._entry_struct
        hidden = torch.empty(1, rows, struct.hidden, dtype=self.dtype)
        ids, states = addresses(token_ids, entering)
        run("vb_enter", None, ctypes.addressof(struct), ids, states, rows, hidden.data_ptr())
        return hidden

    def _added(self, table: Any, batch: Batch) -> Tensor:
        """Return the embeddings of positions, `[1, T, H]`."""
        offset: int = getattr(table, "offset", 0)
        return nn.Embedding.forward(table, batch.positions[None] + offset)

    def _angles_of(
        self, hidden: Tensor, batch: Batch, ahead: int = 0, *, watched: bool
    ) -> tuple[ctypes.Array[AnglesStruct], list[tuple[Tensor, Tensor]]] | None:
        """Return the angles for the kernels, of each kind of layer, and the tensors that they point to; None
        where the kernels don't take them.

        Args:
            ahead: number of positions more that are needed.
        """
        structs, held = (AnglesStruct * max(1, len(self._angles)))(), []
        length = max(batch.context_lens.tolist()) + ahead
        for i, angles in enumerate(self._angles):
            pair = table = None if watched else angles.table(hidden, length)
            if table is None and not ahead:
                pair = angles.of(hidden, batch.positions)
            if pair is None:
                return None
            (cos, sin), rows = pair, None if table is None else batch.positions.data_ptr()
            wide = cos.dtype is torch.float32
            structs[i] = AnglesStruct(*addresses(cos, sin), cos.shape[-1], rows, wide)
            held.append(pair)
        return structs, held

    def _way(self, made: Tensor, wanted: Tensor, others: Iterable[Way] = ()) -> Way:
        """Return how the model makes one tensor of another, with one of its numbers or otherwise."""
        numbered = (partial(way, n) for n, way in itertools.product(self._numbers, _WAYS))
        ways: Iterable[Way] = itertools.chain([_unchanged], others, numbered)
        return next((way for way in ways if bit_equal(way(made), wanted)), _unchanged)

    def check(self, calls: list[LayerCall], batch: Batch, logits: Tensor) -> None:
        """Compare with what the model's own forward does around its layers.

        Args:
            calls: of probes in the layers' places, in a forward of `batch` that gave `logits`.

        Raises:
            NotFusable: it does something else.
        """
        if [call.probe.layer for call in calls] != [x.parts.layer for x in self._layers]:
            raise NotFusable("its layers do not run one behind the other")
        tables = [m.weight for m in self._tables if isinstance(m.weight, Tensor)]
        if self._embeds and not all(x.any() for x in (calls[0].hidden, *tables)):
            raise NotFusable("its embeddings are all 0, which hides what is done to them")
        made, wanted = [self._embed(batch, None), *(call.made for call in calls)], calls[0].hidden
        if self._embeds and not bit_equal(made[0], wanted):
            scaled, look_up = self._way(made[0], wanted, map(forward_of, self._norms)), self._enter
            assert look_up is not None
            self._entry, self._enter = None, lambda ids: scaled(look_up(ids))
            added = (m for m in self._tables if bit_equal(made[0] + self._added(m, batch), wanted))
            self._positions = next(added, None) if scaled is _unchanged else None
            made[0] = self._embed(batch, None)
        kinds = [angles.of(made[0], batch.positions) for angles in self._angles]
        for call, layer, layer_type in zip(calls, self._layers, self._layer_types, strict=True):
            if layer.turns:
                given = layer.angles_in(call.arguments)
                same = [i for i, x in enumerate(kinds) if x and all(map(bit_equal, x, given))]
                if len(same) > 1:  # only today, perhaps
                    same = [i for i in same if self._angles[i].layer_type == layer_type]
                if not same:
                    raise NotFusable("its layers have angles of their own")
                layer.struct.angles = same[0]
        last, behind = made[-1][0], "something happens to the rows behind its last layer"
        if self._ends:
            norm, head = forward_of(self._norm.module), forward_of(self._head)
            last = head(norm(last[batch.logit_rows]))
            if not last.any():
                raise NotFusable("its logits are all 0, which hides what is done to them")
            self._behind = self._way(last, logits)
            last = self._behind(last)
            behind = "its logits are not what its head makes of its last norm"
        before = [call.hidden for call in calls]
        cases = (
            (made[:-1], before, "something happens to the rows before a layer"),
            ([last], [logits], behind),
        )
        found = differential_check(itemgetter(0), itemgetter(1), cases)
        if found is not None:
            raise NotFusable(found.case[2])


def _unchanged(x: Tensor) -> Tensor:
    return x
