"""One plan: for so much that computes at once, the tiers of everything that must lie somewhere."""

from __future__ import annotations

from dataclasses import replace

from verbatim.placement.offload import memory
from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.cost import Load, predict_step
from verbatim.placement.offload.kv import deal
from verbatim.placement.offload.memory import Widths
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.offload.shares import Costs, Room, Shares, solve
from verbatim.placement.offload.wish import ANY, IN_MEMORY, Wish


def settle(
    wish: Wish, widths: Widths, pinned: tuple[int, ...], roomy: bool, kv_on_disk: bool, tight: bool
) -> Plan | None:
    """The best plan of this kind, or None: it takes too much."""
    shape, given = wish.shape, wish.offload
    kv_bytes = wish.kv_bytes(widths.sequences)
    if tight and wish.options.kv_bytes is None:
        kv_bytes = min(kv_bytes, 2 * wish.options.block_size * shape.kv_bytes_per_token)
    waiting = memory.waiting_bytes(shape, widths.max_batch_tokens)
    windows: Percents = (0.0, 0.0, 100.0) if kv_on_disk else IN_MEMORY
    loose = loose_slots(wish, pinned)
    ring_tiers = tiers_of(wish, (0.0, 0.0, 100.0), pinned, loose)
    if ring_tiers is None:
        return None
    best: Plan | None = None
    for _ in range(3):  # what stays in memory makes the ring smaller, and so leaves more of it
        fixed = memory.fixed_bytes(shape, ring_tiers, widths, windows, wish.budget, roomy=roomy)
        stays = [i for i in (*shape.held, *pinned) if given.weights is None]
        taken = sum(fixed.values()) + sum(shape.slots[i].nbytes for i in dict.fromkeys(stays))
        if wish.budget is not None and taken > wish.budget:
            break
        room = Room(
            max(0, wish.gpu - taken),
            max(0, wish.cpu - max(0, taken - wish.gpu)),
            wish.disk,
            ANY if wish.budget is None else wish.budget - taken,
        )
        costs = _costs(wish, widths, ring_tiers, loose, kv_bytes, waiting)
        kv = given.kv
        shares = solve(room, costs, given.weights, kv, given.activations, kv_on_disk=kv_on_disk)
        if shares is not None and kv is None and shares.kv[2]:
            kv = _whole_layers(shares.kv, shape.layers)
            shares = solve(room, costs, given.weights, kv, given.activations)
        if shares is None:
            break
        plan = _settle(wish, widths, pinned, loose, shares, kv_bytes, waiting, roomy)
        if plan is None or (best and _streamed(shape, plan) >= _streamed(shape, best)):
            break
        best, ring_tiers = plan, plan.tiers
        if not _streamed(shape, plan):
            break
    return best


def _costs(
    wish: Wish,
    widths: Widths,
    tiers: tuple[str, ...],
    loose: list[int],
    kv_bytes: int,
    waiting: int,
) -> Costs:
    shape, machine = wish.shape, wish.machine
    load = Load(widths.sequences, widths.sequences, wish.context, widths.sequences)
    busy = shape.chosen_experts(widths.sequences)
    weights_bytes = sum(
        shape.slots[i].disk_bytes * (busy if i in shape.cached else 1.0) for i in loose
    )
    on_disk = Plan(
        weights=IN_MEMORY,
        kv=(0.0, 0.0, 100.0),
        activations=(0.0, 0.0, 100.0),
        tiers=tiers,
        ring_bytes=0,
        kv_bytes=kv_bytes,
        kv_block=wish.options.block_size,
        batch_size=widths.batch_size,
        micro_batches=1,
        micro_tokens=widths.micro_tokens,
        max_batch_tokens=widths.max_batch_tokens,
        prompt_rows=0,
    )
    step = predict_step(shape, on_disk, machine, load, widths)
    rows = widths.max_batch_tokens
    moved = 2 * rows * shape.hidden * shape.itemsize * sum(u.attends for u in shape.units)
    return Costs(
        weights=sum(shape.slots[i].nbytes for i in loose),
        kv=kv_bytes,
        activations=waiting,
        weights_s=weights_bytes / machine.read_rate,
        kv_s=max(0.0, step.io_s - step.weight_bytes / machine.read_rate),
        activations_s=moved / machine.read_rate,
        compute_s=step.compute_s,
        overlap=wish.offload.overlap,
    )


def _settle(
    wish: Wish,
    widths: Widths,
    pinned: tuple[int, ...],
    loose: list[int],
    shares: Shares,
    kv_bytes: int,
    waiting: int,
    roomy: bool,
) -> Plan | None:
    """The plan with these shares, in whole parameters and layers. Where their sizes come out too large, a
    smaller share of the weights stays in memory."""
    kv = wish.offload.kv or _whole_layers(shares.kv, wish.shape.layers)
    gpu, cpu, _ = shares.weights
    for keep in (1.0, 0.99, 0.97, 0.94, 0.9, 0.85, 0.78, 0.7, 0.6, 0.45, 0.3, 0.15, 0.0):
        weights = shares.weights
        if wish.offload.weights is None and keep < 1:
            weights = (gpu * keep, cpu * keep, 100 - (gpu + cpu) * keep)
        tiers = tiers_of(wish, weights, pinned, loose)
        if tiers is None:
            return None
        plan = plan_of(wish, widths, tiers, kv, shares.activations, kv_bytes, waiting, roomy)
        if _fits(wish, plan):
            return plan
        if wish.offload.weights is not None:
            return None
    return None


def plan_of(
    wish: Wish,
    widths: Widths,
    tiers: tuple[str, ...],
    kv: Percents,
    activations: Percents,
    kv_bytes: int,
    waiting: int,
    roomy: bool,
) -> Plan:
    """The plan that all of this makes, whether it fits or not."""
    shape = wish.shape
    fixed = memory.fixed_bytes(shape, tiers, widths, kv, wish.budget, roomy=roomy)
    kv_in_memory = _kv_bytes(shape, kv, kv_bytes)
    taken = {
        "weights": 0,
        "K and V": kv_in_memory[0] + kv_in_memory[1],
        "activations": int(waiting * (activations[0] + activations[1]) / 100),
        **fixed,
        **memory.weight_bytes(shape, tiers),
    }
    return Plan(
        weights=wish.offload.weights or _percents_of(shape, tiers),
        kv=kv,
        activations=activations,
        tiers=tiers,
        ring_bytes=fixed["ring"],
        kv_bytes=kv_bytes,
        kv_block=wish.options.block_size,
        batch_size=widths.batch_size,
        micro_batches=widths.sequences // widths.batch_size,
        micro_tokens=widths.micro_tokens,
        max_batch_tokens=widths.max_batch_tokens,
        prompt_rows=memory.prompt_rows(shape, wish.budget),
        overlap=wish.offload.overlap,
        budget=wish.budget,
        memory={kind: nbytes for kind, nbytes in taken.items() if nbytes},
    )


def _fits(wish: Wish, plan: Plan) -> bool:
    """Does every tier hold what it must?"""
    if wish.budget is None:
        return True
    if plan.memory_bytes > wish.budget:
        return False
    if wish.offload.gpu is None or wish.offload.cpu is None:
        return True  # one budget for all that is in memory
    return all(
        used <= most for used, most in zip(_used(wish, plan), (wish.gpu, wish.cpu), strict=True)
    )


def _used(wish: Wish, plan: Plan) -> list[int]:
    """Bytes of weights, K and V and waiting activations in gpu and in cpu."""
    waiting = memory.waiting_bytes(wish.shape, plan.max_batch_tokens)
    kv = _kv_bytes(wish.shape, plan.kv, plan.kv_bytes)
    return [
        memory.resident_bytes(wish.shape, plan.tiers, tier)
        + kv[at]
        + int(waiting * plan.activations[at] / 100)
        for at, tier in enumerate(("gpu", "cpu"))
    ]


def _kv_bytes(shape: ModelShape, kv: Percents, kv_bytes: int) -> list[int]:
    """Of K and V in gpu and in cpu, as the store deals its layers out."""
    tiers = deal([1] * shape.layers, kv)
    return [-(-kv_bytes * tiers.count(tier) // shape.layers) for tier in ("gpu", "cpu")]


def loose_slots(wish: Wish, pinned: tuple[int, ...]) -> list[int]:
    """The slots that are dealt out by shares."""
    if wish.offload.weights is not None:
        return list(range(len(wish.shape.slots)))
    return [i for i in (*wish.shape.streamable(), *wish.shape.cached) if i not in pinned]


def tiers_of(
    wish: Wish, weights: Percents, pinned: tuple[int, ...], loose: list[int]
) -> tuple[str, ...] | None:
    """The tier of each slot; None: what must stay in memory doesn't fit anywhere."""
    shape = wish.shape
    tiers = ["disk"] * len(shape.slots)
    cached = set(shape.cached)
    kinds = [i for i in loose if i not in cached], [i for i in loose if i in cached]
    sizes = [sum(shape.slots[i].nbytes for i in kind) for kind in kinds]
    for kind, percents in zip(kinds, _experts_last(weights, *sizes), strict=True):
        dealt = deal([shape.slots[i].nbytes for i in kind], percents)
        for i, tier in zip(kind, dealt, strict=True):
            tiers[i] = tier
    left = {"gpu": wish.gpu, "cpu": wish.cpu}
    for i in dict.fromkeys((*shape.held, *pinned)):
        at = "gpu" if shape.slots[i].nbytes <= left["gpu"] else "cpu"
        if i in pinned and shape.slots[i].nbytes > left[at]:
            return None
        tiers[i] = at
        left[at] -= shape.slots[i].nbytes
    return tuple(tiers)


def _experts_last(weights: Percents, others: int, experts: int) -> tuple[Percents, Percents]:
    """Return the shares of all other weights and of experts that come to `weights` of them together.

    What every token needs comes to memory before experts, which only some need.
    """
    in_memory = weights[0] + weights[1]
    wanted = in_memory * (others + experts) / 100
    first = min(wanted, others)
    found = []
    for nbytes, size in ((first, others), (wanted - first, experts)):
        share = min(100.0, 100 * nbytes / size) if size else in_memory
        gpu = share * weights[0] / in_memory if in_memory else 0.0
        found.append((gpu, share - gpu, 100 - share if share < 100 - 1e-9 else 0.0))
    return found[0], found[1]


def _whole_layers(kv: Percents, layers: int) -> Percents:
    """Shares of layers that are not more in memory than these."""
    if kv[2] == 0:
        gpu = 100 * round(kv[0] * layers / 100) / layers if kv[1] else 100.0
        return gpu, 100 - gpu, 0.0
    gpu, cpu = (100 * int(share * layers / 100 + 1e-6) / layers for share in kv[:2])
    return gpu, cpu, 100 - gpu - cpu


def _percents_of(shape: ModelShape, tiers: tuple[str, ...]) -> Percents:
    total = max(1, shape.nbytes)
    gpu, cpu = (100 * memory.resident_bytes(shape, tiers, at) / total for at in ("gpu", "cpu"))
    return gpu, cpu, max(0.0, 100 - gpu - cpu)


def _streamed(shape: ModelShape, plan: Plan) -> int:
    away = [i for unit in shape.units for i in unit.experts if plan.tiers[i] == "disk"]
    streamed = sum(shape.streamed(unit, plan.tiers) for unit in shape.units)
    return streamed + sum(shape.slots[i].disk_bytes for i in away)


def _left(wish: Wish, plan: Plan) -> dict[str, int]:
    """Bytes that are left in gpu and cpu; what has no tier of its own is in gpu as far as it goes."""
    if wish.budget is None:
        return {"gpu": ANY, "cpu": ANY}
    left = max(0, wish.budget - plan.memory_bytes)
    if wish.offload.gpu is None or wish.offload.cpu is None:
        return {"gpu": left, "cpu": 0} if wish.gpu else {"gpu": 0, "cpu": left}
    used = _used(wish, plan)
    elsewhere = plan.memory_bytes - sum(used)
    gpu = wish.gpu - used[0] - elsewhere
    return {
        "gpu": max(0, min(left, gpu)),
        "cpu": max(0, min(left, wish.cpu - used[1] + min(0, gpu))),
    }


def use_the_rest(wish: Wish, plan: Plan) -> Plan:
    """What is left over goes to experts, to embeddings, whose rows are then not looked up on the disk, and to
    K and V: where nothing is streamed, for longer sequences and for prefixes that are kept."""
    shape, all_in_memory = wish.shape, not _streamed(wish.shape, plan)
    left, tiers = _left(wish, plan), list(plan.tiers)
    taken = dict(plan.memory)
    if wish.offload.weights is None:
        for i in range(len(shape.slots)) if all_in_memory else shape.cached:
            slot, at = shape.slots[i], max(left, key=lambda tier: left[tier])
            if tiers[i] == "disk" and slot.nbytes <= left[at]:
                tiers[i] = at
                left[at] -= slot.nbytes
        taken.update(memory.weight_bytes(shape, tuple(tiers)))
    kv_bytes = plan.kv_bytes
    if wish.options.kv_bytes is None and not plan.kv[2]:
        useful = wish.kv_bytes(plan.block_size)
        if all_in_memory:
            block = wish.options.block_size
            blocks = wish.options.max_sequences * -(-(wish.limit or ANY) // block) + 1
            useful = blocks * block * shape.kv_bytes_per_token
        grown = min(
            kv_bytes + int(left[tier] * 100 / share)
            for tier, share in zip(("gpu", "cpu"), plan.kv[:2], strict=True)
            if share
        )
        if wish.budget is None:
            grown = min(grown, wish.most_kv)
        kv_bytes = max(kv_bytes, min(grown, useful))
        taken["K and V"] = kv_bytes
    settled = tuple(tiers)
    return replace(
        plan,
        tiers=settled,
        weights=wish.offload.weights or _percents_of(shape, settled),
        kv_bytes=kv_bytes,
        memory={kind: nbytes for kind, nbytes in taken.items() if nbytes},
    )
