"""The compiled kernels: one library per instruction set, loaded by ctypes on first use.

Their results are bit-identical.

`library()` is the best one for this processor, or None if the package was installed without a compiler;
callers then use their torch references. torch must be imported first: the kernels share its OpenMP runtime,
so that the process has only one thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
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

# Incremented when the arithmetic of a kernel or a model changes; part of the numerics key.
VERSION = 14

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
# Best first, with the required features, named as in /proc/cpuinfo.
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
    """Return the instruction sets that were built and that this processor has, best first."""
    here = Path(__file__).parent
    built = (
        name
        for name, needs in _LEVELS
        if needs <= _cpu_features() and (here / f"verbatim_{name}.so").exists()
    )
    return tuple(name for name in built if name != "avx512_bf16" or load(name).vb_floats_agree())


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Load the library of instruction set `name`, one of `available()`."""
    import torch  # noqa: F401  (its OpenMP runtime must be in the process before ours is bound)

    return ctypes.CDLL(str(Path(__file__).parent / f"verbatim_{name}.so"))


@functools.cache
def requested() -> str | None:
    """Return the value that `VERBATIM_KERNELS` had at the first call."""
    return os.environ.get("VERBATIM_KERNELS")


def instruction_set() -> str | None:
    """Return the instruction set in use; None for the torch references. Results are bit-identical.

    `VERBATIM_KERNELS` selects another one of `available()`, the torch references ("none"), or "triton": the
    Triton kernels under Triton's interpreter wherever a GPU would use them, else the torch references.
    """
    return _select(_override.name or requested(), available())


@functools.cache
def torch_arithmetic(names: str) -> str:
    """Return a short hash of the results of torch functions, which round differently on some processors."""
    import torch

    # Exact numbers from -16 to 16.
    x = (torch.arange(4096, device="cpu") * 7919 % 4099 - 2049).float() / 128
    special = {
        "cos": lambda: torch.cos(x * 4096),
        "sin": lambda: torch.sin(x * 4096),
        "pow": lambda: torch.pow(1e6, x / 16),  # as the frequencies of rotary embeddings
        "softmax": lambda: x.view(16, 256).softmax(-1),
    }
    digest = hashlib.sha256()
    for name in names.split():
        compute = special.get(name) or functools.partial(getattr(torch, name), x.abs() + 0.5)
        digest.update(compute().numpy().tobytes())
    return digest.hexdigest()[:6]


def numerics_key(
    dtype: str,
    kv_dtype: str,
    quantization: str | None = None,
    gpu: dict[str, Any] | None = None,
    *,
    by_torch: bool = False,
) -> str:
    """Return the numerics key; machines with equal keys produce bit-identical outputs.

    The compiled kernels are bit-identical with every instruction set. The key contains a hash of torch's
    cosines, sines and powers, which rotary embeddings are computed from; it is equal with AVX2 and AVX-512.

    Args:
        quantization: name of the format to which weights are rounded, or None. A quantized checkpoint's own
            format does not count: results are the same with packed and with dequantized weights.
        gpu: the GPU's `name` and whether it is `deterministic`; None: the CPU.
        by_torch: whether the model calls functions that torch computes with other bits on other CPUs
            (`ModelSpec.torch_functions`).
    """
    import torch

    packed = "" if quantization is None else f"/weights-{quantization}"
    if gpu is not None:
        computed_by = f"kernels{VERSION}-torch{torch.__version__}-cuda{torch.version.cuda}"
        fast = "" if gpu["deterministic"] else "/fast"
        name = gpu["name"].replace(" ", "-")
        return f"{name}/{computed_by}{fast}/{dtype}{packed}/kv-{kv_dtype}"
    parts = []
    if instruction_set() is not None:
        parts = [f"kernels{VERSION}", torch_arithmetic("cos sin pow")]
    if not parts or by_torch:
        functions = torch_arithmetic("cos sin pow tanh sqrt log log1p expm1 exp erf softmax")
        capability = torch.backends.cpu.get_cpu_capability()
        parts += [f"torch{torch.__version__}", capability, functions]
    computed_by = "-".join(parts)
    return f"cpu/{computed_by}/{dtype}{packed}/kv-{kv_dtype}"


@functools.cache
def _select(name: str | None, names: tuple[str, ...]) -> str | None:
    if name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotSupported(
            "VERBATIM_KERNELS='triton': needs TRITON_INTERPRET=1; a GPU uses Triton without it"
        )
    if name in ("none", "triton"):
        return None
    if name:
        if name not in names:
            raise NotSupported(
                f"VERBATIM_KERNELS={name!r}: this build and processor support {[*names]}"
            )
        return name
    return names[0] if names else None


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton kernels are used on `device`: a GPU, or in tests the CPU (seconds per token)."""
    override = _override.name
    if device.type == "cuda":
        return override is None
    return device.type == "cpu" and (override or requested()) == "triton"


def without_overrides(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function to run without torch-function overrides."""
    import torch

    disabled = torch._C.DisableTorchFunction

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with disabled():
            return function(*args, **kwargs)

    return call


MISSING = "installed without compiled kernels, so this will be slow (docs/install.md)"


def missing() -> bool:
    """Return whether there are no kernels although `VERBATIM_KERNELS` is not set."""
    return instruction_set() is None and not requested()


class _Override(threading.local):
    """The argument of `using` in this thread."""

    name: str | None = None


_override = _Override()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Behave as with `VERBATIM_KERNELS=name` in this thread within the block; "none" applies to GPUs, too.

    Fused layers of an open model keep the kernels with which it was opened.

    Raises:
        NotSupported: the name is unknown, or its kernels were not built or need another processor.
    """
    _select(name, available())
    previous, _override.name = _override.name, name
    try:
        yield
    finally:
        _override.name = previous


def library() -> ctypes.CDLL | None:
    """Return the library for this processor, or None if none was built."""
    return _library(_override.name or requested(), available())


@functools.cache  # called by every kernel call
def _library(name: str | None, names: tuple[str, ...]) -> ctypes.CDLL | None:
    selected = _select(name, names)
    return load(selected) if selected else None
