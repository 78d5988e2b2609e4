"""The share of a rank of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verbatim.errors import TierFailed, VerbatimError
from verbatim.kv.states import open_states
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.packed import weight_bytes
from verbatim.placement.distributed.columns import Cut, key_of, open_share
from verbatim.placement.distributed.drafts import options_of
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.heads import HeadStore
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.tensor import Rank
from verbatim.placement.distributed.wire import Message


class RankShare(Served):
    """A rank's share of a model: rank 0 calls its own, and those of the others by messages.

    A message that rank 0 waits for no answer to is a call that all ranks make: an error of the batch or the
    model is rank 0's as well.

    Args:
        make_runner: makes the runner, with the arguments of `Rank`.

    Attributes:
        cut, decoder, draft_layers: the weights, since `share`.
    """

    calls = Served.calls | {"share", "forward"}

    def __init__(
        self,
        loaded: LoadedModel | None = None,
        source: ModelSource | None = None,
        make_runner: Callable[..., Rank] = Rank,
    ) -> None:
        super().__init__(loaded, source)
        self._make_runner = make_runner
        self._ranks: Gloo | None = None
        self._told: Message = {}
        self.cut: Cut
        self.decoder: Decoder
        self.draft_layers: DraftLayers

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
        """Inspect the model, and return the numerics key.

        Args:
            message: `rank`, `size`, `source`, `options`, `draft` as of `drafts.describe`, and `meeting` and
                `timeout_s` as of `Gloo`.
        """
        self._told = message
        return {"key": key_of(self.skeleton(message["source"]), message["options"])}

    def share(self, message: Message) -> None:
        """Read this rank's share of the weights; all ranks do so at once."""
        told = self._told
        self._ranks = Gloo(told["meeting"], told["rank"], told["size"], told["timeout_s"])
        assert self._loaded is not None
        threads, draft = told["options"].num_threads, options_of(told["draft"])
        self.cut, self.decoder, self.draft_layers = open_share(
            self._loaded, told["source"], self._ranks, threads, draft
        )

    def allocate(self, message: Message) -> Message:
        """Allocate this rank's K and V: `num_blocks` and `num_states`."""
        ranks, blocks, options = self._ranks, message["num_blocks"], self._told["options"]
        assert ranks is not None
        spec, size, drafts = self.decoder.spec, options.block_size, self.draft_layers
        dtype = options.kv_dtype or spec.dtype
        states = open_states(spec.states, message["num_states"])
        store = HeadStore(spec.layers, spec.query_heads, ranks, blocks, size, dtype, states)
        drafts.open_stores(blocks, size, dtype)
        self.runner = self._make_runner(
            self.decoder, store, options.num_threads, drafts, ranks, self.cut
        )
        held = weight_bytes(self.decoder.module)
        return {"kv_bytes": store.nbytes + drafts.nbytes, "weight_bytes": held}

    def forward(self, message: Message) -> None:
        """Run a batch; its logits are rank 0's."""
        self.running.forward(message["batch"])

    def write_cache(self, message: Message) -> None:
        """Write this rank's share of the rows."""
        rows = message.pop("shares")[self._told["rank"]]
        self.pass_on({**message, "rows": rows})

    def _leave(self) -> None:
        if self._ranks is not None:
            self._ranks.close()

    def close(self) -> None:
        """Free everything."""
        self._leave()
        if self.runner is not None:
            self.runner.close()
