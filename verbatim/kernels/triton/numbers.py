"""Rounding and products, the same in a compiled kernel and under Triton's interpreter.

The interpreter truncates where hardware rounds to bfloat16, multiplies the bit patterns of bfloat16
matrices as if they were integers, and makes the bits of a product's row depend on its place. The helpers
here avoid that; compiled, they are the plain operations.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


def _mend() -> None:
    """Patch the interpreter to allow scalars as loop bounds, and infinities without warnings; idempotent.

    The interpreter stores a scalar as an array of one element and calls `int` on it, which numpy
    refuses since 2.4.
    """
    from triton.runtime import interpreter

    plain: Any = interpreter._patch_lang_tensor
    if getattr(plain, "mended", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
    call: Any = interpreter.GridExecutor.__call__

    def quiet(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = quiet


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
if INTERPRETED.value:
    _mend()

# Decorator of a kernel's helper. The interpreter is set up anew at each call of a compiled function, which
# takes longer than the function; it also runs plain functions. Arguments in capitals are constants.
helper: Any = (lambda function: function) if INTERPRETED.value else triton.jit

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Products and sums are rounded separately, because which of them a compiler fuses may differ between two
# kernels that must be bit-identical.
EXACT = {"enable_fp_fusion": False}


@helper
def widened(x):
    """Convert to float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@helper
def rounded(x, dtype):
    """Round from float32 to `dtype`, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@helper
def exp(x):
    """Return exp(x) of float32 x with the bits of CUDA's `expf`, which torch uses."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@helper
def product(a, b, total):
    """Return `total + a @ b`, summed in float32; float32 factors are not rounded to TF32."""
    if INTERPRETED:  # the bits of a row of numpy's product depend on its place
        return total + tl.sum(widened(a)[:, :, None] * widened(b)[None, :, :], 1)
    return tl.dot(a, b, total, input_precision="ieee")
