"""Records steps on a CPU: the calls to torch and the kernels, to be repeated without the Python code.

A layer that has no fused kernel makes hundreds of small calls, each of which takes longer in Python than in
torch. All tensors stay at their addresses, so each call is repeated with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verbatim.errors import NotSupported
from verbatim.kernels import functions
from verbatim.model.differential import all_bit_equal
from verbatim.model.patching import without_torch_modes
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
_INTEGERS = {torch.int32, torch.int64}
_IMPLIED_BY_OUT = {"dtype", "layout", "device", "pin_memory"}

# A recorded call: the function, its arguments and its keyword arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def record_on_cpu(step: Step) -> Recording:
    """Return a function that repeats the calls of `step`, and the bytes of the tensors that it holds.

    The first call of the function raises NotSupported if its results are not bit-identical to `step`.

    Raises:
        NotSupported: the calls depend on the values of tensors.
    """
    with _Tape() as tape, _NoReading(), functions.record_calls(tape.calls):
        out = step()
    unchecked = [step]

    def repeat() -> Any:
        with without_torch_modes():
            for function, args, kwargs in tape.calls:
                function(*args, **kwargs)
        if unchecked:  # after the repeated calls, so that they can't read K and V written by `step`
            repeated = [x.clone() for x in _step_tensors(out)]
            expected = _step_tensors(unchecked[0]())
            if not all_bit_equal(repeated, expected):
                raise NotSupported("the replay of a recorded step is not bit-identical")
            unchecked.clear()
        return out

    return repeat, sum(
        {x._cdata: x.nbytes() for x in map(Tensor.untyped_storage, tape.outputs)}.values()
    )


def _step_tensors(output: tuple[Forward, Tensor | None]) -> list[Tensor]:
    return _tensors((output[0].logits, output[0].hidden, output[1]))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _NoReading(TorchFunctionMode):
    """Raises NotSupported if the values of a tensor are copied to Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            raise NotSupported(f"Tensor.{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Records the calls to torch made in the current thread.

    Attributes:
        calls: the recorded calls, in order.
        outputs: all output tensors, which must stay alive since kernels hold only their addresses.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.outputs: list[Tensor] = []
        self._constant = set[int]()  # storages with values that are the same in every step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _storages(_tensors((args, kwargs)))
        is_constant = inputs <= self._constant
        reads_constants = bool(inputs) and is_constant  # a random generator has no input tensors
        is_stable = _UNSTABLE.isdisjoint(func.tags) or self._is_gather(func, args)
        if not (is_stable or reads_constants):
            raise NotSupported(f"{func} depends on the values of tensors")
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if len(outputs) < len(tree_leaves(result)):
            if reads_constants:
                return result
            raise NotSupported(f"{func} returns no tensor")
        self.outputs += outputs
        if func._schema.is_mutable:
            if not is_constant:
                self._constant -= inputs
            self.calls.append((func._op, args, kwargs))
        elif func.overloadpacket.__name__ not in _WITHOUT_VALUES:
            created = _storages(outputs)
            if is_constant or func is _aten.lift_fresh.default:  # a literal in the code
                self._constant |= created
            if not created <= inputs:  # otherwise the outputs are views
                self.calls.append(_call_into(outputs, func, args, kwargs))
        return result

    def _is_gather(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operation indexes by integers or constants, so that shapes stay the same."""
        if func is not _aten.index.Tensor:
            return False
        given = [x for x in args[1] if x is not None]
        return all(x.dtype in _INTEGERS for x in given) or _storages(given) <= self._constant


def _storages(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


def _call_into(
    outputs: list[Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call:
    """Return a call that writes the results of `func` into the existing tensors `outputs`."""
    if func in _COPIES:
        return Tensor.copy_, (outputs[0], args[0]), {}
    variant = _with_out(func)
    if variant is not None and len(variant[1]) == len(outputs):
        operation, names, dropped = variant
        retained = {name: value for name, value in kwargs.items() if name not in dropped}
        retained |= dict(zip(names, outputs, strict=True))
        # torch's function of that name parses its arguments in half the time.
        function = getattr(torch._C._VariableFunctions, func.overloadpacket.__name__, None)
        if names == ["out"] and function is not None:
            with suppress(TypeError, RuntimeError):
                if function(*args, **retained) is outputs[0]:  # `torch.__rshift__` ignores `out`
                    return function, args, retained
        return operation, args, retained

    def copied(*args: Any, **kwargs: Any) -> None:
        for target, source in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
            target.copy_(source)

    return copied, args, kwargs


@cache
def _with_out(func: Any) -> tuple[Callable[..., Any], list[str], set[str]] | None:
    """Return the `out=` variant of `func`, its output names, and the arguments of `func` that it lacks."""
    required = {a.name: str(a.type) for a in func._schema.arguments}
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        results = [a.name for a in other._schema.arguments if a.is_out]
        taken = {a.name: str(a.type) for a in other._schema.arguments if not a.is_out}
        dropped = required.keys() - taken.keys()
        if results and taken.items() <= required.items() and dropped <= _IMPLIED_BY_OUT:
            return other._op, results, dropped
    return None
