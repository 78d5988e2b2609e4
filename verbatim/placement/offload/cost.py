"""The cost model: predicted times of a plan on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from verbatim.placement.offload.machine import Machine
from verbatim.placement.offload.plan import Plan, working_bytes
from verbatim.placement.offload.shape import ModelShape, UnitShape

LIKELY = 0.9  # that an expert is chosen: then it is read ahead. A wrong guess delays what is needed
_PASSES = 2  # over what a layer allocates, at the rate of a copy


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted times of one forward.

    Attributes:
        seconds: wall time.
        io_s: busy time of the disk.
        compute_s: busy time of the processor.
        weight_bytes: bytes of weights that are read.
        kv_bytes: bytes of K and V that are read and written on the disk.
    """

    seconds: float
    io_s: float
    compute_s: float
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of a workload.

    Attributes:
        sequences: number that runs at once, limited by K and V.
        decode: a step in the middle of the completions, with a token for each sequence.
        sample_s: seconds to sample these tokens.
        prefill_s: seconds for the prompts of all sequences.
        tokens_per_s: new tokens, with the time of the prompts.
        limit: "reading weights", "reading and writing K and V", or "computing".
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


def compute_s(shape: ModelShape, unit: UnitShape, plan: Plan, load: Load, m: Machine) -> float:
    """Return the seconds that one unit computes for all micro-batches of a forward.

    Each micro-batch multiplies its rows with every matrix of the unit; a row goes to a few experts, whose
    matrices see the fewer rows the more experts there are. Norms, activations and the like go over what a
    layer allocates about twice. Attention reads K and V once for each row of a decode step, and costs a
    product for each pair of positions in a prompt. To that comes what was read and must be unpacked, rows
    of embeddings that are looked up, and the calls themselves.
    """
    a_sequence, tiers = max(1, ceil(load.rows / max(1, load.sequences))), plan.tiers
    most = max(1, min(plan.micro_tokens, plan.batch_size * a_sequence))
    if unit.gathers:
        away = any(tiers[i] == "disk" for i in unit.slots)
        return m.unit_s * ceil(load.rows / most) / 8 + (load.rows * m.row_s if away else 0.0)
    rows_left = load.rows if unit.attends else load.logit_rows
    seconds = shape.made(unit, tiers) / m.copy_rate
    dense = sum(shape.slots[i].elements for i in unit.slots if not shape.slots[i].of_experts)
    of_experts = [*unit.experts, *(i for i in unit.slots if shape.slots[i].of_experts)]
    routed = sum(shape.slots[i].elements for i in of_experts)
    full, rest = divmod(rows_left, most)
    for rows, times in ((most, full), (rest, 1 if rest else 0)):
        if not times:
            continue
        one = m.unit_s + dense * m.product(rows)
        if unit.attends:
            one += _PASSES * working_bytes(shape, rows) / m.copy_rate
        if routed:
            sent, experts = rows * max(1, shape.experts_per_token), shape.experts
            busy = experts * (1 - (1 - 1 / experts) ** sent)
            one += routed / experts * busy * m.product(sent / busy) + busy * m.unit_s / 8
        seconds += times * one
    if unit.attends:
        if load.rows > load.sequences:
            pairs = load.rows * load.context * shape.attention
            seconds += pairs * m.attention_s
        else:
            seconds += load.rows * load.context * shape.layer_kv_bytes / m.kv_rate
    return seconds


def predict_step(shape: ModelShape, plan: Plan, machine: Machine, load: Load) -> Step:
    """Predict one forward.

    Weights on the disk are read unit by unit, around and around, into a ring: reading runs ahead as far as
    the ring has room. K and V on the disk are read for every sequence, and written in whole blocks. Where
    reading and computing overlap, a step takes what `pipeline_s` says, else the sum of both.
    """
    tiers, away = plan.tiers, plan.kv[2] / 100
    attending = sum(unit.attends for unit in shape.units) or 1
    a_layer = shape.layer_kv_bytes * shape.layers * away / attending
    block = min(plan.kv_block, load.context)
    read = a_layer * load.sequences * load.context
    written = a_layer * max(load.rows, load.sequences * block)
    kv_s = read / machine.read_rate + written / machine.write_rate
    parts = max(1, ceil(load.rows / max(1, min(plan.micro_tokens, load.rows))))
    moved = load.rows * shape.hidden * shape.itemsize * plan.activations[2] / 100
    moved_s = 0.0 if parts == 1 else moved / machine.read_rate + moved / machine.write_rate
    bytes_of = [shape.streamed(unit, tiers) for unit in shape.units]
    of_experts = [shape.read_of_experts(unit, tiers, load.rows, parts) for unit in shape.units]
    io = [
        nbytes / machine.read_rate + (kv_s + moved_s if unit.attends else 0.0)
        for unit, nbytes in zip(shape.units, bytes_of, strict=True)
    ]
    compute = [compute_s(shape, unit, plan, load, machine) for unit in shape.units]
    waited = [0.0] * len(io)  # for experts that are read when they are chosen
    for j, (nbytes, chosen) in enumerate(of_experts):
        (io if plan.overlap and chosen >= LIKELY else waited)[j] += nbytes / machine.read_rate
    if plan.overlap:  # readers take processor time from the computation
        busy = machine.read_cpu_s / max(1, machine.threads)
        compute = [own + nbytes * busy for own, nbytes in zip(compute, bytes_of, strict=True)]
        taken = [own + wait for own, wait in zip(compute, waited, strict=True)]
        seconds = pipeline_s(bytes_of, io, taken, plan.ring_bytes)
    else:
        seconds = sum(io) + sum(compute) + sum(waited)
    return Step(
        seconds=seconds,
        io_s=sum(io) + sum(waited),
        compute_s=sum(compute),
        weight_bytes=sum(bytes_of) + int(sum(nbytes for nbytes, _ in of_experts)),
        kv_bytes=int((read + written) * attending),
    )


def pipeline_s(
    nbytes: Sequence[int], io: Sequence[float], compute: Sequence[float], ring: int
) -> float:
    """Return the seconds of a step in steady state, with prefetching into a ring of `ring` bytes.

    Unit j is read once unit j - 1 was and those before it have left enough room; it computes once it was
    read and unit j - 1 has computed.
    """
    count = len(nbytes)
    read_at = end = before = 0.0
    ends: list[float] = []
    oldest = held = 0  # the units from `oldest` on, with `held` bytes, are in the ring
    for turn in range(4):
        for j in range(count):
            held += nbytes[j]
            while held > ring and oldest < len(ends):
                held -= nbytes[oldest % count]
                oldest += 1
            free_at = ends[oldest - 1] if oldest and nbytes[j] else 0.0
            if io[j]:
                read_at = max(read_at, free_at) + io[j]
                end = max(end, read_at)
            end += compute[j]
            ends.append(end)
        if turn == 1:
            before = end
    return (end - before) / 2


def predict(
    shape: ModelShape, plan: Plan, machine: Machine, workload: tuple[int, int]
) -> Prediction:
    """Predict a workload of (prompt tokens, new tokens).

    All sequences of a block are taken to begin and to end together: their prompts go through in forwards of
    `max_batch_tokens` rows, then come as many decode steps as there are new tokens, the one in the
    middle standing for all.
    """
    prompt, new = workload
    context = prompt + new
    held = plan.kv_bytes // max(1, shape.kv_bytes_per_token) - plan.kv_block
    a_sequence = -(-context // plan.kv_block) * plan.kv_block
    sequences = max(1, min(plan.block_size, held // a_sequence, plan.max_batch_tokens))
    middle = Load(sequences, sequences, prompt + new / 2, sequences)
    decode = predict_step(shape, plan, machine, middle)
    rows = sequences * prompt
    full, rest = divmod(rows, plan.max_batch_tokens)
    prefill_s = 0.0
    for size, times in ((plan.max_batch_tokens, full), (rest, 1)):
        if size and times:
            some = max(1, min(sequences, round(size / prompt)))
            load = Load(some, size, min(prompt, size) / 2, some)
            prefill_s += times * predict_step(shape, plan, machine, load).seconds
    sample_s = sequences * shape.vocab * machine.sample_s + machine.unit_s
    total_s = prefill_s + new * (decode.seconds + sample_s)
    limit = "computing"
    if decode.io_s > decode.compute_s:
        weights_s = decode.weight_bytes / machine.read_rate
        limit = "reading weights"
        if weights_s < decode.io_s / 2:
            limit = "reading and writing K and V"
    return Prediction(
        sequences=sequences,
        decode=decode,
        sample_s=sample_s,
        prefill_s=prefill_s,
        tokens_per_s=sequences * new / total_s,
        limit=limit,
    )
