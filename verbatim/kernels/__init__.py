"""The compiled kernels: one library per instruction set, loaded by ctypes when first asked for.

`library()` is the best one this processor can run, or None where the package was installed without
a compiler; each caller then takes its torch reference. Torch must be imported first: the kernels
share torch's OpenMP runtime, so that there is one pool of threads in the process and not two.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from verbatim.errors import NotSupported

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")

VERSION = 9  # goes up whenever a kernel's arithmetic changes: part of the numerics key

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
# Best first. The second column is what /proc/cpuinfo or the operating system calls the features.
_LEVELS: tuple[tuple[str, frozenset[str]], ...] = (
    ("avx512_bf16", _AVX512 | {"avx512_bf16", "avx512_vnni"}),  # no processor has the first alone
    ("avx512", _AVX512),
    ("avx2", frozenset({"avx2", "fma", "f16c"})),
    ("generic", frozenset()),
)


@functools.cache
def _cpu_features() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def available() -> tuple[str, ...]:
    """The instruction sets that were built and that this processor has, best first."""
    here = Path(__file__).parent
    return tuple(
        name
        for name, needs in _LEVELS
        if needs <= _cpu_features() and (here / f"verbatim_{name}.so").exists()
    )


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library built for instruction set `name`, one of `available()`."""
    import torch  # noqa: F401  (its OpenMP runtime must be in the process before ours is bound)

    return ctypes.CDLL(str(Path(__file__).parent / f"verbatim_{name}.so"))


@functools.cache
def wanted() -> str | None:
    """Return `VERBATIM_KERNELS` as it was when it was first needed."""
    return os.environ.get("VERBATIM_KERNELS")


def instruction_set() -> str | None:
    """The instruction set in use, part of the numerics key; None where nothing was built.

    `VERBATIM_KERNELS=NAME` picks another one of `available()`, `VERBATIM_KERNELS=none` the torch
    references, and `VERBATIM_KERNELS=triton` those and, wherever a GPU would take them, the kernels in
    Triton, under its interpreter.
    """
    return _chosen(_used.name or wanted(), available())


def numerics_key(
    dtype: str,
    kv_dtype: str,
    quantization: str | None = None,
    gpu: dict[str, Any] | None = None,
) -> str:
    """Return the numerics key: what machines must have in common for bit-identical outputs.

    Args:
        quantization: the name of the format that weights are rounded to. A format in which a checkpoint has
            them changes no bit: they may be held in it, or decoded.
        gpu: its `name` and whether it is `deterministic`; None is the CPU.
    """
    import torch

    packed = "" if quantization is None else f"/weights-{quantization}"
    if gpu is not None:
        computed_by = f"kernels{VERSION}-torch{torch.__version__}-cuda{torch.version.cuda}"
        fast = "" if gpu["deterministic"] else "/fast"
        name = gpu["name"].replace(" ", "-")
        return f"{name}/{computed_by}{fast}/{dtype}{packed}/kv-{kv_dtype}"
    instructions = instruction_set()
    computed_by = f"kernels{VERSION}-{instructions}"
    if instructions is None:
        computed_by = f"torch{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return f"cpu/{computed_by}/{dtype}{packed}/kv-{kv_dtype}"


@functools.cache
def _chosen(name: str | None, names: tuple[str, ...]) -> str | None:
    if name in ("none", "triton"):
        return None
    if name:
        if name not in names:
            raise NotSupported(
                f"VERBATIM_KERNELS={name!r}: this build and processor have {[*names]}"
            )
        return name
    return names[0] if names else None


def triton_serves(device: torch.device) -> bool:
    """Return whether the Triton kernels compute tensors on `device`: on a GPU, and on the CPU if
    `VERBATIM_KERNELS=triton` asks for it, for tests (seconds per token).
    """
    used = _used.name
    if device.type == "cuda":
        return used is None
    if device.type != "cpu" or (used or wanted()) != "triton":
        return False
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("VERBATIM_KERNELS=triton on the CPU needs TRITON_INTERPRET=1 besides")
    return True


def without_overrides(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function without torch-function overrides: each of its torch calls would pass through them."""
    import torch

    disabled = torch._C.DisableTorchFunction

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with disabled():
            return function(*args, **kwargs)

    return call


MISSING = "installed without compiled kernels, so this will be slow (docs/install.md)"


def missing() -> bool:
    """Return whether no kernels were built, unless VERBATIM_KERNELS requests none."""
    return instruction_set() is None and not wanted()


class _Used(threading.local):
    """The argument of `using` in this thread."""

    name: str | None = None


_used = _Used()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute as with `VERBATIM_KERNELS=name` in this thread within the block; "none": also on a GPU.

    Fused layers of a model that is open already keep the kernels that it was opened with.

    Raises:
        NotSupported: the kernels were not built for this processor, or are unknown.
    """
    _chosen(name, available())
    before, _used.name = _used.name, name
    try:
        yield
    finally:
        _used.name = before


def library() -> ctypes.CDLL | None:
    """The library for this processor, or None where none was built."""
    return _library(_used.name or wanted(), available())


@functools.cache  # one lookup, as each call of a kernel asks
def _library(name: str | None, names: tuple[str, ...]) -> ctypes.CDLL | None:
    chosen = _chosen(name, names)
    return load(chosen) if chosen else None
