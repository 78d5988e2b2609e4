"""What a user may say about a cluster, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.errors import InvalidRequest
from verbatim.options import budget, positive

MAX_STAGES = 512
_TRANSPORTS = ("auto", "direct", "actors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A model cut into stages, each a process with some of its layers, on one machine or on several.

    No word depends on where the cuts are, on which machines there are, or on what becomes of them while
    an answer is made: a stage that is lost is replaced, its layers compute again what they had to do with
    the answers that are under way, and those go on with the very words they would have had. Only for
    machines that trust each other: see docs/cluster.md.

    Args:
        stages: how many; None takes one for each machine, and two where there is one.
        address: of a Ray cluster, "host:port", as `verbatim cluster start` prints it. None takes the one
            that this process is connected to or that `RAY_ADDRESS` names, else starts one of its own on
            this machine, which ends with the model's `close`.
        layers: how many of them in each stage, in order; None divides by memory and measured speed.
        keep: what each stage may keep of the hidden states that it has handed on, from which a lost stage
            behind it is computed again: bytes, or "1GB". 0 computes from the ids, through all stages.
        spares: processes that wait, ready to take a lost stage's place.
        micro_batches: pieces of one forward, which are in different stages at the same time. None: as many
            as there are stages where a forward has many rows, else one.
        max_restarts: how often stages are replaced for one step, until its requests fail.
        patience_s: a stage that is silent for so long is lost.
        step_timeout_s: and so is one that computes on one micro-batch for so long.
        transport: "direct" connects the processes to each other, "actors" sends everything through Ray, which
            is slower, and "auto" does so where a connection can't be had and Ray is there.
        hosts: where processes come from, in place of Ray: an object with the methods of
            `verbatim.placement.cluster.hosts.Hosts`.

    Raises:
        InvalidRequest: a value out of range; the message names it and what is allowed.
    """

    stages: int | None = None
    address: str | None = None
    layers: Sequence[int] | None = None
    keep: int | str = "1GB"
    spares: int = 1
    micro_batches: int | None = None
    max_restarts: int = 3
    patience_s: float = 3.0
    step_timeout_s: float = 300.0
    transport: str = "auto"
    hosts: Any = None

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches"):
            value = getattr(self, name)
            if value is not None and positive(name, value) > MAX_STAGES:
                raise InvalidRequest(f"{name}={value}: at most {MAX_STAGES}")
        for name in ("spares", "max_restarts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 64:
                raise InvalidRequest(f"{name}={value!r}: must be a whole number from 0 to 64")
        for name in ("patience_s", "step_timeout_s"):
            value = getattr(self, name)
            if (
                not isinstance(value, numbers.Real)
                or isinstance(value, bool)
                or not 0 < float(value) < math.inf
            ):
                raise InvalidRequest(f"{name}={value!r}: must be a number of seconds above 0")
        if self.address is not None and not isinstance(self.address, str):
            raise InvalidRequest(f"address={self.address!r}: must be a string such as 'host:6379'")
        if self.transport not in _TRANSPORTS:
            raise InvalidRequest(f"transport={self.transport!r}: must be one of {_TRANSPORTS}")
        if self.transport == "actors" and self.hosts is not None:
            raise InvalidRequest("transport='actors' needs Ray, and hosts= is in its place")
        if self.layers is not None:
            self._settle_layers()
        budget("keep", self.keep)

    def _settle_layers(self) -> None:
        given = self.layers
        if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
            raise InvalidRequest(f"layers={given!r}: must be the number of layers of each stage")
        layers = tuple(positive("layers", count) for count in given)
        if self.stages is not None and self.stages != len(layers):
            raise InvalidRequest(
                f"layers={layers} are {len(layers)} stages, and stages={self.stages}"
            )
        object.__setattr__(self, "layers", layers)

    @property
    def keep_bytes(self) -> int:
        return budget("keep", self.keep)
