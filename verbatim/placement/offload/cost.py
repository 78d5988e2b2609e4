"""The cost model: predicted times of a plan on a machine."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any

from verbatim.placement.offload.machine import ROWS, Machine
from verbatim.placement.offload.plan import Plan, working_bytes
from verbatim.placement.offload.shape import ModelShape, UnitShape

LIKELY = 0.9  # that an expert is chosen: then it is read ahead. A wrong guess delays what is needed
_PASSES = 2  # over what a layer allocates, which is read and written
# Seconds that differ little between machines, or are small beside the rest.
_UNIT_S = 1e-3  # for the calls of a layer, for each micro-batch
_ROW_S = 1.5e-4  # to look one row of an embedding up on the disk
_LOGIT = 15  # products of one row with an element, to draw a token from a logit


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted times of one forward.

    Attributes:
        seconds: wall time.
        io_s: busy time of the disk.
        compute_s: busy time of the processor.
        weight_bytes: bytes of weights that are read.
        kv_bytes: bytes of K and V that are read and written on the disk.
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
        sequences: number that runs at once, limited by K and V.
        decode: a step in the middle of the completions, with a token for each sequence.
        sample_s: seconds to sample these tokens.
        prefill_s: seconds for the prompts of all sequences.
        tokens_per_s: new tokens, with the time of the prompts.
        limit: "reading weights", "reading and writing K and V", "copying to the GPU", or "computing".
    """

    sequences: int
    decode: Step
    sample_s: float
    prefill_s: float
    tokens_per_s: float
    limit: str

    @property
    def decode_tokens_per_s(self) -> float:
        """New tokens/s after the prompts."""
        return self.sequences / (self.decode.seconds + self.sample_s)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "decode_tokens_per_s": self.decode_tokens_per_s}


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a forward.

    Attributes:
        sequences: number of sequences.
        rows: rows of all sequences.
        context: positions that a row attends to, on average.
        logit_rows: rows for which the head runs.
    """

    sequences: int
    rows: int
    context: float
    logit_rows: int


@dataclass(frozen=True)
class Forecast:
    """A plan, the model and the machine that it was made for, and the times that follow."""

    shape: ModelShape
    machine: Machine
    plan: Plan

    def sample_s(self, rows: int, draws: int = 1) -> float:
        """Return the seconds to draw tokens from `rows` rows of logits, in `draws` calls."""
        return rows * self.shape.vocab * _LOGIT * self.machine.product(1) + draws * _UNIT_S

    def products_s(self, unit: UnitShape, rows: float) -> float:
        """Return the seconds of one unit's products with `rows` rows, of which each goes to a few experts."""
        shape, m = self.shape, self.machine
        stacked = {*unit.experts, *(i for i in unit.slots if shape.slots[i].of_experts)}
        dense = sum(shape.slots[i].elements for i in unit.slots if i not in stacked)
        seconds = dense * m.product(rows)
        if stacked:
            busy = shape.experts * shape.chosen_experts(rows)
            sent = rows * max(1, shape.experts_per_token)
            routed = sum(shape.slots[i].elements for i in stacked)
            seconds += routed / shape.experts * busy * m.product(sent / busy)
        return seconds

    def compute_s(self, unit: UnitShape, load: Load, parts: int) -> float:
        """Return the seconds that one unit computes for all `parts` micro-batches of a forward.

        Each micro-batch multiplies its rows with every matrix of the unit; a row goes to a few experts, whose
        matrices see the fewer rows the more experts there are. Norms, activations and the like go over what a
        layer allocates about twice. Attention reads K and V once for each row of a decode step, and costs a
        product for each pair of positions in a prompt. To that comes what was read and must be unpacked, rows
        of embeddings that are looked up, and the calls themselves.
        """
        shape, m, tiers = self.shape, self.machine, self.plan.tiers
        memory_rate = m.memory_rate(shape.itemsize)
        if unit.gathers:
            return load.rows * _ROW_S if any(tiers[i] == "disk" for i in unit.slots) else 0.0
        rows = (load.rows if unit.attends else load.logit_rows) / parts
        one = _UNIT_S + self.products_s(unit, rows)
        if unit.experts or any(shape.slots[i].of_experts for i in unit.slots):
            one += shape.experts * shape.chosen_experts(rows) * _UNIT_S / 8
        if unit.attends:
            one += _PASSES * working_bytes(shape, ceil(rows)) * 2 / memory_rate
            pairs = rows * load.context
            if load.rows > load.sequences:
                one += pairs * shape.attention * m.product(ROWS[-1]) / ROWS[-1]
            else:
                one += pairs * shape.layer_kv_bytes / memory_rate
        made = shape.unpacked(unit) + shape.converted(unit, tiers)
        return parts * one + made * 2 / memory_rate

    def step(self, load: Load) -> Step:
        """Predict one forward.

        Weights on the disk are read once; K and V on the disk are read for every sequence, and written in
        whole blocks.
        """
        shape, machine, plan = self.shape, self.machine, self.plan
        tiers, away, rate = plan.tiers, plan.kv[2] / 100, machine.read_rate
        a_sequence = ceil(load.rows / max(1, load.sequences))
        parts = ceil(load.rows / max(1, min(plan.micro_tokens, plan.batch_size * a_sequence)))
        weights = [shape.streamed(unit, tiers) for unit in shape.units]
        ahead, waited = float(sum(weights)), 0.0  # bytes
        for unit in shape.units:
            nbytes, chosen = shape.read_of_experts(unit, tiers, load.rows, parts)
            if plan.overlap and chosen >= LIKELY:
                ahead += nbytes
            else:
                waited += nbytes
        a_token = shape.layer_kv_bytes * shape.layers * away
        read = a_token * load.sequences * load.context
        written = a_token * max(load.rows, load.sequences * min(plan.kv_block, load.context))
        attending = sum(unit.attends for unit in shape.units)
        moved = load.rows * shape.hidden * shape.itemsize * plan.activations[2] / 100 * attending
        moved = moved if parts > 1 else 0.0
        io_s = (ahead + read + moved) / rate + (written + moved) / machine.write_rate
        compute = [self.compute_s(unit, load, parts) for unit in shape.units]
        bus_s, bus_rate, copied = 0.0, machine.bus_rate or rate, [0] * len(weights)
        if machine.bus_rate:
            copied = [shape.copied(unit, tiers) for unit in shape.units]
            a_token = shape.layer_kv_bytes * shape.layers * (100 - plan.kv[0]) / 100
            kv_bytes = a_token * (load.sequences * load.context + load.rows)
            bus_s = (sum(copied) + kv_bytes) / bus_rate
        seconds = io_s + sum(compute) + waited / rate + bus_s
        if plan.overlap:
            read_s = self._pipelined_s(weights, compute, plan.memory.get("ring", 0), rate)
            device_ring = plan.memory.get("GPU ring", 0)
            copy_s = self._pipelined_s(copied, compute, device_ring, bus_rate)
            seconds = max(io_s, bus_s, max(read_s, copy_s) + waited / rate)
        return Step(
            seconds=seconds,
            io_s=io_s + waited / rate,
            compute_s=sum(compute),
            weight_bytes=int(ahead + waited),
            kv_bytes=int(read + written),
            bus_s=bus_s,
        )

    def _pipelined_s(
        self, weights: list[int], compute: list[float], ring_bytes: int, rate: float
    ) -> float:
        """Return the seconds of a forward that computes each unit while the next ones are read.

        A unit is read once the ring has room for it, beside those that are in use or are not used yet.

        Args:
            weights: bytes that are read of each unit.
            compute: seconds that each computes.
            ring_bytes: of the staging buffer.
            rate: bytes/s that are read.
        """
        held = deque[tuple[int, float]]()  # bytes, end of their use
        begin = now = read = 0.0
        for _ in range(2):  # the first time nothing was read before
            begin = now
            for nbytes, seconds in zip(weights, compute, strict=True):
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
        """The times of the plan's workload.

        All sequences of a block are taken to begin and to end together: their prompts go through in as few
        forwards as `max_batch_tokens` allows, then come as many decode steps as there are new tokens, the one
        in the middle standing for all.
        """
        plan, (prompt, new) = self.plan, self.plan.workload
        held = plan.kv_bytes // max(1, self.shape.kv_bytes_per_token) - plan.kv_block
        a_sequence = -(-(prompt + new) // plan.kv_block) * plan.kv_block
        sequences = max(1, min(plan.block_size, held // a_sequence, plan.max_batch_tokens))
        decode = self.step(Load(sequences, sequences, prompt + new / 2, sequences))
        forwards = ceil(sequences * prompt / plan.max_batch_tokens)
        rows = ceil(sequences * prompt / forwards)
        some = max(1, min(sequences, round(rows / prompt)))
        prefill_s = forwards * self.step(Load(some, rows, min(prompt, rows) / 2, some)).seconds
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
        )

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "plan": self.plan.as_dict(),
            "prediction": self.prediction.as_dict(),
            "machine": asdict(self.machine),
        }
