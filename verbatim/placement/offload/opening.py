"""From a folder and an `Offload` to a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from verbatim.kv.store import bytes_per_token, make_store
from verbatim.model.decoder import Decoder
from verbatim.model.loader import LoadedModel
from verbatim.options import available_memory
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.recipe import ingredients
from verbatim.placement.offload.runner import Micro, Offloaded
from verbatim.placement.offload.schedule import BlockSchedule, install_gates
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.stream import lay_out
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.units import Units, find_units, in_step
from verbatim.placement.offload.weights import Weights
from verbatim.placement.options import EngineOptions

_READERS = 2  # threads


def open_offloaded(
    loaded: LoadedModel, offload: Offload, options: EngineOptions, limit: int | None
) -> tuple[Offloaded, EngineOptions]:
    """The runner, and the options of the engine as the plan has them.

    Args:
        limit: tokens of one sequence at most.

    Raises:
        OutOfBlocks, NotSupported: the budgets don't hold what they must.
        TierFailed: a file can't be read.
    """
    assert loaded.recipes is not None
    units = find_units(loaded.module, loaded.recipes)
    plan = simple_plan(units, offload, options)
    for slot, tier in in_step(units.slots, plan.weights):
        slot.tier = tier
    for slot in units.held:
        slot.tier = "gpu"
    for slot in units.slots:
        slot.in_place = slot.tier != "disk"
    trace = Trace(offload.trace)
    scratch = Scratch(offload.disk, offload.disk_limit)
    readers = _READERS if offload.overlap else 0
    weights = Weights(units, plan.ring_bytes, readers, trace, scratch)
    try:
        install_gates(weights)
        schedule = BlockSchedule(weights, None, trace)
        decoder = Decoder(loaded.module, order=Micro(plan, schedule))
        options = replace(
            options,
            kv_bytes=plan.kv_bytes,
            max_sequences=min(options.max_sequences, plan.block_size),
            max_batch_tokens=plan.max_batch_tokens,
        )
        anatomy = decoder.anatomy
        dtype = options.kv_dtype or anatomy.dtype
        recorded = 0 if anatomy.routed is None else anatomy.routed.bytes_per_token
        blocks = options.num_blocks(bytes_per_token(anatomy.layers, dtype) + recorded, limit)
        # (helper A: a store over tiers, of groups_of(units, anatomy.slots))
        store = make_store(anatomy.layers, blocks, options.block_size, dtype, torch.device("cpu"))
        runner = Offloaded(
            decoder,
            store,
            options.num_threads,
            offload=offload,
            plan=plan,
            weights=weights,
            schedule=schedule,
            trace=trace,
            scratch=scratch,
        )
        return runner, options
    except BaseException:
        weights.close()
        raise


def simple_plan(units: Units, offload: Offload, options: EngineOptions) -> Plan:
    """What follows from the budgets without measuring anything."""
    sizes = [
        lay_out("", [s for slot in unit.slots for s in ingredients(slot.recipe)]).nbytes
        for unit in units.order
        if not unit.gathers
    ]
    ring = max([a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True)] or [0])
    total = sum(slot.nbytes for slot in units.slots)
    budget = (offload.gpu or 0) + (offload.cpu or 0)
    if offload.gpu is None and offload.cpu is None:
        budget = int(available_memory() * 0.6)
    share = min(100.0, max(0.0, 100 * (budget * 0.6 - ring) / total))
    batch = offload.batch_size or 16
    return Plan(
        weights=offload.weights or (share, 0, 100 - share),
        kv=offload.kv or (100, 0, 0),
        activations=offload.activations or (100, 0, 0),
        ring_bytes=ring,
        kv_bytes=options.kv_bytes or int(budget * 0.2),
        batch_size=batch,
        micro_batches=offload.micro_batches or -(-options.max_sequences // batch),
        micro_tokens=512,
        max_batch_tokens=options.max_batch_tokens,
    )


def groups_of(units: Units, slots: Mapping[tuple[int, int], int]) -> list[list[int]]:
    """The layers of the KV store that each unit attends in, unit by unit, in the order of a forward."""
    groups = []
    for unit in units.order:
        own = {id(module) for module in unit.module.modules()}
        found = sorted(layer for (module, _), layer in slots.items() if module in own)
        if found:
            groups.append(found)
    return groups
