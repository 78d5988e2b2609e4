"""A whole model in one kernel call for all of its layers, between embedding and logits.

For models that look ids up, turn positions into angles, hand rows from layer to layer, norm them and
multiply them by their head, and do nothing else. Most of what transformers does around the layers prepares
for masks and caches that a flat forward does not have: at one row that takes as long as several layers.

The parts are found by their names. Whether there is nothing else is tried: the model's own forward runs
once with probes in its layers' places, and what it hands to each of them, and makes of the last one's rows,
must be what the lines here make, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verbatim.batch import Batch, SampleRow
from verbatim.kernels.functions import addresses, run, struct_of
from verbatim.kv.hidden import HiddenStore
from verbatim.model.angles import Angles
from verbatim.model.differential import differential_check
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
from verbatim.model.structs import NormStruct, NotFusable, address_of, matrix_of, norm_of
from verbatim.protocols import Forward
from verbatim.sampling import fast

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
# Multiplications of one call of the kernels, for which Ctrl-C waits: a second on two cores. Where there are
# more, the layers take long, and a call each costs nothing.
_MOST_WORK = 1 << 39
_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "embedding_norm")


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

    _fields_ = (
        ("layers", _POINTER),
        ("count", _LONG),
        ("norm", NormStruct),
        ("head", Matrix),
    )


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
        if slots != [*range(len(spec.layers))] or not all(x.parts.has_mlp for x in layers):
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
        norm = next((m for n in _NORM_NAMES if (m := body._modules.get(n)) is not None), None)
        rotary = body._modules.get("rotary_emb")
        embeds = part is None or part.is_first
        ends = part is None or part.is_last
        if embeds and (not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None):
            raise NotFusable("its ids are not looked up in one table")
        turns = any(layer.turns for layer in layers)
        if head is None or norm is None or (turns and rotary is None):
            raise NotFusable("its last norm, its head or its angles are not where others have them")
        owned = (body, embedding, rotary, norm, head)
        for module in owned if part is not None else (inner, *owned):
            if module is not None and "forward" in module.__dict__:
                raise NotFusable("the forward of a part of it was replaced by its owner")
        last = find_norm(norm)
        if last is None:
            raise NotFusable(f"{type(norm).__name__} is no RMS norm of a known family")
        self.dtype = layers[0].dtype
        self._layers, self._head, self._norm = layers, head, last
        self._ends = ends
        self._num_states = [layer.parts.num_states for layer in layers]
        self._entry: Entry | None = None
        self._enter: Callable[[Tensor], Tensor] | None = None
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
        self._angles = None
        if turns and rotary is not None:
            self._angles = Angles(rotary, forward_of(rotary), self.dtype)
        self._structs = (_POINTER * len(layers))(*(layer.address for layer in layers))
        # The embedding and the angles say themselves what they do at the moment.
        entered = [m for m in self._entry or () if isinstance(m, nn.Module)]
        classes = [type(m) for m in (inner, body, norm, head, rotary, *entered) if m is not None]
        places = tensors_of([*([head, norm] if ends else ()), *entered])
        numbered = numbers_of([inner, body, norm, *entered])
        self.fingerprint = Fingerprint(places, numbered, classes)
        numbers = sum(p.numel() for p in inner.parameters() if p.ndim < 3)
        numbers += sum(layer.parts.mixture.numbers for layer in layers if layer.parts.mixture)
        packed = [m for m in inner.modules() if isinstance(m, PackedLinear)]
        numbers += sum(m.in_features * m.out_features for m in packed)
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
        if self._angles is not None:
            self._angles.forget()

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
        hidden = self._embed(batch.token_ids[None], batch.entering)
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
            *_arguments(*angles),
            *((None, None) if context.routing is None else context.routing.all_addresses()),
            batch.logit_rows.data_ptr(),
            count,
            seen.data_ptr(),
            logits.data_ptr(),
            None if body is None else body.tensors[0].data_ptr(),
        )
        if not self._ends:  # the rows leave, in the place of logits
            return Forward(hidden[0][batch.logit_rows], seen)
        return Forward(logits, seen)

    def chain(
        self, context: FlatContext, rows: list[SampleRow], lengths: list[int], *, watched: bool
    ) -> list[list[int]] | None:
        """Draw tokens behind each sequence of `context` in one call; None where that is not possible.

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
        if self._entry.embedding.num_embeddings < self._struct.head.cols:
            return None
        specs = fast.specs_of_chain(rows, self._struct.head.cols)
        entering, most = batch.entering, max(lengths)
        like = torch.empty(1, 1, self._entry_struct.hidden, dtype=self.dtype)
        angles = self._angles_of(like, batch, most, watched=watched)
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
            *_arguments(*angles),
            batch.logit_rows.data_ptr(),
            specs,
            (ctypes.c_int32 * len(lengths))(*lengths),
            most,
            drawn,
        )
        return [drawn[s * most : s * most + n] for s, n in enumerate(lengths)]

    def _embed(self, token_ids: Tensor, entering: Tensor | None) -> Tensor:
        """Return hidden states `[1, T, H]` of ids `[1, T]` in memory of their own: the kernels write to it.

        Args:
            entering: `Batch.entering`; None in trials, too.
        """
        if self._enter is not None:
            found: Tensor = self._enter(token_ids) if entering is None else entering.clone()
            return found.reshape(1, token_ids.shape[1], -1)
        assert entering is None or entering.dtype is self.dtype
        rows, struct = token_ids.shape[1], self._entry_struct
        hidden = torch.empty(1, rows, struct.hidden, dtype=self.dtype)
        ids, states = addresses(token_ids, entering)
        run("vb_enter", None, ctypes.addressof(struct), ids, states, rows, hidden.data_ptr())
        return hidden

    def _angles_of(
        self, hidden: Tensor, batch: Batch, ahead: int = 0, *, watched: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
        """Return cosines, sines and each row's place in them; None where the kernels don't take them.

        Args:
            ahead: number of positions more that are needed.
        """
        if self._angles is None:
            return None, None, None
        length = max(batch.context_lens.tolist()) + ahead
        table = None if watched else self._angles.table(hidden, length)
        if table is not None:
            return *table, batch.positions
        found = None if ahead else self._angles.of(hidden, batch.positions)
        return None if found is None else (*found, None)

    def check(self, calls: list[LayerCall], batch: Batch, logits: Tensor) -> None:
        """Compare with what the model's own forward does around its layers.

        Args:
            calls: of probes in the layers' places, in a forward of `batch` that gave `logits`.

        Raises:
            NotFusable: it does something else.
        """
        if [call.probe.fused for call in calls] != self._layers:
            raise NotFusable("its layers do not run one behind the other")
        made = [self._embed(batch.token_ids[None], None), *(call.made for call in calls)]
        angles = None if self._angles is None else self._angles.of(made[0], batch.positions)
        turning = [call for call, layer in zip(calls, self._layers, strict=True) if layer.turns]
        others = "its layers have angles of their own"
        if turning and angles is None:
            raise NotFusable(others)
        given = [
            x.flatten(0, -2) for call in turning for x in call.arguments["position_embeddings"]
        ]
        last, behind = made[-1][0], "something happens to the rows behind its last layer"
        if self._ends:
            norm, head = forward_of(self._norm.module), forward_of(self._head)
            last = head(norm(last[batch.logit_rows]))
            behind = "its logits are not what its head makes of its last norm"
        before = [call.hidden for call in calls]
        cases = (
            (made[:-1], before, "something happens to the rows before a layer"),
            ([*(angles or ())] * len(turning), given, others),
            ([last], [logits], behind),
        )
        found = differential_check(itemgetter(0), itemgetter(1), cases)
        if found is not None:
            raise NotFusable(found.case[2])


def _arguments(cos: Tensor | None, sin: Tensor | None, rows: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of the kernels for angles."""
    if cos is None:
        return None, None, 0, False, None
    cos_at, sin_at, rows_at = addresses(cos, sin, rows)
    return cos_at, sin_at, cos.shape[-1], cos.dtype is torch.float32, rows_at
