"""The planner: chooses the tiers of an offloaded model and its batch sizes."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, product
from math import ceil
from pathlib import Path
from shutil import disk_usage
from typing import NoReturn

import torch

from verbatim.errors import InvalidRequest, OutOfBlocks, TierFailed
from verbatim.model.products import threads
from verbatim.options import available_memory
from verbatim.placement.offload.choice import TIERS, Offload, Percents, assign_tiers
from verbatim.placement.offload.cost import Forecast, Plan
from verbatim.placement.offload.kv import NUM_STAGED
from verbatim.placement.offload.machine import NOMINAL, NOMINAL_GPU, ROWS, Machine, measure
from verbatim.placement.offload.report import amount, sentences
from verbatim.placement.offload.shape import ModelShape, shape_of
from verbatim.placement.offload.stream import READERS
from verbatim.placement.offload.units import Units
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions, OpenRequest
from verbatim.weights.lazy import sources

IN_MEMORY: Percents = (100.0, 0.0, 0.0)
ON_DISK: Percents = (0.0, 0.0, 100.0)
UNLIMITED = 1 << 60  # bytes
BUDGET_SHARE = 0.6  # of the available memory, if no budget is given
_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MAX_ROWS = 8192  # rows of a forward
_PROMPT_ROWS = 16, 256  # minimum and maximum of `Plan.prompt_rows`
_ROOM_TO_GROW = 1.25  # growth factor of the staging buffers for K and V
# Among plans this fast, relative to the fastest, K and V in memory and then the least work per token win.
_MIN_RELATIVE_SPEED = 0.97

# An item to place in memory: the index of a slot, or one of the strings below.
Item = int | str
_KV = "K and V of a layer"
_SECOND_UNIT = "a second unit in the ring"
_WAITING = "waiting activations"

# Kinds of memory that are in RAM when a GPU computes. All others are on the GPU, except weights, K and V and
# activations in the cpu tier.
_RAM_KINDS = ("ring", "converted weights", "experts", "expert buffers", "K and V buffers")


class _Room:
    """The free bytes of each tier; a single budget covers all memory."""

    def __init__(self, offload: Offload, budget: int, disk: int, *, on_gpu: bool) -> None:
        self.pooled = offload.gpu is None or offload.cpu is None
        # What the gpu tier has no room for goes to cpu.
        self.spills = not self.pooled and not on_gpu
        self.first = "cpu" if offload.gpu is None and offload.cpu is not None else "gpu"
        self.free = {"disk": disk, self.first: budget}
        if not self.pooled:
            self.free |= {"gpu": offload.gpu or 0, "cpu": offload.cpu or 0}

    def take(self, tier: str, nbytes: int) -> str:
        """Take bytes from a tier, even if fewer are free; return the tier."""
        self.free[self.first if self.pooled and tier != "disk" else tier] -= nbytes
        return tier

    def place(self, nbytes: int) -> str:
        """Take bytes from the gpu tier; without a GPU, from cpu if it has too few. Return the tier."""
        return self.take("cpu" if self.spills and nbytes > self.free["gpu"] else self.first, nbytes)

    @property
    def suffices(self) -> bool:
        return min(self.free.values()) >= 0


class Planner:
    """Makes plans for a model, within the user's choices and the limits.

    Args:
        limit: maximum tokens of a sequence; None: unlimited.

    Attributes:
        disk: capacity of the disk tier in bytes, without the checkpoint.
        budget: bytes of gpu and cpu together; None: unlimited.
        workload: (prompt, new) tokens, within the model's limit.
        max_kv_bytes: maximum bytes of K and V if there is no budget.
    """

    def __init__(
        self, shape: ModelShape, offload: Offload, options: EngineOptions, limit: int | None
    ) -> None:
        self.shape, self.options, self.limit = shape, options, limit
        self.on_gpu = options.device.separate_device is not None
        self.budget: int | None = None
        is_given = offload.gpu is not None or offload.cpu is not None
        if self.on_gpu and (is_given or offload.weights is None):
            near, far = options.device.available_memory, available_memory()
            offload = offload.replace(
                gpu=int(near * BUDGET_SHARE) if offload.gpu is None else offload.gpu,
                cpu=int(far * BUDGET_SHARE) if offload.cpu is None else offload.cpu,
            )
        self.offload = offload
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
        self._unpacked_bytes = max(map(shape.unpacked_bytes, shape.units), default=0)
        on_disk = ("disk",) * len(shape.slots)
        self._converted = [unit for unit in shape.units if shape.converted_bytes(unit, on_disk)]
        # Slots of quantized embeddings: on a GPU, never in RAM, but in its memory or in the file.
        self._rounded = {
            i
            for unit in shape.units
            if unit.gathers
            for i in unit.slots
            if shape.slots[i].is_quantized
        }

    @property
    def compute_budget(self) -> int | None:
        """Budget of the memory that computation uses, in bytes: on a GPU, its own."""
        return self.offload.gpu if self.on_gpu else self.budget

    def may_spill(self) -> bool:
        """Return whether K and V or activations may be placed on the disk."""
        offload = self.offload
        if (offload.kv or IN_MEMORY)[2] or (offload.activations or IN_MEMORY)[2]:
            return True
        if offload.kv is not None or self.budget is None:
            return False
        return self._kv_bytes(self.options.max_sequences) + self.shape.nbytes > self.budget

    def best(self, machine: Machine) -> Forecast:
        """Return the plan with the most predicted tokens/s within the budgets and the user's choices.

        Blocks of 1, 2, 4, ... sequences are tried. For each, memory is filled with the items that save the
        most reading (`_orders`), as many as fit, and `cost.py` predicts the time.

        Raises:
            OutOfBlocks: the budgets are too small for any plan; the message names a sufficient budget.
            InvalidRequest: the budgets are too small for the user's choices.
            TierFailed: the disk tier is too small.
        """
        offload = self.offload
        block = (offload.batch_size or 1) * (offload.micro_batches or 1)
        if block > self.options.max_sequences:
            raise InvalidRequest(
                f"batch_size={offload.batch_size} and micro_batches={offload.micro_batches} make "
                f"{block} concurrent sequences, more than "
                f"max_sequences={self.options.max_sequences}"
            )
        for tight in (False, True):
            bases = list(self._sizes(machine, tight=tight))
            plans = (self._fill(base, order) for base in bases for order in self._orders(base))
            entries = [
                (Forecast(self.shape, machine, plan), room) for plan, room in filter(None, plans)
            ]
            if entries:
                break
        else:
            self._refuse()
        fastest = max(forecast.prediction.tokens_per_s for forecast, _ in entries)

        def cost(entry: tuple[Forecast, _Room]) -> tuple[bool, float]:
            plan, prediction = entry[0].plan, entry[0].prediction
            step = prediction.decode
            # Forecasts leave out the overhead of each access to K and V on the disk.
            busy_s = step.io_s + step.bus_s + step.compute_s
            return plan.kv[2] > 0, busy_s / prediction.sequences

        threshold = _MIN_RELATIVE_SPEED * fastest
        best, room = min(
            (entry for entry in entries if entry[0].prediction.tokens_per_s >= threshold), key=cost
        )
        plan = self._with_more_kv(best, room)
        if self.budget is None and not self.on_gpu and plan.memory_bytes > available_memory():
            raise OutOfBlocks(
                f"placement=Offload: {plan.memory_bytes} bytes are needed ({_memory_text(plan)}), and "
                f"{available_memory()} are available"
            )
        reasons = sentences(replace(best, plan=plan), offload)
        return replace(best, plan=replace(plan, reasons=reasons))

    def _kv_bytes(self, sequences: int) -> int:
        """Return the bytes of K and V: whole blocks for `sequences` of the workload, and the scratch block.

        As the workload is only typical, there is also room for one sequence of the maximum length, as far as
        a quarter of the budget allows.
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
        """Return the bytes of recurrent states: two per sequence, one per cached prefix, and zeros."""
        state_bytes = self.shape.state_bytes
        if state_bytes and self.options.kv_bytes is not None:
            return self.options.num_states(state_bytes) * state_bytes
        return (1 + 3 * sequences) * state_bytes

    def _sizes(self, machine: Machine, *, tight: bool) -> Iterator[Plan]:
        """Yield the batch sizes to try, as plans with nothing placed in memory yet.

        Args:
            tight: use as little memory as possible, with K and V for fewer tokens than the workload has; the
                last plan takes the least.
        """
        shape, offload, options = self.shape, self.offload, self.options
        room = UNLIMITED if self.compute_budget is None else self.compute_budget
        step, most = (offload.batch_size or 1) * (offload.micro_batches or 1), options.max_sequences
        blocks, micro_sizes, most_rows = [step], list(_MICRO_TOKENS[4:]), 0
        if not tight:
            if not (offload.batch_size and offload.micro_batches):
                doubled = (step << n for n in range(most.bit_length()))
                blocks = sorted({*(n for n in doubled if n < most), most // step * step})
            micro_sizes = [n for n in _MICRO_TOKENS if shape.working_bytes(n) <= room // 8][:3:2]
            # With `target_rows` rows, computing a prompt takes twice as long as reading all weights.
            chosen = shape.experts_per_token / max(1, shape.experts)
            elements = sum(s.elements * (chosen if s.of_experts else 1) for s in shape.slots)
            row_s = max(1, elements) * machine.packed(ROWS[-1]) / ROWS[-1]
            rate = machine.bus_rate or machine.read_rate
            target_rows = max(256, int(2 * shape.nbytes / rate / row_s))
            most_rows = min(target_rows, _MAX_ROWS, room // 12 // shape.waiting_bytes(1))
            most_rows = 1 << most_rows.bit_length() >> 1
        least, prompt_rows = _PROMPT_ROWS
        if self.compute_budget is not None:
            fitting = self.compute_budget // 30 // shape.logits_bytes(1)
            prompt_rows = max(least, min(prompt_rows, fitting))
        for block in blocks:
            sizes = {offload.batch_size or block // (offload.micro_batches or 1)}
            if not (offload.batch_size or offload.micro_batches) and (
                offload.kv is None or offload.kv[2]
            ):
                sizes.add(max(1, block // 8))  # smaller micro-batches need smaller buffers
            kv_bytes, rows = self._kv_bytes(block), options.max_batch_tokens
            if tight and options.kv_bytes is None:
                kv_bytes = min(kv_bytes, 2 * options.block_size * shape.kv_bytes_per_token)
            if options.plan_sets_batch_tokens:
                rows = block if tight else max(block, min(block * self.workload[0], most_rows))
            for batch_size, micro_tokens in product(sizes, micro_sizes):
                yield Plan(
                    weights=offload.weights or ON_DISK,
                    kv=offload.kv or ON_DISK,
                    activations=offload.activations or ON_DISK,
                    kv_bytes=kv_bytes,
                    kv_block=options.block_size,
                    batch_size=batch_size,
                    micro_batches=block // batch_size,
                    micro_tokens=micro_tokens,
                    max_batch_tokens=rows,
                    workload=self.workload,
                    prompt_rows=prompt_rows,
                    overlap=offload.overlap,
                    budget=self.budget,
                )

    def _orders(self, base: Plan) -> list[list[list[Item]]]:
        """Return orders in which to fill memory, as groups of items of one kind.

        Every byte of one kind saves about the same disk time, so either K and V or weights go first. If
        memory is short, K and V are worth more than a second unit in the ring.
        """
        shape, offload = self.shape, self.offload
        num_overflowing = -(-(base.kv_bytes - self.disk) * shape.layers // max(1, base.kv_bytes))
        overflow: list[Item] = [_KV] * max(0, num_overflowing)  # the disk has no room for these
        kv: list[Item] = [] if offload.kv else [_KV] * (shape.layers - len(overflow))
        waiting: list[Item] = [] if offload.activations else [_WAITING]
        start = [[] if offload.kv else overflow, waiting]
        large, needed, experts, gathered = _groups(shape) if offload.weights is None else [[]] * 4
        return [
            [*start, kv, large, [_SECOND_UNIT], needed, experts, gathered],
            [*start, large, [_SECOND_UNIT], needed, experts, kv, gathered],
            [*start, large, needed, experts, kv, gathered],
        ]

    def _fill(self, base: Plan, order: list[list[Item]]) -> tuple[Plan, _Room] | None:
        """Return the plan with as many items of each group in memory as fit, in order, and its free bytes.

        Returns None if memory is too small for no items at all. A GPU's memory is filled before RAM.
        """

        def fits(items: Sequence[Item]) -> bool:
            room = self._assign(base, items)[1]
            return room.free["gpu"] >= 0 if self.on_gpu else room.suffices

        items, ram_items = _longest_prefix(order, fits), None
        if items is None:
            return None
        if self.on_gpu:
            taken = Counter(item for item in items if item != _SECOND_UNIT)
            remaining: list[list[Item]] = []
            for group in order:
                rest = (Counter(group) - taken).elements()
                remaining.append([item for item in rest if item not in self._rounded])
                taken -= Counter(group)
            ram_items = _longest_prefix(
                remaining, lambda more: self._assign(base, items, more)[1].suffices
            )
            if ram_items is None:
                return None
        return self._assign(base, items, ram_items or ())

    def _assign(
        self, base: Plan, items: Sequence[Item], ram_items: Sequence[Item] = ()
    ) -> tuple[Plan, _Room]:
        """Return a plan with these items in memory, whether they fit or not, and its free bytes.

        Percents given by the user are applied; everything else fills the gpu tier first.

        Args:
            base: plan with the batch sizes.
            items: items in memory; with a GPU, in its memory.
            ram_items: items in RAM, with a GPU.
        """
        shape, offload = self.shape, self.offload
        budget = UNLIMITED if self.budget is None else self.budget
        room = _Room(offload, budget, self.disk, on_gpu=self.on_gpu)
        sizes, layers = [slot.nbytes for slot in shape.slots], [1] * shape.layers
        slots = dict.fromkeys([*shape.resident, *(item for item in items if isinstance(item, int))])
        tiers = assign_tiers(sizes, offload.weights) if offload.weights else ["disk"] * len(sizes)
        if self.on_gpu:  # their rows come from the GPU's memory or from the file
            for i in self._rounded:
                tiers[i] = "disk" if tiers[i] == "cpu" else tiers[i]
        for i in slots:
            tiers[i] = "gpu"
        for item in ram_items:
            if isinstance(item, int):
                tiers[item] = "cpu"
        resident = (
            base.kv_bytes * shape.resident_bytes_per_token // max(1, shape.kv_bytes_per_token)
        )
        kv_size = -(-(base.kv_bytes - resident) // shape.layers)
        waiting = shape.waiting_bytes(base.max_batch_tokens)
        memory = self._buffers(base, tuple(tiers), items, ram_items)
        # Bytes of the weights in memory that are in the cache of experts.
        cached = max(0, memory["experts"] - shape.min_expert_cache_bytes)
        in_ram = sum(memory[kind] for kind in _RAM_KINDS) if self.on_gpu else 0
        buffers = resident + sum(memory.values()) - cached - in_ram  # in the gpu tier, if they fit
        for i, tier in enumerate(tiers):
            if tier != "disk" and i not in slots:
                room.take(tier, sizes[i])
        kv_tiers = assign_tiers(layers, offload.kv) if offload.kv else []
        for tier in kv_tiers:
            room.take(tier, kv_size)
        for tier, share in zip(TIERS, offload.activations or (), strict=False):
            room.take(tier, int(waiting * share / 100))
        gpu_buffers = max(0, min(buffers, room.free["gpu"])) if room.spills else buffers
        room.take("gpu", gpu_buffers)
        room.take("cpu", buffers - gpu_buffers + in_ram)
        for i in slots:
            tiers[i] = room.place(sizes[i])
        if not offload.kv:
            kv_tiers = [room.place(kv_size) for _ in range(items.count(_KV))]
            kv_tiers += [room.take("cpu", kv_size) for _ in range(ram_items.count(_KV))]
            kv_tiers += [room.take("disk", kv_size) for _ in range(shape.layers - len(kv_tiers))]
        activations = offload.activations
        if activations is None:
            tier = "cpu" if _WAITING in ram_items else "disk"
            tier = room.place(waiting) if _WAITING in items else room.take(tier, waiting)
            activations = _shares([1], [tier])
        in_memory = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier != "disk")
        memory = {
            "weights": in_memory - cached,
            "K and V": resident + kv_size * (shape.layers - kv_tiers.count("disk")),
            "activations": int(waiting * (100 - activations[2]) / 100),
            **memory,
        }
        plan = replace(
            base,
            weights=offload.weights or _shares(sizes, tiers),
            kv=offload.kv or _shares(layers, kv_tiers),
            activations=activations,
            tiers=tuple(tiers),
            memory={kind: nbytes for kind, nbytes in memory.items() if nbytes},
        )
        return plan, room

    def _buffers(
        self,
        base: Plan,
        tiers: tuple[str, ...],
        items: Sequence[Item],
        ram_items: Sequence[Item],
    ) -> dict[str, int]:
        """Return the bytes by kind that a plan takes beside weights, K and V and waiting activations.

        Staging buffers for K and V are sized for the workload.
        """
        shape, kv = self.shape, self.offload.kv
        kv_in_place = items.count(_KV) == shape.layers
        if kv:
            kv_in_place = kv[0] == 100 if self.on_gpu else kv[2] == 0
        staged = 0
        if not kv_in_place:
            tokens = base.batch_size * sum(self.workload)
            staged = int(NUM_STAGED * _ROOM_TO_GROW * tokens * ceil(shape.layer_kv_bytes))
        experts, budget = shape.expert_cache_bytes(tiers), self.compute_budget
        copied = [shape.copied_bytes(unit, tiers) for unit in shape.units if self.on_gpu]
        rows = min(base.micro_tokens, base.max_batch_tokens)
        return {
            "ring": _ring_bytes(
                [shape.streamed_bytes(unit, tiers) for unit in shape.units],
                roomy=_SECOND_UNIT in (ram_items if self.on_gpu else items),
            ),
            "GPU ring": _ring_bytes(copied, roomy=_SECOND_UNIT in items),
            "experts": experts,
            "expert buffers": READERS
            * max(unit.expert_buffer for unit in shape.units)
            * bool(experts),
            "unpacked weights": self._unpacked_bytes,
            "converted weights": max(
                (shape.converted_bytes(unit, tiers) for unit in self._converted), default=0
            ),
            "computation": shape.working_bytes(rows),
            "logits": shape.logits_bytes(base.block_size + base.prompt_rows),
            "K and V buffers": staged // (NUM_STAGED if self.on_gpu else 1),
            "GPU K and V buffers": staged if self.on_gpu else 0,
            "MTP layers": shape.draft_bytes,
            # Untracked memory, such as malloc's overhead: a sixteenth of the budget, at most 100 MB.
            "slack": 0 if budget is None else min(100_000_000, budget // 16),
            "recurrent states": self._state_bytes(base.block_size),
        }

    def _with_more_kv(self, forecast: Forecast, room: _Room) -> Plan:
        """Use free memory for K and V: of the block's sequences or, if no weights are read, of any more."""
        options, shape, plan = self.options, self.shape, forecast.plan
        if options.kv_bytes is not None or plan.kv[2]:
            return plan
        useful = self._kv_bytes(plan.block_size)
        if not forecast.prediction.decode.weight_bytes:
            longest = -(-(self.limit or UNLIMITED) // options.block_size)
            blocks = options.max_sequences * longest + 1
            useful = blocks * options.block_size * shape.kv_bytes_per_token
        shares = {room.first: 100.0} if room.pooled else dict(zip(TIERS, plan.kv, strict=True))
        free = min(int(room.free[tier] * 100 / share) for tier, share in shares.items() if share)
        grown = plan.kv_bytes + free
        if self.budget is None:
            grown = min(grown, self.max_kv_bytes)
        kv_bytes = max(plan.kv_bytes, min(grown, useful))
        return replace(plan, kv_bytes=kv_bytes, memory={**plan.memory, "K and V": kv_bytes})

    def _refuse(self) -> NoReturn:
        """Raise an error that names the chosen values, the limits and a sufficient budget."""
        offload, options = self.offload, self.options
        chosen = {
            "weights": offload.weights,
            "kv": offload.kv,
            "activations": offload.activations,
            "kv_memory": options.kv_bytes,
            "batch_size": offload.batch_size,
            "micro_batches": offload.micro_batches,
            "max_batch_tokens": None
            if options.plan_sets_batch_tokens
            else options.max_batch_tokens,
        }
        choices = ", ".join(f"{name}={v}" for name, v in chosen.items() if v is not None)
        choices = f"with {choices}, " if choices else ""
        at_least = None if self.compute_budget is None else self._smallest_plan(self.compute_budget)
        if at_least is None or (
            at_least[1].suffices and self._ram(at_least[1]) <= (offload.cpu or 0)
        ):
            raise TierFailed(
                f"placement=Offload: {choices}the disk tier is too small: "
                f"{offload.disk or 'the temporary folder'} has room for {self.disk} bytes "
                f"(disk_limit={offload.disk_limit})"
            )
        budgets = f"gpu={offload.gpu} and cpu={offload.cpu} allow for {self.budget}"
        tried = [int(max(1 << 16, self.compute_budget or 0) * 1.01**n) for n in range(3000)]
        enough = bisect_left(
            tried, True, key=lambda budget: self._smallest_plan(budget)[1].suffices
        )
        if enough == len(tried):
            raise InvalidRequest(f"placement=Offload: {choices}no plan fits; {budgets}")
        plan, room = self._smallest_plan(tried[enough])
        where = f" on the GPU and {self._ram(room)} in RAM" if self.on_gpu else ""
        needs = f"{tried[enough]} bytes are needed{where} ({_memory_text(plan)})"
        if offload.gpu is not None and offload.cpu is not None and not self.on_gpu:
            needs += ", in the proportion of gpu and cpu"
        if choices:
            raise InvalidRequest(f"placement=Offload: {choices}at least {needs}; {budgets}")
        raise OutOfBlocks(f"placement=Offload: at least {needs}; {budgets}")

    def _ram(self, room: _Room) -> int:
        """Return the bytes of RAM that a plan of `_smallest_plan` takes beside a GPU; 0 without a GPU."""
        return UNLIMITED - room.free["cpu"] if self.on_gpu else 0

    def _smallest_plan(self, budget: int) -> tuple[Plan, _Room]:
        """Return the plan that takes the least memory, whether it fits or not, and its free bytes.

        Args:
            budget: bytes in the user's proportion of gpu and cpu, with an unlimited disk; on a GPU, bytes of
                its memory, with unlimited RAM.
        """
        planner = copy(self)
        planner.budget, planner.disk = budget, UNLIMITED
        gpu, cpu = self.offload.gpu, self.offload.cpu
        if self.on_gpu:
            planner.offload = self.offload.replace(gpu=budget, cpu=UNLIMITED)
        elif gpu is not None and cpu is not None:
            gpu = budget * gpu // max(1, gpu + cpu)
            planner.offload = self.offload.replace(gpu=gpu, cpu=budget - gpu)
        *_, base = planner._sizes(NOMINAL, tight=True)
        beginnings = [
            items for order in planner._orders(base) for items in accumulate([[], *order])
        ]
        plans = [planner._assign(base, items) for items in beginnings]
        return min(plans, key=lambda entry: entry[0].memory_bytes)


def forecast(model: OpenRequest, offload: Offload, units: Units) -> Forecast:
    """Make a plan; with `policy="auto"`, measure the machine first, once per process.

    Raises:
        OutOfBlocks, InvalidRequest: as for `Planner.best`.
        TierFailed: as for `Planner.best` and `measure`.
    """
    dtype = next(
        (slot.parameter.dtype for slot in units.slots if slot.parameter.is_floating_point()),
        torch.float32,
    )
    options, device = model.options, model.options.device.separate_device
    shape = shape_of(model.loaded, units, dtype, options.kv_dtype, model.draft)
    planner = Planner(shape, offload, options, model.limit)
    machine = NOMINAL if device is None else NOMINAL_GPU
    if offload.policy is not None:
        folder = None
        if planner.may_spill():
            folder = offload.disk or Path(tempfile.gettempdir())
        tensors = [stored for slot in units.slots for stored in sources(slot.lazy)]
        with threads(options.num_threads), options.device.current():
            machine = measure(tensors, folder, dtype, offload.disk_limit, device, units.packing)
    return planner.best(machine)


def _ring_bytes(sizes: list[int], *, roomy: bool) -> int:
    """Return the size of the staging buffer for weights.

    Args:
        sizes: bytes of the units in the order of a forward.
        roomy: whether two neighbours fit, so that one is read while the other is used; else one unit.
    """
    sizes = [size for size in sizes if size]
    if not roomy or len(sizes) < 2:
        return max(sizes, default=0)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


def _longest_prefix(
    order: list[list[Item]], fits: Callable[[Sequence[Item]], bool]
) -> list[Item] | None:
    """Return as many items of each group as fit, in order; None if not even an empty list fits.

    The last item of a group may free a buffer, so whole groups are tried first.
    """
    groups = [group for group in order if group]
    prefixes = [*accumulate([[], *groups])]
    num_whole = next((n for n in reversed(range(len(prefixes))) if fits(prefixes[n])), None)
    if num_whole is None:
        return None
    held = prefixes[num_whole]
    for group in groups[num_whole:]:
        counts = range(1, len(group) + 1)
        held = held + group[: bisect_left(counts, True, key=lambda n: not fits(held + group[:n]))]
    return held


def _groups(shape: ModelShape) -> list[list[Item]]:
    """Return the slots in groups, in the order in which they are placed in memory.

    A unit much larger than the others comes first: an LM head is often as large as six layers, and streaming
    it would need a ring of that size. Then come the weights that every token needs, then experts, which only
    some tokens need, and embeddings, from which only rows are read.
    """
    all_on_disk = ("disk",) * len(shape.slots)
    sizes = sorted(
        (shape.streamed_bytes(unit, all_on_disk), i) for i, unit in enumerate(shape.units)
    )
    is_large = len(sizes) > 2 and sizes[-1][0] >= 2 * sizes[-2][0]
    groups = [
        list(shape.units[sizes[-1][1]].slots if is_large else ()),
        _interleaved(shape, [unit.slots for unit in shape.units if not unit.gathers]),
        _interleaved(shape, [unit.experts for unit in shape.units]),
        list(range(len(shape.slots))),
    ]
    seen = set(shape.resident)
    unique: list[list[Item]] = []
    for group in groups:
        unique.append([i for i in group if i not in seen])
        seen.update(group)
    return unique


def _interleaved(shape: ModelShape, units: list[tuple[int, ...]]) -> list[int]:
    """Order the slots of units so that every prefix is spread evenly over the units, for a small ring."""
    ranked = [
        (rank, index % 2, index, slot)
        for index, slots in enumerate(units)
        for rank, slot in enumerate(sorted(slots, key=lambda i: -shape.slots[i].nbytes))
    ]
    return list(dict.fromkeys(slot for *_, slot in sorted(ranked)))


def _shares(sizes: list[int], tiers: list[str]) -> Percents:
    """Return the percents of the total size in each tier."""
    held = dict.fromkeys(TIERS, 0)
    for size, tier in zip(sizes, tiers, strict=True):
        held[tier] += size
    gpu, cpu, disk = (100 * nbytes / max(1, sum(sizes)) for nbytes in held.values())
    return gpu, cpu, disk


def _memory_text(plan: Plan) -> str:
    return ", ".join(f"{kind} {amount(nbytes)}" for kind, nbytes in plan.memory.items())
