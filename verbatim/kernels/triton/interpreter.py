"""Fixes for Triton's interpreter where numpy would fail."""

from __future__ import annotations

from typing import Any

import numpy as np


def mend() -> None:
    """Allow scalars of kernels as bounds of loops, and infinities without warnings; idempotent.

    The interpreter holds a scalar as an array of one element and asks `int` for its value, which numpy
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
