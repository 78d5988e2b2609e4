"""The planner: chooses the tiers of an offloaded model's parts, and its batch sizes."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from shutil import disk_usage
from typing import NoReturn

from verbatim.errors import InvalidRequest, OutOfBlocks, TierFailed
from verbatim.options import available_memory
from verbatim.placement.offload.choice import Offload, Percents
from verbatim.placement.offload.cost import Forecast
from verbatim.placement.offload.kv import TIERS, assign_tiers
from verbatim.placement.offload.machine import NOMINAL, ROWS, Machine
from verbatim.placement.offload.plan import (
    IN_RAM,
    Plan,
    memory_of,
    prompt_rows,
    waiting_bytes,
    working_bytes,
)
from verbatim.placement.offload.report import amount, sentences
from verbatim.placement.offload.shape import ModelShape
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions

IN_MEMORY: Percents = (100.0, 0.0, 0.0)
ON_DISK: Percents = (0.0, 0.0, 100.0)
UNLIMITED = 1 << 60  # bytes
BUDGET_SHARE = 0.6  # of the available memory, where no budget is given
_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MAX_ROWS = 8192  # of a forward
# Of the fastest plan: of these, K and V in memory and then the least work per token wins.
_AS_FAST = 0.97

# What memory may hold: a slot, by its number, or one of these.
Item = int | str
_KV = "K and V of a layer"
_SECOND = "a second unit in the ring"
_WAITING = "waiting activations"


class _Room:
    """The free bytes of each tier. A single budget covers all memory, whichever tier it is given for."""

    def __init__(self, given: Offload, budget: int, disk: int) -> None:
        self.pooled = given.gpu is None or given.cpu is None
        self.first = "cpu" if given.gpu is None and given.cpu is not None else "gpu"
        self.left = {"disk": disk, self.first: budget}
        if not self.pooled:
            self.left |= {"gpu": given.gpu or 0, "cpu": given.cpu or 0}

    def take(self, tier: str, nbytes: int) -> str:
        """Take bytes of a tier, whether they are there or not; return the tier."""
        self.left[self.first if self.pooled and tier != "disk" else tier] -= nbytes
        return tier

    def place(self, nbytes: int) -> str:
        """Take bytes of the gpu tier if it has them, else of cpu; return which."""
        return self.take(self.first if self.pooled or nbytes <= self.left["gpu"] else "cpu", nbytes)

    @property
    def suffices(self) -> bool:
        return min(self.left.values()) >= 0


class Planner:
    """A model, the user's choices and the limits, and the plans that keep to them.

    Args:
        limit: maximal tokens of a sequence; None: unlimited.

    Attributes:
        disk: capacity of the disk tier in bytes, beside the checkpoint.
        budget: bytes of gpu and cpu together; None: unlimited.
        workload: (prompt, new) tokens, within the model's limit.
        max_kv_bytes: maximal bytes of K and V where there is no budget.
    """

    def __init__(
        self, shape: ModelShape, offload: Offload, options: EngineOptions, limit: int | None
    ) -> None:
        self.shape, self.options, self.limit = shape, options, limit
        self.on_gpu = options.device.beside_ram is not None
        self.budget: int | None = None
        is_given = offload.gpu is not None or offload.cpu is not None
        if self.on_gpu and (is_given or offload.weights is None):
            near, far = options.device.available_memory, available_memory()
            offload = offload.replace(
                gpu=int(near * BUDGET_SHARE) if offload.gpu is None else offload.gpu,
                cpu=int(far * BUDGET_SHARE) if offload.cpu is None else offload.cpu,
            )
        self.given = offload
        if offload.gpu is not None or offload.cpu is not None:
            self.budget = (offload.gpu or 0) + (offload.cpu or 0)
        elif offload.weights is None:
            self.budget = int(available_memory() * BUDGET_SHARE)
        self.max_kv_bytes = UNLIMITED
        if self.budget is None:
            self.max_kv_bytes = int(options.device.available_memory * DEFAULT_KV_SHARE)
        self.disk = UNLIMITED if offload.disk_limit is None else offload.disk_limit
        try:
            free = disk_usage(offload.disk or tempfile.gettempdir()).free
            self.disk = min(self.disk, int(free * 0.9))
        except OSError:
            pass  # opening the folder raises the error
        prompt, new = offload.workload
        if limit is not None:
            prompt = min(prompt, max(1, limit - 1))
            new = min(new, max(1, limit - prompt))
        self.workload = prompt, new
        # Quantized embeddings, whose rows a GPU gets from its memory or from the file.
        self._rounded = {
            i
            for unit in shape.units
            if unit.gathers
            for i in unit.slots
            if shape.slots[i].is_quantized
        }

    @property
    def computing(self) -> int | None:
        """Bytes of the memory that computation takes from: on a GPU, its own."""
        return self.given.gpu if self.on_gpu else self.budget

    def may_spill(self) -> bool:
        """Return whether K and V or activations may go to the disk."""
        given = self.given
        if (given.kv or IN_MEMORY)[2] or (given.activations or IN_MEMORY)[2]:
            return True
        if given.kv is not None or self.budget is None:
            return False
        return self._kv_bytes(self.options.max_sequences) + self.shape.nbytes > self.budget

    def best(self, machine: Machine) -> Forecast:
        """Return the plan with the most predicted tokens/s within the budgets and the user's choices.

        Blocks of 1, 2, 4, ... sequences are tried. For each of them, memory is filled with what saves
        reading (`_orders`), as far as it goes, and `cost.py` predicts the time.

        Raises:
            OutOfBlocks: the budgets are too small for any plan; the message names a sufficient number.
            InvalidRequest: they are too small for the user's choices.
            TierFailed: the disk tier is too small.
        """
        given = self.given
        block = (given.batch_size or 1) * (given.micro_batches or 1)
        if block > self.options.max_sequences:
            raise InvalidRequest(
                f"batch_size={given.batch_size} and micro_batches={given.micro_batches} make {block} "
                f"sequences at once, and max_sequences is {self.options.max_sequences}"
            )
        for tight in (False, True):
            bases = list(self._sizes(machine, tight=tight))
            plans = (self._fill(base, order) for base in bases for order in self._orders(base))
            found = [
                (Forecast(self.shape, machine, plan), room) for plan, room in filter(None, plans)
            ]
            if found:
                break
        else:
            self._refuse()
        fastest = max(forecast.prediction.tokens_per_s for forecast, _ in found)

        def cost(entry: tuple[Forecast, _Room]) -> tuple[bool, float]:
            plan, prediction = entry[0].plan, entry[0].prediction
            step = prediction.decode
            # Forecasts leave out what each visit to K and V on the disk costs beside its bytes.
            busy_s = step.io_s + step.bus_s + step.compute_s
            return plan.kv[2] > 0, busy_s / prediction.sequences

        as_fast = _AS_FAST * fastest
        best, room = min(
            (entry for entry in found if entry[0].prediction.tokens_per_s >= as_fast), key=cost
        )
        plan = self._with_more_kv(best, room)
        if self.budget is None and not self.on_gpu and plan.memory_bytes > available_memory():
            raise OutOfBlocks(
                f"placement=Offload: {plan.memory_bytes} bytes are needed ({_kinds(plan)}), and "
                f"{available_memory()} are available"
            )
        reasons = sentences(replace(best, plan=plan), given)
        return replace(best, plan=replace(plan, reasons=reasons))

    def _kv_bytes(self, sequences: int) -> int:
        """Return the bytes of whole blocks for `sequences` of the workload, and the scratch block.

        Since the workload is only typical, there is room for one sequence of the maximal length, in at most
        a quarter of the budget.
        """
        if self.options.kv_bytes is not None:
            return self.options.kv_bytes - self._state_bytes(sequences)
        block = self.options.block_size
        block_bytes = block * self.shape.kv_bytes_per_token
        blocks = sequences * -(-sum(self.workload) // block) + 1
        if self.limit is not None and self.budget is not None:
            longest = -(-self.limit // block) + 1
            blocks = max(blocks, min(longest, self.budget // 4 // max(1, block_bytes)))
        return min(blocks, max(2, self.max_kv_bytes // max(1, block_bytes))) * block_bytes

    def _state_bytes(self, sequences: int) -> int:
        """Return the bytes of recurrent states: two of each sequence, one of a cached prefix, and zeros."""
        one = self.shape.state_bytes
        if one and self.options.kv_bytes is not None:
            return self.options.num_states(one) * one
        return (1 + 3 * sequences) * one

    def _sizes(self, machine: Machine, *, tight: bool) -> Iterator[Plan]:
        """Yield the batch sizes to try, as plans that hold nothing yet.

        Args:
            tight: in as little memory as possible, with K and V of fewer tokens than the workload has. The
                last one takes the least.
        """
        shape, given, options = self.shape, self.given, self.options
        room = UNLIMITED if self.computing is None else self.computing
        step, most = (given.batch_size or 1) * (given.micro_batches or 1), options.max_sequences
        blocks, heights, most_rows = [step], list(_MICRO_TOKENS[4:]), 0
        if not tight:
            if not (given.batch_size and given.micro_batches):
                doubled = (step << n for n in range(most.bit_length()))
                blocks = sorted({*(n for n in doubled if n < most), most // step * step})
            fitting = [n for n in _MICRO_TOKENS if working_bytes(shape, n) <= room // 8]
            heights = fitting[:3:2]
            # With so many rows a prompt computes for twice as long as all weights are read.
            chosen = shape.experts_per_token / max(1, shape.experts)
            elements = sum(s.elements * (chosen if s.of_experts else 1) for s in shape.slots)
            row_s = max(1, elements) * machine.product(ROWS[-1]) / ROWS[-1]
            rate = machine.bus_rate or machine.read_rate
            wanted = max(256, int(2 * shape.nbytes / rate / row_s))
            most_rows = min(wanted, _MAX_ROWS, room // 12 // waiting_bytes(shape, 1))
            most_rows = 1 << most_rows.bit_length() >> 1
        for block in blocks:
            sizes = {given.batch_size or block // (given.micro_batches or 1)}
            if not (given.batch_size or given.micro_batches) and (given.kv is None or given.kv[2]):
                sizes.add(max(1, block // 8))  # smaller ones take smaller buffers
            kv_bytes, rows = self._kv_bytes(block), options.max_batch_tokens
            if tight and options.kv_bytes is None:
                kv_bytes = min(kv_bytes, 2 * options.block_size * shape.kv_bytes_per_token)
            if options.default_batch_tokens:
                rows = block if tight else max(block, min(block * self.workload[0], most_rows))
            for batch_size, micro_tokens in product(sizes, heights):
                yield Plan(
                    weights=given.weights or ON_DISK,
                    kv=given.kv or ON_DISK,
                    activations=given.activations or ON_DISK,
                    kv_bytes=kv_bytes,
                    kv_block=options.block_size,
                    batch_size=batch_size,
                    micro_batches=block // batch_size,
                    micro_tokens=micro_tokens,
                    max_batch_tokens=rows,
                    workload=self.workload,
                    prompt_rows=prompt_rows(shape, self.computing),
                    overlap=given.overlap,
                    budget=self.budget,
                )

    def _orders(self, base: Plan) -> list[list[list[Item]]]:
        """Return orders in which memory is filled, each in groups of items of one kind.

        All bytes of one kind save about the same time of the disk, so the kind that saves more goes first:
        K and V, or weights. Where memory is short, K and V are worth more than what lets reading overlap.
        """
        shape, given = self.shape, self.given
        lacking = -(-(base.kv_bytes - self.disk) * shape.layers // max(1, base.kv_bytes))
        first: list[Item] = [_KV] * max(0, lacking)  # on the disk there is no room for them
        kv: list[Item] = [] if given.kv else [_KV] * (shape.layers - len(first))
        waiting: list[Item] = [] if given.activations else [_WAITING]
        start = [[] if given.kv else first, waiting]
        large, needed, experts, gathered = _weights(shape) if given.weights is None else [[]] * 4
        return [
            [*start, kv, large, [_SECOND], needed, experts, gathered],
            [*start, large, [_SECOND], needed, experts, kv, gathered],
            [*start, large, needed, experts, kv, gathered],
        ]

    def _fill(self, base: Plan, order: list[list[Item]]) -> tuple[Plan, _Room] | None:
        """Return the plan that holds as many items of each group as fit, the first group first.

        None if not even none fits. On a GPU its memory is filled first, then RAM.
        """
        if not self.on_gpu:
            held = _most(order, lambda held: self._assign(base, held)[1].suffices)
            return None if held is None else self._assign(base, held)
        near = _most(order, lambda held: self._assign(base, held)[1].left["gpu"] >= 0)
        if near is None:
            return None
        taken = Counter(item for item in near if item != _SECOND)
        left: list[list[Item]] = [[] for _ in order]
        for group, rest in zip(order, left, strict=True):
            for item in group:
                if taken[item]:
                    taken[item] -= 1
                elif item not in self._rounded:
                    rest.append(item)
        far = _most(left, lambda held: self._assign(base, near, held)[1].suffices)
        return None if far is None else self._assign(base, near, far)

    def _assign(
        self, base: Plan, held: Sequence[Item], far: Sequence[Item] = ()
    ) -> tuple[Plan, _Room]:
        """Return a plan that holds these items, whether they fit or not, and the bytes that it leaves.

        What is given as percents is taken from its tiers; everything else fills the gpu tier first.

        Args:
            base: has the batch sizes.
            held: on a GPU, in its memory.
            far: in RAM beside a GPU.
        """
        shape, given = self.shape, self.given
        room = _Room(given, UNLIMITED if self.budget is None else self.budget, self.disk)
        sizes, layers = [slot.nbytes for slot in shape.slots], [1] * shape.layers
        slots = dict.fromkeys([*shape.held, *(item for item in held if isinstance(item, int))])
        tiers = assign_tiers(sizes, given.weights) if given.weights else ["disk"] * len(sizes)
        if self.on_gpu:  # their rows come from the GPU's memory or from the file
            for i in self._rounded:
                tiers[i] = "disk" if tiers[i] == "cpu" else tiers[i]
        for i in slots:
            tiers[i] = "gpu"
        for item in far:
            if isinstance(item, int):
                tiers[item] = "cpu"
        kv_tiers, kv_layers = assign_tiers(layers, given.kv or ON_DISK), held.count(_KV)
        resident = (
            base.kv_bytes * shape.resident_bytes_per_token // max(1, shape.kv_bytes_per_token)
        )
        a_layer = -(-(base.kv_bytes - resident) // shape.layers)
        waiting = waiting_bytes(shape, base.max_batch_tokens)
        kv_away = kv_layers < shape.layers
        if given.kv:
            kv_away = given.kv[0] < 100 if self.on_gpu else given.kv[2] > 0
        memory = memory_of(
            shape,
            base,
            tuple(tiers),
            kv_away=kv_away,
            roomy=_SECOND in (far if self.on_gpu else held),
            device_roomy=_SECOND in held if self.on_gpu else None,
            budget=self.computing,
        )
        memory["recurrent states"] = self._state_bytes(base.block_size)
        in_ram = sum(memory[kind] for kind in IN_RAM) if self.on_gpu else 0
        buffers = resident + sum(memory.values()) - in_ram  # of gpu as far as it goes
        buffers -= sum(size for size, tier in zip(sizes, tiers, strict=True) if tier != "disk")
        for i, tier in enumerate(tiers):
            room.take(tier, 0 if i in slots or tier == "disk" else sizes[i])
        for tier in kv_tiers if given.kv else ():
            room.take(tier, a_layer)
        for tier, share in zip(TIERS, given.activations or (), strict=False):
            room.take(tier, int(waiting * share / 100))
        near = buffers
        place: Callable[[int], str] = partial(room.take, "gpu")
        if not self.on_gpu:
            near = buffers if room.pooled else max(0, min(buffers, room.left["gpu"]))
            place = room.place
        room.take("gpu", near)
        room.take("cpu", buffers - near + in_ram)
        for i in slots:
            tiers[i] = place(sizes[i])
        if not given.kv:
            kv_tiers = [place(a_layer) for _ in range(kv_layers)]
            kv_tiers += [room.take("cpu", a_layer) for _ in range(far.count(_KV))]
            kv_tiers += [room.take("disk", a_layer) for _ in range(shape.layers - len(kv_tiers))]
        activations = given.activations
        if activations is None:
            tier = "cpu" if _WAITING in far else "disk"
            tier = place(waiting) if _WAITING in held else room.take(tier, waiting)
            activations = _shares([1], [tier])
        memory = {
            "weights": memory.pop("weights"),
            "K and V": resident + a_layer * (shape.layers - kv_tiers.count("disk")),
            "activations": int(waiting * (100 - activations[2]) / 100),
            **memory,
        }
        plan = replace(
            base,
            weights=given.weights or _shares(sizes, tiers),
            kv=given.kv or _shares(layers, kv_tiers),
            activations=activations,
            tiers=tuple(tiers),
            memory={kind: nbytes for kind, nbytes in memory.items() if nbytes},
        )
        return plan, room

    def _with_more_kv(self, forecast: Forecast, room: _Room) -> Plan:
        """Use the free memory for K and V: for the block's sequences or, where no weights are read, for
        longer sequences and cached prefixes.
        """
        options, shape, plan = self.options, self.shape, forecast.plan
        if options.kv_bytes is not None or plan.kv[2]:
            return plan
        useful = self._kv_bytes(plan.block_size)
        if not forecast.prediction.decode.weight_bytes:
            longest = -(-(self.limit or UNLIMITED) // options.block_size)
            blocks = options.max_sequences * longest + 1
            useful = blocks * options.block_size * shape.kv_bytes_per_token
        shares = {room.first: 100.0} if room.pooled else dict(zip(TIERS, plan.kv, strict=True))
        free = min(int(room.left[tier] * 100 / share) for tier, share in shares.items() if share)
        grown = plan.kv_bytes + free
        if self.budget is None:
            grown = min(grown, self.max_kv_bytes)
        kv_bytes = max(plan.kv_bytes, min(grown, useful))
        return replace(plan, kv_bytes=kv_bytes, memory={**plan.memory, "K and V": kv_bytes})

    def _refuse(self) -> NoReturn:
        """Raise an error that names the chosen values, the limits and a sufficient budget."""
        given, options = self.given, self.options
        chosen = {
            "weights": given.weights,
            "kv": given.kv,
            "activations": given.activations,
            "kv_memory": options.kv_bytes,
            "batch_size": given.batch_size,
            "micro_batches": given.micro_batches,
            "max_batch_tokens": None if options.default_batch_tokens else options.max_batch_tokens,
        }
        choices = ", ".join(f"{name}={v}" for name, v in chosen.items() if v is not None)
        choices = f"with {choices}, " if choices else ""
        at_least = None if self.computing is None else self._least(self.computing)
        if at_least is None or (
            at_least[1].suffices and self._ram(at_least[1]) <= (given.cpu or 0)
        ):
            raise TierFailed(
                f"placement=Offload: {choices}the disk tier is too small: "
                f"{given.disk or 'the temporary folder'} has room for {self.disk} bytes "
                f"(disk_limit={given.disk_limit})"
            )
        budgets = f"gpu={given.gpu} and cpu={given.cpu} allow for {self.budget}"
        tried = [int(max(1 << 16, self.computing or 0) * 1.01**n) for n in range(3000)]
        enough = bisect_left(tried, True, key=lambda budget: self._least(budget)[1].suffices)
        if enough == len(tried):
            raise InvalidRequest(f"placement=Offload: {choices}no plan holds all; {budgets}")
        plan, room = self._least(tried[enough])
        where = f" on the GPU and {self._ram(room)} in RAM" if self.on_gpu else ""
        needs = f"{tried[enough]} bytes are needed{where} ({_kinds(plan)})"
        if given.gpu is not None and given.cpu is not None and not self.on_gpu:
            needs += ", in the proportion of gpu and cpu"
        if choices:
            raise InvalidRequest(f"placement=Offload: {choices}at least {needs}; {budgets}")
        raise OutOfBlocks(f"placement=Offload: at least {needs}; {budgets}")

    def _ram(self, room: _Room) -> int:
        """Return the bytes of RAM that a plan of `_least` takes beside a GPU; 0 without one."""
        return UNLIMITED - room.left["cpu"] if self.on_gpu else 0

    def _least(self, budget: int) -> tuple[Plan, _Room]:
        """Return a plan in as little memory as possible, whether it fits into another budget or not.

        Args:
            budget: in the same proportion of gpu and cpu, beside an unlimited disk; on a GPU its memory,
                beside unlimited RAM.
        """
        other = copy(self)
        other.budget, other.disk = budget, UNLIMITED
        gpu, cpu = self.given.gpu, self.given.cpu
        if self.on_gpu:
            other.given = self.given.replace(gpu=budget, cpu=UNLIMITED)
        elif gpu is not None and cpu is not None:
            gpu = budget * gpu // max(1, gpu + cpu)
            other.given = self.given.replace(gpu=gpu, cpu=budget - gpu)
        *_, base = other._sizes(NOMINAL, tight=True)
        starts = [held for order in other._orders(base) for held in accumulate([[], *order])]
        found = [other._assign(base, held) for held in starts]
        return min(found, key=lambda entry: entry[0].memory_bytes)


def _most(order: list[list[Item]], fits: Callable[[Sequence[Item]], bool]) -> list[Item] | None:
    """Return as many items of each group as fit, the first group first; None if not even none fits.

    The last item of a group may free a buffer, so whole groups are tried first.
    """
    groups = [group for group in order if group]
    beginnings = [*accumulate([[], *groups])]
    whole = next((n for n in reversed(range(len(beginnings))) if fits(beginnings[n])), None)
    if whole is None:
        return None
    held = beginnings[whole]
    for group in groups[whole:]:
        counts = range(1, len(group) + 1)
        held = held + group[: bisect_left(counts, True, key=lambda n: not fits(held + group[:n]))]
    return held


def _weights(shape: ModelShape) -> list[list[Item]]:
    """Return the slots in the order in which they are to stay in memory.

    A unit much larger than the others comes first: a head is often as large as six layers, and streamed, it
    would need a ring of that size for itself. Then come weights that every token needs, experts, which only
    some tokens need, and embeddings, of which only rows are read.
    """
    everywhere = ("disk",) * len(shape.slots)
    sizes = sorted((shape.streamed(unit, everywhere), i) for i, unit in enumerate(shape.units))
    is_large = len(sizes) > 2 and sizes[-1][0] >= 2 * sizes[-2][0]
    groups = [
        list(shape.units[sizes[-1][1]].slots if is_large else ()),
        _by_turns(shape, [unit.slots for unit in shape.units if not unit.gathers]),
        _by_turns(shape, [unit.experts for unit in shape.units]),
        list(range(len(shape.slots))),
    ]
    seen = set(shape.held)
    found: list[list[Item]] = []
    for group in groups:
        found.append([i for i in group if i not in seen])
        seen.update(group)
    return found


def _by_turns(shape: ModelShape, units: list[tuple[int, ...]]) -> list[int]:
    """Return slots of units so that any beginning of them is spread evenly over the units.

    That keeps the ring small, which holds two neighbours.
    """
    ranked = [
        (place, number % 2, number, slot)
        for number, slots in enumerate(units)
        for place, slot in enumerate(sorted(slots, key=lambda i: -shape.slots[i].nbytes))
    ]
    return list(dict.fromkeys(slot for *_, slot in sorted(ranked)))


def _shares(sizes: list[int], tiers: list[str]) -> Percents:
    """Return the percents of the sizes in each tier."""
    held = dict.fromkeys(TIERS, 0)
    for size, tier in zip(sizes, tiers, strict=True):
        held[tier] += size
    gpu, cpu, disk = (100 * nbytes / max(1, sum(sizes)) for nbytes in held.values())
    return gpu, cpu, disk


def _kinds(plan: Plan) -> str:
    return ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in plan.memory.items())
