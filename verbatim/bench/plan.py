"""`BenchPlan`: what a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from verbatim.checks import integer


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements of a run.

    Attributes:
        rows: sequences decoded at once.
        contexts: context lengths of decoding, in tokens.
        prefills: prompt lengths in tokens.
        mixed: requests in the mixed workload, of Verbatim only; 0 skips it.
        rounds: turns per system and case.
        steps: decode steps per turn.

    Raises:
        InvalidRequest: a number out of its range.
    """

    rows: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 1024)
    prefills: tuple[int, ...] = (512,)
    mixed: int = 32
    rounds: int = 3
    steps: int = 8

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                integer(name, number, low=int(name != "mixed"))

    def fitting(self, max_length: int) -> tuple[BenchPlan, list[str]]:
        """Return the plan without lengths over the model's limit, and remarks on what was left out."""
        room = max_length - max(self.rows, default=0) - self.steps - 4
        contexts = tuple(n for n in self.contexts if n <= room)
        prefills = tuple(n for n in self.prefills if n < max_length)
        dropped = [f"a context of {n}" for n in self.contexts if n not in contexts]
        dropped += [f"a prompt of {n}" for n in self.prefills if n not in prefills]
        remarks = [f"{item} is left out: at most {max_length} tokens fit" for item in dropped]
        return replace(self, contexts=contexts, prefills=prefills), remarks
