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
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verbatim.batch import Batch
from verbatim.kernels.functions import kernel, struct_of
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
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.structs import NormStruct, NotFusable, matrix_of, norm_of

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
# Multiplications of one call of the kernels, for which Ctrl-C waits: a second on two cores. Where there are
# more, the layers take long, and a call each costs nothing.
_MOST_WORK = 1 << 39
_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "embedding_norm")


class Output(NamedTuple):
    """The output of one forward."""

    logits: Tensor  # [R, V], in the model's dtype
    hidden: Tensor | None  # [R, H], the head's input; if the batch wants it


class ModelPart(Protocol):
    """The ends of a module that has only some layers of a model, and runs these."""

    is_first: bool  # it begins with the embedding
    is_last: bool  # it ends with the norm and the head

    def entering(self, token_ids: Tensor) -> Tensor:
        """Return made-up hidden states `[1, T, H]` for its first layer, in memory of their own."""
        ...


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
        if not all(type(m).__module__.startswith("transformers.models.") for m in (inner, body)):
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
        if part is not None and not part.is_first:
            self._embed = part.entering
        else:
            self._embed = forward_of(embedding)
        self._angles = None
        if turns and rotary is not None:
            self._angles = Angles(rotary, forward_of(rotary), self.dtype)
        self._structs = (_POINTER * len(layers))(*(layer.address for layer in layers))
        # The embedding and the angles say themselves what they do at the moment.
        classes = [type(m) for m in (inner, body, norm, head, rotary) if m is not None]
        places = tensors_of([head, norm]) if ends else []
        self.fingerprint = Fingerprint(places, numbers_of([inner, body, norm]), classes)
        numbers = sum(p.numel() for p in inner.parameters() if p.ndim < 3)
        numbers += sum(layer.parts.mixture.numbers for layer in layers if layer.parts.mixture)
        packed = [m for m in inner.modules() if isinstance(m, PackedLinear)]
        numbers += sum(m.in_features * m.out_features for m in packed)
        self._most_rows = max(1, _MOST_WORK // max(1, numbers))
        self._struct, function = _Model(), kernel("vb_model")
        assert function is not None
        self._function = function
        self._prepare()
        self.fingerprint.record_layouts()

    def _prepare(self) -> None:
        struct, layers = self._struct, self._structs
        struct.layers, struct.count = ctypes.addressof(layers), len(layers)
        if self._ends:
            struct.head = matrix_of(self._head, self.dtype)
            struct.norm = norm_of(self._norm, self.dtype, struct.head.depth, None)

    def fits(self) -> bool:
        """Return whether nothing around the layers changed but perhaps the values of weights."""
        return self.fingerprint.fits(self._prepare)

    def forget(self) -> None:
        """Keep nothing from call to call."""
        if self._angles is not None:
            self._angles.forget()

    def run(self, context: FlatContext, *, watched: bool) -> Output | None:
        """Run the rows of `context`; None where they are many, or K, V or dtypes are not the kernels'.

        Args:
            watched: the caller has the model, so nothing is kept that may have changed.
        """
        direct, batch = context.direct, context.batch
        if direct is None or direct.dtype is not self.dtype or direct.count > self._most_rows:
            return None
        # In memory of its own: the kernel writes to it.
        if batch.entering is None:
            hidden = self._embed(batch.token_ids[None])
        else:
            hidden = batch.entering.clone()[None]
        if hidden.dtype is not self.dtype or not hidden.is_contiguous():
            return None
        cos, sin, angle_rows = None, None, None
        if self._angles is not None:
            length = max(batch.context_lens.tolist())
            found = None if watched else self._angles.table(hidden, length)
            if found is not None:
                angle_rows = batch.positions.data_ptr()
            else:
                found = self._angles.of(hidden, batch.positions)
            if found is None:
                return None
            cos, sin = found
        count = len(batch.logit_rows) if self._ends else 0
        seen = hidden.new_empty(count, hidden.shape[-1])
        logits = hidden.new_empty(count, self._struct.head.cols)
        self._function(
            ctypes.addressof(self._struct),
            direct.address,
            direct.all_stores(self._num_states),
            hidden.data_ptr(),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            0 if cos is None else cos.shape[-1],
            cos is not None and cos.dtype is torch.float32,
            angle_rows,
            *((None, None) if context.routing is None else context.routing.all_addresses()),
            batch.logit_rows.data_ptr(),
            count,
            seen.data_ptr(),
            logits.data_ptr(),
        )
        if not self._ends:  # the rows leave, in the place of logits
            return Output(hidden[0][batch.logit_rows], seen)
        return Output(logits, seen)

    def check(self, calls: list[LayerCall], batch: Batch, logits: Tensor) -> None:
        """Compare with what the model's own forward does around its layers.

        Args:
            calls: of probes in the layers' places, in a forward of `batch` that gave `logits`.

        Raises:
            NotFusable: it does something else.
        """
        if [call.probe.fused for call in calls] != self._layers:
            raise NotFusable("its layers do not run one behind the other")
        made = [self._embed(batch.token_ids[None]), *(call.made for call in calls)]
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
