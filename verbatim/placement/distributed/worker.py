"""The functions that worker processes of this machine run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from verbatim.errors import VerbatimError
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.layers import Layers
from verbatim.placement.distributed.rank_share import RankShare
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.stage import Stage

Report = Callable[[Any], None]


def serve_layers(key: str, model: dict[str, Any] | None, report: Report) -> None:
    """Serve layers of a model until the head is gone.

    Args:
        key: in hexadecimal digits.
        model: inspected in advance, if given.
        report: takes the port.
    """
    _serve(Layers(), key, model, report)


def serve_rank(key: str, model: dict[str, Any] | None, report: Report) -> None:
    """Serve a rank's share of each layer; arguments as of `serve_layers`."""
    _serve(RankShare(), key, model, report)


def _serve(share: Served, key: str, model: dict[str, Any] | None, report: Report) -> None:
    ended = threading.Event()
    stage = Stage(bytes.fromhex(key), HOST, share, ended.set)
    report(stage.address[1])
    if model is not None:
        try:
            share.warm(model)
        except VerbatimError:
            pass  # reported when the model is opened
    ended.wait()
