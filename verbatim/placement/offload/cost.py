"""Plans of placement, and the cost model: predicted times of a plan on a machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import ceil
from typing import Any

from verbatim.placement.offload.choice import Percents
from verbatim.placement.offload.machine import ROWS, Machine
from verbatim.placement.offload.shape import ModelShape, UnitShape

LIKELY = 0.9  # minimum probability to read an expert ahead; a wrong guess delays needed reads
_PASSES = 2  # passes over a layer's allocations, which are read and written
# Costs that differ little between machines, or are small compared to the rest.
_UNIT_S = 1e-3  # call overhead of a layer, per micro-batch
_ROW_S = 1.5e-4  # read of one embedding row from the disk
_LOGIT = 15  # cost of sampling per logit, in products of a row with a matrix element


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement of weights, K and V and activations, with the sizes of batches and buffers.

    Attributes:
        weights, kv, activations: percents in (gpu, cpu, disk).
        kv_bytes: bytes of K and V in all tiers together.
        batch_size: sequences of a micro-batch.
        micro_batches: micro-batches that share each read of a layer.
        micro_tokens: maximum rows of a micro-batch; bounds the memory for activations.
        max_batch_tokens: maximum rows of a forward.
        workload: prompt tokens and new tokens of a typical request, within the model's limit.
        tiers: tier of each parameter, in the order of `Units.slots`.
        kv_block: token positions in a block of K and V.
        prompt_rows: maximum rows of logits for prompt log-probs and drafts in a forward.
        overlap: whether reads and writes overlap with computation.
        budget: bytes of memory, of a GPU and RAM together; None: unlimited.
        memory: maximum bytes in memory, by kind. "ring" and "GPU ring" are the staging buffers for weights.
        reasons: sentences that explain the choice.
    """

    weights: Percents
    kv: Percents
    activations: Percents
    kv_bytes: int
    batch_size: int
    micro_batches: int
    micro_tokens: int
    max_batch_tokens: int
    workload: tuple[int, int]
    tiers: tuple[str, ...] = ()
    kv_block: int = 16
    prompt_rows: int = 16
    overlap: bool = True
    budget: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def block_size(self) -> int:
        """Sequences that run at once."""
        return self.batch_size * self.micro_batches

    @property
    def memory_bytes(self) -> int:
        """Maximum bytes in memory."""
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, without the tier of each parameter."""
        values = {k: v for k, v in asdict(self).items() if k not in ("tiers", "kv_block")}
        for name in ("weights", "kv", "activations"):
            values[name] = [round(share, 1) for share in values[name]]
        return {**values, "memory_bytes": self.memory_bytes, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted times of one forward.

    Attributes:
        seconds: wall time.
        io_s: busy time of the disk.
        compute_s: busy time of the processor.
        weight_bytes: bytes of weights read from the disk.
        kv_bytes: bytes of K and V read from and written to the disk.
        bus_s: busy time of the copies between RAM and a GPU.
    """

    seconds: float
    io_s: float
    compute_s: float
    weight_bytes: int
    kv_bytes: int
    bus_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a workload.

    Attributes:
        sequences: number of concurrent sequences, limited by memory for K and V.
        decode: a decode step in the middle of the completions, with one token per sequence.
        sample_s: seconds to sample these tokens.
        prefill_s: seconds for the prompts of all sequences.
        tokens_per_s: new tokens/s, including the time of the prompts.
        limit: "reading weights", "reading and writing K and V", "copying to the GPU", or "computing".
        decode_tokens_per_s: new tokens/s, without the time of the prompts.
    """

    sequences: int
    decode: Step
    sample_s: float
    prefill_s: float
    tokens_per_s: float
    limit: str
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a forward.

    Attributes:
        sequences: number of sequences.
        rows: rows of all sequences.
        context: average number of positions that a row attends to.
        logit_rows: rows for which the LM head runs.
    """

    sequences: int
    rows: int
    context: float
    logit_rows: int


@dataclass(frozen=True)
class Forecast:
    """A plan, the model and machine it was made for, and the predicted times."""

    shape: ModelShape
    machine: Machine
    plan: Plan

    def sample_s(self, rows: int, draws: int = 1) -> float:
        """Return the seconds to sample tokens from `rows` rows of logits, in `draws` calls."""
        return rows * self.shape.vocab * _LOGIT * self.machine.product(1) + draws * _UNIT_S

    def products_s(self, unit: UnitShape, rows: float) -> float:
        """Return the seconds of a unit's matrix products for `rows` rows, each routed to a few experts."""
        shape, m = self.shape, self.machine
        stacked = {*unit.experts, *(i for i in unit.slots if shape.slots[i].of_experts)}

        def products_s(numbers: Iterable[int], rows: float) -> float:
            slots, rates = (shape.slots[i] for i in numbers), (m.product(rows), m.packed(rows))
            return sum(s.elements * rates[s.is_quantized and not s.unpacked_bytes] for s in slots)

        seconds = products_s((i for i in unit.slots if i not in stacked), rows)
        if stacked:
            num_active = shape.experts * shape.chosen_experts(rows)
            routed_rows = rows * max(1, shape.experts_per_token)
            seconds += products_s(stacked, routed_rows / num_active) * num_active / shape.experts
        return seconds

    def compute_s(self, unit: UnitShape, load: Load, parts: int) -> float:
        """Return the compute time of a unit, in seconds, for all `parts` micro-batches of a forward.

        Each micro-batch multiplies its rows with every matrix of the unit; an expert's matrices see only the
        rows routed to it. Elementwise operations such as norms and activations read and write a layer's
        allocations about twice. Attention reads K and V once for each row of a decode step, and costs a
        product for each pair of positions in a prompt. Added are dequantization and conversion of weights,
        reads of embedding rows, and call overhead.
        """
        shape, m, tiers = self.shape, self.machine, self.plan.tiers
        memory_rate = m.memory_rate(shape.itemsize)
        if unit.gathers:
            return load.rows * _ROW_S if any(tiers[i] == "disk" for i in unit.slots) else 0.0
        rows = (load.rows if unit.attends else load.logit_rows) / parts
        part_s = _UNIT_S + self.products_s(unit, rows)
        if unit.experts or any(shape.slots[i].of_experts for i in unit.slots):
            part_s += shape.experts * shape.chosen_experts(rows) * _UNIT_S / 8
        if unit.attends:
            part_s += _PASSES * shape.working_bytes(ceil(rows)) * 2 / memory_rate
            pairs = rows * load.context
            if load.rows > load.sequences:
                part_s += pairs * shape.attention * m.product(ROWS[-1]) / ROWS[-1]
            else:
                part_s += pairs * shape.unit_kv_bytes / memory_rate
        temporary_bytes = shape.unpacked_bytes(unit) + shape.converted_bytes(unit, tiers)
        return parts * part_s + temporary_bytes * 2 / memory_rate

    def step(self, load: Load) -> Step:
        """Predict one forward: it reads weights once, reads K and V per sequence, and writes whole blocks."""
        shape, machine, plan = self.shape, self.machine, self.plan
        tiers, disk_share, rate = plan.tiers, plan.kv[2] / 100, machine.read_rate
        mean_rows = ceil(load.rows / max(1, load.sequences))
        parts = ceil(load.rows / max(1, min(plan.micro_tokens, plan.batch_size * mean_rows)))
        weights = [shape.streamed_bytes(unit, tiers) for unit in shape.units]
        ahead, on_demand = float(sum(weights)), 0.0  # bytes
        for unit in shape.units:
            nbytes, chosen = shape.expert_reads(unit, tiers, load.rows, parts)
            if plan.overlap and chosen >= LIKELY:
                ahead += nbytes
            else:
                on_demand += nbytes
        token_bytes = sum(shape.kv_layers) * disk_share
        read = token_bytes * load.sequences * load.context
        written = token_bytes * max(load.rows, load.sequences * min(plan.kv_block, load.context))
        attending = sum(unit.attends for unit in shape.units)
        moved = load.rows * shape.hidden * shape.itemsize * plan.activations[2] / 100 * attending
        moved = moved if parts > 1 else 0.0
        io_s = (ahead + read + moved) / rate + (written + moved) / machine.write_rate
        compute = [self.compute_s(unit, load, parts) for unit in shape.units]
        bus_s, bus_rate, copied = 0.0, machine.bus_rate or rate, [0] * len(weights)
        if machine.bus_rate:
            copied = [shape.copied_bytes(unit, tiers) for unit in shape.units]
            token_bytes = sum(shape.kv_layers) * (100 - plan.kv[0]) / 100
            kv_bytes = token_bytes * (load.sequences * load.context + load.rows)
            bus_s = (sum(copied) + kv_bytes) / bus_rate
        seconds = io_s + sum(compute) + on_demand / rate + bus_s
        if plan.overlap:
            read_s = self._pipelined_s(weights, compute, plan.memory.get("ring", 0), rate)
            device_ring = plan.memory.get("GPU ring", 0)
            copy_s = self._pipelined_s(copied, compute, device_ring, bus_rate)
            seconds = max(io_s, bus_s, max(read_s, copy_s) + on_demand / rate)
        return Step(
            seconds=seconds,
            io_s=io_s + on_demand / rate,
            compute_s=sum(compute),
            weight_bytes=int(ahead + on_demand),
            kv_bytes=int(read + written),
            bus_s=bus_s,
        )

    def _pipelined_s(
        self, read_bytes: list[int], compute_s: list[float], ring_bytes: int, rate: float
    ) -> float:
        """Return the seconds of a forward that computes each unit while the next ones are read.

        A unit is read as soon as the ring has room for it beside the units that are in use or wait.
        """
        held = deque[tuple[int, float]]()  # (bytes of a unit, end of its use)
        begin = now = read = 0.0
        for _ in range(2):  # the first forward starts with an empty ring
            begin = now
            for nbytes, seconds in zip(read_bytes, compute_s, strict=True):
                if nbytes:
                    while held and sum(size for size, _ in held) + nbytes > ring_bytes:
                        read = max(read, held.popleft()[1])
                    read += nbytes / rate
                    now = max(now, read)
                now += seconds
                if nbytes:
                    held.append((nbytes, now))
        return now - begin

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted times of the plan's workload.

        All sequences of a block are assumed to begin and end together: their prompts run in as few forwards
        as `max_batch_tokens` allows, then one decode step per new token, each as long as the middle one.
        """
        plan, (prompt, new) = self.plan, self.plan.workload
        capacity = plan.kv_bytes // max(1, self.shape.kv_bytes_per_token) - plan.kv_block
        length = -(-(prompt + new) // plan.kv_block) * plan.kv_block
        sequences = max(1, min(plan.block_size, capacity // length, plan.max_batch_tokens))
        decode = self.step(Load(sequences, sequences, prompt + new / 2, sequences))
        forwards = ceil(sequences * prompt / plan.max_batch_tokens)
        rows = ceil(sequences * prompt / forwards)
        count = max(1, min(sequences, round(rows / prompt)))
        prefill_s = forwards * self.step(Load(count, rows, min(prompt, rows) / 2, count)).seconds
        drawing_s = self.sample_s(sequences)
        total_s = prefill_s + new * (decode.seconds + drawing_s)
        limit = "computing"
        if decode.bus_s > max(decode.compute_s, decode.io_s):
            limit = "copying to the GPU"
        elif decode.io_s > decode.compute_s:
            weights_s = decode.weight_bytes / self.machine.read_rate
            kv_first = weights_s < decode.io_s / 2
            limit = "reading and writing K and V" if kv_first else "reading weights"
        return Prediction(
            sequences=sequences,
            decode=decode,
            sample_s=drawing_s,
            prefill_s=prefill_s,
            tokens_per_s=sequences * new / total_s,
            limit=limit,
            decode_tokens_per_s=sequences / (decode.seconds + drawing_s),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "plan": self.plan.as_dict(),
            "prediction": asdict(self.prediction),
            "machine": asdict(self.machine),
        }
