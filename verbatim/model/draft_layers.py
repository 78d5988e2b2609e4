"""The base class of layers of a model that draft for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from verbatim.batch import Batch, SampleRow
from verbatim.kv.flat import BlockStore, HiddenStore
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder


class DraftLayers:
    """Layers of a model that draft for it. This base class stands for a model that has none.

    Attributes:
        hooks: a forward of theirs runs the module's hooks. A hook may count the model's own forwards, or
            depend on their number.
        hidden: takes the output of the model's body, of all rows of every forward; None: not needed.
        stores: everything that is kept in blocks.
    """

    hooks = False
    hidden: HiddenStore | None = None
    stores: Sequence[BlockStore] = ()

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """Return the bytes that one token takes in `stores`."""
        return 0

    def open_stores(self, num_blocks: int, block_size: int, kv_dtype: KVDtype) -> None:
        """Allocate as many blocks as the model's KV store has."""

    def info(self) -> dict[str, int]:
        """Describe them in plain values."""
        return {}

    def close(self) -> None:
        """Free all memory, and drop the references to modules."""
        for store in self.stores:
            store.release()

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Return the decoder of layer `k` and the store of its K and V, and prepare `batch` for them.

        Args:
            store: K and V of the whole model.
        """
        raise NotImplementedError

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        """Run layer `k`: `[R, V]` logits of `batch.logit_rows`."""
        decoder, store = self.enter(k, batch, store)
        return decoder.run(batch, store, hooks=self.hooks).logits

    def chain(
        self, k: int, batch: Batch, store: KVStore, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        """Draw tokens by layer `k` and its own earlier draws, as of `WholeModel.chain`; None if it can't."""
        decoder, store = self.enter(k, batch, store)
        return decoder.chain(batch, store, rows, lengths, hooks=self.hooks)
