"""The assignment of layers to stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.errors import OutOfBlocks

Range = tuple[int, int]  # first layer, and the one behind the last


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The bytes of a model's layers, and the places where it may be cut.

    Attributes:
        layer_bytes: weights of each layer.
        outside: bytes of what the first and the last stage hold besides.
        everywhere: of what every stage holds.
        cuts: layers in front of which the model may be cut.
        spills: weights for which a stage lacks memory are on its disk.
    """

    layer_bytes: tuple[int, ...]
    outside: tuple[int, int]
    everywhere: int
    cuts: tuple[int, ...]
    spills: bool = False

    def room(self, memory: float) -> float:
        """Return the bytes of weights that a stage with so much memory may hold."""
        return math.inf if self.spills else memory

    def bytes_of(self, first: int, end: int) -> int:
        """Return the bytes of weights of a stage with these layers."""
        held = self.everywhere + sum(self.layer_bytes[first:end])
        last = end == len(self.layer_bytes)
        return held + self.outside[0] * (first == 0) + self.outside[1] * last

    def divide(
        self, room: Sequence[float], speed: Sequence[float], part: Range | None = None
    ) -> list[Range]:
        """Divide all layers, or a range of them, as the function `divide`."""
        first, end = part or (0, len(self.layer_bytes))
        outside = self.outside[0] * (first == 0), self.outside[1] * (end == len(self.layer_bytes))
        cuts = [cut - first for cut in self.cuts]
        free = [most - self.everywhere for most in room]
        found = divide(self.layer_bytes[first:end], outside, cuts, free, speed)
        return [(first + a, first + b) for a, b in found]


def divide(
    layer_bytes: Sequence[int],
    outside: tuple[int, int],
    cuts: Sequence[int],
    room: Sequence[float],
    speed: Sequence[float],
) -> list[tuple[int, int]]:
    """Return contiguous ranges of layers, one per stage, that make the slowest stage as fast as possible.

    Args:
        layer_bytes: weights of each layer.
        outside: bytes of what the first and the last stage hold besides.
        cuts: layers in front of which the model may be cut.
        room: bytes that each stage may hold.
        speed: of each stage, bytes of weights a second, or anything in proportion.

    Returns:
        (first, end) of each stage.

    Raises:
        OutOfBlocks: there is no such division.
    """
    count, stages = len(layer_bytes), len(room)
    total = [0]
    for size in layer_bytes:
        total.append(total[-1] + size)

    def cost(stage: int, first: int, end: int) -> float:
        held = total[end] - total[first]
        held += outside[0] * (first == 0) + outside[1] * (end == count)
        return math.inf if held > room[stage] else held / speed[stage]

    places = [0, *sorted(cut for cut in set(cuts) if 0 < cut < count), count]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        reached: dict[int, tuple[float, int]] = {}
        for first, (slowest, _) in best[stage].items():
            for end in places:
                if end > first:
                    found = max(slowest, cost(stage, first, end))
                    if found < reached.get(end, (math.inf, 0))[0]:
                        reached[end] = found, first
        best.append(reached)
    if count not in best[stages]:
        needed = total[-1] + sum(outside)
        raise OutOfBlocks(
            f"{count} layers of together {needed} bytes, with {len(places) - 2} places to cut, can't be "
            f"divided over {stages} stages with room for {[int(r) for r in room]} bytes"
        )
    ranges, end = [], count
    for stage in range(stages, 0, -1):
        first = best[stage][end][1]
        ranges.append((first, end))
        end = first
    return ranges[::-1]
