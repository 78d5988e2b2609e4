"""What a call took: measured, and an estimate only where it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from verbatim.core import Request
from verbatim.placement.offload.runner import Timings as Spent


@dataclass(slots=True)
class Phase:
    """The steps of the prefill, or those of decoding.

    Attributes:
        num_steps: forwards in which a row got a token.
        wall_s: seconds by the clock.
        load_s: of these, what the computing thread waited for weights, K and V and activations; with
            `overlap=False` that is all reading. None but with `debug_mode="breakdown"`, like the next two.
        compute_s: of these, in the model's layers.
        store_s: of these, what it waited for K and V and activations to be written.
    """

    num_steps: int = 0
    wall_s: float = 0.0
    load_s: float | None = None
    compute_s: float | None = None
    store_s: float | None = None

    @property
    def other_s(self) -> float | None:
        """What is left of `wall_s`: scheduling, drawing tokens, and handing them out."""
        if self.load_s is None or self.compute_s is None or self.store_s is None:
            return None
        return self.wall_s - self.load_s - self.compute_s - self.store_s

    def _add(self, wall_s: float, spent: Sequence[float] | None) -> None:
        self.wall_s += wall_s
        if spent is not None:
            self.load_s = (self.load_s or 0.0) + spent[0]
            self.compute_s = (self.compute_s or 0.0) + spent[1]
            self.store_s = (self.store_s or 0.0) + spent[2]


@dataclass(slots=True)
class Timings:
    """Of one `generate`.

    Attributes:
        num_rows: that were run.
        costs: seconds of each step; of prompts that take several steps, the first token's has them all.
        prefill: the steps in which some row's prompt was computed, of a row that came later too.
        decode: the others.
        projected_s: where `debug_mode="fewer_batch"` or `cut_gen_len` left something out: an estimate of
            the whole, as if no row met its stop. None where everything was run.
    """

    num_rows: int = 0
    costs: list[float] = field(default_factory=list)
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    projected_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return self.prefill.wall_s + self.decode.wall_s

    def project(self, rows: int, new_tokens: int, ran: int) -> None:
        """Estimate the whole of `rows` and `new_tokens` from `num_rows` rows and `ran` tokens of each.

        Decoding goes up with the tokens (a little more than that, for the context grows), and all of it
        with the blocks of rows.
        """
        if not self.num_rows or (rows == self.num_rows and new_tokens <= ran):
            return
        decode = self.decode.wall_s * (new_tokens - 1) / (ran - 1) if ran > 1 else 0.0
        self.projected_s = (self.prefill.wall_s + decode) * rows / self.num_rows

    def lines(self) -> list[str]:
        """For people."""
        found = []
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            line = f"{name}: {phase.wall_s:.3f} s in {phase.num_steps} steps"
            if phase.other_s is not None:
                line += f" (load {phase.load_s:.3f}, compute {phase.compute_s:.3f}"
                line += f", store {phase.store_s:.3f}, other {phase.other_s:.3f})"
            found.append(line)
        if self.projected_s is not None:
            found.append(f"projected for the whole: {self.projected_s:.3f} s (an estimate)")
        return found


class Clock:
    """Puts the time between two looks at some requests down to one of the phases.

    Args:
        spent: tells load, compute and store so far, in seconds; None where nobody asked for them.
    """

    def __init__(self, requests: list[Request], spent: Callable[[], Spent] | None) -> None:
        self.timings = Timings(num_rows=len(requests))
        self._requests = requests
        self._read = spent
        self._spent = None if spent is None else spent()
        if spent is not None:
            for phase in (self.timings.prefill, self.timings.decode):
                phase.load_s = phase.compute_s = phase.store_s = 0.0
        self._progress = self._look()
        self._begin = perf_counter()

    def lap(self) -> int:
        """Look again, after a step; the tokens that it brought."""
        now, progress = perf_counter(), self._look()
        wall_s, self._begin = now - self._begin, now
        added = None
        if self._read is not None and self._spent is not None:
            spent = self._read()
            added = [new - old for new, old in zip(spent, self._spent, strict=True)]
            self._spent = spent
        (tokens, *prompts), (tokens_before, *prompts_before) = progress, self._progress
        phase = self.timings.decode if prompts == prompts_before else self.timings.prefill
        phase._add(wall_s, added)
        if tokens > tokens_before:
            phase.num_steps += 1
            self.timings.costs.append(wall_s)
        elif self.timings.costs:
            self.timings.costs[-1] += wall_s
        self._progress = progress
        return tokens - tokens_before

    def _look(self) -> tuple[int, int, int]:
        """Tokens made; rows that have one; and of the others, how much of their prompts is computed."""
        rows = [request.sequences[0] for request in self._requests]
        return (
            sum(len(row.output_ids) for row in rows),
            sum(bool(row.output_ids) for row in rows),
            sum(row.num_computed for row in rows if not row.output_ids),
        )
