"""The functions that a forward calls, to compare later forwards with it.

Code may ask how many rows or sequences there are, and do something else then. It shows in its steps: the
functions, the numbers they are given and the widths of their sums are those of a trial, or they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (
    int,
    float,
    Number,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A function that a forward called.

    Attributes:
        given: everything it was given that is no tensor, and the widths of a sum or product.
        by_position: the same, where the range of the forward's own positions is told as such: a table of
            angles is cut by it.
    """

    func: Any
    given: list[Any]
    by_position: list[Any]


class Steps:
    """A forward's steps.

    Args:
        positions: whose rows it computes, in every sequence alike.
        expected: another forward's, which this one must take, too. None: any will do.
    """

    def __init__(
        self, positions: range | None = None, expected: Sequence[RecordedCall] | None = None
    ) -> None:
        self.taken: list[RecordedCall] = []
        self.positions = positions
        self._expected = expected

    def take(self, func: Any, given: Any) -> bool:
        """Record a call; return whether it is the expected one."""
        expected, at = self._expected, len(self.taken)
        same_func = expected is not None and at < len(expected) and expected[at].func == func
        leaves = _leaves(given, None)
        if expected is not None and same_func and expected[at].given == leaves:
            self.taken.append(expected[at])
            return True
        step = RecordedCall(func, leaves, _leaves(given, self.positions))
        self.taken.append(step)
        return expected is None or (same_func and expected[at].by_position == step.by_position)

    def missing(self) -> Any:
        """Return the first expected function that was not called; None if all were."""
        left = (self._expected or ())[len(self.taken) :]
        return left[0].func if left else None


def _leaves(given: Any, positions: range | None) -> list[Any]:
    """Return everything inside of `given`, with a marker in place of each tensor."""
    found: list[Any] = []
    _collect(given, positions, found)
    return found


def _collect(given: Any, positions: range | None, found: list[Any]) -> None:
    if isinstance(given, Tensor):
        found.append(Tensor)
    elif isinstance(given, tuple | list):
        found.append((type(given), len(given)))
        for value in given:
            _collect(value, positions, found)
    elif isinstance(given, slice):
        ends = given.start or 0, given.stop
        mine = positions is not None and ends == (positions.start, positions.stop)
        found.append((slice, *(("positions",) if mine else ends), given.step or 1))
    else:
        found.append(given if isinstance(given, _PLAIN) else object())  # equal to nothing


class Unseen(TorchDispatchMode):
    """Records operations that reach torch without having been a step: torch.jit, extensions. Slow, for
    trials only.

    Attributes:
        looked_at: a function that was a step, or need not be one, is being called right now.
        found: the first operation that was none; None: there was none. (What is raised inside of
            torch.jit comes out as something else.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looked_at = False
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.looked_at:
            self.found = self.found or f"{func}, from where nothing can be looked at"
        return func(*args, **(kwargs or {}))
