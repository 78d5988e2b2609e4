"""The numerics key: what machines must have in common for bit-identical outputs."""

from __future__ import annotations

from typing import Any

import torch

from verbatim import kernels


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
    if gpu is not None:
        computed_by = f"kernels{kernels.VERSION}-torch{torch.__version__}-cuda{torch.version.cuda}"
        fast = "" if gpu["deterministic"] else "/fast"
        return f"{gpu['name'].replace(' ', '-')}/{computed_by}{fast}/{dtype}/kv-{kv_dtype}"
    instructions = kernels.instruction_set()
    computed_by = f"kernels{kernels.VERSION}-{instructions}"
    if instructions is None:
        computed_by = f"torch{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    packed = "" if quantization is None else f"/weights-{quantization}"
    return f"cpu/{computed_by}/{dtype}{packed}/kv-{kv_dtype}"
