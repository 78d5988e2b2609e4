"""The weights of an offloaded model, in the tiers of its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from verbatim.errors import NotSupported, UnsupportedModel
from verbatim.heap import Heap
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.hidden import head_of
from verbatim.model.packed import moved_to
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.whole import ModelPart
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.compress import choose, pack
from verbatim.placement.offload.forecast import forecast
from verbatim.placement.offload.head import split_head
from verbatim.placement.offload.schedule import BlockSchedule, HiddenStates, install_gates
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Units, find_units
from verbatim.placement.offload.weights import Weights
from verbatim.placement.options import ToOpen
from verbatim.weights.formats.stored import packings_of


class Tiers:
    """The weights of a model, or of a part of one, in the tiers of a plan.

    Args:
        model: with the lazy weights, and the MTP layers, of all that is held here. Its `LoadedModel` gets the
            report of what is held quantized, the state dict before that, and the weights in the place of a
            checkpoint.

    Attributes:
        options: as the plan chose them.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """

    def __init__(self, model: ToOpen, offload: Offload) -> None:
        loaded, _, options, self._limit, _ = model
        device = options.device.beside_ram
        if device is not None and offload.cpu_cache_compute:
            raise NotSupported(
                f"cpu_cache_compute=True: not supported with device={device}: attention computed on the CPU "
                "has other bits than on the GPU, and tokens would depend on the tier"
            )
        self.offload, self.loaded = offload, loaded
        units = units_of(model, offload)
        trace = Trace(offload.trace)
        with ExitStack() as undo:
            scratch = Scratch(offload.disk, offload.disk_limit)
            undo.callback(scratch.close)
            self.forecast = forecast(model, offload, units)
            plan = self.forecast.plan
            self._heap = heap = Heap(plan.heap_bytes)
            for slot, tier in zip(units.slots, plan.tiers, strict=True):
                slot.tier = "disk" if slot.rows_only else tier
            if plan.memory.get("experts"):
                for layer in units.experts:
                    for slot in layer.slots:
                        slot.tier = "disk"
            else:
                units.join_experts()
            loaded.original = loaded.module.state_dict(keep_vars=True)
            packed: Scratch | None = None
            if any(slot.packing or slot.rounding for slot in units.slots):
                packed = scratch.another()
                undo.callback(packed.close)
                loaded.packed = pack(units, options.quantization, packed)
                heap.tidy()
            if device is not None:
                module = loaded.module  # pieces of a head are not in it
                pieces = [slot.parameter for slot in units.slots]
                move([*module.buffers(), *module.parameters(), *pieces], device)
            self.weights = Weights(units, plan, trace, scratch, packed, heap.tidy, device)
            undo.callback(self.weights.close)
            loaded.checkpoint = self.weights
            away = HiddenStates(
                loaded.module, plan.activations, scratch, trace, is_apart=device is not None
            )
            moves = plan.activations[2] or (device is not None and plan.activations[1])
            self.schedule = BlockSchedule(self.weights, away if moves else None)
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
        module, weights = self.loaded.module, self.weights
        install_gates(weights)
        device = self.options.device
        with device.current():
            decoder = Decoder(
                module,
                order=self.schedule,
                fused=self.options.fused and not device.is_gpu,
                unseen=part is not None,
                batch_invariant=device.batch_invariant,
                part=part,
            )
        weights.trace.restart()  # behind the inspection
        if not decoder.spec.finite:
            raise UnsupportedModel(
                f"placement=Offload: {type(module).__name__} gives logits that are not numbers: its "
                "weights hold NaN or infinities, or are used outside of the modules that hold them"
            )
        self._heap.tidy()
        return decoder

    def num_blocks(self, spec: ModelSpec, layers: DraftLayers) -> tuple[int, int]:
        """Return how many blocks of K and V, and slots of recurrent states, the plan has room for."""
        blocks = self.options.num_blocks(self.options.token_bytes(spec, layers), self._limit)
        state_bytes = sum(state.nbytes for state in spec.states)
        return blocks, max(3, self.forecast.plan.state_bytes // max(1, state_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in all tiers."""
        return sum(slot.tier_bytes for slot in self.weights.units.slots if not slot.rows_only)

    def close(self) -> None:
        """Free all memory and files."""
        self._undo.close()


def units_of(model: ToOpen, offload: Offload) -> Units:
    """Return the units that are installed in one piece, and how their weights are quantized.

    Raises:
        NotSupported: nothing can be quantized, or activations can't.
    """
    module, lazy_weights = model.loaded.module, model.loaded.lazy_weights
    assert lazy_weights is not None
    units = find_units(module, lazy_weights)
    packings = packings_of(module, lazy_weights, model.options.quantization)
    device = model.options.device
    if device.beside_ram is None:
        units.split_experts()  # a GPU gets them with their layer
    if device.batch_invariant and (offload.weights is None or offload.weights[2]):
        split_head(units, head_of(inner_model(module)), packings)
    choose(units, module, packings)
    return units


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move buffers, and parameters without data, to a device in place."""
    for tensor in tensors:
        tensor.data = moved_to(tensor.data, device)


def groups_of(units: Units, slots: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Return the layers of the KV store that each unit attends in, in the order of a forward."""
    groups = []
    for unit in units.order:
        own = {id(module) for module in unit.module.modules()}
        found = sorted(layer for (module, _), layer in slots.items() if module in own)
        if found:
            groups.append(found)
    return groups
