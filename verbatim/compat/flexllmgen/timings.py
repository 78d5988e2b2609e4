"""Timings of one call, measured unless stated otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from verbatim.core import Request

Spent = Callable[[], Sequence[float]]  # load, compute and store so far, in seconds
_PARTS = ("load_s", "compute_s", "store_s")


@dataclass(slots=True)
class Phase:
    """Timings of the prefill steps, or of the decoding steps.

    Attributes:
        num_steps: forwards that generated a token.
        wall_s: elapsed seconds.
        load_s: seconds the computing thread waited for weights, K and V and activations; with
            `overlap=False`, all reading. Like the next two, None without `debug_mode="breakdown"`.
        compute_s: seconds in the model's layers.
        store_s: seconds it waited for K and V and activations to be written.
    """

    num_steps: int = 0
    wall_s: float = 0.0
    load_s: float | None = None
    compute_s: float | None = None
    store_s: float | None = None

    @property
    def other_s(self) -> float | None:
        """The rest of `wall_s`: scheduling, sampling and output."""
        parts = [getattr(self, name) for name in _PARTS]
        return None if None in parts else self.wall_s - sum(parts)

    def add(self, wall_s: float, spent: Sequence[float]) -> None:
        """Add a step: its elapsed seconds, and load, compute and store if they are measured."""
        self.wall_s += wall_s
        for name, seconds in zip(_PARTS, spent, strict=False):
            setattr(self, name, (getattr(self, name) or 0.0) + seconds)


@dataclass(slots=True)
class Timings:
    """Timings of one `generate`.

    Attributes:
        num_rows: number of rows run.
        costs: seconds of each step; all steps of a prompt count towards its first token's.
        prefill: the steps that computed part of any row's prompt.
        decode: the other steps.
        projected_s: if `debug_mode="fewer_batch"` or `cut_gen_len` left work out, an estimate of
            the whole without stops. None if everything was run.
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
        """Estimate the time of `rows` and `new_tokens` from `num_rows` rows and `ran` tokens of each.

        Decoding is taken as proportional to the tokens (a little too low, as the context grows), the
        total as proportional to the rows.
        """
        if not self.num_rows or (rows == self.num_rows and new_tokens <= ran):
            return
        decode = self.decode.wall_s * (new_tokens - 1) / (ran - 1) if ran > 1 else 0.0
        self.projected_s = (self.prefill.wall_s + decode) * rows / self.num_rows

    def lines(self) -> list[str]:
        """Return a readable summary."""
        lines = []
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            line = f"{name}: {phase.wall_s:.3f} s in {phase.num_steps} steps"
            if phase.other_s is not None:
                line += f" (load {phase.load_s:.3f}, compute {phase.compute_s:.3f}"
                line += f", store {phase.store_s:.3f}, other {phase.other_s:.3f})"
            lines.append(line)
        if self.projected_s is not None:
            lines.append(f"projected for the whole: {self.projected_s:.3f} s (an estimate)")
        return lines


class Clock:
    """Attributes the time of each step to prefill or decoding.

    Args:
        spent: returns load, compute and store so far, in seconds; None if not measured.
    """

    def __init__(self, requests: list[Request], spent: Spent | None) -> None:
        self.timings = Timings(num_rows=len(requests))
        self._requests = requests
        self._read_spent: Spent = spent or tuple
        self._last = self._read()
        for phase in (self.timings.prefill, self.timings.decode):
            phase.add(0.0, [0.0 for _ in self._last[1]])

    def lap(self) -> int:
        """Record a step; return the number of tokens that it generated."""
        (begin, spent, tokens, prompts), self._last = self._last, self._read()
        now, spent_now, tokens_now, prompts_now = self._last
        wall_s, num_new = now - begin, tokens_now - tokens
        phase = self.timings.decode if prompts == prompts_now else self.timings.prefill
        phase.add(wall_s, [new - old for new, old in zip(spent_now, spent, strict=True)])
        if num_new > 0:
            phase.num_steps += 1
            self.timings.costs.append(wall_s)
        elif self.timings.costs:
            self.timings.costs[-1] += wall_s
        return num_new

    def _read(self) -> tuple[float, Sequence[float], int, tuple[int, int]]:
        """Return the time, `spent`, the generated tokens, and what changes while a prompt is computed.

        That is the number of rows with tokens, and of computed prompt tokens of the other rows.
        """
        rows = [request.sequences[0] for request in self._requests]
        begun = sum(bool(row.output_ids) for row in rows)
        computed = sum(row.num_computed for row in rows if not row.output_ids)
        tokens = sum(len(row.output_ids) for row in rows)
        return perf_counter(), self._read_spent(), tokens, (begun, computed)
