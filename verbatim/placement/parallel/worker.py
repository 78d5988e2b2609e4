"""A worker process of `TensorParallel`: one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verbatim.placement.cluster.link import LinkLost, connect
from verbatim.placement.launcher import HOST
from verbatim.placement.parallel.rank_worker import RankWorker


def serve(rank: int, port: int, key: str, report: Callable[[Any], None]) -> None:
    """Serve rank 0 until it closes, or is gone."""
    secret = bytes.fromhex(key)
    try:
        link = connect((HOST, port), secret, {"rank": rank})
        link.receive()  # welcome
        RankWorker(link, rank, secret).serve("close")
    except LinkLost:
        pass  # rank 0 is gone
    except Exception:
        raise SystemExit(1) from None  # rank 0 has got the reason
