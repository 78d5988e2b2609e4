"""A worker process of `TensorParallel`: one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verbatim.placement.cluster import local
from verbatim.placement.parallel.rank_share import RankShare


def serve(key: str, model: dict[str, Any] | None, report: Callable[[Any], None]) -> None:
    """Serve rank 0 until it closes, or is gone; arguments as of `local.serve`."""
    local.serve(key, model, report, RankShare())
