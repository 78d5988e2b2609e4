"""The assignment of layers to stages, and of memory to K and V."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from verbatim.errors import OutOfBlocks
from verbatim.placement.options import DEFAULT_KV_SHARE, EngineOptions

Range = tuple[int, int]  # first layer, and the one behind the last


def kv_sizes(
    options: EngineOptions,
    limit: int | None,
    memories: Sequence[tuple[Hashable, int]],
    token_bytes: Sequence[int],
    state_bytes: Sequence[int],
) -> tuple[EngineOptions, int, int]:
    """Return the options with a KV budget of all processes, and how many blocks and slots of states it holds.

    Where none is given, it has as many tokens as the least memory has room for.

    Args:
        limit: maximum tokens of one sequence.
        memories: what names the memory of each process, which several may share, and its free bytes.
        token_bytes: of one token in blocks, in each process.
        state_bytes: of one slot of states, in each process.

    Raises:
        OutOfBlocks: the memory doesn't hold one block, or the slots of one sequence.
    """
    in_blocks, in_states = sum(token_bytes), sum(state_bytes)
    if options.kv_bytes is None:
        needed, free = Counter[Hashable](), dict[Hashable, int]()
        for (memory, nbytes), *each in zip(memories, token_bytes, state_bytes, strict=True):
            needed[memory] += max(1, each[0] or each[1])
            free[memory] = min(nbytes, free.get(memory, nbytes))
        share = min(DEFAULT_KV_SHARE * free[memory] / needed[memory] for memory in needed)
        options = replace(options, kv_bytes=int(share * needed.total()))
    num_states = options.num_states(in_states)
    return options, options.num_blocks(in_blocks, limit, num_states * in_states), num_states


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
        """Return contiguous ranges of layers, one per stage, that make the slowest stage as fast as possible.

        Args:
            room: bytes that each stage may hold.
            speed: of each stage, bytes of weights a second, or anything in proportion.
            part: of these layers only; None: of all.

        Raises:
            OutOfBlocks: there is no such division.
        """
        first, end = part or (0, len(self.layer_bytes))
        cuts = [cut for cut in sorted(set(self.cuts)) if first < cut < end]
        pairs = itertools.combinations([first, *cuts, end], 2)
        held = {(begin, stop): self.bytes_of(begin, stop) for begin, stop in pairs}
        # By stage: to each place that its layers can end at, the slowest stage so far, and their begin.
        best: list[dict[int, tuple[float, int]]] = [{first: (0.0, 0)}]
        for most, pace in zip(room, speed, strict=True):
            reached: dict[int, tuple[float, int]] = {}
            for begin, (slowest, _) in best[-1].items():
                for stop in [*cuts, end]:
                    size = held.get((begin, stop))
                    if size is not None and size <= most:
                        found = max(slowest, (size - self.everywhere) / pace)
                        if found < reached.get(stop, (math.inf, 0))[0]:
                            reached[stop] = found, begin
            best.append(reached)
        if end not in best[-1]:
            needed = self.bytes_of(first, end) - self.everywhere
            free = [int(most - self.everywhere) for most in room]
            raise OutOfBlocks(
                f"{end - first} layers of together {needed} bytes, with {len(cuts)} places to cut, can't be "
                f"divided over {len(room)} stages with room for {free} bytes"
            )
        ranges = []
        for reached in best[:0:-1]:
            begin = reached[end][1]
            ranges.append((begin, end))
            end = begin
        return ranges[::-1]
