"""The share of a rank other than 0, as rank 0 calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbatim.errors import TierFailed, VerbatimError
from verbatim.kv.quantized import resolve_kv_dtype
from verbatim.kv.states import open_states
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.numerics import numerics_key
from verbatim.placement.cluster.drafts import options_of
from verbatim.placement.parallel.heads import HeadStore
from verbatim.placement.parallel.ranks import Gloo
from verbatim.placement.parallel.runner import Rank
from verbatim.placement.parallel.share import Shared, open_share
from verbatim.placement.served import Message, Served
from verbatim.weights.reopen import reopen


class RankShare(Served):
    """A rank's share of a model, served by a `Stage`.

    A message that rank 0 waits for no answer to is a call that all ranks make: an error of the batch or the
    model is rank 0's as well.

    Args:
        loaded: the model without its weights, where it was opened here before; None opens the one that
            rank 0 names.
    """

    calls = Served.calls | {"open", "share", "store", "forward"}

    def __init__(self, loaded: LoadedModel | None = None) -> None:
        self._loaded = loaded
        self._ranks: Gloo | None = None
        self._shared: Shared
        self._told: Message = {}

    def call(self, message: Message) -> Any:
        try:
            return super().call(message)
        except BaseException as error:
            ours = isinstance(error, TierFailed) or not isinstance(error, VerbatimError)
            if ours or message["do"] == "share":
                self._leave()  # the others may wait for this rank
            elif "call" not in message:
                return None
            raise

    def open(self, message: Message) -> Message:
        """Inspect the model, and return the numerics key."""
        self._told = message
        if self._loaded is None:
            self._loaded = reopen(ModelSource(**message["source"]))
        return {"key": numerics_key(message["dtype"], message["kv_dtype"])}

    def share(self, message: Message) -> None:
        """Read this rank's share of the weights."""
        assert self._loaded is not None
        told = self._told
        meeting = Path(told["meeting"])
        self._ranks = Gloo(meeting, told["rank"], told["size"], told["timeout_s"])
        draft = options_of(told["draft"])
        source = ModelSource(**told["source"])
        self._shared = open_share(self._loaded, source, self._ranks, told["num_threads"], draft)

    def store(self, message: Message) -> Message:
        """Allocate this rank's K and V."""
        shared, blocks, size = self._shared, message["num_blocks"], message["block_size"]
        spec, kv_dtype = shared.decoder.spec, resolve_kv_dtype(message["kv_dtype"])
        states = open_states(spec.states, message["num_states"])
        heads = spec.layers, spec.query_heads, shared.ranks
        store = HeadStore(*heads, blocks, size, kv_dtype, states)
        shared.draft_layers.open_stores(blocks, size, kv_dtype)
        self.runner = Rank(shared, store, self._told["num_threads"])
        kv_bytes = store.nbytes + shared.draft_layers.nbytes
        return {"kv_bytes": kv_bytes, "weight_bytes": shared.weight_bytes}

    def forward(self, message: Message) -> None:
        """Run a batch; its logits are rank 0's."""
        self.running.forward(message["batch"])

    def write_cache(self, message: Message) -> None:
        """Write this rank's share of the rows."""
        super().write_cache({**message, "rows": message["shares"][self._told["rank"]]})

    def load_adapter(self, message: Message) -> Message:
        """Hold an adapter whole."""
        self.running.load_adapter(message["adapter"])
        return {}

    def _leave(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def close(self) -> None:
        """Free everything."""
        self._leave()
        if self.runner is not None:
            self.runner.close()
