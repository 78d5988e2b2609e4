"""Toys with odd widths, in several dtypes."""

from __future__ import annotations

from typing import Any

import torch

from support.toys import make_toy
from verbatim import LLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Dense and mixture-of-experts models, with and without windows, sinks, soft caps and ALiBi, all odd widths.
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=60, intermediate_size=100, num_attention_heads=6),
    "qwen3_moe": dict(hidden_size=60, moe_intermediate_size=36),
    "gemma2": dict(hidden_size=100),
    "gpt_oss": dict(hidden_size=60, intermediate_size=50),
    "deepseek_v3": dict(hidden_size=60),
    "gpt2": dict(n_embd=60, n_head=3),
    "bloom": dict(hidden_size=60),
    "falcon": {},
    "qwen3_next": dict(hidden_size=60, moe_intermediate_size=36),
    "granite_hybrid": dict(mamba_d_state=9),
    "lfm2": {},
}


def open_toy(name: str, dtype: str, **options: Any) -> LLM:
    return LLM(make_toy(name, dtype=DTYPES[dtype], **MODELS[name]), **options)
