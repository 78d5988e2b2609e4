"""The planner: chooses the tiers of an offloaded model's parts, and its batch sizes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from verbatim.errors import InvalidRequest, OutOfBlocks, TierFailed
from verbatim.options import available_memory
from verbatim.placement.offload import memory
from verbatim.placement.offload.choice import Offload, Percents
from verbatim.placement.offload.cost import Prediction, predict
from verbatim.placement.offload.kv import assign_tiers
from verbatim.placement.offload.machine import NOMINAL, Machine
from verbatim.placement.offload.memory import Widths
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.report import amount, sentences
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.options import EngineOptions

IN_MEMORY: Percents = (100.0, 0.0, 0.0)
ON_DISK: Percents = (0.0, 0.0, 100.0)
UNLIMITED = 1 << 60  # bytes
_KV_SHARE = 0.4  # of the available memory, for K and V, where no budget is given
_BUDGET_SHARE = 0.6  # of the available memory, where no budget is given
_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MAX_ROWS = 8192  # of a forward
_AS_FAST = (
    0.98  # of the fastest plan: of these, K and V in memory and then the least work per token wins
)
ORDERS = ("all K and V", "K and V first", "weights first")  # in which memory is filled
_STEPS = 512  # in which the share of weights in memory is searched


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """A model, a machine, the user's choices and the limits.

    Attributes:
        gpu, cpu, disk: capacity of the tiers in bytes, beside the checkpoint.
        budget: bytes of gpu and cpu together; None: unlimited.
        workload: (prompt, new) tokens, within the model's limit.
        limit: maximal tokens of a sequence; None: unlimited.
        max_kv_bytes: maximal bytes of K and V where there is no budget.
    """

    shape: ModelShape
    offload: Offload
    options: EngineOptions
    machine: Machine
    gpu: int
    cpu: int
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
            return replace(self, budget=budget, gpu=budget, cpu=budget)
        gpu = budget * self.gpu // max(1, self.gpu + self.cpu)
        return replace(self, budget=budget, gpu=gpu, cpu=budget - gpu)


def resolve_inputs(
    shape: ModelShape, offload: Offload, options: EngineOptions, machine: Machine, limit: int | None
) -> PlannerInputs:
    """Resolve budgets, disk space and workload.

    Args:
        limit: maximal tokens of a sequence; None: unlimited.
    """
    gpu, cpu, budget = offload.gpu, offload.cpu, None
    if gpu is not None or cpu is not None:
        budget = (gpu or 0) + (cpu or 0)
    elif offload.weights is None:
        gpu = budget = int(available_memory() * _BUDGET_SHARE)
    # A single budget covers all memory, whichever tier it is given for.
    together = UNLIMITED if budget is None else budget
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
    return PlannerInputs(
        shape,
        offload,
        options,
        machine,
        together if cpu is None else gpu or 0,
        together if gpu is None or cpu is None else cpu,
        disk,
        budget,
        (prompt, new),
        limit,
        int(available_memory() * _KV_SHARE) if budget is None else UNLIMITED,
    )


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


def make_plan(
    shape: ModelShape,
    offload: Offload,
    options: EngineOptions,
    machine: Machine,
    limit: int | None,
) -> tuple[Plan, Prediction]:
    """Return the plan with the most predicted tokens/s within the budgets and the user's choices.

    Blocks of 1, 4, 16, ... sequences are tried, with micro-batches of several sizes, a ring for one layer
    or for two, and the largest unit streamed or kept in memory. For each of them, memory is filled with
    K and V first or with weights first (`_fill`), and `cost.py` predicts the time.

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
    fastest = max(prediction.tokens_per_s for _, prediction in found)
    plan, _ = min(
        (entry for entry in found if entry[1].tokens_per_s >= _AS_FAST * fastest),
        # The model leaves out what each visit to K and V on the disk costs beside its bytes.
        key=lambda entry: (
            entry[0].kv[2] > 0,
            (entry[1].decode.io_s + entry[1].decode.compute_s) / entry[1].sequences,
        ),
    )
    plan = _use_rest(inputs, plan)
    if inputs.budget is None and plan.memory_bytes > available_memory():
        raise OutOfBlocks(
            f"placement=Offload: {plan.memory_bytes} bytes are needed ({_kinds(plan)}), and "
            f"{available_memory()} are available"
        )
    prediction = predict(shape, plan, machine, inputs.workload)
    reasons = sentences(shape, plan, prediction, offload, inputs.workload)
    return replace(plan, reasons=reasons), prediction


def _search(inputs: PlannerInputs) -> list[tuple[Plan, Prediction]]:
    """Return plans within the budgets, with their predictions."""
    found: list[tuple[Plan, Prediction]] = []

    def consider(sequences: int, *, tight: bool) -> None:
        found.extend(
            (plan, predict(inputs.shape, plan, inputs.machine, inputs.workload))
            for plan in _plans(inputs, sequences, tight=tight)
        )

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


def _plans(inputs: PlannerInputs, sequences: int, *, tight: bool) -> Iterator[Plan]:
    """Yield plans within the budgets for a block of `sequences`.

    Args:
        tight: in as little memory as possible, with K and V of fewer tokens than the workload has.
    """
    given, most = inputs.offload, inputs.options.max_batch_tokens
    for batch_size in _batch_sizes(inputs, sequences):
        for micro_tokens in _micro_tokens(inputs, tight=tight):
            block = batch_size * (given.micro_batches or max(1, sequences // batch_size))
            rows = most
            if inputs.options.default_batch_tokens:
                rows = block if tight else _rows(inputs, block, micro_tokens)
            widths = Widths(block, batch_size, micro_tokens, rows, inputs.context)
            for pinned in _pins(inputs):
                for order in ORDERS if given.kv is None else ORDERS[:1]:
                    for roomy in (True, False):
                        plan = _fill(inputs, widths, pinned, roomy, order, tight)
                        if plan is not None:
                            yield plan
                            break  # a ring for one layer is used where two do not fit


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
    fitting = (n for n in _MICRO_TOKENS if memory.working_bytes(inputs.shape, n) <= room)
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
        while rows > sequences and memory.waiting_bytes(shape, rows) > inputs.budget // 12:
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


_Planned = Callable[[int, int], Plan | None]


def _fill(
    inputs: PlannerInputs,
    widths: Widths,
    pinned: tuple[int, ...],
    roomy: bool,
    order: str,
    tight: bool,
) -> Plan | None:
    """Fill memory with K and V and with weights, each as far as it goes; None: not even the least fits.

    All bytes of one kind save about the same time of the disk, so the kind that saves more goes first. The
    caller tries all `ORDERS`.
    """
    layers = inputs.shape.layers
    kv_bytes = inputs.kv_bytes(widths.sequences)
    if tight and inputs.options.kv_bytes is None:
        kv_bytes = min(kv_bytes, 2 * inputs.options.block_size * inputs.shape.kv_bytes_per_token)
    least_kv = max(0, -(-(kv_bytes - inputs.disk) * layers // max(1, kv_bytes)))
    if order == "all K and V":
        least_kv = layers

    for activations in (IN_MEMORY, ON_DISK)[: 1 if inputs.offload.activations else 2]:

        def plan(kv: int, weights: int, activations: Percents = activations) -> Plan | None:
            found = _assign(inputs, widths, pinned, kv, weights, activations, kv_bytes, roomy)
            return found if _fits(inputs, found) else None

        steps = _STEPS if inputs.offload.weights is None else 0

        def fits_kv(kv: int, steps: int = steps, plan: _Planned = plan) -> bool:
            return bool(plan(kv, 0) or (steps and plan(kv, steps)))

        kv = least_kv if order == "weights first" else _largest(least_kv, layers, fits_kv)
        if kv is None:
            continue
        weights = _largest(0, steps, partial(plan, kv))
        if weights is None:
            continue
        if order == "weights first":
            kv = _largest(kv, layers, partial(plan, weights=weights)) or kv
        return plan(kv, weights)
    return None


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
    widths: Widths,
    pinned: tuple[int, ...],
    kv_layers: int,
    weight_steps: int,
    activations: Percents,
    kv_bytes: int,
    roomy: bool,
) -> Plan:
    """Build a plan, whether it fits or not. The gpu tier is filled first.

    Args:
        kv_layers: number of layers whose K and V stay in memory.
        weight_steps: share of the weights that stays in memory, in `_STEPS`.
    """
    shape, given = inputs.shape, inputs.offload
    tiers = ["disk"] * len(shape.slots)
    first = list(dict.fromkeys((*shape.held, *pinned)))
    if given.weights is not None:
        tiers = assign_tiers([slot.nbytes for slot in shape.slots], given.weights)
    kept = _spread(shape, pinned, weight_steps) if given.weights is None else []
    for i in (*first, *kept):
        tiers[i] = "gpu"
    kv = given.kv or (100 * kv_layers / shape.layers, 0.0, 100 * (1 - kv_layers / shape.layers))
    waiting = memory.waiting_bytes(shape, widths.max_batch_tokens)
    activations = given.activations or activations
    fixed = memory.fixed_bytes(shape, tuple(tiers), widths, kv, inputs.budget, roomy=roomy)
    fixed["recurrent states"] = inputs.state_bytes(widths.sequences)
    room = UNLIMITED if inputs.gpu else 0
    if inputs.two_budgets:
        room = max(0, inputs.gpu - sum(fixed.values()))
        room -= memory.resident_bytes(shape, tuple(tiers), "gpu") if given.weights else 0
        room -= _kv_in_memory(shape, given.kv, kv_bytes)[0] if given.kv else 0
        room -= int(waiting * given.activations[0] / 100) if given.activations else 0
    for i in (*first, *kept):
        if (nbytes := shape.slots[i].nbytes) <= room:
            room -= nbytes
        else:
            tiers[i] = "cpu"
    if given.kv is None:
        in_gpu = min(kv_layers, max(0, room) // max(1, -(-kv_bytes // shape.layers)))
        room -= in_gpu * -(-kv_bytes // shape.layers)
        kv = (100 * in_gpu / shape.layers, 100 * (kv_layers - in_gpu) / shape.layers, kv[2])
    if given.activations is None and activations[0] and waiting > room:
        activations = (0.0, 100.0, 0.0)
    in_memory = sum(_kv_in_memory(shape, kv, kv_bytes))
    assigned = tuple(tiers)
    taken = {
        "weights": 0,
        "K and V": in_memory,
        "activations": int(waiting * (activations[0] + activations[1]) / 100),
        **fixed,
        **memory.weight_bytes(shape, assigned),
    }
    return Plan(
        weights=given.weights or _percents(shape, assigned),
        kv=kv,
        activations=activations,
        tiers=assigned,
        ring_bytes=fixed["ring"],
        kv_bytes=kv_bytes,
        kv_block=inputs.options.block_size,
        batch_size=widths.batch_size,
        micro_batches=widths.sequences // widths.batch_size,
        micro_tokens=widths.micro_tokens,
        max_batch_tokens=widths.max_batch_tokens,
        prompt_rows=memory.prompt_rows(shape, inputs.budget),
        overlap=given.overlap,
        budget=inputs.budget,
        memory={kind: nbytes for kind, nbytes in taken.items() if nbytes},
    )


def _spread(shape: ModelShape, pinned: tuple[int, ...], steps: int) -> list[int]:
    """Return the slots that stay in memory, spread evenly over the units, which keeps the ring small.

    Weights that every token needs come before experts, which only some tokens need.
    """
    kinds = [i for i in shape.streamable() if i not in pinned], shape.cached
    sizes = [sum(shape.slots[i].nbytes for i in slots) for slots in kinds]
    wanted, kept = sum(sizes) * steps / _STEPS, []
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


def _fits(inputs: PlannerInputs, plan: Plan) -> bool:
    """Return whether every tier holds its part."""
    waiting = memory.waiting_bytes(inputs.shape, plan.max_batch_tokens)
    on_disk = plan.kv_bytes * plan.kv[2] / 100 + waiting * plan.activations[2] / 100
    capacity = UNLIMITED if inputs.budget is None else inputs.budget
    if on_disk > inputs.disk or plan.memory_bytes > capacity:
        return False
    if not inputs.two_budgets:
        return True
    gpu, cpu = _used(inputs, plan)
    return gpu <= inputs.gpu and cpu <= inputs.cpu


def _used(inputs: PlannerInputs, plan: Plan) -> list[int]:
    """Return the bytes of weights, K and V and waiting activations in gpu and in cpu."""
    waiting = memory.waiting_bytes(inputs.shape, plan.max_batch_tokens)
    kv = _kv_in_memory(inputs.shape, plan.kv, plan.kv_bytes)
    return [
        memory.resident_bytes(inputs.shape, plan.tiers, tier)
        + kv[at]
        + int(waiting * plan.activations[at] / 100)
        for at, tier in enumerate(("gpu", "cpu"))
    ]


def _kv_in_memory(shape: ModelShape, kv: Percents, kv_bytes: int) -> list[int]:
    """Return the bytes of K and V in gpu and in cpu, in whole layers as in the store."""
    tiers = assign_tiers([1] * shape.layers, kv)
    return [-(-kv_bytes * tiers.count(tier) // shape.layers) for tier in ("gpu", "cpu")]


def _percents(shape: ModelShape, tiers: tuple[str, ...]) -> Percents:
    total = max(1, shape.nbytes)
    gpu, cpu = (100 * memory.resident_bytes(shape, tiers, at) / total for at in ("gpu", "cpu"))
    return gpu, cpu, max(0.0, 100 - gpu - cpu)


def _left(inputs: PlannerInputs, plan: Plan) -> dict[str, int]:
    """Return the free bytes of gpu and cpu; buffers and computation count as gpu as far as it goes."""
    if inputs.budget is None:
        return {"gpu": UNLIMITED, "cpu": UNLIMITED}
    left = max(0, inputs.budget - plan.memory_bytes)
    if not inputs.two_budgets:
        return {"gpu": left, "cpu": 0} if inputs.gpu else {"gpu": 0, "cpu": left}
    used = _used(inputs, plan)
    gpu = inputs.gpu - used[0] - (plan.memory_bytes - sum(used))
    return {
        "gpu": max(0, min(left, gpu)),
        "cpu": max(0, min(left, inputs.cpu - used[1] + min(0, gpu))),
    }


def _use_rest(inputs: PlannerInputs, plan: Plan) -> Plan:
    """Use the free memory for experts, embeddings (no look-ups on the disk), and K and V.

    Where nothing is streamed, K and V grow for longer sequences and for cached prefixes.
    """
    shape = inputs.shape
    away = any(plan.tiers[i] == "disk" for i in (*shape.streamable(), *shape.cached))
    left, tiers = _left(inputs, plan), list(plan.tiers)
    taken = dict(plan.memory)
    if inputs.offload.weights is None:
        for i in shape.cached if away else range(len(shape.slots)):
            slot, at = shape.slots[i], max(left, key=lambda tier: left[tier])
            if tiers[i] == "disk" and slot.nbytes <= left[at]:
                tiers[i] = at
                left[at] -= slot.nbytes
        taken.update(memory.weight_bytes(shape, tuple(tiers)))
    kv_bytes = plan.kv_bytes
    if inputs.options.kv_bytes is None and not plan.kv[2]:
        useful = inputs.kv_bytes(plan.block_size)
        if not away:
            block = inputs.options.block_size
            blocks = inputs.options.max_sequences * -(-(inputs.limit or UNLIMITED) // block) + 1
            useful = blocks * block * shape.kv_bytes_per_token
        grown = min(
            kv_bytes + int(left[tier] * 100 / share)
            for tier, share in zip(("gpu", "cpu"), plan.kv[:2], strict=True)
            if share
        )
        if inputs.budget is None:
            grown = min(grown, inputs.max_kv_bytes)
        kv_bytes = max(kv_bytes, min(grown, useful))
        taken["K and V"] = kv_bytes
    assigned = tuple(tiers)
    return replace(
        plan,
        tiers=assigned,
        weights=inputs.offload.weights or _percents(shape, assigned),
        kv_bytes=kv_bytes,
        memory={kind: nbytes for kind, nbytes in taken.items() if nbytes},
    )


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
    if _smallest(unlimited_disk) is not None:
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


def _smallest(inputs: PlannerInputs) -> Plan | None:
    """Return a plan in as little memory as possible."""
    return next(_plans(inputs, _blocks(inputs)[0], tight=True), None)


def _enough(inputs: PlannerInputs) -> Plan | None:
    """Return a plan for about the smallest sufficient budget; None: no budget is sufficient."""
    assert inputs.budget is not None
    low = high = max(inputs.budget, 1 << 20)
    while (plan := _smallest(inputs.within(high))) is None:
        low, high = high, 2 * high
        if high > UNLIMITED:
            return None
    while high - low > high // 50:
        middle = (low + high) // 2
        found = _smallest(inputs.within(middle))
        if found is None:
            low = middle
        else:
            high, plan = middle, found
    return plan


def _kinds(plan: Plan) -> str:
    return ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in plan.memory.items())
