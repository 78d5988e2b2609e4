"""The linear program: which share of weights, K and V and activations lies in which tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verbatim.placement.offload.choice import Percents

_GB = 1e9
_SECOND = 1e-4  # what is in memory is on the device rather than elsewhere, where both are as fast
_LESS_IO = 1e-3  # a second in which the disk is busy without making the step longer


class Room(NamedTuple):
    """Bytes that are left in each tier, and in the first two of them together."""

    gpu: float
    cpu: float
    disk: float
    memory: float


class Shares(NamedTuple):
    """Percents in (gpu, cpu, disk)."""

    weights: Percents
    kv: Percents
    activations: Percents


@dataclass(frozen=True, slots=True)
class Costs:
    """What the program weighs: for each kind, bytes, and seconds of the disk if all of it lay there.

    Attributes:
        compute_s: of a step, wherever anything lies.
        overlap: the disk works while the step computes.
    """

    weights: float
    kv: float
    activations: float
    weights_s: float
    kv_s: float
    activations_s: float
    compute_s: float
    overlap: bool


def solve(
    room: Room,
    costs: Costs,
    weights: Percents | None = None,
    kv: Percents | None = None,
    activations: Percents | None = None,
    *,
    kv_on_disk: bool = True,
) -> Shares | None:
    """The shares with which a step is shortest; None: there are none that fit.

    As in FlexGen (Sheng et al. 2023, section 4.3): variables are the nine shares and the time T of a step;
    T is minimised, is at least what the disk takes and at least what computing takes, and each tier holds
    what it may. Of equal times, the one with less work for the disk is taken, and what stays in memory
    goes to the device first.

    Args:
        weights, kv, activations: shares that are settled.
        kv_on_disk: K and V may lie there.
    """
    from scipy.optimize import linprog

    kinds = (
        (costs.weights / _GB, costs.weights_s, weights, True),
        (costs.kv / _GB, costs.kv_s, kv, kv_on_disk),
        (costs.activations / _GB, costs.activations_s, activations, True),
    )
    total = sum(seconds for _, seconds, _, _ in kinds) + costs.compute_s + 1e-9
    aims, bounds = [], []
    all_of_it = sum(gigabytes for gigabytes, _, _, _ in kinds) + 1e-9
    for kind, (gigabytes, seconds, given, may_spill) in enumerate(kinds):
        waited_for = kind == 2 or not costs.overlap  # nothing computes while activations move
        busy = seconds / total * (1.0 if waited_for else _LESS_IO)
        part = gigabytes / all_of_it + 1e-3
        aims += [0.0, _SECOND * part, busy + 2 * _SECOND * part]
        for tier in range(3):
            most = 1.0 if tier < 2 or may_spill else 0.0
            bounds.append((0.0, most) if given is None else (given[tier] / 100,) * 2)
    sizes = [gigabytes for gigabytes, _, _, _ in kinds]
    holds = [
        [size if tier == at else 0.0 for size in sizes for at in range(3)] + [0.0]
        for tier in range(3)
    ]
    for at in range(3):  # weights on the disk are the checkpoint's own
        holds[2][at] = 0.0
    reads = [0.0 if at < 2 else s / total for _, s, _, _ in kinds[:2] for at in range(3)]
    reads += [0.0, 0.0, 0.0, -1.0]
    if not costs.overlap:
        reads[-1] = 0.0
    found = linprog(
        c=[*aims, 1.0],
        A_ub=[*holds, [a + b for a, b in zip(*holds[:2], strict=True)], reads],
        b_ub=[*(min(left, 1e15) / _GB for left in room), 0.0 if costs.overlap else 1e9],
        A_eq=[[1.0 if i // 3 == kind else 0.0 for i in range(9)] + [0.0] for kind in range(3)],
        b_eq=[1.0] * 3,
        bounds=[*bounds, (costs.compute_s / total, None)],
        method="highs",
    )
    if not found.success:
        return None
    shares = [min(1.0, max(0.0, float(x))) for x in found.x[:9]]
    return Shares(*(_percents(shares[i : i + 3]) for i in (0, 3, 6)))


def _percents(shares: list[float]) -> Percents:
    gpu, cpu = 100 * shares[0], 100 * shares[1]
    return gpu, cpu, max(0.0, 100 - gpu - cpu) if shares[2] > 1e-9 else 0.0
