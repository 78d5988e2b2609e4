"""The weights of an offloaded model, in the tiers of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from verbatim.errors import UnsupportedModel
from verbatim.heap import Heap
from verbatim.kv.store import bytes_per_token
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.packing import PackingReport, choose_packings, holdable_of
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.whole import ModelPart
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.compress import choose, pack
from verbatim.placement.offload.forecast import forecast
from verbatim.placement.offload.head import split_head
from verbatim.placement.offload.prefetch import READERS
from verbatim.placement.offload.schedule import BlockSchedule, HiddenStates, install_gates
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Units, find_units
from verbatim.placement.offload.weights import Weights
from verbatim.placement.options import EngineOptions
from verbatim.weights.formats.stored import held_packing


class Tiers:
    """The weights of a model, or of a part of one, in the tiers of a plan.

    Args:
        loaded: with the lazy weights of all that is held here.
        limit: tokens of one sequence at most.
        draft: MTP layers that are held here, or None.

    Attributes:
        options: as the plan chose them.
        original: the state dict before quantization.
        report: the quantized weights; None: none.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        offload: Offload,
        options: EngineOptions,
        limit: int | None,
        draft: Mtp | EarlyExit | None,
    ) -> None:
        self.offload, self._loaded, self._limit = offload, loaded, limit
        units = units_of(loaded, offload, options)
        self.trace = Trace(offload.trace)
        with ExitStack() as undo:
            self.scratch = scratch = Scratch(offload.disk, offload.disk_limit)
            undo.callback(scratch.close)
            self.forecast = forecast(loaded, units, offload, options, limit, draft)
            plan = self.plan = self.forecast.plan
            self._heap = heap = Heap(plan.heap_bytes)
            for slot, tier in zip(units.slots, plan.tiers, strict=True):
                slot.tier = "disk" if slot.rows_only else tier
            held_experts = self.forecast.shape.held_experts(plan.tiers)
            if held_experts:
                for layer in units.experts:
                    for slot in layer.slots:
                        slot.tier = "disk"
            else:
                units.join_experts()
            self.original = loaded.module.state_dict(keep_vars=True)
            packed: Scratch | None = None
            self.report: PackingReport | None = None
            if any(slot.packing or slot.rounding for slot in units.slots):
                packed = scratch.another()
                undo.callback(packed.close)
                self.report = pack(units, loaded.module, options.quantization, packed)
                heap.tidy()
            self.weights = Weights(
                units,
                plan.ring_bytes,
                READERS if offload.overlap else 0,
                self.trace,
                scratch,
                packed,
                heap.tidy,
                held_experts,
            )
            undo.callback(self.weights.close)
            away = HiddenStates(loaded.module, plan.activations, scratch, self.trace)
            moved = away if plan.activations[2] else None
            self.schedule = BlockSchedule(plan, self.weights, moved, self.trace)
            self.options = replace(
                options,
                kv_bytes=plan.kv_bytes,
                max_sequences=min(options.max_sequences, plan.block_size),
                max_batch_tokens=plan.max_batch_tokens,
                prompt_rows=plan.prompt_rows,
            )
            self._undo = undo.pop_all()

    def inspect(self, part: ModelPart | None = None) -> Decoder:
        """Return the decoder; its inspection of the model records the order of the units.

        Args:
            part: as of `Decoder`.

        Raises:
            UnsupportedModel: its logits are not numbers.
        """
        module, weights = self._loaded.module, self.weights
        install_gates(weights)
        with weights.learning():
            # Not fused: weights move.
            decoder = Decoder(
                module, order=self.schedule, fused=False, unseen=part is not None, part=part
            )
        self.trace.restart()  # behind the inspection
        if not decoder.spec.finite:
            raise UnsupportedModel(
                f"placement=Offload: {type(module).__name__} gives logits that are not numbers: its "
                "weights hold NaN or infinities, or are used outside of the modules that hold them"
            )
        self._heap.tidy()
        return decoder

    def num_blocks(self, spec: ModelSpec, layers: DraftLayers) -> tuple[int, int]:
        """Return how many blocks of K and V, and slots of recurrent states, the plan has room for."""
        dtype = self.options.kv_dtype or spec.dtype
        beside = spec.choices["routing"].bytes_per_token + layers.bytes_per_token(dtype)
        blocks = self.options.num_blocks(bytes_per_token(spec.layers, dtype) + beside, self._limit)
        state_bytes = sum(state.nbytes for state in spec.states)
        return blocks, max(3, self.plan.state_bytes // max(1, state_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in all tiers."""
        return sum(slot.tier_bytes for slot in self.weights.units.slots if not slot.rows_only)

    def close(self) -> None:
        """Free all memory and files."""
        self._undo.close()


def units_of(loaded: LoadedModel, offload: Offload, options: EngineOptions) -> Units:
    """Return the units that are installed in one piece, and how their weights are quantized.

    Raises:
        NotSupported: nothing can be quantized, or activations can't.
    """
    assert loaded.lazy_weights is not None
    units, kind = find_units(loaded.module, loaded.lazy_weights), options.quantization
    packings = {} if kind is None else choose_packings(loaded.module, kind)
    holdable = holdable_of(loaded.module)
    for parameter, lazy in loaded.lazy_weights.items():
        stored = held_packing(lazy, packings.get(parameter), holdable.get(parameter))
        if stored is not None:
            packings[parameter] = stored[0]
    units.split_experts()
    if offload.weights is None or offload.weights[2]:
        split_head(units, head_of(inner_model(loaded.module)), packings)
    choose(units, loaded.module, packings)
    return units


def groups_of(units: Units, slots: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Return the layers of the KV store that each unit attends in, in the order of a forward."""
    groups = []
    for unit in units.order:
        own = {id(module) for module in unit.module.modules()}
        found = sorted(layer for (module, _), layer in slots.items() if module in own)
        if found:
            groups.append(found)
    return groups
