"""The sizes of a model, from which memory and speed are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from verbatim import kernels
from verbatim.kv.store import bytes_per_token
from verbatim.model.context import head_of
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.spec import inner_model, outline
from verbatim.placement.offload.units import Slot, Units
from verbatim.quantization.formats import KVDtype
from verbatim.weights.files import PAGE, round_to_pages
from verbatim.weights.lazy import Computed, Stored, sources


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The sizes of a parameter.

    Attributes:
        nbytes: bytes in memory, in the tiers "gpu" and "cpu".
        disk_bytes: bytes read from the disk for each use, in whole pages.
        unpacked_bytes: bytes of the dequantized weight, if a module dequantizes it as a whole.
        converted_bytes: bytes of RAM that reading takes, if the bytes in the file must be converted.
        elements: elements of the matrix that each row is multiplied with; 0 for norms and biases.
        of_experts: whether it stacks the matrices of all experts.
        is_quantized: whether it is held quantized.
    """

    nbytes: int
    disk_bytes: int
    unpacked_bytes: int = 0
    converted_bytes: int = 0
    elements: int = 0
    of_experts: bool = False
    is_quantized: bool = False


@dataclass(frozen=True, slots=True)
class UnitShape:
    """The sizes of a layer, an embedding or the head.

    Attributes:
        slots: indices of its parameters in `ModelShape.slots`.
        gathers: whether it is an embedding from which only rows are read; it is never streamed.
        attends: whether it is a layer, with K and V.
        experts: indices of the parameters of experts that are read one by one.
        expert_bytes: bytes of one of these experts.
        expert_buffer: bytes of memory that a thread needs to read one.
    """

    slots: tuple[int, ...]
    gathers: bool = False
    attends: bool = False
    experts: tuple[int, ...] = ()
    expert_bytes: int = 0
    expert_buffer: int = 0

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the parameters that are read as a whole, unless they stay in memory."""
        return () if self.gathers else self.slots


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        slots: all parameters, in the order of first use.
        units: the units, in the order of a forward.
        resident: indices of the slots outside of all units, which stay in memory.
        itemsize: bytes per element of an activation.
        kv_layers: bytes per token of each layer of K and V, at least one.
        resident_bytes_per_token: bytes per token that always stay in memory: K and V of draft layers, and
            routing records.
        state_bytes: bytes of a sequence's recurrent states.
        hidden, intermediate, attention, vocab: widths of the hidden states; of the MLP, over all experts of a
            token; of queries, keys and values together; of the logits.
        experts, experts_per_token: number of experts in a layer, and chosen for a token; 0 without experts.
        draft_bytes: bytes of separate draft layers, which stay in memory.
    """

    slots: tuple[SlotShape, ...]
    units: tuple[UnitShape, ...]
    resident: tuple[int, ...]
    itemsize: int
    kv_layers: tuple[int, ...]
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
    def kv_bytes_per_token(self) -> int:
        """Bytes per token of K and V and routing records, over all layers."""
        return sum(self.kv_layers) + self.resident_bytes_per_token

    @property
    def unit_kv_bytes(self) -> float:
        """Mean bytes of a token's K and V in a unit with attention."""
        return sum(self.kv_layers) / max(1, sum(unit.attends for unit in self.units))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, as they are held in memory."""
        return sum(slot.nbytes for slot in self.slots)

    def streamed_bytes(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes read from the disk for each use of `unit`."""
        return sum(self.slots[i].disk_bytes for i in unit.streamed if tiers[i] == "disk")

    def copied_bytes(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes copied to a GPU for each use of `unit`, in whole pages."""
        return sum(round_to_pages(self.slots[i].nbytes) for i in unit.streamed if tiers[i] != "gpu")

    def unpacked_bytes(self, unit: UnitShape) -> int:
        """Return the bytes of dequantized weights that `unit` allocates while it computes."""
        return sum(self.slots[i].unpacked_bytes for i in unit.streamed)

    def converted_bytes(self, unit: UnitShape, tiers: tuple[str, ...]) -> int:
        """Return the bytes of RAM for weights of `unit` that are computed from the bytes read."""
        return sum(self.slots[i].converted_bytes for i in unit.streamed if tiers[i] == "disk")

    def waiting_bytes(self, rows: int) -> int:
        """Return the bytes of hidden states between two layers, with residuals and rotary embeddings."""
        rotary = 2 * 4 * min(self.hidden, 256)
        return rows * (3 * self.hidden * self.itemsize + rotary + 64)

    def working_bytes(self, rows: int) -> int:
        """Return the peak bytes of a layer's allocations for `rows` rows."""
        item = self.itemsize
        norms = self.hidden * (4 * item + 3 * 4)  # computed in float32
        attention = 3 * self.attention * item + self.hidden * item
        mlp = self.intermediate * (4 * item + 3 * 4)
        routed = self.experts_per_token * self.hidden * (3 * item + 2 * 4)
        return rows * (norms + max(attention, mlp) + routed)

    def logits_bytes(self, rows: int) -> int:
        """Return the bytes of logits: per micro-batch, concatenated, and copied by the sampler."""
        return rows * self.vocab * (2 * self.itemsize + 2 * 4)

    @property
    def expert_slots(self) -> tuple[int, ...]:
        """The indices of the slots of experts that are read one by one."""
        return tuple(i for unit in self.units for i in unit.experts)

    def expert_cache_bytes(self, tiers: tuple[str, ...]) -> int:
        """Return the bytes of the cache of experts; 0 if all experts stay in memory.

        It has the size of the experts placed in memory, plus those of two tokens, but holds the experts used
        most in all layers.
        """
        if all(tiers[i] != "disk" for i in self.expert_slots):
            return 0
        return self.min_expert_cache_bytes + sum(
            self.slots[i].nbytes for i in self.expert_slots if tiers[i] != "disk"
        )

    @property
    def min_expert_cache_bytes(self) -> int:
        """Minimum bytes of the cache of experts."""
        largest = max((unit.expert_bytes for unit in self.units), default=0)
        return min(self.experts, 2 * max(1, self.experts_per_token)) * largest

    def expert_reads(
        self, unit: UnitShape, tiers: tuple[str, ...], rows: int, parts: int
    ) -> tuple[float, float]:
        """Return the bytes of a unit's experts that a forward reads, and the fraction of experts chosen.

        All experts are assumed to be equally likely. If the chosen experts of one layer do not fit into
        memory, each of `parts` micro-batches reads its own.
        """
        held = self.expert_cache_bytes(tiers)
        if not held or not unit.experts:
            return 0.0, 0.0
        chosen = self.chosen_experts(rows)
        repeats, total = 1, sum(self.slots[i].nbytes for i in self.expert_slots)
        if held < chosen * self.experts * unit.expert_bytes:
            chosen, repeats = self.chosen_experts(rows / parts), parts
        num_reads = repeats * max(0.0, 1 - held / total)
        return chosen * num_reads * sum(self.slots[i].disk_bytes for i in unit.experts), chosen

    def chosen_experts(self, rows: float) -> float:
        """Return the expected fraction of a layer's experts that `rows` rows choose, all equally likely."""
        missed: float = (1 - 1 / max(1, self.experts)) ** (rows * max(1, self.experts_per_token))
        return 1 - missed


def shape_of(
    loaded: LoadedModel,
    units: Units,
    dtype: torch.dtype,
    kv_dtype: KVDtype | None,
    draft: Mtp | EarlyExit | None = None,
    *,
    latent: bool = True,
) -> ModelShape:
    """Return the sizes of a model; its weights need not be in memory.

    Args:
        dtype: dtype of activations.
        kv_dtype: dtype of K and V; None: `dtype`.
        draft: source of the draft layers; MTP layers stay in memory, and so do their K and V.
        latent: as for `Decoder`.
    """
    model = inner_model(loaded.module)
    text = model.config.get_text_config(decoder=True)
    slots, number = units.slots, {id(slot): i for i, slot in enumerate(units.slots)}
    moe = {unit: [layer for layer in units.experts if layer.unit is unit] for unit in units.order}
    experts = max((layer.count for layer in units.experts), default=0) or _first(
        text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    )
    names = "num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"
    top_k = _first(text, *names) or _first(getattr(text, "ffn_config", None), "moe_top_k")
    hidden = _first(text, "hidden_size") or max(
        (slot.parameter.shape[-1] for slot in slots), default=1
    )
    structure = outline(loaded.module, latent=latent)
    attending = sum(bool(layer.value_dim) for layer in structure.layers)  # the others are indexers
    heads = zip(structure.query_heads, structure.layers, strict=True)
    kv_layers = [bytes_per_token([layer], kv_dtype or dtype) for layer in structure.layers]
    layers = _first(text, "num_hidden_layers") or 1
    layers = layers if loaded.layers is None else len(loaded.layers)
    resident, draft_bytes = 2 * top_k * layers * bool(experts), 0  # records of routing
    if isinstance(draft, Mtp):
        assert loaded.folder is not None
        count, draft_bytes = mtp_size(model, loaded.folder, draft.beside)
        layer_bytes = (sum(kv_layers) + resident) // max(1, attending) + hidden * dtype.itemsize
        resident += count * layer_bytes
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
                experts=tuple(number[id(slot)] for layer in moe[unit] for slot in layer.slots),
                expert_bytes=max((layer.expert_bytes for layer in moe[unit]), default=0),
                expert_buffer=max((layer.buffer_bytes for layer in moe[unit]), default=0),
            )
            for unit in units.order
        ),
        resident=tuple(number[id(slot)] for slot in units.resident),
        itemsize=dtype.itemsize,
        kv_layers=tuple(kv_layers) or (0,),
        hidden=hidden,
        intermediate=max(inner, routed * top_k),
        attention=max((n * layer.key_dim + layer.elements for n, layer in heads), default=0),
        vocab=1 if is_elsewhere else _first(text, "vocab_size") or 1,
        experts=experts,
        experts_per_token=top_k if experts else 0,
        state_bytes=sum(state.nbytes for state in structure.states),
        resident_bytes_per_token=resident,
        draft_bytes=draft_bytes,
    )


def _first(config: Any, *names: str) -> int:
    """Return the first field that is a positive integer; 0 if none is."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # the field differs between layers
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
    # Pages at the unaligned ends of a tensor are read as a whole.
    disk = sum(
        round_to_pages(s.nbytes) + (PAGE if s.nbytes % PAGE or s.offset % PAGE else 0)
        for s in stored
    )
    is_quantized, shape = slot.packing is not None, slot.parameter.shape
    return SlotShape(
        slot.tier_bytes,
        round_to_pages(slot.tier_bytes) if is_quantized else disk,
        slot.nbytes if slot.is_unpacked else 0,
        0 if is_quantized else _temporary_bytes(slot.lazy),
        slot.parameter.numel() if len(shape) > 1 else 0,
        bool(experts) and len(shape) > 2 and shape[0] == experts,
        is_quantized,
    )


def _temporary_bytes(part: Any) -> int:
    """Return the bytes that `materialize` allocates beside those read; views take none."""
    if isinstance(part, Stored):  # misaligned tensors are copied; without kernels, all are
        is_copied = part.offset % part.dtype.itemsize or not kernels.available()
        return part.nbytes if is_copied else 0
    if not isinstance(part, Computed):
        return 0
    schema = getattr(part.func, "_schema", None)  # only torch's own operators have one
    is_view = schema is not None and all(v.alias_info is not None for v in schema.returns)
    assert part.shape is not None and part.dtype is not None
    own = 0 if is_view else prod(part.shape) * part.dtype.itemsize
    return own + sum(map(_temporary_bytes, tree_leaves(part.args)))
