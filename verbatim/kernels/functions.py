"""The functions and structs of the compiled kernels, as `extern "C"` in their sources declares them."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from verbatim import kernels

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
# A letter for each argument: an address (P), an integer of 64 (L) or 32 bits (I), one without a sign (Q, U),
# a float (F). The number of threads, which follows in most of them, is left out.
_ARGUMENTS = {
    "vb_activate": "PPPLI",
    "vb_add_low_rank": "PLPLLLPL",
    "vb_attention": "PPPPPPPLLLLLLLLLLLIIFFPP",
    "vb_causal_conv": "PPPIPPPPPPLLLL",
    "vb_chain": "PPPPPPPLPPPLP",
    "vb_choose": "PPLPPLPP",
    "vb_collapse_streams": "PPPPPPPLLLLFFF",
    "vb_enter": "PPPLP",
    "vb_expand_streams": "PPPPPLLL",
    "vb_experts": "PPLPPLP",
    "vb_experts_sorted": "PPPP",
    "vb_glu": "PPL",
    "vb_gumbel": "QUULP",
    "vb_index_scores": "PPPPLLLL",
    "vb_interleave": "PPLLII",
    "vb_layer": "PPPPPPPLIPPLPP",
    "vb_layer_after": "PPPPLPPLPP",
    "vb_layer_before": "PPLPPLIP",
    "vb_linear_recurrence": "PPPPPPPPPPPLLLLLLIP",
    "vb_model": "PPPPPPPPLPPP",
    "vb_multiply": "PPLLPILI",
    "vb_multiply_batch": "PPLPLL",
    "vb_norm": "PPPL",
    "vb_pack_kv": "PPPPPLLLLLPII",
    "vb_pack_rows": "PPLLIIIP",
    "vb_sample_rows": "PILLLPPPLI",
    "vb_support": "PLPPP",
    "vb_unpack_rows": "PPLLIII",
    "vb_weighted_mean": "PPPPPPPPPPLLLI",
    "vb_write_kv": "PPPPPLLLLLLLLL",
}
# Those to which the number of torch's threads is not passed on.
_WITHOUT_THREADS = frozenset({"vb_gumbel", "vb_sample_rows", "vb_support"})
_RESULTS = {"vb_pack_rows": ctypes.c_int, "vb_support": ctypes.c_int64}
_TYPES = {
    "P": ctypes.c_void_p,
    "L": ctypes.c_int64,
    "I": ctypes.c_int,
    "Q": ctypes.c_uint64,
    "U": ctypes.c_uint32,
    "F": ctypes.c_float,
}

_Struct = TypeVar("_Struct", bound=type[ctypes.Structure])
_structs: dict[str, type[ctypes.Structure]] = {}


class _Recording(threading.local):
    calls: list[Any] | None = None  # of `recorded`


_recording = _Recording()


@contextmanager
def recorded(calls: list[Any]) -> Iterator[None]:
    """Append the calls of kernels in this thread within the block: the function, its arguments and {}."""
    _recording.calls = calls
    try:
        yield
    finally:
        _recording.calls = None


def struct_of(name: str) -> Callable[[_Struct], _Struct]:
    """Return a decorator of a struct that is held to the size which `vb_{name}_size` returns."""

    def register(cls: _Struct) -> _Struct:
        _structs[name] = cls
        return cls

    return register


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return where tensors lie in memory; None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def has_kernels(device: torch.device) -> bool:
    """Return whether the compiled kernels compute tensors on `device`."""
    return device.type == "cpu" and kernels.library() is not None


def kernel(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any] | None:
    """Return a function of the kernels, for a dtype if it has several; None where torch is to compute."""
    library = kernels.library()
    if library is None or not (dtype is None or dtype in SUFFIX):
        return None
    return _bound(library, name, dtype)


def run(name: str, dtype: torch.dtype | None, *arguments: Any) -> Any:
    """Call a function of the kernels, which must be there, for a dtype if it has several.

    Args:
        arguments: without the number of threads.
    """
    return _bound(kernels.library(), name, dtype)(*arguments)


@functools.cache
def _bound(library: ctypes.CDLL | None, name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    assert library is not None
    for known, struct in _structs.items():
        size: Any = getattr(library, f"vb_{known}_size")
        size.restype = ctypes.c_int64
        assert size() == ctypes.sizeof(struct)
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
