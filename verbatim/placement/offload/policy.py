"""Where everything goes, and how much runs at once: the fastest plan that the budgets hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verbatim.errors import InvalidRequest, OutOfBlocks, TierFailed
from verbatim.options import available_memory
from verbatim.placement.offload import memory
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.cost import Prediction, predict
from verbatim.placement.offload.machine import Machine
from verbatim.placement.offload.memory import Widths
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.report import amount, sentences
from verbatim.placement.offload.settling import settle, use_the_rest
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.offload.wish import ANY, Wish, wish_of
from verbatim.placement.options import EngineOptions

_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MOST_ROWS = 8192  # of a forward
_AS_FAST = 0.98  # of the fastest plan: then the one with the least work for a token is taken


def make_plan(
    shape: ModelShape,
    offload: Offload,
    options: EngineOptions,
    machine: Machine,
    limit: int | None,
) -> tuple[Plan, Prediction]:
    """The plan with the most tokens/s for the workload, of those that keep to the budgets and to what the
    user chose.

    Blocks of 1, 4, 16, ... sequences are tried, with micro-batches of several sizes, a ring for one layer
    or for two, and the largest unit streamed or kept in memory; for each of them a linear program deals
    weights, K and V and activations out to the tiers (`shares.py`), and `cost.py` predicts the rest.

    Args:
        limit: tokens of a sequence at most; None: any number.

    Raises:
        OutOfBlocks: the budgets are too small for any plan; the message tells a number that would do.
        InvalidRequest: they are too small for the shares that were asked for.
        TierFailed: the disk tier is too small.
    """
    _check_block(offload, options)
    wish = wish_of(shape, offload, options, machine, limit)
    found = _search(wish)
    if not found:
        _refuse(wish)
    fastest = max(speed for speed, _, _ in found)
    _, plan, _ = min(
        (entry for entry in found if entry[0] >= _AS_FAST * fastest),
        key=lambda entry: (entry[2].decode.io_s + entry[2].decode.compute_s) / entry[2].sequences,
    )
    plan = use_the_rest(wish, plan)
    if wish.budget is None and plan.memory_bytes > available_memory():
        raise OutOfBlocks(
            f"placement=Offload: {plan.memory_bytes} bytes are needed ({_kinds(plan)}), and "
            f"{available_memory()} are available"
        )
    prediction = predict(shape, plan, machine, wish.workload)
    reasons = sentences(shape, plan, prediction, offload, wish.workload)
    return replace(plan, reasons=reasons), prediction


_Found = list[tuple[float, Plan, Prediction]]


def _search(wish: Wish) -> _Found:
    """Plans that keep to the budgets, with their tokens/s; none: there are none."""
    found: _Found = []

    def consider(sequences: int, *, tight: bool) -> None:
        for plan in _plans(wish, sequences, tight=tight):
            prediction = predict(wish.shape, plan, wish.machine, wish.workload)
            found.append((prediction.tokens_per_s, plan, prediction))

    tried = _blocks(wish)
    for sequences in tried:
        consider(sequences, tight=False)
    if found and len(tried) > 1 and wish.offload.batch_size is None:
        best = max(found, key=lambda entry: entry[0])[1].block_size
        more = {max(1, best // 2), min(2 * best, wish.options.max_sequences)}
        for sequences in more - set(tried):
            consider(sequences, tight=False)
    for sequences in tried:
        if not found:
            consider(sequences, tight=True)
    return found


def _check_block(offload: Offload, options: EngineOptions) -> None:
    block = (offload.batch_size or 1) * (offload.micro_batches or 1)
    if block > options.max_sequences:
        raise InvalidRequest(
            f"batch_size={offload.batch_size} and micro_batches={offload.micro_batches} make {block} "
            f"sequences at once, and max_sequences is {options.max_sequences}"
        )


def _blocks(wish: Wish) -> list[int]:
    """Numbers of sequences to try."""
    offload, most = wish.offload, wish.options.max_sequences
    if offload.batch_size and offload.micro_batches:
        return [offload.batch_size * offload.micro_batches]
    step = offload.batch_size or offload.micro_batches or 1
    found = [step]
    while found[-1] * 4 < most:
        found.append(found[-1] * 4)
    if most > found[-1]:
        found.append(most // step * step)
    return sorted(set(found))


def _plans(wish: Wish, sequences: int, *, tight: bool) -> Iterator[Plan]:
    """Plans for a block of so many sequences that keep to the budgets.

    Args:
        tight: in as little memory as can be, with K and V of fewer tokens than the workload has.
    """
    given = wish.offload
    spill = given.kv is None or given.kv[2] > 0
    for kv_on_disk in dict.fromkeys((spill and given.kv is not None, spill)):
        for batch_size in _batch_sizes(wish, sequences, kv_on_disk=kv_on_disk):
            for micro_tokens in _micro_tokens(wish, tight=tight):
                block = batch_size * (given.micro_batches or max(1, sequences // batch_size))
                rows = _rows(wish, block, micro_tokens, tight=tight)
                widths = Widths(block, batch_size, micro_tokens, rows, wish.context)
                for pinned in _pins(wish):
                    for roomy in (True, False):
                        plan = settle(wish, widths, pinned, roomy, kv_on_disk, tight)
                        if plan is not None:
                            yield plan
                            break  # a ring for one layer is for those who have no room for two


def _batch_sizes(wish: Wish, sequences: int, *, kv_on_disk: bool) -> list[int]:
    if wish.offload.batch_size:
        return [wish.offload.batch_size]
    if wish.offload.micro_batches:
        return [max(1, sequences // wish.offload.micro_batches)]
    if not kv_on_disk:
        return [sequences]
    return sorted({sequences, max(1, sequences // 8)}, reverse=True)


def _micro_tokens(wish: Wish, *, tight: bool) -> list[int]:
    """Rows of a micro-batch: the most that an eighth of the memory holds, and a quarter of that."""
    if tight:
        return list(_MICRO_TOKENS[4:])
    room = ANY if wish.budget is None else wish.budget // 8
    fitting = [n for n in _MICRO_TOKENS if memory.working_bytes(wish.shape, n) <= room]
    return fitting[::2][:2]


def _rows(wish: Wish, sequences: int, micro_tokens: int, *, tight: bool) -> int:
    """Rows of a forward: so many that computing a prompt takes as long as reading the weights."""
    shape, machine = wish.shape, wish.machine
    if not wish.options.default_batch_tokens:
        return wish.options.max_batch_tokens
    if tight:
        return sequences
    elements = sum(slot.elements for slot in shape.slots)
    if shape.experts:
        routed = sum(slot.elements for slot in shape.slots if slot.of_experts)
        elements -= routed - routed * shape.experts_per_token // shape.experts
    everything = sum(shape.slots[i].disk_bytes for i in (*shape.streamable(), *shape.cached))
    a_row = elements * machine.product(micro_tokens) / micro_tokens
    wanted = everything / machine.read_rate / max(a_row, 1e-12)
    rows = 256
    while rows < min(wanted, _MOST_ROWS, sequences * wish.workload[0]):
        rows *= 2
    rows = max(rows, sequences)
    if wish.budget is not None:
        while rows > sequences and memory.waiting_bytes(shape, rows) > wish.budget // 12:
            rows = max(sequences, rows // 2)
    return rows


def _pins(wish: Wish) -> list[tuple[int, ...]]:
    """Slots to keep in memory before all others: none, or those of a unit much larger than the others.

    A head is often as large as six layers. Streamed, it would need a ring of that size for itself.
    """
    shape = wish.shape
    if wish.offload.weights is not None:
        return [()]
    everywhere = ("disk",) * len(shape.slots)
    sizes = sorted((shape.streamed(unit, everywhere), i) for i, unit in enumerate(shape.units))
    if len(sizes) < 3 or sizes[-1][0] < 2 * sizes[-2][0]:
        return [()]
    return [(), shape.units[sizes[-1][1]].slots]


def _refuse(wish: Wish) -> None:
    """Tell what would do."""
    given, options = wish.offload, wish.options
    assert wish.budget is not None
    chosen = {
        "weights": given.weights,
        "kv": given.kv,
        "activations": given.activations,
        "kv_memory": options.kv_bytes,
        "batch_size": given.batch_size,
        "micro_batches": given.micro_batches,
        "max_batch_tokens": None if options.default_batch_tokens else options.max_batch_tokens,
    }
    said = ", ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)
    said = f"with {said}, " if said else ""
    roomy = replace(wish, disk=ANY)
    if _smallest(roomy) is not None:
        raise TierFailed(
            f"placement=Offload: {said}the disk tier is too small: {given.disk or 'the temporary folder'} "
            f"has room for {wish.disk} bytes (disk_limit={given.disk_limit})"
        )
    budgets = f"gpu={given.gpu} and cpu={given.cpu} allow for {wish.budget}"
    enough = _enough(roomy)
    if enough is None:
        raise InvalidRequest(f"placement=Offload: {said}no plan holds all; {budgets}")
    needs = f"{enough.budget} bytes are needed ({_kinds(enough)})"
    if given.gpu is not None and given.cpu is not None:
        needs += ", in the proportion of gpu and cpu"
    if said:
        raise InvalidRequest(f"placement=Offload: {said}at least {needs}; {budgets}")
    raise OutOfBlocks(f"placement=Offload: at least {needs}; {budgets}")


def _smallest(wish: Wish) -> Plan | None:
    """A plan that takes as little memory as can be."""
    return next(_plans(wish, _blocks(wish)[0], tight=True), None)


def _enough(wish: Wish) -> Plan | None:
    """A plan under about the smallest budget for which there is one; None: there is none at all."""
    assert wish.budget is not None
    low = high = max(wish.budget, 1 << 20)
    while (plan := _smallest(wish.within(high))) is None:
        low, high = high, 2 * high
        if high > ANY:
            return None
    while high - low > high // 50:
        middle = (low + high) // 2
        found = _smallest(wish.within(middle))
        if found is None:
            low = middle
        else:
            high, plan = middle, found
    return plan


def _kinds(plan: Plan) -> str:
    return ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in plan.memory.items())
