"""`WholeModel`: runs all layers of a model, from embedding to logits, in one kernel call.

Supported are models that consist of token embeddings, rotary embeddings, a sequence of decoder layers, a
final norm and an LM head; embeddings may be scaled, logits scaled or capped. This skips transformers' code
around the layers, which mostly prepares unused masks and caches: for one row, that takes as long as several
layers.

The parts are found by name. To verify that nothing else happens, the model's own forward runs once with
probes in place of its layers: the input of every probe and the final logits must be bit-identical to the ones
computed here.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verbatim.batch import Batch, SampleRow
from verbatim.kernels.functions import addresses, run, struct_layout
from verbatim.kv.flat import HiddenStore
from verbatim.model.angles import Angles, AnglesStruct
from verbatim.model.context import head_of
from verbatim.model.differential import bit_equal
from verbatim.model.fingerprint import Fingerprint, Place, numbers_of, tensors_of
from verbatim.model.flat import FlatContext
from verbatim.model.layer import FusedLayer
from verbatim.model.layer_trial import LayerCall
from verbatim.model.norms import find_norm
from verbatim.model.patching import forward_of
from verbatim.model.quantized import QuantizedLinear
from verbatim.model.spec import ModelSpec, OwnModel, inner_model
from verbatim.model.structs import NotFusable, address_of, matrix_of, norm_of
from verbatim.protocols import Forward
from verbatim.sampling import fast

# Maximum number of multiplications in one kernel call, a second on two cores, as Ctrl-C has no effect during
# the call. Larger batches run layer by layer; there the overhead per layer is negligible.
_MAX_MULTIPLICATIONS = 1 << 39


TensorFunction = Callable[[Tensor], Tensor]

# Scalings that a model may apply to its embeddings or logits.
_SCALINGS: tuple[Callable[[float, Tensor], Tensor], ...] = (
    lambda number, x: x * number,
    lambda number, x: x / number,
    lambda number, x: torch.tanh(x / number) * number,
)


class Entry(NamedTuple):
    """The modules before the first layer: the embedding, and in MTP layers those that add a hidden state."""

    embedding: nn.Embedding
    of_embedding: nn.Module | None = None  # norm of the embedding
    of_hidden: nn.Module | None = None  # norm of the hidden state
    project: nn.Module | None = None  # linear layer applied to both, concatenated
    hidden_first: bool = False  # whether the hidden state comes first in the input of `project`


class ModelPart(Protocol):
    """A module that has only some layers of a model, and perhaps its embedding or its head."""

    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the LM head

    @property
    def entry(self) -> Entry | Callable[[Tensor], Tensor]:
        """The modules before the first layer; or a function from ids to hidden states, random in a trial."""
        ...


_ENTRY = """
    P table
    L hidden
    Matrix project
    NormStruct of_embedding of_hidden
    I hidden_first is_bf16
"""


@struct_layout(_ENTRY, size="entry")
class _EntryStruct(ctypes.Structure):
    """`Entry` of kernels/layer.cpp."""


@struct_layout("P layers\nL count\nNormStruct norm\nMatrix head", size="model")
class _Model(ctypes.Structure):
    """`Model` of kernels/layer.cpp."""


class WholeModel:
    """Runs the forward of one model by a single kernel call.

    Args:
        module: a transformers model, not wrapped.
        layers: all of its layers, fused, in call order.
        part: describes `module` if it has only some layers, and perhaps no embedding or head; else None.

    Raises:
        NotFusable: the model has a different structure; the message says where.
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
            raise NotFusable("it keeps states outside of its layers")
        if slots != [*range(len(spec.layers))] or not all(x.is_whole for x in layers):
            raise NotFusable("the kernels cover only parts of its layers")
        experts = [x.experts for x in layers if x.experts is not None]
        if spec.routed.layers and tuple(map(id, experts)) != spec.routed_modules:
            raise NotFusable("its experts run in another order, or outside of its layers")
        body: Any = inner.get_decoder()
        if not all(
            type(m).__module__.startswith("transformers.models.") or isinstance(m, OwnModel)
            for m in (inner, body)
        ):
            raise NotFusable(
                "its code is not from transformers, and may depend on token ids that no trial "
                "covers"
            )
        embedding, head = inner.get_input_embeddings(), head_of(inner)
        children = [m for m in body._modules.values() if m is not None]
        self._norms = [m for m in children if find_norm(m) is not None]
        norm = self._norms[-1] if self._norms else None
        rotary = body._modules.get("rotary_emb") or body._modules.get("pos_emb")
        embeds = part is None or part.is_first
        ends = part is None or part.is_last
        if embeds and (not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None):
            raise NotFusable("its token embedding is not a plain nn.Embedding")
        rotates = any(layer.rotates for layer in layers)
        if head is None or norm is None or (rotates and rotary is None):
            raise NotFusable(
                "it has no final norm of a known family, no LM head, or no `rotary_emb` or `pos_emb`"
            )
        owned = (body, embedding, rotary, norm, head, *children)
        for module in owned if part is not None else (inner, *owned):
            if module is not None and "forward" in module.__dict__:
                raise NotFusable("the forward of one of its modules was replaced")
        last = find_norm(norm)
        assert last is not None
        self.dtype = layers[0].dtype
        self._layers, self._head, self._norm = layers, head, last
        self._has_head = ends
        self._num_states = [layer.parts.num_states for layer in layers]
        self._has_embedding = embeds
        self._entry: Entry | None = None
        self._enter: Callable[[Tensor], Tensor] | None = None
        self._tables = [m for m in children if isinstance(m, nn.Embedding) and m is not embedding]
        self._positions: nn.Module | None = None  # position embeddings, an element of `_tables`
        self._scale_logits: Callable[[Tensor], Tensor] = _identity
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
        fits = len(layer_types) == len(layers)  # False for a part of a model
        self._layer_types = [*layer_types] if fits else [None] * len(layers)
        if rotates and rotary is not None:
            kinds = rotary.__dict__.get("rope_type")
            self._angles = [
                Angles(rotary, forward_of(rotary), self.dtype, kind)
                for kind in (kinds if isinstance(kinds, dict) else [None])
            ]
        self._structs = (ctypes.c_void_p * len(layers))(
            *(ctypes.addressof(layer.struct) for layer in layers)
        )
        # Rotary modules and embeddings without an entry run their own code, so changes take effect.
        entered = [m for m in self._entry or () if isinstance(m, nn.Module)]
        owners = (inner, body, norm, head, rotary, *entered, *self._tables)
        classes = [type(m) for m in owners if m is not None]
        places = tensors_of([*([head, norm] if ends else ()), *entered])
        numbered = [*numbers_of([inner, body, norm, *entered]), Place(config, "layer_types")]
        self.fingerprint = Fingerprint(places, numbered, classes)
        numbers = sum(p.numel() for p in inner.parameters() if p.ndim < 3)
        numbers += sum(layer.parts.mixture.numbers for layer in layers if layer.parts.mixture)
        packed = [m for m in inner.modules() if isinstance(m, QuantizedLinear)]
        numbers += sum(math.prod(m.matrix.packing.shape) for m in packed)
        self._max_rows = max(1, _MAX_MULTIPLICATIONS // max(1, numbers))
        self._struct, self._entry_struct = _Model(), _EntryStruct()
        self._prepare()
        self.fingerprint.record_layouts()

    def _prepare(self) -> None:
        struct, layers = self._struct, self._structs
        struct.layers, struct.count = ctypes.addressof(layers), len(layers)
        if self._has_head:
            struct.head = matrix_of(self._head, self.dtype)
            struct.norm = norm_of(self._norm, self.dtype, struct.head.depth, None)
        if self._entry is not None:
            self._prepare_entry(self._entry, self._entry_struct)

    def _prepare_entry(self, entry: Entry, struct: _EntryStruct) -> None:
        if type(entry.embedding) is not nn.Embedding:
            raise NotFusable("its token embedding is not a plain nn.Embedding")
        struct.table = address_of(entry.embedding.weight, self.dtype)
        struct.hidden, struct.is_bf16 = entry.embedding.embedding_dim, self.dtype is torch.bfloat16
        if entry.project is None:
            return
        assert entry.of_embedding is not None and entry.of_hidden is not None
        norms = find_norm(entry.of_embedding), find_norm(entry.of_hidden)
        if entry.embedding.num_embeddings < self._struct.head.cols:
            raise NotFusable("its token embedding has fewer ids than its LM head")
        if None in norms:
            raise NotFusable("its embedding or its hidden state has no known kind of RMS norm")
        struct.of_embedding, struct.of_hidden = (
            norm_of(norm, self.dtype, struct.hidden, None) for norm in norms
        )
        struct.project = matrix_of(entry.project, self.dtype)
        struct.hidden_first = entry.hidden_first
        if (struct.project.cols, struct.project.depth) != (struct.hidden, 2 * struct.hidden):
            raise NotFusable("its embedding and its hidden state differ in width")

    def fits(self) -> bool:
        """Return whether everything around the layers is unchanged; values of weights may differ."""
        return self.fingerprint.fits(self._prepare)

    def forget(self) -> None:
        """Drop the cached cos/sin tables."""
        for angles in self._angles:
            angles.forget()

    def run(
        self, context: FlatContext, body: HiddenStore | None = None, *, editable: bool
    ) -> Forward | None:
        """Run the batch of `context` in one kernel call.

        Args:
            body: store for the hidden states of all rows, or None.
            editable: whether the caller may have edited the module; if so, cached cos/sin are not used.

        Returns:
            None if the batch is too large, or if the kernels don't support a dtype or the KV cache.
        """
        direct, batch = context.direct, context.batch
        if direct is None or direct.dtype is not self.dtype or direct.count > self._max_rows:
            return None
        if body is not None and body.tensors[0].dtype is not self.dtype:
            return None
        hidden = self._embed(batch, batch.entering)
        if hidden.dtype is not self.dtype or not hidden.is_contiguous():
            return None
        angles = self._angles_of(hidden, batch, editable=editable)
        if angles is None:
            return None
        count = len(batch.logit_rows) if self._has_head else 0
        normed = hidden.new_empty(count, hidden.shape[-1])
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
            normed.data_ptr(),
            logits.data_ptr(),
            None if body is None else body.tensors[0].data_ptr(),
        )
        if not self._has_head:  # the hidden states of the rows, in place of logits
            return Forward(hidden[0][batch.logit_rows], normed)
        return Forward(self._scale_logits(logits), normed)

    def chain(
        self, context: FlatContext, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        """Draw several tokens for each sequence of `context` in one kernel call.

        The first forward runs the rows of `context`. Later ones run the last token drawn, with the hidden
        state from which it was drawn if the entry merges the two. The module must not have been edited.

        Args:
            rows: sampling parameters of the first token of each sequence.
            lengths: number of tokens to draw for each sequence.

        Returns:
            The ids of each sequence; -1 from the first that can't be drawn. None if this is unsupported.
        """
        direct, batch = context.direct, context.batch
        if direct is None or direct.dtype is not self.dtype or direct.count > self._max_rows:
            return None
        if self._entry is None or any(self._num_states) or context.adapted:
            return None
        if self._scale_logits is not _identity:
            return None
        if self._entry.embedding.num_embeddings < self._struct.head.cols:
            return None
        specs = fast.specs_of_chain(rows, self._struct.head.cols)
        entering, max_length = batch.entering, max(lengths)
        like = torch.empty(1, 1, self._entry_struct.hidden, dtype=self.dtype)
        angles = self._angles_of(like, batch, max_length, editable=False)
        if specs is None or angles is None or len(batch.logit_rows) != batch.num_sequences:
            return None
        if entering is not None and entering.dtype is not self.dtype:
            return None
        drawn = (ctypes.c_int32 * (len(lengths) * max_length))(*[-1] * (len(lengths) * max_length))
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
            max_length,
            drawn,
        )
        return [drawn[s * max_length : s * max_length + n] for s, n in enumerate(lengths)]

    def _embed(self, batch: Batch, entering: Tensor | None) -> Tensor:
        """Return the input of the first layer, `[1, T, H]`, in a buffer that the kernels may overwrite.

        `entering` is `Batch.entering`, or None in a trial.
        """
        token_ids = batch.token_ids[None]
        if self._enter is not None:
            x: Tensor = self._enter(token_ids) if entering is None else entering.clone()
            x = x.reshape(1, token_ids.shape[1], -1)
            return x if self._positions is None else x + self._lookup(self._positions, batch)
        assert entering is None or entering.dtype is self.dtype
        rows, struct = token_ids.shape[1], self._entry_struct
        hidden = torch.empty(1, rows, struct.hidden, dtype=self.dtype)
        ids, states = addresses(token_ids, entering)
        run("vb_enter", None, ctypes.addressof(struct), ids, states, rows, hidden.data_ptr())
        return hidden

    def _lookup(self, table: Any, batch: Batch) -> Tensor:
        """Return the position embeddings of a table, `[1, T, H]`."""
        offset: int = getattr(table, "offset", 0)
        return nn.Embedding.forward(table, batch.positions[None] + offset)

    def _angles_of(
        self, hidden: Tensor, batch: Batch, num_extra: int = 0, *, editable: bool
    ) -> tuple[ctypes.Array[AnglesStruct], list[tuple[Tensor, Tensor]]] | None:
        """Return the cos/sin structs for the kernels, one per layer type, and the tensors they point to.

        They include `num_extra` positions after the batch. None if the kernels don't support the angles.
        """
        structs, held = (AnglesStruct * max(1, len(self._angles)))(), []
        length = max(batch.context_lens.tolist()) + num_extra
        for i, angles in enumerate(self._angles):
            pair = table = None if editable else angles.table(hidden, length)
            if table is None and not num_extra:
                pair = angles.of(hidden, batch.positions)
            if pair is None:
                return None
            (cos, sin), rows = pair, None if table is None else batch.positions.data_ptr()
            wide = cos.dtype is torch.float32
            structs[i] = AnglesStruct(*addresses(cos, sin), cos.shape[-1], rows, wide)
            held.append(pair)
        return structs, held

    def _scaling(
        self, output: Tensor, expected: Tensor, others: Iterable[TensorFunction] = ()
    ) -> TensorFunction:
        """Return the function or scaling that turns `output` into `expected`; the identity if none does."""
        scaled = (partial(scale, n) for n, scale in itertools.product(self._numbers, _SCALINGS))
        candidates: Iterable[TensorFunction] = itertools.chain([_identity], others, scaled)
        return next(
            (scale for scale in candidates if bit_equal(scale(output), expected)), _identity
        )

    def check(self, calls: list[LayerCall], batch: Batch, logits: Tensor) -> None:
        """Verify that the computation around the layers is the same as in the model's own forward.

        Args:
            calls: calls of the probes in place of the layers, in a forward of `batch` that returned `logits`.

        Raises:
            NotFusable: the model's forward computes something else.
        """
        if [call.probe.layer for call in calls] != [x.parts.layer for x in self._layers]:
            raise NotFusable("its layers do not run in sequence")
        tables = [m.weight for m in self._tables if isinstance(m.weight, Tensor)]
        if self._has_embedding and not all(x.any() for x in (calls[0].hidden, *tables)):
            raise NotFusable("its embeddings are all 0, so their use can't be checked")
        ours, first = [self._embed(batch, None), *(call.output for call in calls)], calls[0].hidden
        if self._has_embedding and not bit_equal(ours[0], first):
            scale, enter = self._scaling(ours[0], first, map(forward_of, self._norms)), self._enter
            assert enter is not None
            self._entry, self._enter = None, lambda ids: scale(enter(ids))
            added = (m for m in self._tables if bit_equal(ours[0] + self._lookup(m, batch), first))
            self._positions = next(added, None) if scale is _identity else None
            ours[0] = self._embed(batch, None)
        kinds = [angles.of(ours[0], batch.positions) for angles in self._angles]
        for call, layer, layer_type in zip(calls, self._layers, self._layer_types, strict=True):
            if layer.rotates:
                passed = layer.angles_in(call.arguments)
                same = [i for i, x in enumerate(kinds) if x and all(map(bit_equal, x, passed))]
                if len(same) > 1:  # they may differ later
                    same = [i for i in same if self._angles[i].layer_type == layer_type]
                if not same:
                    raise NotFusable("its layers use their own rotary angles")
                layer.struct.angles = same[0]
        last, problem = ours[-1][0], "hidden states are changed after its last layer"
        if self._has_head:
            norm, head = forward_of(self._norm.module), forward_of(self._head)
            last = head(norm(last[batch.logit_rows]))
            if not last.any():
                raise NotFusable("its logits are all 0, so their computation can't be checked")
            self._scale_logits = self._scaling(last, logits)
            last = self._scale_logits(last)
            problem = "its logits differ from its LM head's output for the final norm"
        if not all(map(bit_equal, ours, (call.hidden for call in calls))):
            raise NotFusable("hidden states are changed before one of its layers")
        if not bit_equal(last, logits):
            raise NotFusable(problem)


def _identity(x: Tensor) -> Tensor:
    return x
