"""The sizes of a model, from which memory and speed are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verbatim import kernels
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import bytes_per_token
from verbatim.model.early_exit import EarlyExit
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.outline import outline
from verbatim.model.spec import inner_model
from verbatim.placement.offload.units import Slot, Units
from verbatim.weights.files import PAGE, up
from verbatim.weights.lazy import Computed, LazyWeight, Stored, sources


@dataclass(frozen=True, slots=True)
class SlotShape:
    """A parameter.

    Attributes:
        nbytes: as it is held in memory, in the tiers "gpu" and "cpu".
        disk_bytes: read whenever it is streamed, in whole pages.
        made_bytes: fresh memory that it takes beside its own: for a quantized weight, where a module
            dequantizes it whole; for another, where it is not in its file as it is used.
        elements: of a matrix, that each row is multiplied with; 0 of norms and biases.
        of_experts: it holds the matrices of all experts.
        is_quantized: it is held quantized.
    """

    nbytes: int
    disk_bytes: int
    made_bytes: int = 0
    elements: int = 0
    of_experts: bool = False
    is_quantized: bool = False


@dataclass(frozen=True, slots=True)
class UnitShape:
    """A layer, an embedding, the head.

    Attributes:
        slots: indices in `ModelShape.slots`.
        experts: the same of experts that are read one by one.
        an_expert: bytes of one of them.
        expert_buffer: memory in which a thread reads one.
        gathers: an embedding, of which rows are looked up and which is never streamed.
        attends: it has K and V.
    """

    slots: tuple[int, ...]
    gathers: bool = False
    attends: bool = False
    experts: tuple[int, ...] = ()
    an_expert: int = 0
    expert_buffer: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model.

    Attributes:
        slots: in the order of first use.
        units: in the order of a forward.
        held: slots outside of all units, which stay in memory.
        itemsize: bytes of a number of its activations.
        kv_bytes_per_token: over all layers.
        resident_bytes_per_token: the part of them that stays in memory in every plan: K and V of draft
            layers, and records of routing.
        state_bytes: of a sequence's recurrent states.
        layers: that attend, at least 1.
        hidden, intermediate, attention, vocab: widths: of hidden states; of the MLP, over all experts of a
            token; of queries, keys and values together; of the logits.
        experts, experts_per_token: 0 where there are none.
        draft_bytes: of layers beside the model that draft, which stay in memory.
    """

    slots: tuple[SlotShape, ...]
    units: tuple[UnitShape, ...]
    held: tuple[int, ...]
    itemsize: int
    kv_bytes_per_token: int
    layers: int
    hidden: int
    intermediate: int
    attention: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    state_bytes: int = 0
    resident_bytes_per_token: int = 0
    draft_bytes: int = 0

    @property
    def layer_kv_bytes(self) -> float:
        """Bytes of a token's K and V in a layer that may be on the disk."""
        return (self.kv_bytes_per_token - self.resident_bytes_per_token) / self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(slot.nbytes for slot in self.slots)

    def streamed(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes that are read for each use of `unit`."""
        if unit.gathers:
            return 0
        return sum(self.slots[i].disk_bytes for i in unit.slots if tiers[i] == "disk")

    def copied(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes that are copied to a GPU for each use of `unit`, in whole pages."""
        if unit.gathers:
            return 0
        return sum(up(self.slots[i].nbytes) for i in unit.slots if tiers[i] != "gpu")

    def unpacked(self, unit: UnitShape) -> int:
        """Return the bytes that `unit` dequantizes while it computes, in the memory that it computes in."""
        own = [] if unit.gathers else [self.slots[i] for i in unit.slots]
        return sum(slot.made_bytes for slot in own if slot.is_quantized)

    def converted(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes of RAM in which weights of `unit` are made of what is read."""
        read = [] if unit.gathers else [self.slots[i] for i in unit.slots if tiers[i] == "disk"]
        return sum(slot.made_bytes for slot in read if not slot.is_quantized)

    @property
    def cached(self) -> tuple[int, ...]:
        """The slots of experts that are read one by one."""
        return tuple(i for unit in self.units for i in unit.experts)

    def held_experts(self, tiers: tuple[str, ...]) -> int:
        """Bytes of memory that hold experts, where not all are there.

        What would hold some layers' experts holds those of all layers that are used most, and beside them
        there is always room for the choices of two tokens.
        """
        if all(tiers[i] != "disk" for i in self.cached):
            return 0
        return self.fewest_experts + sum(
            self.slots[i].nbytes for i in self.cached if tiers[i] != "disk"
        )

    @property
    def fewest_experts(self) -> int:
        """Bytes of memory that experts take at least where not all of them are there."""
        largest = max((unit.an_expert for unit in self.units), default=0)
        return min(self.experts, 2 * max(1, self.experts_per_token)) * largest

    def read_of_experts(
        self, unit: UnitShape, tiers: tuple[str, ...], rows: int, parts: int
    ) -> tuple[float, float]:
        """Return the bytes that a forward reads of a unit's experts, and the part of experts it chooses.

        All experts are taken to be chosen equally often, those in memory as often as the others. Where
        those of one layer do not fit, each micro-batch reads its own.

        Args:
            rows: of the forward.
            parts: micro-batches.
        """
        held = self.held_experts(tiers)
        if not held or not unit.experts:
            return 0.0, 0.0
        chosen = self.chosen_experts(rows)
        times, total = 1, sum(self.slots[i].nbytes for i in self.cached)
        if held < chosen * self.experts * unit.an_expert:
            chosen, times = self.chosen_experts(rows / parts), parts
        away = times * max(0.0, 1 - held / total)
        return chosen * away * sum(self.slots[i].disk_bytes for i in unit.experts), chosen

    def chosen_experts(self, rows: float) -> float:
        """Return which part of a layer's experts `rows` rows choose, if all are as likely."""
        missed: float = (1 - 1 / max(1, self.experts)) ** (rows * max(1, self.experts_per_token))
        return 1 - missed


def shape_of(
    loaded: LoadedModel,
    units: Units,
    dtype: torch.dtype,
    kv_dtype: KVDtype | None,
    draft: Mtp | EarlyExit | None = None,
) -> ModelShape:
    """Return the sizes of a model without weights in memory.

    Args:
        dtype: the model computes in.
        kv_dtype: None: the same.
        draft: MTP layers stay in memory, with what they keep of a token.
    """
    model = inner_model(loaded.module)
    text = model.config.get_text_config(decoder=True)
    slots, number = units.slots, {id(slot): i for i, slot in enumerate(units.slots)}
    own = {unit: [layer for layer in units.experts if layer.unit is unit] for unit in units.order}
    experts = max((layer.count for layer in units.experts), default=0) or _first(
        text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    names = "num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"
    top_k = _first(text, *names) or _first(getattr(text, "ffn_config", None), "moe_top_k")
    hidden = _first(text, "hidden_size") or max(
        (slot.parameter.shape[-1] for slot in slots), default=1
    )
    seen = outline(loaded.module)
    attending = sum(bool(layer.value_dim) for layer in seen.layers)  # others are indexers
    heads = zip(seen.query_heads, seen.layers, strict=True)
    kv_bytes = bytes_per_token(seen.layers, kv_dtype or dtype)
    layers = _first(text, "num_hidden_layers") or 1
    layers = layers if loaded.layers is None else len(loaded.layers)
    resident, draft_bytes = 2 * top_k * layers * bool(experts), 0  # records of routing
    if isinstance(draft, Mtp):
        assert loaded.folder is not None
        count, draft_bytes = mtp_size(model, loaded.folder, draft.beside)
        a_layer = (kv_bytes + resident) // max(1, attending) + hidden * dtype.itemsize
        resident += count * a_layer
    inner = _first(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    routed = _first(text, "moe_intermediate_size") or inner
    head, lazy_weights = head_of(model), loaded.lazy_weights or {}
    is_elsewhere = head is not None and lazy_weights.keys().isdisjoint(head.parameters())
    return ModelShape(
        slots=tuple(_slot(slot, experts) for slot in slots),
        units=tuple(
            UnitShape(
                tuple(number[id(slot)] for slot in unit.slots),
                unit.gathers,
                attends=not isinstance(unit.module, nn.Embedding | nn.Linear),
                experts=tuple(number[id(slot)] for layer in own[unit] for slot in layer.slots),
                an_expert=max((layer.expert_bytes for layer in own[unit]), default=0),
                expert_buffer=max((layer.buffer_bytes for layer in own[unit]), default=0),
            )
            for unit in units.order
        ),
        held=tuple(number[id(slot)] for slot in units.held),
        itemsize=dtype.itemsize,
        kv_bytes_per_token=kv_bytes + resident,
        layers=max(1, attending),
        hidden=hidden,
        intermediate=max(inner, routed * top_k),
        attention=max((n * layer.key_dim + layer.elements for n, layer in heads), default=0),
        vocab=1 if is_elsewhere else _first(text, "vocab_size") or 1,
        experts=experts,
        experts_per_token=top_k if experts else 0,
        state_bytes=sum(state.nbytes for state in seen.states),
        resident_bytes_per_token=resident,
        draft_bytes=draft_bytes,
    )


def _first(config: Any, *names: str) -> int:
    """Return the first of these fields that is a number above 0; 0 if none is."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # it differs from layer to layer
            layers = getattr(config, "per_layer_config", None) or ()
            value = [getattr(layer, name, 0) or 0 for layer in layers]
        if isinstance(value, list | tuple):
            value = max(value, default=0)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _slot(slot: Slot, experts: int) -> SlotShape:
    if slot.rows_only:
        return SlotShape(0, 0)
    stored = sources(slot.lazy)
    # A tensor in the middle of a file begins and ends within pages that are read as a whole.
    disk = sum(up(s.nbytes) + (PAGE if s.nbytes % PAGE or s.offset % PAGE else 0) for s in stored)
    shape = slot.parameter.shape
    of_experts = bool(experts) and len(shape) > 2 and shape[0] == experts
    elements = slot.parameter.numel() if len(shape) > 1 else 0
    if slot.packing is not None:
        held, made = slot.tier_bytes, slot.nbytes if slot.is_unpacked else 0
        return SlotShape(held, up(held), made, elements, of_experts, is_quantized=True)
    return SlotShape(slot.nbytes, disk, _made_bytes(slot.lazy, slot.nbytes), elements, of_experts)


def _made_bytes(lazy: LazyWeight, nbytes: int) -> int:
    """Return the bytes that `materialize` allocates: 0 if a parameter is a view of what was read."""
    if not isinstance(lazy, Computed):
        return _cloned_bytes(lazy)
    schema = getattr(lazy.func, "_schema", None)  # of torch's own operators
    is_view = schema is not None and all(v.alias_info is not None for v in schema.returns)
    below = sum(_made_bytes(part, nbytes) for part in lazy.args if isinstance(part, Computed))
    return below + _cloned_bytes(lazy.args) + (0 if is_view else nbytes)


def _cloned_bytes(part: Any) -> int:
    """Return the bytes of tensors that are copied after they are read.

    Those are tensors that are not aligned to their dtype, and all of them for torch's products.
    """
    if isinstance(part, Stored):
        clones = part.offset % part.dtype.itemsize or not kernels.available()
        return part.nbytes if clones else 0
    return sum(map(_cloned_bytes, part)) if isinstance(part, list | tuple) else 0
