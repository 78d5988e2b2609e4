"""The device of Triton's kernels in tests: a GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (torch brings it along on a GPU)")

tl = pytest.importorskip("triton.language")

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16}


def noise(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
