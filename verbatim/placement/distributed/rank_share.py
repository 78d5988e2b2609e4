"""The share of a rank of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from verbatim.errors import TierFailed, VerbatimError
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import open_draft_layers
from verbatim.model.hidden import head_of
from verbatim.model.packed import weight_bytes
from verbatim.model.products import threads
from verbatim.model.spec import inner_model
from verbatim.placement.distributed.columns import Cut, take_share
from verbatim.placement.distributed.gloo import Gloo
from verbatim.placement.distributed.heads import HeadStore, own_layers
from verbatim.placement.distributed.served import Served, draft_of, key_of
from verbatim.placement.distributed.wire import Message
from verbatim.placement.resident import Resident, open_store


class RankShare(Served):
    """A rank's share of a model: rank 0 calls its own, and those of the others by messages.

    A message that rank 0 waits for no answer to is a call that all ranks make: an error of the batch or the
    model is rank 0's as well.

    Attributes:
        make_runner: makes the runner, with the arguments of `Resident`.
        ranks: all of them, since `share`; and the weights: cut, decoder, draft_layers.
    """

    calls = Served.calls | {"memory", "share", "forward"}
    make_runner: Callable[..., Resident] = Resident
    ranks: Gloo | None = None
    _told: Message
    cut: Cut
    decoder: Decoder
    draft_layers: DraftLayers

    def call(self, message: Message) -> Any:
        try:
            return super().call(message)
        except BaseException as error:
            ours = isinstance(error, TierFailed) or not isinstance(error, VerbatimError)
            if ours or message["do"] == "share":
                self.leave()  # the others may wait for this rank
            elif "call" not in message:
                return None
            raise

    def open(self, **told: Any) -> Message:
        """Inspect the model, and return the numerics key.

        Args:
            told: `rank`, `size`, `source`, `options`, `draft` as of `describe_draft`, and `meeting` and
                `timeout_s` as of `Gloo`.
        """
        self.use(told["options"].device, told["rank"])
        options = replace(told["options"], device=self.device)
        self._told = {**told, "options": options}
        return {"key": key_of(self.skeleton(told["source"]), options)}

    def share(self) -> None:
        """Read this rank's share of the weights, and inspect the model; all ranks do so at once.

        Raises:
            UnsupportedModel: it can't be run on flat batches, on any rank.
            NotSupported: its layers for attention have heads that can't be shared by so many.
            TierFailed: a file can't be read, or another rank is gone.
        """
        told, loaded, rank, size = self._told, self._loaded, self._told["rank"], self._told["size"]
        assert loaded is not None
        ranks, device = Gloo(told["meeting"], rank, size, told["timeout_s"]), self.device
        self.ranks, head = ranks, head_of(inner_model(loaded.module))
        with threads(told["options"].num_threads), ranks.everywhere(), device.current():
            self.cut = take_share(loaded, told["source"], ranks, device, head=head)
            loaded.move(device.torch)
            decoder = self.decoder = Decoder(
                loaded.module,
                fused=False,  # its products are shared
                batch_invariant=device.batch_invariant,
            )
            own_layers(decoder.spec.layers, decoder.spec.query_heads, rank, size)  # checks them
            self.draft_layers = open_draft_layers(draft_of(told["draft"]), decoder, loaded)

    def allocate(self, num_blocks: int, num_states: int) -> Message:
        """Allocate this rank's K and V, and all states, as every rank computes recurrent layers whole."""
        decoder, drafts, options = self.decoder, self.draft_layers, self._told["options"]
        assert self.ranks is not None
        make = partial(HeadStore, query_heads=decoder.spec.query_heads, ranks=self.ranks)
        store = open_store(decoder.spec, options, drafts, num_blocks, num_states, make)
        runner = self.make_runner(decoder, store, options.num_threads, drafts, self._loaded)
        runner.cuts, self.runner = self.cut.ranges, runner
        held = weight_bytes(decoder.held)
        return {
            "kv_bytes": sum(each.nbytes for each in runner.stores),
            "weight_bytes": held,
            "row_widths": self.row_widths,
        }

    def leave(self) -> None:
        """Leave the other ranks, which may wait for this one."""
        if self.ranks is not None:
            self.ranks.close()

    def close(self) -> None:
        """Free everything."""
        self.leave()
        super().close()
