"""The planner: chooses the tiers of an offloaded model's parts, and its batch sizes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from verbatim.errors import InvalidRequest, OutOfBlocks, TierFailed
from verbatim.options import available_memory
from verbatim.placement.offload.choice import Offload, Percents
from verbatim.placement.offload.cost import Prediction, predict
from verbatim.placement.offload.kv import TIERS, assign_tiers
from verbatim.placement.offload.machine import NOMINAL, Machine
from verbatim.placement.offload.plan import (
    Plan,
    buffer_bytes,
    prompt_rows,
    waiting_bytes,
    weight_bytes,
    working_bytes,
)
from verbatim.placement.offload.report import amount, sentences
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.options import EngineOptions

IN_MEMORY: Percents = (100.0, 0.0, 0.0)
ON_DISK: Percents = (0.0, 0.0, 100.0)
UNLIMITED = 1 << 60  # bytes
_KV_SHARE = 0.4  # of the available memory, for K and V, where no budget is given
BUDGET_SHARE = 0.6  # of the available memory, where no budget is given
_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MAX_ROWS = 8192  # of a forward
# Of the fastest plan: of these, K and V in memory and then the least work per token wins.
_AS_FAST = 0.98
_STEPS = 512  # in which the share of weights in memory is searched


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """A model, a machine, the user's choices and the limits.

    Attributes:
        disk: capacity of the disk tier in bytes, beside the checkpoint.
        budget: bytes of gpu and cpu together; None: unlimited.
        workload: (prompt, new) tokens, within the model's limit.
        limit: maximal tokens of a sequence; None: unlimited.
        max_kv_bytes: maximal bytes of K and V where there is no budget.
    """

    shape: ModelShape
    offload: Offload
    options: EngineOptions
    machine: Machine
    disk: int
    budget: int | None
    workload: tuple[int, int]
    limit: int | None
    max_kv_bytes: int = UNLIMITED

    @property
    def context(self) -> int:
        return sum(self.workload)

    @property
    def two_budgets(self) -> bool:
        """Return whether gpu and cpu have a budget each, rather than one budget for all memory."""
        return self.offload.gpu is not None and self.offload.cpu is not None

    def kv_bytes(self, sequences: int) -> int:
        """Return the bytes of whole blocks for `sequences` of the workload, and the scratch block.

        Since the workload is only typical, there is room for one sequence of the maximal length, in at most
        a quarter of the budget.
        """
        if self.options.kv_bytes is not None:
            return self.options.kv_bytes - self.state_bytes(sequences)
        block = self.options.block_size
        block_bytes = block * self.shape.kv_bytes_per_token
        blocks = sequences * -(-self.context // block) + 1
        if self.limit is not None and self.budget is not None:
            longest = -(-self.limit // block) + 1
            blocks = max(blocks, min(longest, self.budget // 4 // max(1, block_bytes)))
        return min(blocks, max(2, self.max_kv_bytes // max(1, block_bytes))) * block_bytes

    def state_bytes(self, sequences: int) -> int:
        """Return the bytes of recurrent states: two of each sequence, one of a cached prefix, and zeros."""
        one = self.shape.state_bytes
        if one and self.options.kv_bytes is not None:
            return self.options.num_states(one) * one
        return (1 + 3 * sequences) * one

    def within(self, budget: int) -> PlannerInputs:
        """Return a copy with another budget, in the same proportion of gpu and cpu."""
        if not self.two_budgets:
            return replace(self, budget=budget)
        gpu, cpu = self.offload.gpu or 0, self.offload.cpu or 0
        gpu = budget * gpu // max(1, gpu + cpu)
        return replace(self, budget=budget, offload=self.offload.replace(gpu=gpu, cpu=budget - gpu))


def resolve_inputs(
    shape: ModelShape, offload: Offload, options: EngineOptions, machine: Machine, limit: int | None
) -> PlannerInputs:
    """Resolve budgets, disk space and workload.

    Args:
        limit: maximal tokens of a sequence; None: unlimited.
    """
    budget = None
    if offload.gpu is not None or offload.cpu is not None:
        budget = (offload.gpu or 0) + (offload.cpu or 0)
    elif offload.weights is None:
        budget = int(available_memory() * BUDGET_SHARE)
    disk = UNLIMITED if offload.disk_limit is None else offload.disk_limit
    try:
        stat = os.statvfs(offload.disk or tempfile.gettempdir())
        disk = min(disk, int(stat.f_bavail * stat.f_frsize * 0.9))
    except OSError:
        pass  # opening the folder raises the error
    prompt, new = offload.workload
    if limit is not None:
        prompt = min(prompt, max(1, limit - 1))
        new = min(new, max(1, limit - prompt))
    most = int(available_memory() * _KV_SHARE) if budget is None else UNLIMITED
    workload = prompt, new
    return PlannerInputs(shape, offload, options, machine, disk, budget, workload, limit, most)


def may_spill(shape: ModelShape, offload: Offload, options: EngineOptions) -> bool:
    """Return whether K and V or activations may go to the disk."""
    if (offload.kv or IN_MEMORY)[2] or (offload.activations or IN_MEMORY)[2]:
        return True
    inputs = resolve_inputs(shape, offload, options, NOMINAL, None)
    return (
        offload.kv is None
        and inputs.budget is not None
        and (inputs.kv_bytes(options.max_sequences) + shape.nbytes > inputs.budget)
    )


class _Room:
    """The free bytes of each tier. A single budget covers all memory, whichever tier it is given for."""

    def __init__(self, inputs: PlannerInputs) -> None:
        given, budget = inputs.offload, UNLIMITED if inputs.budget is None else inputs.budget
        self.pooled = not inputs.two_budgets
        self.first = "cpu" if given.gpu is None and given.cpu is not None else "gpu"
        self.left = {"disk": inputs.disk, self.first: budget}
        if not self.pooled:
            self.left |= {"gpu": given.gpu or 0, "cpu": given.cpu or 0}

    def take(self, tier: str, nbytes: int) -> None:
        """Take bytes of a tier, whether they are there or not."""
        self.left[self.first if self.pooled and tier != "disk" else tier] -= nbytes

    def place(self, nbytes: int) -> str:
        """Take bytes of the gpu tier if it has them, else of cpu; return which."""
        tier = self.first if self.pooled or nbytes <= self.left["gpu"] else "cpu"
        self.take(tier, nbytes)
        return tier

    @property
    def suffices(self) -> bool:
        return min(self.left.values()) >= 0


def make_plan(
    shape: ModelShape,
    offload: Offload,
    options: EngineOptions,
    machine: Machine,
    limit: int | None,
) -> tuple[Plan, Prediction]:
    """Return the plan with the most predicted tokens/s within the budgets and the user's choices.

    Blocks of 1, 4, 16, ... sequences are tried, with micro-batches of several sizes, and the largest unit
    streamed or kept in memory. For each of them, memory is filled with K and V first or with weights
    first (`_fill`), and `cost.py` predicts the time.

    Args:
        limit: maximal tokens of a sequence; None: unlimited.

    Raises:
        OutOfBlocks: the budgets are too small for any plan; the message names a sufficient number.
        InvalidRequest: they are too small for the user's choices.
        TierFailed: the disk tier is too small.
    """
    block = (offload.batch_size or 1) * (offload.micro_batches or 1)
    if block > options.max_sequences:
        raise InvalidRequest(
            f"batch_size={offload.batch_size} and micro_batches={offload.micro_batches} make {block} "
            f"sequences at once, and max_sequences is {options.max_sequences}"
        )
    inputs = resolve_inputs(shape, offload, options, machine, limit)
    found = _search(inputs)
    if not found:
        _refuse(inputs)
    fastest = max(prediction.tokens_per_s for _, prediction, _ in found)
    plan, _, room = min(
        (entry for entry in found if entry[1].tokens_per_s >= _AS_FAST * fastest),
        # The model leaves out what each visit to K and V on the disk costs beside its bytes.
        key=lambda entry: (
            entry[0].kv[2] > 0,
            (entry[1].decode.io_s + entry[1].decode.compute_s) / entry[1].sequences,
        ),
    )
    plan = _with_more_kv(inputs, plan, room)
    if inputs.budget is None and plan.memory_bytes > available_memory():
        raise OutOfBlocks(
            f"placement=Offload: {plan.memory_bytes} bytes are needed ({_kinds(plan)}), and "
            f"{available_memory()} are available"
        )
    prediction = predict(shape, plan, machine, inputs.workload)
    reasons = sentences(shape, plan, prediction, offload, inputs.workload)
    return replace(plan, reasons=reasons), prediction


def _search(inputs: PlannerInputs) -> list[tuple[Plan, Prediction, _Room]]:
    """Return plans within the budgets, with their predictions and what is left free."""
    found: list[tuple[Plan, Prediction, _Room]] = []

    def consider(sequences: int, *, tight: bool) -> None:
        for base in _sizes(inputs, sequences, tight=tight):
            for pinned in _pins(inputs):
                for plan, room in _fill(inputs, base, pinned, tight=tight):
                    prediction = predict(inputs.shape, plan, inputs.machine, inputs.workload)
                    found.append((plan, prediction, room))

    tried = _blocks(inputs)
    for sequences in tried:
        consider(sequences, tight=False)
    if found and len(tried) > 1 and inputs.offload.batch_size is None:
        best = max(found, key=lambda entry: entry[1].tokens_per_s)[0].block_size
        more = {max(1, best // 2), min(2 * best, inputs.options.max_sequences)}
        for sequences in more - set(tried):
            consider(sequences, tight=False)
    for sequences in tried:
        if not found:
            consider(sequences, tight=True)
    return found


def _blocks(inputs: PlannerInputs) -> list[int]:
    """Return the numbers of sequences to try."""
    offload, most = inputs.offload, inputs.options.max_sequences
    if offload.batch_size and offload.micro_batches:
        return [offload.batch_size * offload.micro_batches]
    step = offload.batch_size or offload.micro_batches or 1
    found = [step]
    while found[-1] * 4 < most:
        found.append(found[-1] * 4)
    return sorted({*found, max(found[-1], most // step * step)})


def _sizes(inputs: PlannerInputs, sequences: int, *, tight: bool) -> Iterator[Plan]:
    """Yield the batch sizes to try for a block of `sequences`, as plans that hold nothing yet.

    Args:
        tight: in as little memory as possible, with K and V of fewer tokens than the workload has.
    """
    shape, given, options = inputs.shape, inputs.offload, inputs.options
    for batch_size in _batch_sizes(inputs, sequences):
        for micro_tokens in _micro_tokens(inputs, tight=tight):
            micro_batches = given.micro_batches or max(1, sequences // batch_size)
            block, rows = batch_size * micro_batches, options.max_batch_tokens
            kv_bytes = inputs.kv_bytes(block)
            if tight and options.kv_bytes is None:
                kv_bytes = min(kv_bytes, 2 * options.block_size * shape.kv_bytes_per_token)
            if options.default_batch_tokens:
                rows = block if tight else _rows(inputs, block, micro_tokens)
            yield Plan(
                weights=given.weights or ON_DISK,
                kv=given.kv or ON_DISK,
                activations=given.activations or ON_DISK,
                ring_bytes=0,
                kv_bytes=kv_bytes,
                kv_block=options.block_size,
                batch_size=batch_size,
                micro_batches=micro_batches,
                micro_tokens=micro_tokens,
                max_batch_tokens=rows,
                prompt_rows=prompt_rows(shape, inputs.budget),
                overlap=given.overlap,
                budget=inputs.budget,
            )


def _batch_sizes(inputs: PlannerInputs, sequences: int) -> list[int]:
    given = inputs.offload
    if given.batch_size:
        return [given.batch_size]
    if given.micro_batches:
        return [max(1, sequences // given.micro_batches)]
    if given.kv is not None and not given.kv[2]:
        return [sequences]
    return sorted({sequences, max(1, sequences // 8)}, reverse=True)


def _micro_tokens(inputs: PlannerInputs, *, tight: bool) -> tuple[int, ...]:
    """Return rows of a micro-batch to try: as many as an eighth of the budget holds, and a quarter."""
    if tight:
        return _MICRO_TOKENS[4:]
    room = UNLIMITED if inputs.budget is None else inputs.budget // 8
    fitting = (n for n in _MICRO_TOKENS if working_bytes(inputs.shape, n) <= room)
    return tuple(fitting)[::2][:2]


def _rows(inputs: PlannerInputs, sequences: int, micro_tokens: int) -> int:
    """Return the rows of a forward for which a prompt computes as long as the weights are read."""
    shape, machine = inputs.shape, inputs.machine
    elements = sum(slot.elements for slot in shape.slots)
    if shape.experts:
        routed = sum(slot.elements for slot in shape.slots if slot.of_experts)
        elements -= routed - routed * shape.experts_per_token // shape.experts
    everything = sum(shape.slots[i].disk_bytes for i in (*shape.streamable(), *shape.cached))
    row_s = elements * machine.product(micro_tokens) / micro_tokens
    wanted = everything / machine.read_rate / max(row_s, 1e-12)
    rows = 256
    while rows < min(wanted, _MAX_ROWS, sequences * inputs.workload[0]):
        rows *= 2
    rows = max(rows, sequences)
    if inputs.budget is not None:
        while rows > sequences and waiting_bytes(shape, rows) > inputs.budget // 12:
            rows = max(sequences, rows // 2)
    return rows


def _pins(inputs: PlannerInputs) -> list[tuple[int, ...]]:
    """Return sets of slots to keep in memory first: none, or those of a unit much larger than the others.

    A head is often as large as six layers. Streamed, it would need a ring of that size for itself.
    """
    shape = inputs.shape
    if inputs.offload.weights is not None:
        return [()]
    everywhere = ("disk",) * len(shape.slots)
    sizes = sorted((shape.streamed(unit, everywhere), i) for i, unit in enumerate(shape.units))
    if len(sizes) < 3 or sizes[-1][0] < 2 * sizes[-2][0]:
        return [()]
    return [(), shape.units[sizes[-1][1]].slots]


def _fill(
    inputs: PlannerInputs, base: Plan, pinned: tuple[int, ...], *, tight: bool
) -> Iterator[tuple[Plan, _Room]]:
    """Yield plans that fill memory with K and V and with weights, each as far as it goes.

    All bytes of one kind save about the same time of the disk, so the kind that saves more goes first; both
    orders are tried. Activations go to the disk, and the ring holds one layer in place of two, only where
    not all K and V fit otherwise.

    Args:
        base: has the batch sizes.
        pinned: slots that stay in memory in any case.
        tight: yield the first plan alone.
    """
    layers, given = inputs.shape.layers, inputs.offload
    steps = _STEPS if given.weights is None else 0
    for kv_first in (True, False) if given.kv is None else (True,):
        least = max(0, -(-(base.kv_bytes - inputs.disk) * layers // max(1, base.kv_bytes)))
        for activations, roomy in product((IN_MEMORY, ON_DISK), (True, False)):
            if given.activations and activations != IN_MEMORY:
                continue  # they are not chosen here

            def plan(
                kv: int,
                weights: int,
                activations: Percents = activations,
                roomy: bool = roomy,
            ) -> tuple[Plan, _Room] | None:
                found = _assign(inputs, base, pinned, kv, weights, activations, roomy=roomy)
                return found if found[1].suffices else None

            def with_kv(kv: int, plan: Any = plan) -> bool:
                return bool(plan(kv, 0) or (steps and plan(kv, steps)))

            kv = _largest(least, layers, with_kv) if kv_first else least
            weights = None if kv is None else _largest(0, steps, partial(plan, kv))
            if kv is None or weights is None:
                continue
            if not kv_first:
                kv = _largest(kv, layers, partial(plan, weights=weights)) or kv
            if weights == steps:  # embeddings are left
                weights = _largest(weights, 2 * steps, partial(plan, kv)) or weights
            found = plan(kv, weights)
            assert found is not None
            yield found
            if tight:
                return
            if not kv_first or given.kv is not None or not found[0].kv[2]:
                break
            least = layers


def _largest(least: int, most: int, fits: Callable[[int], object]) -> int | None:
    """Return the largest number from `least` to `most` that fits; None: not even `least` does."""
    if fits(most):
        return most
    if least == most or not fits(least):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _assign(
    inputs: PlannerInputs,
    base: Plan,
    pinned: tuple[int, ...],
    kv_layers: int,
    weight_steps: int,
    activations: Percents,
    *,
    roomy: bool,
) -> tuple[Plan, _Room]:
    """Return a plan, whether it fits or not, and the bytes that it leaves. The gpu tier is filled first.

    Args:
        base: has the batch sizes.
        kv_layers: number of layers whose K and V stay in memory.
        weight_steps: share of the weights that stays in memory, as of `_spread`.
    """
    shape, given, room = inputs.shape, inputs.offload, _Room(inputs)
    in_memory = list(dict.fromkeys((*shape.held, *pinned)))
    tiers, kv = ["disk"] * len(shape.slots), given.kv
    if given.weights is not None:
        tiers = assign_tiers([slot.nbytes for slot in shape.slots], given.weights)
    else:
        in_memory += _spread(shape, pinned, weight_steps)
    for i in in_memory:
        tiers[i] = "gpu"
    if kv is None:
        share = 100 * kv_layers / shape.layers
        kv = (share, 0.0, 100 - share)
    resident = base.kv_bytes * shape.resident_bytes_per_token // max(1, shape.kv_bytes_per_token)
    a_layer = -(-(base.kv_bytes - resident) // shape.layers)
    fixed = buffer_bytes(shape, replace(base, kv=kv), tuple(tiers), inputs.context, roomy=roomy)
    fixed["recurrent states"] = inputs.state_bytes(base.block_size)
    waiting = waiting_bytes(shape, base.max_batch_tokens)
    if given.weights is not None:
        for i in set(range(len(tiers))) - set(in_memory):
            room.take(tiers[i], 0 if tiers[i] == "disk" else shape.slots[i].nbytes)
    if given.kv is not None:
        kept = assign_tiers([1] * shape.layers, kv)
        for tier in TIERS:
            room.take(tier, a_layer * kept.count(tier))
    if given.activations is not None:
        for tier, share in zip(TIERS, given.activations, strict=True):
            room.take(tier, int(waiting * share / 100))
    buffers = resident + sum(fixed.values())  # of gpu as far as it goes
    near = buffers if room.pooled else max(0, min(buffers, room.left["gpu"]))
    room.take("gpu", near)
    room.take("cpu", buffers - near)
    for i in in_memory:
        tiers[i] = room.place(shape.slots[i].nbytes)
    if given.kv is None:
        kept = [room.place(a_layer) for _ in range(kv_layers)]
        room.take("disk", a_layer * (shape.layers - kv_layers))
        gpu, cpu = (100 * kept.count(tier) / shape.layers for tier in ("gpu", "cpu"))
        kv = (gpu, cpu, kv[2])
    if given.activations is not None:
        activations = given.activations
    elif activations[2]:
        room.take("disk", waiting)
    elif room.place(waiting) == "cpu":
        activations = (0.0, 100.0, 0.0)
    assigned = tuple(tiers)
    taken = {
        "weights": 0,
        "K and V": resident + a_layer * (len(kept) - kept.count("disk")),
        "activations": int(waiting * (activations[0] + activations[1]) / 100),
        **fixed,
        **weight_bytes(shape, assigned),
    }
    plan = replace(
        base,
        weights=given.weights or _percents(shape, assigned),
        kv=kv,
        activations=activations,
        tiers=assigned,
        ring_bytes=fixed["ring"],
        memory={kind: nbytes for kind, nbytes in taken.items() if nbytes},
    )
    return plan, room


def _spread(shape: ModelShape, pinned: tuple[int, ...], steps: int) -> list[int]:
    """Return the slots that stay in memory, spread evenly over the units, which keeps the ring small.

    Weights that every token needs come before experts, which only some tokens need; last come embeddings, of
    which only rows are read.

    Args:
        steps: up to `_STEPS`, the share of all but the embeddings; from there on, the share of these.
    """
    needed = [i for i in shape.streamable() if i not in pinned]
    seen = {*needed, *shape.cached, *shape.held, *pinned}
    kinds = needed, shape.cached, [i for i in range(len(shape.slots)) if i not in seen]
    sizes = [sum(shape.slots[i].nbytes for i in slots) for slots in kinds]
    wanted: float = (sizes[0] + sizes[1]) * min(steps, _STEPS) / _STEPS
    wanted += sizes[2] * max(0, steps - _STEPS) / _STEPS
    kept = []
    for slots, size in zip(kinds, sizes, strict=True):
        share = min(1.0, wanted / max(1, size))
        passed = held = 0
        for i in slots:
            nbytes = shape.slots[i].nbytes
            passed += nbytes
            if share * passed - held >= nbytes / 2:
                kept.append(i)
                held += nbytes
        wanted = max(0.0, wanted - size)
    return kept


def _percents(shape: ModelShape, tiers: tuple[str, ...]) -> Percents:
    held = dict.fromkeys(TIERS, 0)
    for slot, tier in zip(shape.slots, tiers, strict=True):
        held[tier] += slot.nbytes
    gpu, cpu = (100 * held[tier] / max(1, shape.nbytes) for tier in ("gpu", "cpu"))
    return gpu, cpu, max(0.0, 100 - gpu - cpu)


def _with_more_kv(inputs: PlannerInputs, plan: Plan, room: _Room) -> Plan:
    """Use the free memory for K and V: for the block's sequences or, where no weights are read, for longer
    sequences and cached prefixes.
    """
    options, shape = inputs.options, inputs.shape
    if options.kv_bytes is not None or plan.kv[2]:
        return plan
    useful = inputs.kv_bytes(plan.block_size)
    if all(plan.tiers[i] != "disk" for i in (*shape.streamable(), *shape.cached)):
        longest = -(-(inputs.limit or UNLIMITED) // options.block_size)
        blocks = options.max_sequences * longest + 1
        useful = blocks * options.block_size * shape.kv_bytes_per_token
    free = [room.left[room.first]] * 2 if room.pooled else [room.left["gpu"], room.left["cpu"]]
    shares = [(left, share) for left, share in zip(free, plan.kv[:2], strict=True) if share]
    grown = min(
        plan.kv_bytes + int(left * 100 / (100 if room.pooled else share)) for left, share in shares
    )
    if inputs.budget is None:
        grown = min(grown, inputs.max_kv_bytes)
    kv_bytes = max(plan.kv_bytes, min(grown, useful))
    return replace(plan, kv_bytes=kv_bytes, memory={**plan.memory, "K and V": kv_bytes})


def _refuse(inputs: PlannerInputs) -> None:
    """Raise an error that names the chosen values, the limits and a sufficient budget."""
    given, options = inputs.offload, inputs.options
    assert inputs.budget is not None
    chosen = {
        "weights": given.weights,
        "kv": given.kv,
        "activations": given.activations,
        "kv_memory": options.kv_bytes,
        "batch_size": given.batch_size,
        "micro_batches": given.micro_batches,
        "max_batch_tokens": None if options.default_batch_tokens else options.max_batch_tokens,
    }
    choices = ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
    choices = f"with {choices}, " if choices else ""
    unlimited_disk = replace(inputs, disk=UNLIMITED)
    if _least(unlimited_disk)[1].suffices:
        raise TierFailed(
            f"placement=Offload: {choices}the disk tier is too small: {given.disk or 'the temporary folder'} "
            f"has room for {inputs.disk} bytes (disk_limit={given.disk_limit})"
        )
    budgets = f"gpu={given.gpu} and cpu={given.cpu} allow for {inputs.budget}"
    enough = _enough(unlimited_disk)
    if enough is None:
        raise InvalidRequest(f"placement=Offload: {choices}no plan holds all; {budgets}")
    needs = f"{enough.budget} bytes are needed ({_kinds(enough)})"
    if inputs.two_budgets:
        needs += ", in the proportion of gpu and cpu"
    if choices:
        raise InvalidRequest(f"placement=Offload: {choices}at least {needs}; {budgets}")
    raise OutOfBlocks(f"placement=Offload: at least {needs}; {budgets}")


def _least(inputs: PlannerInputs) -> tuple[Plan, _Room]:
    """Return a plan in as little memory as possible, whether it fits or not."""
    *_, base = _sizes(inputs, _blocks(inputs)[0], tight=True)
    kept = product((0, inputs.shape.layers), (0, _STEPS))  # without buffers, or without a ring
    found = [_assign(inputs, base, (), kv, steps, ON_DISK, roomy=False) for kv, steps in kept]
    return min(found, key=lambda entry: entry[0].memory_bytes)


def _enough(inputs: PlannerInputs) -> Plan | None:
    """Return a plan for about the smallest sufficient budget; None: no budget is sufficient."""
    while inputs.budget is not None and inputs.budget <= UNLIMITED:
        plan, room = _least(inputs)
        if room.suffices:
            return plan
        needed = plan.memory_bytes + plan.memory_bytes // 100
        if needed <= inputs.budget:  # gpu or cpu alone is too small: both grow
            needed = inputs.budget + inputs.budget // 16 + 1
        inputs = inputs.within(needed)
    return None


def _kinds(plan: Plan) -> str:
    return ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in plan.memory.items())
