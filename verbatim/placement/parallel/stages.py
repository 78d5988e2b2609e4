"""A pipeline of ranks: each holds some layers, and hidden states go from rank to rank by gloo.

Rank 0 holds the last layers, so that logits are made where they are drawn from; rank 1 holds the first ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.batch import Batch
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError
from verbatim.kv.quantized import KVDtype, settle_kv_dtype
from verbatim.kv.store import KVStore, bytes_per_token, make_store
from verbatim.model.borrow import threads
from verbatim.model.loader import LoadedModel
from verbatim.model.routing import RoutingStore
from verbatim.options import dtype_name
from verbatim.placement.cluster.messages import pack_batch
from verbatim.placement.cluster.part import Part, PartOutput
from verbatim.placement.cluster.shape import PartShape, joined_quantization
from verbatim.placement.cluster.split import Split
from verbatim.placement.parallel.crew import Crew
from verbatim.placement.parallel.ranks import Gloo
from verbatim.placement.parallel.runner import Leading
from verbatim.placement.parallel.share import Cut
from verbatim.protocols import Forward
from verbatim.shield import Shield


def stage_of(rank: int, size: int) -> int:
    """Which part of the model a rank holds: rank 0 the last."""
    return (rank - 1) % size


def open_part(loaded: LoadedModel, rank: int, size: int, num_threads: int) -> Part:
    """Read a rank's layers.

    Raises:
        InvalidRequest: there are not so many places to cut at.
        UnsupportedModel: it can't be cut, or can't be run on flat batches.
    """
    with threads(num_threads):
        split = Split(loaded)
        ends = [0, *_cuts(split, size), split.num_layers]
        stage = stage_of(rank, size)
        return Part(loaded, ends[stage], ends[stage + 1], split=split)


def _cuts(split: Split, size: int) -> list[int]:
    """`size` - 1 places to cut at, as near to equal parts as the model has them."""
    left, found = sorted(split.cuts), list[int]()
    if len(left) < size - 1:
        raise InvalidRequest(
            f"PipelineParallel(size={size}): the model can be cut in {len(left) + 1} parts at most"
        )
    for number in range(1, size):
        rest = size - 1 - number  # places that those behind need
        choice = left[: len(left) - rest]
        wanted = split.num_layers * number / size
        place = min(choice, key=lambda cut: abs(cut - wanted))
        found.append(place)
        left = [cut for cut in left if cut > place]
    return found


class Stage:
    """The layers of one rank, with their K and V.

    Args:
        first_routed: layers with experts in the parts before.
    """

    def __init__(
        self,
        part: Part,
        ranks: Gloo,
        num_threads: int,
        num_blocks: int,
        block_size: int,
        dtype: KVDtype,
        first_routed: int,
    ) -> None:
        self.part = part
        self._ranks = ranks
        self._num_threads = num_threads
        self._first_routed = first_routed
        cpu = torch.device("cpu")
        self.store: KVStore = make_store(part.shape.layers, num_blocks, block_size, dtype, cpu)
        self.records = None
        if part.routed is not None:
            self.records = RoutingStore(part.routed, num_blocks, block_size)

    def run(self, batch: Batch) -> PartOutput:
        """One forward, from the rank before to the rank behind."""
        part, ranks, shape = self.part, self._ranks, self.part.shape
        received = None
        if not part.is_first:
            received = torch.empty(batch.num_tokens, shape.hidden_size, dtype=shape.hidden_dtype)
            ranks.receive(received, (ranks.rank - 1) % ranks.size)
        forced, batch.forced_experts = batch.forced_experts, None
        if forced is not None and part.routed is not None:
            first = self._first_routed
            batch.forced_experts = forced[:, first : first + part.routed.count]
        with threads(self._num_threads):
            out = part.run(batch, self.store, received, self.records)
        batch.forced_experts = forced
        if out.leaving is not None:
            ranks.send(out.leaving, (ranks.rank + 1) % ranks.size)
        return out

    def forward(self, batch: Batch) -> None:
        """`run`, of a rank other than 0, whose results have left it."""
        self.run(batch)

    def why_not_replayable(self) -> str | None:
        """Why the experts here can't be forced; None: they can, or there are none."""
        if self.part.routed is None:
            return None
        try:
            with threads(self._num_threads):
                self.part.check_replay()
        except VerbatimError as error:
            return str(error)
        return None

    def routing(self, block_table: list[int], num_tokens: int) -> Tensor | None:
        """The experts of a sequence's tokens in these layers."""
        return None if self.records is None else self.records.read(block_table, num_tokens)

    def sleep(self, weights: bool) -> None:
        """Give the memory of K and V back."""
        self.store.release()

    def wake(self) -> None:
        """Take it again."""
        self.store.allocate()

    def close(self) -> None:
        """Free everything, and hang up."""
        self._ranks.close()
        self.store.release()
        self.part.close()


class PipelineLead(Leading):
    """Rank 0, which holds the last layers and draws.

    Args:
        shapes: of all parts, in the order of the layers.
        kv_bytes: of each rank.
    """

    def __init__(
        self,
        stage: Stage,
        shapes: list[PartShape],
        ranks: Gloo,
        num_threads: int,
        *,
        crew: Crew,
        kv_bytes: list[int],
    ) -> None:
        store: Any = stage.store
        weights = [shapes[stage_of(rank, ranks.size)].weight_bytes for rank in range(ranks.size)]
        super().__init__(
            stage.part.decoder,
            store,
            num_threads,
            ranks,
            Cut(),
            crew=crew,
            weight_bytes=weights,
            kv_bytes=kv_bytes,
        )
        self.stage, self.shapes = stage, shapes
        self._records = None  # every stage has its own
        kinds = {shape.routed[1:] for shape in shapes if shape.routed is not None}
        self.routed_layers = sum(shape.routed[0] for shape in shapes if shape.routed is not None)
        self.experts_per_token, self.num_experts = 0, 0
        reasons = [s.routing_reason for s in shapes if s.routed is None and s.routing_reason]
        if len(kinds) == 1:
            ((self.experts_per_token, self.num_experts),) = kinds
            self.routing_reason = None
        else:
            self.routed_layers = 0
            self.routing_reason = reasons[0] if not kinds else "its routed layers are not alike"

    def forward(self, batch: Batch) -> Forward:
        def run() -> Forward:
            out = self.stage.run(batch)
            assert out.logits is not None
            return Forward(out.logits, out.hidden)

        self.num_forwards += 1
        with Shield().up():
            made: Forward = self._together({"do": "forward", "batch": pack_batch(batch)}, run)
        return made

    def check_replay(self) -> None:
        if not self.routed_layers:
            raise NotSupported(f"its routing can't be replayed: {self.routing_reason}")
        with Shield().up():
            self.crew.tell({"do": "replay"})
            own = self.stage.why_not_replayable()
            reasons = [a["reason"] for a in self._answers().values()]
        for reason in [own, *reasons]:
            if reason is not None:
                error = NotSupported(reason)
                self._refuse(error)
                raise error

    def routing(self, block_table: list[int], num_tokens: int) -> Tensor:
        if not self.routed_layers:
            raise NotSupported(f"the model's routing can't be recorded: {self.routing_reason}")
        with Shield().up():
            self.crew.tell(
                {"do": "routing", "block_table": list(block_table), "num_tokens": num_tokens}
            )
            own = self.stage.routing(block_table, num_tokens)
            found = [a["routing"] for _, a in sorted(self._answers().items())] + [own]
        return torch.cat([part for part in found if part is not None], dim=1)

    def _answers(self) -> dict[int, dict[str, Any]]:
        return self.crew.answers(self.ranks.timeout_s)

    def info(self) -> dict[str, Any]:
        last, shapes = self.shapes[-1], self.shapes
        dtype = self.stage.store.dtype_name
        settled = settle_kv_dtype(dtype)
        return {
            "architecture": last.architecture,
            "placement": "pipeline parallel",
            "ranks": self.ranks.size,
            "exact": True,
            "parameters": sum(shape.parameters for shape in shapes),
            "weight_bytes": sum(self._weight_bytes),
            "rank_weight_bytes": self._weight_bytes,
            "rank_layers": [
                [shapes[s].first, shapes[s].end]
                for s in (stage_of(rank, self.ranks.size) for rank in range(self.ranks.size))
            ],
            "dtype": dtype_name(last.dtype),
            **joined_quantization([shape.quantization for shape in shapes]),
            "layers": sum(len(shape.layers) for shape in shapes),
            "kv_bytes": sum(self._kv_bytes),
            "rank_kv_bytes": self._kv_bytes,
            "kv_dtype": dtype,
            "kv_bytes_per_token": sum(bytes_per_token(s.layers, settled) for s in shapes),
            "safety_net": sorted({name for shape in shapes for name in shape.safety_net}),
        }

    def wake(self) -> None:
        self.crew.tell({"do": "wake"})
        self.stage.wake()

    def close(self) -> None:
        super().close()
        self.stage.part.close()
