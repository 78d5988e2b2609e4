"""The model in this process's memory."""

from __future__ import annotations

from typing import Any

from verbatim.batch import Batch, Draws, SamplePlan
from verbatim.kv.store import KVStore
from verbatim.model.borrow import threads
from verbatim.model.decoder import Decoder
from verbatim.placement.runner import Forward
from verbatim.sampling.sampler import sample_rows


class Resident:
    """Runs the decoder and the sampler right here.

    Args:
        decoder: the model.
        store: its K and V.
        num_threads: of torch's pool while a forward or a draw runs; None leaves torch's setting.
    """

    def __init__(self, decoder: Decoder, store: KVStore, num_threads: int | None) -> None:
        self.decoder = decoder
        self.store = store
        self.vocab_size = decoder.anatomy.vocab_size
        self.block_size = store.block_size
        self.num_blocks = store.num_blocks
        self.num_forwards = 0
        self._num_threads = num_threads

    def forward(self, batch: Batch) -> Forward:
        self.num_forwards += 1
        with threads(self._num_threads):
            return Forward(self.decoder.forward(batch, self.store))

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        with threads(self._num_threads):
            return sample_rows(forward.logits, plan)

    def info(self) -> dict[str, Any]:
        return {
            "placement": "resident",
            "kv_bytes": self.store.nbytes,
            "kv_dtype": str(self.store.layers[0][0].dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        self.store.layers.clear()
        self.decoder.close()
