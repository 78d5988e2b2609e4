"""The planner: chooses the tiers of an offloaded model and its batch sizes."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import accumulate, product
from operator import or_
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

ON_DISK: Percents = (0.0, 0.0, 100.0)
UNLIMITED = 1 << 60  # bytes
BUDGET_SHARE = 0.6  # of the available memory, if no budget is given
_MICRO_TOKENS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
_MAX_ROWS = 8192  # rows of a forward
_PROMPT_ROWS = 16, 256  # minimum and maximum of `Plan.prompt_rows`
_ROOM_TO_GROW = 1.25  # growth factor of the staging buffers for K and V
# Among plans this fast, relative to the fastest, K and V in memory and then the least work per token win.
_MIN_RELATIVE_SPEED = 0.97

# What memory holds: the number of layers of K and V ("kv"), of slots of each group of `_groups`, of waiting
# activations (0 or 1), and of second units in the ring (0 or 1).
Held = Counter[str]
_NOTHING: Held = Counter()

# Kinds of memory that are in RAM when a GPU computes. All others are on the GPU, except weights, K and V and
# activations in the cpu tier.
_RAM_KINDS = ("ring", "converted weights", "experts", "expert buffers", "K and V buffers")


class Planner:
    """Makes plans for a model, within the user's choices and the limits.

    Args:
        limit: maximum tokens of a sequence; None: unlimited.

    Attributes:
        budgets: bytes of the tiers in memory; of a single one, it covers both tiers; empty: unlimited.
        disk: capacity of the disk tier in bytes, without the checkpoint.
        workload: (prompt, new) tokens, within the model's limit.
        max_kv_bytes: maximum bytes of K and V if there is no budget.
    """

    def __init__(
        self, shape: ModelShape, offload: Offload, options: EngineOptions, limit: int | None
    ) -> None:
        self.shape, self.options, self.limit = shape, options, limit
        self.on_gpu = options.device.separate_device is not None
        is_given = offload.gpu is not None or offload.cpu is not None
        if self.on_gpu and (is_given or offload.weights is None):
            near, far = options.device.available_memory, available_memory()
            offload = offload.replace(
                gpu=int(near * BUDGET_SHARE) if offload.gpu is None else offload.gpu,
                cpu=int(far * BUDGET_SHARE) if offload.cpu is None else offload.cpu,
            )
        self.offload = offload
        given = {"gpu": offload.gpu, "cpu": offload.cpu}
        self.budgets = {tier: nbytes for tier, nbytes in given.items() if nbytes is not None}
        if not self.budgets and offload.weights is None:
            self.budgets = {"gpu": int(available_memory() * BUDGET_SHARE)}
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
        # Slots of quantized embeddings, whose rows come from a GPU's memory or from the file, never from RAM.
        self._rounded = [
            i
            for unit in shape.units
            if unit.gathers and self.on_gpu
            for i in unit.slots
            if shape.slots[i].is_quantized
        ]
        self._groups = _groups(shape)

    @property
    def budget(self) -> int | None:
        """Bytes of all memory; None: unlimited."""
        return sum(self.budgets.values()) if self.budgets else None

    @property
    def compute_budget(self) -> int | None:
        """Budget of the memory that computation uses, in bytes: on a GPU, its own."""
        return self.budgets.get("gpu") if self.on_gpu else self.budget

    @property
    def _has_kv_size(self) -> bool:
        """True if the size of the KV cache is given, and not chosen by the plan."""
        return self.options.kv_bytes is not None or self.options.cache_sizes is not None

    def may_spill(self) -> bool:
        """Return whether K and V or activations may be placed on the disk."""
        offload = self.offload
        if any(given and given[2] for given in (offload.kv, offload.activations)):
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
            bases = self._sizes(machine, tight=tight)
            filled = (self._fill(base, order) for base in bases for order in self._orders(base))
            entries = [
                (Forecast(self.shape, machine, plan), free) for plan, free in filter(None, filled)
            ]
            if entries:
                break
        else:
            self._refuse()
        fastest = max(forecast.prediction.tokens_per_s for forecast, _ in entries)

        def cost(entry: tuple[Forecast, Mapping[str, int]]) -> tuple[bool, float]:
            plan, prediction = entry[0].plan, entry[0].prediction
            step = prediction.decode
            # Forecasts leave out the overhead of each access to K and V on the disk.
            busy_s = step.io_s + step.bus_s + step.compute_s
            return plan.kv[2] > 0, busy_s / prediction.sequences

        threshold = _MIN_RELATIVE_SPEED * fastest
        best, free = min(
            (entry for entry in entries if entry[0].prediction.tokens_per_s >= threshold), key=cost
        )
        plan = self._with_more_kv(best, free)
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
        block = self.options.block_size
        block_bytes = block * self.shape.kv_bytes_per_token
        if self.options.cache_sizes is not None:
            return self.options.cache_sizes[0] * block_bytes
        if self.options.kv_bytes is not None:
            return self.options.kv_bytes - self._state_bytes(sequences)
        blocks = sequences * -(-sum(self.workload) // block) + 1
        if self.limit is not None and self.budget is not None:
            longest = -(-self.limit // block) + 1
            blocks = max(blocks, min(longest, self.budget // 4 // max(1, block_bytes)))
        return min(blocks, max(2, self.max_kv_bytes // max(1, block_bytes))) * block_bytes

    def _state_bytes(self, sequences: int) -> int:
        """Return the bytes of recurrent states: two per sequence, one per cached prefix, and zeros."""
        state_bytes = self.shape.state_bytes
        if state_bytes and self._has_kv_size:
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
            if tight and not self._has_kv_size:
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

    def _orders(self, base: Plan) -> list[list[tuple[str, int]]]:
        """Return orders in which to fill memory, as stages: what to hold (`Held`), up to which count.

        Every byte of one kind saves about the same disk time, so either K and V or weights go first. If
        memory is short, K and V are worth more than a second unit in the ring.
        """
        layers = len(self.shape.kv_layers)
        num_overflowing = -(-(base.kv_bytes - self.disk) * layers // max(1, base.kv_bytes))
        # The disk has no room for the overflowing layers.
        start = [("kv", max(0, num_overflowing)), ("waiting", 1)]
        kv, second = ("kv", layers), ("second", 1)
        large, needed, experts, gathered = (
            (name, len(group)) for name, group in self._groups.items()
        )
        orders = [
            [*start, kv, large, second, needed, experts, gathered],
            [*start, large, second, needed, experts, kv, gathered],
            [*start, large, needed, experts, kv, gathered],
        ]
        given = dict.fromkeys(self._groups, self.offload.weights)
        given |= {"kv": self.offload.kv, "waiting": self.offload.activations}
        return [[s for s in order if given.get(s[0]) is None] for order in orders]

    def _fill(
        self, base: Plan, order: list[tuple[str, int]]
    ) -> tuple[Plan, Mapping[str, int]] | None:
        """Return the plan with as much of each stage in memory as fits, in order, and its free bytes.

        Returns None if memory is too small even with nothing in it. A GPU's memory is filled before RAM.
        """

        def fits(held: Held) -> bool:
            free = self._place(base, held)[1]
            return (free["gpu"] if self.on_gpu else min(free.values())) >= 0

        held = _most(order, fits)
        if held is None or not self.on_gpu:
            return None if held is None else self._place(base, held)
        taken = held - Held(second=1)
        remaining = [(kind, max(0, count - taken[kind])) for kind, count in order]
        in_ram = _most(remaining, lambda ram: min(self._place(base, held, ram)[1].values()) >= 0)
        return None if in_ram is None else self._place(base, held, in_ram)

    def _place(
        self, base: Plan, held: Held, in_ram: Held = _NOTHING
    ) -> tuple[Plan, Mapping[str, int]]:
        """Return the plan with this in memory, whether it fits or not, and the free bytes of each tier.

        Percents given by the user are applied; everything else fills the gpu tier first.

        Args:
            base: plan with the batch sizes.
            held: what memory holds; with a GPU, its memory.
            in_ram: what RAM holds, with a GPU.
        """
        shape, offload = self.shape, self.offload
        free = (self.budgets or {"gpu": UNLIMITED}) | {"disk": self.disk}
        first = next(iter(free))
        # What the gpu tier has no room for goes to cpu.
        spills = len(self.budgets) == 2 and not self.on_gpu

        def take(tier: str, nbytes: int) -> str:
            """Take bytes from a tier, even if fewer are free; return the tier."""
            free[tier if tier in free else first] -= nbytes
            return tier

        def place(nbytes: int) -> str:
            return take("cpu" if spills and nbytes > free["gpu"] else first, nbytes)

        sizes, layers = [slot.nbytes for slot in shape.slots], len(shape.kv_layers)
        slots = [*shape.resident]
        tiers = assign_tiers(sizes, offload.weights) if offload.weights else ["disk"] * len(sizes)
        for name, group in self._groups.items():
            slots += group[: held[name]]
            for i in group[held[name] :][: in_ram[name]]:
                tiers[i] = "cpu"
        for i in self._rounded:
            tiers[i] = "disk" if tiers[i] == "cpu" else tiers[i]
        for i in slots:
            tiers[i] = "gpu"
        token_bytes = max(1, shape.kv_bytes_per_token)
        resident = base.kv_bytes * shape.resident_bytes_per_token // token_bytes
        kv_sizes = [-(-base.kv_bytes * nbytes // token_bytes) for nbytes in shape.kv_layers]
        num_held = held["kv"], in_ram["kv"], layers - held["kv"] - in_ram["kv"]
        kv = offload.kv or _shares([*num_held], [*TIERS])
        kv_tiers = assign_tiers(shape.kv_layers, kv)  # as the store does
        waiting = shape.waiting_bytes(base.max_batch_tokens)
        memory = self._buffers(base, tuple(tiers), kv_tiers, held, in_ram)
        # Bytes of the weights in memory that are in the cache of experts.
        cached = max(0, memory["experts"] - shape.min_expert_cache_bytes)
        in_ram_bytes = sum(memory[kind] for kind in _RAM_KINDS) if self.on_gpu else 0
        buffers = resident + sum(memory.values()) - cached - in_ram_bytes
        for i in {*range(len(tiers))}.difference(slots):
            if tiers[i] != "disk":
                take(tiers[i], sizes[i])
        for tier, nbytes in zip(kv_tiers, kv_sizes, strict=True) if offload.kv else ():
            take(tier, nbytes)
        for tier, share in zip(TIERS, offload.activations or (), strict=False):
            take(tier, int(waiting * share / 100))
        spilled = max(0, buffers - max(0, free["gpu"])) if spills else 0
        take("gpu", buffers - spilled)
        take("cpu", spilled + in_ram_bytes)
        for i in slots:
            tiers[i] = place(sizes[i])
        if not offload.kv:
            pairs = zip(kv_tiers, kv_sizes, strict=True)
            kv_tiers = [place(size) if tier == "gpu" else take(tier, size) for tier, size in pairs]
            kv = _shares([*shape.kv_layers], kv_tiers) if spills else kv
        activations = offload.activations
        if activations is None:
            tier = "cpu" if in_ram["waiting"] else "disk"
            activations = _shares([1], [place(waiting) if held["waiting"] else take(tier, waiting)])
        in_memory = sum(size for size, tier in zip(sizes, tiers, strict=True) if tier != "disk")
        memory = {
            "weights": in_memory - cached,
            "K and V": resident
            + sum(n for n, tier in zip(kv_sizes, kv_tiers, strict=True) if tier != "disk"),
            "activations": sum(int(waiting * share / 100) for share in activations[:2]),
            **memory,
        }
        plan = replace(
            base,
            weights=offload.weights or _shares(sizes, tiers),
            kv=kv,
            activations=activations,
            tiers=tuple(tiers),
            memory={kind: nbytes for kind, nbytes in memory.items() if nbytes},
        )
        return plan, free

    def _buffers(
        self, base: Plan, tiers: tuple[str, ...], kv_tiers: list[str], held: Held, in_ram: Held
    ) -> dict[str, int]:
        """Return the bytes by kind that a plan takes beside weights, K and V and waiting activations.

        Staging buffers for K and V are sized for the workload.
        """
        shape, in_place = self.shape, ("gpu",) if self.on_gpu else ("gpu", "cpu")
        pairs = zip(shape.kv_layers, kv_tiers, strict=True)
        largest = max((nbytes for nbytes, tier in pairs if tier not in in_place), default=0)
        tokens = base.batch_size * base.kv_block * -(-sum(self.workload) // base.kv_block)
        staged = int(NUM_STAGED * _ROOM_TO_GROW * tokens) * largest
        experts, budget = shape.expert_cache_bytes(tiers), self.compute_budget
        copied = [shape.copied_bytes(unit, tiers) for unit in shape.units if self.on_gpu]
        rows = min(base.micro_tokens, base.max_batch_tokens)
        return {
            "ring": _ring_bytes(
                [shape.streamed_bytes(unit, tiers) for unit in shape.units],
                roomy=bool((in_ram if self.on_gpu else held)["second"]),
            ),
            "GPU ring": _ring_bytes(copied, roomy=bool(held["second"])),
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

    def _with_more_kv(self, forecast: Forecast, free: Mapping[str, int]) -> Plan:
        """Use free memory for K and V: of the block's sequences or, if no weights are read, of any more."""
        options, shape, plan = self.options, self.shape, forecast.plan
        if self._has_kv_size or plan.kv[2]:
            return plan
        useful = self._kv_bytes(plan.block_size)
        if not forecast.prediction.decode.weight_bytes:
            longest = -(-(self.limit or UNLIMITED) // options.block_size)
            blocks = options.max_sequences * longest + 1
            useful = blocks * options.block_size * shape.kv_bytes_per_token
        # A single budget covers all memory.
        shares = (
            dict(zip(TIERS, plan.kv, strict=True)) if len(free) > 2 else {next(iter(free)): 100.0}
        )
        room = min(int(free[tier] * 100 / share) for tier, share in shares.items() if share)
        grown = min(plan.kv_bytes + room, self.max_kv_bytes, useful)
        kv_bytes = max(plan.kv_bytes, grown)
        return replace(plan, kv_bytes=kv_bytes, memory={**plan.memory, "K and V": kv_bytes})

    def _refuse(self) -> NoReturn:
        """Raise an error that names the chosen values, the limits and a sufficient budget."""
        offload, options = self.offload, self.options
        names = "weights", "kv", "activations", "batch_size", "micro_batches"
        chosen = {name: getattr(offload, name) for name in names}
        chosen["kv_memory"] = options.kv_bytes
        if not options.plan_sets_batch_tokens:
            chosen["max_batch_tokens"] = options.max_batch_tokens
        choices = ", ".join(f"{name}={v}" for name, v in chosen.items() if v is not None)
        choices = f"with {choices}, " if choices else ""
        if self._smallest_plan(self.budgets)[1]["disk"] < 0:
            raise TierFailed(
                f"placement=Offload: {choices}the disk tier is too small: "
                f"{offload.disk or 'the temporary folder'} has room for {self.disk} bytes "
                f"(disk_limit={offload.disk_limit})"
            )
        limits = f"gpu={offload.gpu} and cpu={offload.cpu} allow for {self.budget}"

        def scaled(exponent: int) -> dict[str, int]:
            budgets = {tier: int(max(1, n) * 1.01**exponent) for tier, n in self.budgets.items()}
            return budgets | {"cpu": UNLIMITED} if self.on_gpu else budgets

        exponents = range(3000)
        enough = bisect_left(
            exponents, True, key=lambda n: min(self._smallest_plan(scaled(n))[1].values()) >= 0
        )
        if enough == len(exponents):
            raise InvalidRequest(f"placement=Offload: {choices}no plan fits; {limits}")
        plan, free = self._smallest_plan(scaled(enough))
        needs = f"{sum(scaled(enough).values())} bytes are needed"
        if self.on_gpu:
            in_ram = UNLIMITED - free["cpu"]
            needs = f"{scaled(enough)['gpu']} bytes are needed on the GPU and {in_ram} in RAM"
        needs += f" ({_memory_text(plan)})"
        if len(self.budgets) == 2 and not self.on_gpu:
            needs += ", in the proportion of gpu and cpu"
        if choices:
            raise InvalidRequest(f"placement=Offload: {choices}at least {needs}; {limits}")
        raise OutOfBlocks(f"placement=Offload: at least {needs}; {limits}")

    def _smallest_plan(self, budgets: dict[str, int]) -> tuple[Plan, Mapping[str, int]]:
        """Return the plan that takes the least memory, whether it fits or not, and its free bytes.

        Plans that do not fit on the disk are the last choice.
        """
        planner = copy(self)
        planner.budgets = budgets
        *_, base = planner._sizes(NOMINAL, tight=True)
        prefixes = [held for order in planner._orders(base) for held in _prefixes(order)]
        plans = [planner._place(base, held) for held in prefixes]
        return min(plans, key=lambda entry: (entry[1]["disk"] < 0, entry[0].memory_bytes))


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
    latent = options.device.stores_latent
    shape = shape_of(model.loaded, units, dtype, options.kv_dtype, model.draft, latent=latent)
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
    """Return the size of the staging buffer for units of these sizes, in the order of a forward.

    If `roomy`, two neighbours fit, so that one is read while the other is used; else one unit.
    """
    sizes = [size for size in sizes if size]
    if not roomy or len(sizes) < 2:
        return max(sizes, default=0)
    return max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))


def _prefixes(order: list[tuple[str, int]]) -> list[Held]:
    """Return what memory holds before the first stage of an order, and after each, if all fits."""
    return [*accumulate((Held({kind: count}) for kind, count in order), or_, initial=Held())]


def _most(order: list[tuple[str, int]], fits: Callable[[Held], bool]) -> Held | None:
    """Return as much of each stage as fits, in order; None if memory is too small even with nothing in it.

    The last item of a stage may free a buffer, so whole stages are tried first.
    """
    prefixes = _prefixes(order)
    num_whole = next((n for n in reversed(range(len(prefixes))) if fits(prefixes[n])), None)
    if num_whole is None:
        return None
    held = prefixes[num_whole]
    for kind, most in order[num_whole:]:
        counts = range(held[kind] + 1, most + 1)
        more = bisect_left(counts, True, key=lambda n: not fits(held | Held({kind: n})))
        held[kind] += more
    return held


def _groups(shape: ModelShape) -> dict[str, list[int]]:
    """Return the slots outside of `resident` in groups, in the order in which memory takes them.

    A unit much larger than the others comes first: an LM head is often as large as six layers, and streaming
    it would need a ring of that size. Then come the weights that every token needs, then experts, which only
    some tokens need, and embeddings, from which only rows are read.
    """
    all_on_disk = ("disk",) * len(shape.slots)
    sizes = sorted(
        (shape.streamed_bytes(unit, all_on_disk), i) for i, unit in enumerate(shape.units)
    )
    is_large = len(sizes) > 2 and sizes[-1][0] >= 2 * sizes[-2][0]
    groups = {
        "large": shape.units[sizes[-1][1]].slots if is_large else (),
        "needed": _interleaved(shape, [unit.slots for unit in shape.units if not unit.gathers]),
        "experts": _interleaved(shape, [unit.experts for unit in shape.units]),
        "gathered": range(len(shape.slots)),
    }
    seen, unique = set(shape.resident), dict[str, list[int]]()
    for name, group in groups.items():
        unique[name] = [i for i in group if i not in seen]
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
