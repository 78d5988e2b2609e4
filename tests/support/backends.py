"""Compute backends for tests: the kernels of an instruction set, or torch's references ("none")."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from verbatim import kernels

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = [*kernels.available(), "none"]


def by(name: str, function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, run with the backend `name`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with kernels.using(name):
            return function(*args, **kwargs)

    return call
