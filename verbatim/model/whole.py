"""A whole model in one call of the kernels for all of its layers, with a few lines around it.

For models that look ids up, turn positions into angles, hand rows from layer to layer, norm them and
multiply them by their head, and do nothing else. Most of what transformers does around the layers prepares
for masks and caches that a flat forward does not have: at one row that takes as long as several layers.

The parts are found by their names. Whether there is nothing else is tried: the model's own forward runs
once with spies in its layers' places, and what it hands to each of them, and makes of the last one's rows,
must be what the lines here make, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from verbatim import kernels
from verbatim.model.anatomy import Anatomy, inner_model
from verbatim.model.direct import DirectRows
from verbatim.model.hidden import head_of
from verbatim.model.invariant import forward_for
from verbatim.model.layer import FusedLayer, NotFusable, numbers_of
from verbatim.model.layer_trial import noise, same_bits
from verbatim.model.norms import norm_parts

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_NORM_NAMES = ("norm", "final_layernorm", "ln_f")

# A forward with these callables in the layers' places: ids, positions, the rows that have logits, logits.
Forward = Callable[[list[Callable[..., Any]]], tuple[Tensor, Tensor, Tensor, Tensor]]


class Note(NamedTuple):
    """One call of a layer, as its spy saw it."""

    layer: FusedLayer
    hidden: Tensor
    arguments: dict[str, Any]
    made: Tensor


class Made(NamedTuple):
    """What a whole forward computed."""

    logits: Tensor  # [R, V]
    hidden: Tensor  # [R, H], what the head saw


class Rows(Protocol):
    """What a whole forward needs of a pass."""

    batch: Any
    direct: DirectRows | None


@functools.cache
def _function(library: ctypes.CDLL | None) -> Callable[..., None]:
    assert library is not None
    function: Any = library.vb_layers
    function.restype = None
    function.argtypes = [
        *[_POINTER, _LONG],
        *[_POINTER] * 5,
        *[_LONG, _INT],
        *[_POINTER, _INT],
    ]
    return function  # type: ignore[no-any-return]


class WholeModel:
    """The forward of one model, layers in the order in which they are called.

    Args:
        module: a transformers model, not wrapped.
        anatomy: of it.
        layers: all of its layers, fused.

    Raises:
        NotFusable: it is of another kind; the message tells of which.
    """

    def __init__(self, module: nn.Module, anatomy: Anatomy, layers: list[FusedLayer]) -> None:
        inner = inner_model(module)
        if id(module) != id(inner):
            raise NotFusable("the model is wrapped")
        if not (anatomy.takes_positions and anatomy.takes_logit_rows) or anatomy.needs_safety_net:
            raise NotFusable("its forward has no position_ids and logits_to_keep, or needs a net")
        if not all(layer.is_complete for layer in layers):
            raise NotFusable("parts of its layers are not in the kernels")
        body: Any = inner.get_decoder()
        embedding, head = inner.get_input_embeddings(), head_of(inner)
        norm = next((m for n in _NORM_NAMES if (m := body._modules.get(n)) is not None), None)
        rotary = body._modules.get("rotary_emb")
        turns = any(layer.turns for layer in layers)
        if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
            raise NotFusable("its ids are not looked up in one table")
        if head is None or norm is None or norm_parts(norm) is None or (turns and rotary is None):
            raise NotFusable("its last norm, its head or its angles are not where others have them")
        for part in (inner, body, embedding, rotary, norm, head):
            if part is not None and "forward" in part.__dict__:
                raise NotFusable("the forward of a part of it was replaced by its owner")
        self.dtype = layers[0].dtype
        self._embed, self._norm, self._head = map(_forward_of, (embedding, norm, head))
        self._rotate = _forward_of(rotary) if turns and rotary is not None else None
        self._layers = layers
        self._slots = [anatomy.slots[id(layer.attention), 0] for layer in layers]
        self._structs = (_POINTER * len(layers))(*(layer.address for layer in layers))
        # Whatever else is called says itself what it does at the moment.
        self._own = [type(inner), type(body)]
        self._codes = [cls.forward for cls in self._own]
        self._numbers = numbers_of([inner, body])
        self._values = self._values_now()

    def _values_now(self) -> list[Any]:
        return [fields.get(name) for fields, name in self._numbers]

    def unchanged(self) -> bool:
        """Are the model's own forward and its numbers what they were? Its layers are not looked at."""
        same_code = [cls.forward for cls in self._own] == self._codes
        return same_code and self._values_now() == self._values

    def run(self, walk: Rows) -> Made | None:
        """The forward of `walk`'s rows; None where its K and V or its dtypes are not for the kernels."""
        direct, batch = walk.direct, walk.batch
        if direct is None or direct.dtype is not self.dtype:
            return None
        hidden = self._embed(batch.token_ids[None])
        angles = self._angles(hidden, batch.positions[None])
        if angles is None or hidden.dtype is not self.dtype or not hidden.is_contiguous():
            return None
        out = self._run_layers(hidden[0], angles, direct)
        rows = batch.logit_rows
        if len(rows) < len(out):  # they ascend
            out = out[rows]
        seen = self._norm(out)
        return Made(self._head(seen), seen)

    def _angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines `[T, angles]`, in float32 or in the model's dtype."""
        if self._rotate is None:
            return hidden.new_empty(0), hidden.new_empty(0)
        cos, sin = (x.flatten(0, -2).contiguous() for x in self._rotate(hidden, positions))
        fits = cos.dtype is sin.dtype and cos.dtype in (torch.float32, self.dtype)
        return (cos, sin) if fits and cos.shape == sin.shape else None

    def _run_layers(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], direct: DirectRows
    ) -> Tensor:
        cos, sin = angles
        out = torch.empty_like(hidden)
        _function(kernels.library())(
            self._structs,
            len(self._structs),
            direct.address,
            direct.all_stores(self._slots),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            cos.dtype is torch.float32,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def check(self, forward: Forward) -> None:
        """Compare with what the model's own forward does around its layers.

        Raises:
            NotFusable: it does something else.
        """
        notes: list[Note] = []
        ids, positions, rows, logits = forward([_spy(layer, notes) for layer in self._layers])
        if [note.layer for note in notes] != self._layers:
            raise NotFusable("its layers do not run one behind the other")
        hidden = self._embed(ids)
        angles = self._angles(hidden, positions)
        if angles is None:
            raise NotFusable("its angles are in another dtype")
        for note in notes:
            if not same_bits(note.hidden, hidden):
                raise NotFusable("something happens to the rows before a layer")
            if note.layer.turns and not _same_angles(note.arguments, angles):
                raise NotFusable("its layers have angles of their own")
            hidden = note.made
        made = self._head(self._norm(hidden[0][rows]))
        if not same_bits(made, logits):
            raise NotFusable("its logits are not what its head makes of its last norm")


def _same_angles(arguments: dict[str, Any], angles: tuple[Tensor, Tensor]) -> bool:
    given = arguments.get("position_embeddings")
    return isinstance(given, tuple) and all(
        same_bits(a.flatten(0, -2), b) for a, b in zip(given, angles, strict=True)
    )


def _spy(layer: FusedLayer, notes: list[Note]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = noise(tuple(hidden_states.shape), hidden_states.dtype, seed=len(notes) + 1)
        notes.append(Note(layer, hidden_states.clone(), kwargs, made))
        return made.clone()

    return forward


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """What `module` computes while it is borrowed, without its hooks."""
    ours = forward_for(module)
    return ours if ours is not None else lambda *args: type(module).forward(module, *args)


def in_order(layers: Sequence[FusedLayer], anatomy: Anatomy) -> list[FusedLayer]:
    """As they were called in the look."""
    return sorted(layers, key=lambda layer: anatomy.slots[id(layer.attention), 0])
