"""The function that worker processes of this machine run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.layers import Layers
from verbatim.placement.distributed.rank_share import RankShare
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.stage import Stage

SHARES: dict[str, type[Served]] = {"layers": Layers, "rank": RankShare}


def serve(
    share: str, key: str, model: dict[str, Any] | None, report: Callable[[Any], None]
) -> None:
    """Serve a share of a model until the head is gone.

    Args:
        share: which of `SHARES`.
        key: in hexadecimal digits.
        model: inspected in advance, if given.
        report: takes the port.
    """
    ended, served = threading.Event(), SHARES[share]()
    stage = Stage(bytes.fromhex(key), HOST, served, ended.set)
    report(stage.address[1])
    if model is not None:
        served.warm(model)
    ended.wait()
