"""Opening of an offloaded model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from verbatim.errors import InvalidRequest, NotSupported, OutOfBlocks, UnsupportedModel
from verbatim.heap import Heap
from verbatim.kv.states import open_states
from verbatim.kv.store import bytes_per_token
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit, open_draft_layers
from verbatim.model.hidden import head_of
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp, mtp_size
from verbatim.model.packing import choose_packings, matrices_of
from verbatim.model.spec import ModelSpec, inner_model
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.compress import Compression, choose
from verbatim.placement.offload.forecast import forecast
from verbatim.placement.offload.head import split_head
from verbatim.placement.offload.kv import TieredKVStore
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.prefetch import READERS
from verbatim.placement.offload.runner import Offloaded
from verbatim.placement.offload.schedule import BlockSchedule, HiddenStates, install_gates
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Units, find_units
from verbatim.placement.offload.weights import Weights
from verbatim.placement.options import EngineOptions, Placed
from verbatim.weights.formats.stored import held_packing


def open_offloaded(
    loaded: LoadedModel,
    offload: Offload,
    options: EngineOptions,
    limit: int | None,
    draft: Mtp | EarlyExit | None,
) -> Placed:
    """Open a model with weights, K and V in the tiers of a plan.

    Args:
        limit: tokens of one sequence at most.

    Raises:
        OutOfBlocks, NotSupported: the budgets are too small.
        TierFailed: a file can't be read.
    """
    units, compression = units_of(loaded, offload, options)
    trace = Trace(offload.trace)
    with ExitStack() as undo:
        scratch = Scratch(offload.disk, offload.disk_limit)
        undo.callback(scratch.close)
        expected = forecast(loaded, units, offload, options, limit)
        if isinstance(draft, Mtp):
            draft_bytes, token_bytes = _draft_bytes(loaded, draft, expected.shape)
            smaller = _without(offload, draft_bytes)
            try:
                expected = forecast(loaded, units, smaller, options, limit, token_bytes)
            except (InvalidRequest, OutOfBlocks) as error:
                raise type(error)(f"{error}, beside MTP layers of {draft_bytes} bytes") from None
        plan, heap = expected.plan, Heap(expected.plan.heap_bytes)
        for slot, tier in zip(units.slots, plan.tiers, strict=True):
            slot.tier = "disk" if slot.rows_only else tier
        if expected.shape.held_experts(plan.tiers):
            for layer in units.experts:
                for slot in layer.slots:
                    slot.tier = "disk"
        else:
            units.join_experts()
        for slot in units.slots:
            slot.in_place = slot.tier != "disk"
        original = loaded.module.state_dict(keep_vars=True)
        packed: Scratch | None = None
        if compression is not None:
            packed = Scratch(offload.disk, offload.disk_limit)
            undo.callback(packed.close)
            compression.pack(units, loaded.module, packed)
            heap.tidy()
        readers = READERS if offload.overlap else 0
        weights = Weights(
            units,
            plan.ring_bytes,
            readers,
            trace,
            packed,
            heap.tidy,
            expected.shape.held_experts(plan.tiers),
        )
        undo.callback(weights.close)
        scratch.reserved_elsewhere = weights.disk_bytes
        away = HiddenStates(loaded.module, plan.activations, scratch, trace)
        moved = away if plan.activations[2] else None
        schedule = BlockSchedule(plan, weights, moved, trace)
        decoder = _inspect(loaded, weights, schedule)
        heap.tidy()
        options = replace(
            options,
            kv_bytes=plan.kv_bytes,
            max_sequences=min(options.max_sequences, plan.block_size),
            max_batch_tokens=plan.max_batch_tokens,
            prompt_rows=plan.prompt_rows,
        )
        layers = open_draft_layers(draft, decoder, loaded)
        store = _store(decoder.spec, units, offload, options, plan, limit, scratch, trace, layers)
        undo.callback(store.release)
        kv_dtype = options.kv_dtype or decoder.spec.dtype
        layers.open_stores(store.num_blocks, store.block_size, kv_dtype)
        runner = Offloaded(
            decoder,
            store,
            options.num_threads,
            offload=offload,
            forecast=expected,
            weights=weights,
            schedule=schedule,
            trace=trace,
            scratch=scratch,
            compression=compression,
            draft_layers=layers,
        )
        runner.original = original
        undo.pop_all()
    return Placed(runner, options)


def _draft_bytes(loaded: LoadedModel, draft: Mtp, shape: ModelShape) -> tuple[int, int]:
    """Return the bytes of MTP layers, which stay in memory, and about what they keep of a token."""
    assert loaded.folder is not None
    inner = inner_model(loaded.module)
    count, nbytes = mtp_size(inner, loaded.folder, draft.beside)
    hidden = shape.hidden * inner.dtype.itemsize
    return nbytes, count * (shape.kv_bytes_per_token // shape.layers + hidden)


def _without(offload: Offload, reserved: int) -> Offload:
    """Return the options with a smaller budget; without one, the plan takes a share of the free memory."""
    for name, budget in (("gpu", offload.gpu), ("cpu", offload.cpu)):
        if budget and budget > reserved:
            smaller: dict[str, Any] = {name: budget - reserved}
            return replace(offload, **smaller)
        if budget:
            raise OutOfBlocks(
                f"placement=Offload: MTP layers take {reserved} bytes; {name}={budget}"
            )
    return offload


def _inspect(loaded: LoadedModel, weights: Weights, order: BlockSchedule) -> Decoder:
    """Return the decoder; its inspection of the model records the order of the units."""
    install_gates(weights)
    with weights.learning():
        decoder = Decoder(loaded.module, order=order, fused=False)  # weights move
    if weights.experts is not None:
        weights.experts.wait_s = 0.0  # of the inspection
    if not decoder.spec.finite:
        raise UnsupportedModel(
            f"placement=Offload: {type(loaded.module).__name__} gives logits that are not numbers: its "
            "weights hold NaN or infinities, or are used outside of the modules that hold them"
        )
    return decoder


def _store(
    spec: ModelSpec,
    units: Units,
    offload: Offload,
    options: EngineOptions,
    plan: Plan,
    limit: int | None,
    scratch: Scratch,
    trace: Trace,
    layers: DraftLayers,
) -> TieredKVStore:
    if spec.is_sparse and offload.attention_top_k is not None:
        raise NotSupported(
            f"attention_top_k={offload.attention_top_k}: not supported for models with an indexer or "
            "records, which choose the keys themselves"
        )
    dtype = options.kv_dtype or spec.dtype
    beside = spec.choices["routing"].bytes_per_token
    beside += layers.bytes_per_token(dtype)
    blocks = options.num_blocks(bytes_per_token(spec.layers, dtype) + beside, limit)
    state_bytes = sum(state.nbytes for state in spec.states)
    num_states = max(3, plan.state_bytes // max(1, state_bytes))
    store = TieredKVStore(
        spec.layers,
        blocks,
        options.block_size,
        dtype,
        torch.device("cpu"),
        percents=plan.kv,
        groups=groups_of(units, spec.slots),
        scratch=scratch,
        trace=trace,
        overlap=offload.overlap,
        cpu_cache_compute=offload.cpu_cache_compute,
        top_k=offload.attention_top_k,
    )
    store.states = open_states(spec.states, num_states)
    return store


def units_of(
    loaded: LoadedModel, offload: Offload, options: EngineOptions
) -> tuple[Units, Compression | None]:
    """Return the units that are installed in one piece, and their quantization.

    Raises:
        NotSupported: nothing can be quantized, or activations can't.
    """
    assert loaded.lazy_weights is not None
    units, kind = find_units(loaded.module, loaded.lazy_weights), options.quantization
    packings = {} if kind is None else choose_packings(loaded.module, kind)
    matrices = matrices_of(loaded.module)
    for parameter, lazy in loaded.lazy_weights.items():
        stored = held_packing(lazy, packings.get(parameter), matrices.get(parameter))
        if stored is not None:
            packings[parameter] = stored[0]
    units.split_experts()
    if offload.weights is None or offload.weights[2]:
        split_head(units, head_of(inner_model(loaded.module)), packings)
    return units, choose(units, loaded.module, kind, packings) if packings else None


def groups_of(units: Units, slots: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """Return the layers of the KV store that each unit attends in, in the order of a forward."""
    groups = []
    for unit in units.order:
        own = {id(module) for module in unit.module.modules()}
        found = sorted(layer for (module, _), layer in slots.items() if module in own)
        if found:
            groups.append(found)
    return groups
