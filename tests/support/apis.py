"""The APIs of `examples/five_apis.py`: functions of a model, rows `[B, P]`, a length and `sampled`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from verbatim import LLM

_EXAMPLE = Path(__file__).parents[2] / "examples/five_apis.py"


def _load() -> dict[str, Callable[[LLM, Tensor, int, bool], Tensor]]:
    spec = importlib.util.spec_from_file_location("five_apis", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.APIS


APIS = _load()
