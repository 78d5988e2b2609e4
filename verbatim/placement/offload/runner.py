"""The runner of an offloaded model: weights, K and V in three tiers."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.common.heap import Heap, release_free_memory
from verbatim.errors import ModelChanged, NotSupported, UnsupportedModel
from verbatim.model.context import head_of
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import open_draft_layers
from verbatim.model.quantized import moved_to
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.model.whole import ModelPart
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.kv import TieredKVStore
from verbatim.placement.offload.planner import forecast
from verbatim.placement.offload.report import Measured, plan_line
from verbatim.placement.offload.schedule import BlockSchedule, HiddenStates, UnitGate
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Slot, Units, choose, find_units, pack, split_head
from verbatim.placement.offload.weights import TierWriter, Weights
from verbatim.placement.options import OpenRequest, Placed
from verbatim.placement.resident import Resident, open_store
from verbatim.protocols import Forward
from verbatim.weights.lazy import packings_of


class Tiers:
    """The weights of a model, or of a part of one, in the tiers of a plan.

    Args:
        model: the model to open, with the lazy weights and MTP layers of the part held here. Its
            `LoadedModel` receives `packed`, `original` (before quantization) and `checkpoint` (`Weights`).

    Attributes:
        options: the model's options, with the sizes that the plan chose.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """

    def __init__(self, model: OpenRequest, offload: Offload) -> None:
        loaded, _, options, self._limit, _ = model
        device = options.device.separate_device
        if device is not None and offload.cpu_cache_compute:
            raise NotSupported(
                f"cpu_cache_compute=True: not supported with device={device}: attention computed on the CPU "
                "is not bit-identical to attention on the GPU, so tokens would depend on the tier"
            )
        self.offload, self.loaded = offload, loaded
        units = units_of(model, offload)
        trace = Trace(offload.trace)
        with ExitStack() as undo:
            scratch = Scratch(offload.disk, offload.disk_limit)
            undo.callback(scratch.close)
            self.forecast = forecast(model, offload, units)
            plan = self.forecast.plan
            # Between two layers, the heap holds the next one's allocations and slack.
            free_bytes = plan.memory.get("computation", 0) + plan.memory.get("slack", 0) // 2
            self._heap = heap = Heap(None if plan.budget is None else free_bytes)
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
                packed = scratch.open_sibling()
                undo.callback(packed.close)
                loaded.packed = pack(units, options.quantization, packed)
                heap.tidy()
            if device is not None:
                module = loaded.module  # pieces of a head are not in it
                pieces = [slot.parameter for slot in units.slots]
                for tensor in (*module.buffers(), *module.parameters(), *pieces):
                    tensor.data = moved_to(tensor.data, device)  # parameters have no data
            self.weights = Weights(units, plan, trace, scratch, packed, heap.tidy, device)
            undo.callback(self.weights.close)
            loaded.checkpoint = self.weights
            hidden = HiddenStates(
                loaded.module, plan.activations, scratch, trace, is_separate=device is not None
            )
            self.schedule = BlockSchedule(self.weights, hidden)
            self.options = replace(
                options,
                kv_bytes=plan.kv_bytes,
                max_sequences=min(options.max_sequences, plan.block_size),
                max_batch_tokens=plan.max_batch_tokens,
                prompt_rows=plan.prompt_rows,
            )
            self._undo = undo.pop_all()

    def inspect(self, part: ModelPart | None = None) -> Decoder:
        """Return the decoder; its inspection of the model also records the order of the units.

        Raises:
            UnsupportedModel: the logits are not finite.
        """
        module, weights = self.loaded.module, self.weights
        for unit in weights.units.order:
            unit.module.forward = UnitGate(unit, weights)
        device = self.options.device
        with device.current():
            decoder = Decoder(
                module,
                order=self.schedule,
                fused=self.options.fused and not device.is_gpu,
                latent=device.stores_latent,
                is_private=part is not None,
                batch_invariant=device.batch_invariant,
                part=part,
            )
        weights.trace.restart()  # the inspection does not count
        if not decoder.spec.finite:
            raise UnsupportedModel(
                f"placement=Offload: {type(module).__name__} produces NaN or infinite logits: its "
                "weights hold NaN or infinities, or are used outside of the modules that hold them"
            )
        self._heap.tidy()
        return decoder

    def num_blocks(self, spec: ModelSpec, layers: DraftLayers) -> tuple[int, int]:
        """Return the numbers of KV blocks and of recurrent state slots that the plan has room for."""
        blocks = self.options.num_blocks(self.options.token_bytes(spec, layers), self._limit)
        state_bytes = sum(state.nbytes for state in spec.states)
        planned = self.forecast.plan.memory.get("recurrent states", 0)
        return blocks, max(3, planned // max(1, state_bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in all tiers."""
        return sum(slot.tier_bytes for slot in self.weights.units.slots if not slot.rows_only)

    def close(self) -> None:
        """Free all memory and files."""
        self._undo.close()


def units_of(model: OpenRequest, offload: Offload) -> Units:
    """Return the units of a model, with the formats of the weights to quantize.

    Raises:
        NotSupported: the model's weights or activations can't be quantized as requested.
    """
    module, lazy_weights = model.loaded.module, model.loaded.lazy_weights
    assert lazy_weights is not None
    units = find_units(module, lazy_weights)
    packings = packings_of(module, lazy_weights, model.options.quantization)
    device = model.options.device
    if device.separate_device is None:
        units.split_experts()  # on a GPU, they are copied with their layer
    if device.batch_invariant and (offload.weights is None or offload.weights[2]):
        split_head(units, head_of(inner_model(module)), packings)
    choose(units, module, packings)
    return units


def groups_of(units: Units, slots: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Return the KV store's layers of each unit that has any, in the order of a forward."""
    groups = []
    for unit in units.order:
        modules = {id(module) for module in unit.module.modules()}
        layers = sorted(layer for (module, _), layer in slots.items() if module in modules)
        if layers:
            groups.append(layers)
    return groups


_SAMPLING_BYTES = 28  # maximum per logit: copies in float32, and memory for sorting


class Timings(NamedTuple):
    """Seconds of the computing thread since the model was opened."""

    load_s: float  # waiting for weights, K and V, activations
    compute_s: float
    store_s: float  # waiting for K and V and activations to be written


class Offloaded(Resident):
    """A `Resident` that reads parameters, K and V and activations on demand.

    Args:
        decoder: decoder of the model in `tiers`.
        tiers: the weights, closed with this object.
    """

    def __init__(
        self, decoder: Decoder, store: TieredKVStore, tiers: Tiers, draft_layers: DraftLayers
    ) -> None:
        super().__init__(decoder, store, tiers.options.num_threads, draft_layers, tiers.loaded)
        self.store: TieredKVStore = store
        self.offload, self.forecast, self.weights = tiers.offload, tiers.forecast, tiers.weights
        self.plan, self.trace = self.forecast.plan, self.weights.trace
        self._measured = Measured()
        # Runs even without `close`; its arguments must not refer to this object.
        self._release = weakref.finalize(self, _release, os.getpid(), tiers, store)

    @property
    def whole_module(self) -> None:
        """None: parameters are in memory only while they are used."""
        return None

    def info(self) -> dict[str, Any]:
        top_k, info = self.store.top_k, super().info()
        return {
            **info,
            "placement": "offload",
            "quantization": None if self.packed is None else self.packed.info(),
            "unit_tiers": {unit.name: _tiers_of(unit.slots) for unit in self.weights.units.order}
            | {layer.name: _tiers_of(layer.slots) for layer in self.weights.units.experts},
            "kv_tiers": self.store.bytes_by_tier(),
            **({} if top_k is None else {"torch_functions": [*info["torch_functions"], "exp"]}),
            "attention": "exact" if top_k is None else f"approximate: top {top_k} keys",
            "plan_summary": plan_line(self.forecast),
            "plan": self.plan.as_dict(),
            "prediction": asdict(self.forecast.prediction),
        }

    def forward(self, batch: Batch) -> Forward:
        if self.weights.is_mixed:
            # Not a TierFailed, which would close the engine.
            raise ModelChanged("a weight update was interrupted; call update_weights again")
        self.weights.files.check()
        before, begin = self.timings().compute_s, perf_counter()
        read = self.weights.bytes_read
        output = super().forward(batch)
        seconds, compute_s = perf_counter() - begin, self.timings().compute_s - before
        self._measured.add_forward(batch, seconds, compute_s, self.weights.bytes_read - read)
        return output

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        begin, sample, rows = perf_counter(), super().sample, range(len(plan.rows))
        at_once, room = max(1, len(rows)), self.plan.memory.get("logits")
        if self.plan.budget is not None and room is not None:  # the memory for logits
            at_once = max(1, room // (_SAMPLING_BYTES * self.vocab_size))
        pieces = [rows[first : first + at_once] for first in rows[::at_once]]
        draws = [draw for piece in pieces for draw in sample(forward, plan.of(piece))]
        self._measured.sample_s += perf_counter() - begin
        self._measured.draws += 1
        self._measured.tokens += sum(row.target is None for row in plan.rows)
        return draws

    def stats(self) -> dict[str, Any]:
        """Return predicted and measured values, and the `Timings`."""
        facts = self._measured.compare(self.forecast, self._peaks())
        return {"offload": facts, "offload_seconds": self.timings()._asdict()}

    def _peaks(self) -> dict[str, int]:
        """Return the bytes in memory by kind."""
        in_place = sum(slot.tier_bytes for slot in self.weights.units.slots if slot.tier != "disk")
        experts, device_ring = self.weights.experts, self.weights.device_ring
        kv, (staging, device_staging) = self.store.bytes_by_tier(), self.store.staging_bytes
        return {
            "weights": in_place,
            "experts": 0 if experts is None else experts.nbytes,
            "expert buffers": 0 if experts is None else experts.buffer_bytes,
            "ring": self.weights.ring.nbytes,
            "GPU ring": 0 if device_ring is None else device_ring.nbytes,
            "K and V": kv["gpu"] + kv["cpu"],
            "K and V buffers": staging,
            "GPU K and V buffers": device_staging,
        }

    def timings(self) -> Timings:
        """Return the timings of all forwards so far."""
        s = self.trace.seconds
        within = s("wait experts") + s("wait K and V")  # waits within a layer's forward
        # With a GPU, other threads read and convert weights, and this one waits for copies.
        on_gpu = self.weights.device_ring is not None
        wait_s = s("wait device weights" if on_gpu else "wait weights")
        convert_s = 0.0 if on_gpu else s("make weights")
        return Timings(
            load_s=wait_s + within + s("read hidden states"),
            compute_s=s("compute weights") + convert_s - within - s("store K and V"),
            store_s=s("store K and V") + s("flush K and V") + s("write hidden states"),
        )

    def writer(self, *, whole: bool = True) -> TierWriter:
        assert self.original is not None
        return TierWriter(self.weights, self.original)

    def close(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self.trace.write)
            last_first.callback(release_free_memory)
            last_first.callback(super().close)
            last_first.callback(self._release)


def _tiers_of(slots: list[Slot]) -> dict[str, int]:
    """Return the bytes of weights in each tier that has any."""
    held = Counter[str]()
    for slot in slots:
        held[slot.tier] += slot.tier_bytes
    return dict(held)


def _release(process: int, tiers: Tiers, store: TieredKVStore) -> None:
    """End threads, free memory and disk space, unless this is a forked process, which has no such threads."""
    if os.getpid() == process:
        with ExitStack() as last_first:
            last_first.callback(tiers.close)
            last_first.callback(store.release)


def open_offloaded(model: OpenRequest, offload: Offload) -> Placed:
    """Open a model with weights, K and V in the tiers of a plan.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """
    with ExitStack() as undo:
        tiers = Tiers(model, offload)
        undo.callback(tiers.close)
        decoder = tiers.inspect()
        with tiers.options.device.current():
            layers = open_draft_layers(model.draft, decoder, model.loaded)
        runner = open_tiered(tiers, decoder, layers, *tiers.num_blocks(decoder.spec, layers))
        undo.pop_all()
    return Placed(runner, tiers.options)


def open_tiered(
    tiers: Tiers, decoder: Decoder, layers: DraftLayers, num_blocks: int, num_states: int
) -> Offloaded:
    """Allocate K and V, and return the runner, which closes `tiers`.

    Raises:
        NotSupported: `attention_top_k` is given, and the model selects keys itself.
        TierFailed: the disk has no room.
    """
    spec, offload, weights = decoder.spec, tiers.offload, tiers.weights
    if spec.is_sparse and offload.attention_top_k is not None:
        raise NotSupported(
            f"attention_top_k={offload.attention_top_k}: not supported for models with an indexer "
            "or records, which select keys themselves"
        )
    make = partial(
        TieredKVStore,
        percents=weights.plan.kv,
        groups=groups_of(weights.units, spec.slots),
        scratch=weights.scratch,
        trace=weights.trace,
        overlap=offload.overlap,
        top_k=offload.attention_top_k,
        is_separate=tiers.options.device.separate_device is not None,
    )
    store = open_store(spec, tiers.options, layers, num_blocks, num_states, make)
    return Offloaded(decoder, store, tiers, layers)
