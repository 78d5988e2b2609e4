"""Calls of the compiled kernels: argument types, struct checks, and recording."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from verbatim import kernels

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
# Argument types of the `extern "C"` functions, by the letters of `_TYPES`. The number of threads, the last
# argument of most functions, is omitted.
_ARGUMENTS = {
    "vb_activate": "PPPLI",
    "vb_add_low_rank": "PLPLLLPL",
    "vb_attention": "PPPPPPPLLLLLLLLLLLIIFFPLPPL",
    "vb_causal_conv": "PPPIPPPPPPLLLL",
    "vb_chain": "PPPPPPPLPPPLP",
    "vb_choose": "PPLPPLPP",
    "vb_choose_width": "I",
    "vb_collapse_streams": "PPPPPPPLLLLFFF",
    "vb_enter": "PPPLP",
    "vb_exchange": "PLLLUPPLLPLL",
    "vb_expand_streams": "PPPPPLLL",
    "vb_experts": "PPLPPLP",
    "vb_experts_sorted": "PPPP",
    "vb_glu": "PPL",
    "vb_gumbel": "QUULP",
    "vb_index_scores": "PPPPPLLLLL",
    "vb_interleave": "PPLLII",
    "vb_layer": "PPPPPPPLIPPLPP",
    "vb_layer_after": "PPPPLPPLPP",
    "vb_layer_before": "PPLPPLIP",
    "vb_linear_recurrence": "PPPPPPPPPPPLLLLLLIP",
    "vb_model": "PPPPPPPPLPPP",
    "vb_multiply": "PPLLPILI",
    "vb_multiply_batch": "PPLPLL",
    "vb_multiply_chosen": "PLPLPLP",
    "vb_norm": "PPPL",
    "vb_pack_kv": "PPPPPLLLLLPII",
    "vb_pack_rows": "PPLLIIIP",
    "vb_sample_rows": "PILLLPPPLI",
    "vb_support": "PLPPP",
    "vb_unpack_rows": "PPLLIII",
    "vb_weighted_mean": "PPPPPPPPPPLLLI",
    "vb_with_team": "P",
    "vb_write_kv": "PPPPPLLLLLLLLL",
}
# Functions without torch's number of threads as their last argument.
_WITHOUT_THREADS = frozenset(
    {"vb_choose_width", "vb_exchange", "vb_gumbel", "vb_sample_rows", "vb_support"}
)
_RESULTS = {"vb_exchange": ctypes.c_int, "vb_pack_rows": ctypes.c_int, "vb_support": ctypes.c_int64}
_TYPES = {
    "P": ctypes.c_void_p,
    "L": ctypes.c_int64,
    "I": ctypes.c_int,
    "Q": ctypes.c_uint64,
    "U": ctypes.c_uint32,
    "F": ctypes.c_float,
}

_T = TypeVar("_T")
_Struct = TypeVar("_Struct", bound=type[ctypes.Structure])
_structs: dict[str, type[ctypes.Structure]] = {}  # by the name of the class
_sizes: dict[str, int] = {}  # by the name in `vb_{name}_size()`


class _Recording(threading.local):
    calls: list[Any] | None = None  # the argument of `record_calls`


_recording = _Recording()


@contextmanager
def record_calls(calls: list[Any] | None) -> Iterator[None]:
    """Append this thread's kernel calls in the block to `calls` (unless None), as (function, args, {})."""
    previous, _recording.calls = _recording.calls, calls
    try:
        yield
    finally:
        _recording.calls = previous


def recorded_whole(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `function` so that a recorded step repeats it as a whole, not its kernel calls.

    It may read tensor contents, but the shape of its result must depend only on the shapes of its arguments.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        calls = _recording.calls
        if calls is None:
            return function(*args)
        with record_calls(None), _disable_current_modes(), torch._C.DisableTorchFunction():
            out = function(*args)
        calls.append((lambda: out.copy_(function(*args)), (), {}))
        return out

    return call


def struct_layout(layout: str, size: str = "") -> Callable[[_Struct], _Struct]:
    """Return a decorator that gives a struct of the kernels its fields.

    Args:
        layout: the fields in order: lines of a type and names. The type is a letter of `_TYPES`, or another
            struct; "name[n]" is an array.
        size: name of the struct in `vb_{size}_size()`, against which its size is checked; "": unchecked.
    """

    def declare(cls: _Struct) -> _Struct:
        fields = []
        for kind, *names in map(str.split, layout.strip().splitlines()):
            item: Any = _TYPES.get(kind) or _structs[kind]
            for name, _, count in (text.rstrip("]").partition("[") for text in names):
                fields.append((name, item * int(count) if count else item))
        cls._fields_ = fields
        _structs[cls.__name__] = cls
        if size:
            _sizes[size] = ctypes.sizeof(cls)
        return cls

    return declare


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the data pointers of tensors; None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def has_kernels(device: torch.device) -> bool:
    """Return whether the compiled kernels compute tensors on `device`."""
    return device.type == "cpu" and kernels.library() is not None


def kernel(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any] | None:
    """Return a compiled function, or its variant for `dtype`; None if there are no kernels for it."""
    library = kernels.library()
    if library is None or not (dtype is None or dtype in SUFFIX):
        return None
    return _bind(library, name, dtype)


def run(name: str, dtype: torch.dtype | None, *arguments: Any) -> Any:
    """Call an existing compiled function, or its variant for `dtype`; the thread count is added."""
    return _bind(kernels.library(), name, dtype)(*arguments)


_NO_ARGUMENTS = ctypes.CFUNCTYPE(None)


def in_team(work: Callable[[], _T]) -> _T:
    """Call `work`; the threads of the kernels that it calls stay awake in between.

    Otherwise they sleep after each call, and while another program uses the processors, waking them takes a
    time slice. Torch's own operations run on the calling thread alone, so `work` with large ones gets slower.
    """
    if torch.get_num_threads() == 1:
        return work()
    results: list[_T] = []
    errors: list[BaseException] = []

    def calls() -> Iterator[None]:
        try:
            yield
            results.append(work())
        except BaseException as error:
            errors.append(error)
        yield

    # A generator within its `try`: an exception of a signal handler could reach a function before it.
    started = calls()
    next(started)
    run("vb_with_team", None, _NO_ARGUMENTS(started.__next__))
    if errors:
        raise errors.pop()
    return results.pop()


@functools.cache
def _bind(library: ctypes.CDLL | None, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    assert library is not None
    for known, size in _sizes.items():
        size_of: Any = getattr(library, f"vb_{known}_size")
        size_of.restype = ctypes.c_int64
        assert size_of() == size, known
    function: Any = getattr(library, name if dtype is None else f"{name}_{SUFFIX[dtype]}")
    function.argtypes = [*map(_TYPES.__getitem__, _ARGUMENTS[name])]
    function.restype = _RESULTS.get(name)
    if name in _WITHOUT_THREADS:
        return function  # type: ignore[no-any-return]
    function.argtypes = [*function.argtypes, ctypes.c_int]

    def call(*arguments: Any) -> Any:
        if _recording.calls is not None:
            _recording.calls.append((call, arguments, {}))
        return function(*arguments, torch.get_num_threads())

    return call
