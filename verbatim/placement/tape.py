"""Steps recorded on a CPU: what a step asks torch and the kernels to do, repeated without its Python.

A layer whose form the kernels don't know makes some hundred small calls, each of which takes longer in
Python than in torch. All tensors stay where they were, so a call is repeated with the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verbatim.errors import NotSupported
from verbatim.kernels import functions
from verbatim.model.differential import differential_check
from verbatim.model.patching import plain_numbers
from verbatim.placement.recorded import Recording, Step
from verbatim.protocols import Forward

_aten = torch.ops.aten
_UNSTABLE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_WITHOUT_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {_aten._to_copy.default, _aten.clone.default}
_OF_RESULT = {"dtype", "layout", "device", "pin_memory"}  # arguments that an `out` has for itself

# A function that repeats a call, and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def record_on_cpu(step: Step) -> Recording:
    """Return a function that makes the calls of `step` once more, and the bytes that it keeps.

    It raises NotSupported if its first result differs from that of `step`.

    Raises:
        NotSupported: the calls depend on what tensors hold.
    """
    with _Tape() as tape, _NoReading(), functions.recorded(tape.calls):
        out = step()
    unchecked = [step]

    def repeat() -> Any:
        with plain_numbers():
            for function, args, kwargs in tape.calls:
                function(*args, **kwargs)
        if unchecked:  # first, so that it finds no K and V that the step itself has written
            found = [x.clone() for x in _results(out)]
            expected = _results(unchecked[0]())
            if differential_check(lambda _: found, lambda _: expected, (None,)) is not None:
                raise NotSupported("a recorded step has other bits")
            unchecked.clear()
        return out

    return repeat, sum(
        {x._cdata: x.nbytes() for x in map(Tensor.untyped_storage, tape.kept)}.values()
    )


def _results(made: tuple[Forward, Tensor | None]) -> list[Tensor]:
    return _tensors((made[0].logits, made[0].hidden, made[1]))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _NoReading(TorchFunctionMode):
    """Refuses to copy tensors to Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise NotSupported(f"Tensor.{func.__name__} reads what a tensor holds")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Notes what a thread asks torch to do.

    Attributes:
        calls: in their order.
        kept: all tensors that were made, as kernels know only where they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.kept: list[Tensor] = []
        self._constant = set[int]()  # storages whose values follow from the code

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _storages(_tensors((args, kwargs)))
        is_constant = given <= self._constant
        reads_constants = bool(given) and is_constant  # random numbers are made of nothing
        is_stable = _UNSTABLE.isdisjoint(func.tags) or _looks_up(func, args)
        if not (is_stable or reads_constants):
            raise NotSupported(f"{func} depends on what tensors hold")
        result = func(*args, **kwargs)
        made = _tensors(result)
        if len(made) < len(tree_leaves(result)):
            if reads_constants:
                return result
            raise NotSupported(f"{func} returns no tensor")
        self.kept += made
        if func._schema.is_mutable:
            if not is_constant:
                self._constant -= given
            self.calls.append((func._op, args, kwargs))
        elif func.overloadpacket.__name__ not in _WITHOUT_VALUES:
            new = _storages(made)
            if is_constant or func is _aten.lift_fresh.default:  # of a number in the code
                self._constant |= new
            if not new <= given:  # else views
                self.calls.append(_into(made, func, args, kwargs))
        return result


def _storages(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


def _looks_up(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation looks up rows by their numbers, and not by a mask."""
    if func is not _aten.index.Tensor:
        return False
    return all(x is None or x.dtype in (torch.int32, torch.int64) for x in args[1])


def _into(made: list[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the call that computes the same into tensors that there are."""
    if func in _COPIES:
        return _aten.copy_.default._op, (made[0], args[0]), {}
    variant = _with_out(func)
    if variant is not None and len(variant[1]) == len(made):
        operation, names, dropped = variant
        own = {name: value for name, value in kwargs.items() if name not in dropped}
        return operation, args, own | dict(zip(names, made, strict=True))

    def copied(*args: Any, **kwargs: Any) -> None:
        for target, source in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
            target.copy_(source)

    return copied, args, kwargs


@cache
def _with_out(func: Any) -> tuple[Callable[..., Any], list[str], set[str]] | None:
    """Return the operation that is given its results, their names, and arguments that it does not take."""
    wanted = {a.name: str(a.type) for a in func._schema.arguments}
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        results = [a.name for a in other._schema.arguments if a.is_out]
        taken = {a.name: str(a.type) for a in other._schema.arguments if not a.is_out}
        dropped = wanted.keys() - taken.keys()
        if results and taken.items() <= wanted.items() and dropped <= _OF_RESULT:
            return other._op, results, dropped
    return None
