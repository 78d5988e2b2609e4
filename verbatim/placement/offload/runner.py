"""The model over three tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from verbatim.batch import Batch
from verbatim.errors import NotSupported
from verbatim.kv.store import KVStore
from verbatim.model.context import Pass
from verbatim.model.decoder import Decoder
from verbatim.placement.offload.choice import Offload
from verbatim.placement.offload.cut import cut
from verbatim.placement.offload.plan import Plan
from verbatim.placement.offload.schedule import BlockSchedule
from verbatim.placement.offload.scratch import Scratch
from verbatim.placement.offload.trace import Trace
from verbatim.placement.offload.weights import Weights
from verbatim.placement.resident import Resident


class Timings(NamedTuple):
    """Seconds of the thread that computes, since the model was opened."""

    load_s: float  # waiting for weights, K and V, activations
    compute_s: float
    store_s: float  # waiting for K and V and activations to be written


class Micro:
    """The order of work of an offloaded model: in micro-batches, unit by unit."""

    def __init__(self, plan: Plan, schedule: BlockSchedule) -> None:
        self._plan = plan
        self._schedule = schedule

    def cut(self, batch: Batch) -> list[Batch]:
        return cut(batch, self._plan.batch_size, self._plan.micro_tokens)

    def run(self, walks: Sequence[Pass], forwards: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        return self._schedule.run(walks, forwards)


class Offloaded(Resident):
    """As `Resident`, with parameters, K and V and activations that come and go.

    Args:
        decoder: with the order of work above.
        weights: what it lends its units.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        num_threads: int | None,
        *,
        offload: Offload,
        plan: Plan,
        weights: Weights,
        schedule: BlockSchedule,
        trace: Trace,
        scratch: Scratch,
    ) -> None:
        super().__init__(decoder, store, num_threads)
        self.offload, self.plan = offload, plan
        self.weights, self.schedule, self.trace = weights, schedule, trace
        self.scratch = scratch

    def info(self) -> dict[str, Any]:
        return {**super().info(), "placement": "offload"}

    def timings(self) -> Timings:
        """Where the time of all forwards so far went."""
        load_s, store_s = getattr(self.store, "load_s", 0.0), getattr(self.store, "store_s", 0.0)
        return Timings(
            load_s=self.weights.stream.wait_s + load_s,
            compute_s=self.schedule.compute_s - load_s - store_s,
            store_s=store_s,
        )

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        raise NotSupported(
            "placement=Offload: the weights are read from their files again and again, so they can't "
            "be updated in memory"
        )

    def stamp(self) -> object:
        return None  # parameters change all the time, and never their numbers

    def sleep(self, weights: bool) -> None:
        if weights:
            raise NotSupported("sleep(weights=True): placement=Offload; close the LLM instead")
        super().sleep(False)

    def close(self) -> None:
        try:
            self.weights.close()
        finally:
            super().close()
            self.scratch.close()
            self.trace.write()
