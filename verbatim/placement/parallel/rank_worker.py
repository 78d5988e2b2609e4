"""A rank other than 0: handles rank 0's messages with its share of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.errors import TierFailed, VerbatimError
from verbatim.kv.quantized import resolve_kv_dtype
from verbatim.kv.states import open_states
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.numerics import numerics_key
from verbatim.placement.cluster.drafts import options_of
from verbatim.placement.cluster.link import Link
from verbatim.placement.cluster.stage import Stage
from verbatim.placement.launcher import HOST
from verbatim.placement.parallel.heads import HeadStore
from verbatim.placement.parallel.ranks import Gloo
from verbatim.placement.parallel.runner import Rank
from verbatim.placement.parallel.share import Shared, open_share
from verbatim.placement.served import Message, Served
from verbatim.weights.reopen import reopen

_OPENING = frozenset({"open", "share", "store", "ready", "stage"})
# What rank 0 does as well, so that it has the same errors of the batch and the model.
_TOGETHER = frozenset({"forward", "draft", "load_adapter", "unload_adapter", "check_replay"})
_TOGETHER |= {"read_cache", "write_cache", "prepare_weights", "write_weights", "sleep", "wake"}


class RankWorker(Served):
    """Handles rank 0's messages.

    Args:
        link: to rank 0.
        key: the secret of all ranks.
        loaded: the model without its weights, where it was opened here before; None opens the one that
            rank 0 names.
    """

    def __init__(
        self, link: Link, rank: int, key: bytes, loaded: LoadedModel | None = None
    ) -> None:
        self._link = link
        self._rank = rank
        self._key = key
        self._loaded = loaded
        self._shared: Shared
        self._stage: Stage | None = None
        self._told: Message = {}

    def serve(self, *until: str) -> Message:
        """Handle messages up to the first one of a kind in `until`, and return that one.

        A message with `asks` is answered.

        Raises:
            LinkLost: rank 0 is gone. TierFailed: another rank is. Whatever else goes wrong here.
        """
        while True:
            message = self._link.receive()
            what, answer = str(message["do"]), None
            try:
                if what in _OPENING:
                    answer = getattr(self, what)(message)
                elif what in _TOGETHER:
                    answer = self._together(getattr(self, what), message)
                elif what not in until:
                    raise TierFailed(f"rank {self._rank} was told to {what!r}, which it can't")
            except BaseException as error:
                self._link.send({"gone": f"{type(error).__name__}: {error}"})
                raise
            if message.get("asks"):
                self._link.send(answer or {})
            if what in until:
                return message

    @staticmethod
    def _together(do: Callable[[Message], Any], message: Message) -> Any:
        """Make a call; an error that rank 0 has as well, or asks for, is its answer."""
        try:
            return do(message)
        except TierFailed:
            raise
        except VerbatimError as error:
            return {"error": str(error)}

    def open(self, message: Message) -> Message:
        """Inspect the model, and return the numerics key."""
        self._told = message
        if self._loaded is None:
            self._loaded = reopen(ModelSource(**message["source"]))
        return {"key": numerics_key(message["dtype"], message["kv_dtype"])}

    def share(self, message: Message) -> Message:
        """Read this rank's share of the weights."""
        assert self._loaded is not None
        told = self._told
        ranks = Gloo(Path(told["meeting"]), self._rank, told["size"], told["timeout_s"])
        draft = options_of(told["draft"])
        self._shared = open_share(self._loaded, ranks, told["num_threads"], draft)
        return {"weight_bytes": self._shared.weight_bytes}

    def store(self, message: Message) -> Message:
        """Allocate this rank's K and V."""
        shared, blocks, size = self._shared, message["num_blocks"], message["block_size"]
        spec, kv_dtype = shared.decoder.spec, resolve_kv_dtype(message["kv_dtype"])
        states = open_states(spec.states, message["num_states"])
        heads = spec.layers, spec.query_heads, shared.ranks
        store = HeadStore(*heads, blocks, size, kv_dtype, states)
        shared.draft_layers.open_stores(blocks, size, kv_dtype)
        self.runner = Rank(shared, store, self._told["num_threads"])
        return {"kv_bytes": store.nbytes + shared.draft_layers.nbytes}

    def ready(self, message: Message) -> None:
        """Do nothing: all ranks are open."""

    def stage(self, message: Message) -> Message:
        """Serve one stage of a pipeline, beside rank 0's calls."""
        self._stage = Stage(self._key, HOST)
        return {"port": self._stage.address[1]}

    def forward(self, message: Message) -> None:
        """Run a batch; its logits are rank 0's."""
        self.running.forward(message["batch"])

    def write_cache(self, message: Message) -> None:
        """Write this rank's share of the rows."""
        super().write_cache({**message, "rows": message["shares"][self._rank]})

    def load_adapter(self, message: Message) -> None:
        """Hold an adapter."""
        self.running.load_adapter(message["adapter"])

    def unload_adapter(self, message: Message) -> None:
        """Drop an adapter, if it is held."""
        self.running.unload_adapter(message["number"])

    def sleep(self, message: Message) -> None:
        """Free the memory of K and V."""
        self.running.sleep(False)

    def wake(self, message: Message) -> None:
        """Allocate it again."""
        self.running.wake()

    def close(self) -> None:
        """Close the connection, and free everything."""
        self._link.close()
        if self._stage is not None:
            self._stage.close()
        if self.runner is not None:
            self.runner.close()
