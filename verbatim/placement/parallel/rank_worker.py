"""A rank other than 0: handles rank 0's messages with its share of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from verbatim.weights.reopen import reopen
from verbatim.weights.update import WeightWriter

Message = dict[str, Any]


class RankWorker:
    """Handles rank 0's messages.

    Args:
        link: to rank 0.
        key: the secret of all ranks.
        loaded: the model without its weights, where it was opened here before; None opens the one that
            rank 0 names.
    """

    runner: Rank | None = None

    def __init__(
        self, link: Link, rank: int, key: bytes, loaded: LoadedModel | None = None
    ) -> None:
        self._link = link
        self._rank = rank
        self._key = key
        self._loaded = loaded
        self._shared: Shared
        self._stage: Stage | None = None
        self._new_weights: WeightWriter | None = None
        self._told: Message = {}

    def serve(self, *until: str) -> Message:
        """Handle messages up to the first one of a kind in `until`, and return that one.

        Raises:
            LinkLost: rank 0 is gone. TierFailed: another rank is. Whatever else goes wrong here.
        """
        while True:
            message = self._link.receive()
            what = str(message["do"])
            try:
                do: Callable[[Message], None] | None = getattr(self, f"_do_{what}", None)
                if do is not None:
                    do(message)
                elif what not in until:
                    raise TierFailed(f"rank {self._rank} was told to {what!r}, which it can't")
            except BaseException as error:
                self._link.send({"gone": f"{type(error).__name__}: {error}"})
                raise
            if what in until:
                return message

    def _do_open(self, message: Message) -> None:
        self._told = message
        if self._loaded is None:
            self._loaded = reopen(ModelSource(**message["source"]))
        key = numerics_key(message["dtype"], message["kv_dtype"])
        self._link.send({"key": key})

    def _do_share(self, message: Message) -> None:
        assert self._loaded is not None
        told = self._told
        ranks = Gloo(Path(told["meeting"]), self._rank, told["size"], told["timeout_s"])
        draft = options_of(told["draft"])
        self._shared = open_share(self._loaded, ranks, told["num_threads"], draft)
        self._link.send({"weight_bytes": self._shared.weight_bytes})

    def _do_store(self, message: Message) -> None:
        shared, spec = self._shared, self._shared.decoder.spec
        kv_dtype = resolve_kv_dtype(message["kv_dtype"])
        store = HeadStore(
            spec.layers,
            spec.query_heads,
            shared.ranks,
            message["num_blocks"],
            message["block_size"],
            kv_dtype,
            open_states(spec.states, message["num_states"]),
        )
        shared.draft_layers.open_stores(message["num_blocks"], message["block_size"], kv_dtype)
        self.runner = Rank(shared, store, self._told["num_threads"])
        self._link.send({"kv_bytes": store.nbytes + shared.draft_layers.nbytes})

    def _do_ready(self, message: Message) -> None:
        """Do nothing: all ranks are open."""

    def _do_forward(self, message: Message) -> None:
        assert self.runner is not None
        with _same_errors():
            self.runner.forward(message["batch"])

    def _do_draft(self, message: Message) -> None:
        assert self.runner is not None
        with _same_errors(), self.runner.drafting():
            self.runner.draft(message["k"], message["batch"], None)

    def _do_read_cache(self, message: Message) -> None:
        assert self.runner is not None
        self._link.send({"rows": self.runner.read_cache("blocks", message["blocks"])})

    def _do_write_cache(self, message: Message) -> None:
        assert self.runner is not None
        share = message["shares"][self._rank]
        self.runner.write_cache(message["kind"], message["numbers"], share)

    def _do_prepare_weights(self, message: Message) -> None:
        error = None
        try:
            self._writer().prepare(message["tensors"])
        except VerbatimError as failed:
            error = str(failed)
        self._link.send({"error": error})

    def _do_write_weights(self, message: Message) -> None:
        assert self.runner is not None
        self._writer().write(message["tensors"])
        self.runner.decoder.weights_moved()

    def _writer(self) -> WeightWriter:
        assert self.runner is not None
        if self._new_weights is None:
            self._new_weights = WeightWriter(self.runner.decoder.held, self.runner.cuts)
        return self._new_weights

    def _do_load_adapter(self, message: Message) -> None:
        assert self.runner is not None
        with _same_errors():
            self.runner.load_adapter(message["adapter"])

    def _do_unload_adapter(self, message: Message) -> None:
        assert self.runner is not None
        self.runner.unload_adapter(message["number"])

    def _do_stage(self, message: Message) -> None:
        """Serve one stage of a pipeline, beside rank 0's calls."""
        self._stage = Stage(self._key, HOST)
        self._link.send({"port": self._stage.address[1]})

    def _do_check_replay(self, message: Message) -> None:
        assert self.runner is not None
        with _same_errors():
            self.runner.check_replay(message["name"])

    def _do_sleep(self, message: Message) -> None:
        assert self.runner is not None
        self.runner.sleep(False)

    def _do_wake(self, message: Message) -> None:
        assert self.runner is not None
        self.runner.wake()

    def close(self) -> None:
        """Close the connection, and free everything."""
        self._link.close()
        if self._stage is not None:
            self._stage.close()
        if self.runner is not None:
            self.runner.close()


@contextmanager
def _same_errors() -> Iterator[None]:
    """Ignore errors of the batch and the model: rank 0 has the same ones, and goes on."""
    try:
        yield
    except TierFailed:
        raise
    except VerbatimError:
        pass
