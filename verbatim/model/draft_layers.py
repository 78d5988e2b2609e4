"""Layers of a model that draft tokens for it, such as those for multi-token prediction (MTP).

At slot i, MTP layer k takes a hidden state and token i + 1 + k, and predicts token i + 2 + k. The hidden
state is the output of the model's body at position i for layer 0, and the output of layer k - 1 at slot i
for later layers (DeepSeek-V3, section 2.2). Slots thus correspond to positions of the model, and their data
is stored in the same blocks: it is evicted, shared and copied together with the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from verbatim.batch import Batch, SampleRow
from verbatim.errors import NotSupported, UnsupportedModel
from verbatim.kv.flat import BlockStore, HiddenStore
from verbatim.kv.store import KVStore, bytes_per_token
from verbatim.model.angles import rotary
from verbatim.model.context import active_context
from verbatim.model.decoder import Decoder
from verbatim.model.quantized import weight_info
from verbatim.model.spec import OwnModel
from verbatim.model.whole import Entry
from verbatim.quantization.formats import KVDtype


class DraftLayers:
    """Layers of a model that draft tokens for it; the base class itself is used if there are none.

    Attributes:
        hooks: whether drafting runs the module's hooks; False by default, as hooks may count forwards.
        hidden: store for the output of the model's body in all rows of every forward; None: not needed.
        stores: all block stores of the layers.
    """

    hooks = False
    hidden: HiddenStore | None = None
    stores: Sequence[BlockStore] = ()

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """Return the bytes per token in `stores`."""
        return 0

    def open_stores(self, num_blocks: int, block_size: int, kv_dtype: KVDtype) -> None:
        """Allocate the stores, with the same number of blocks as the model's KV store."""

    def info(self) -> dict[str, int]:
        """Return a description in plain values."""
        return {}

    def close(self) -> None:
        """Free all memory, and drop the references to modules."""
        for store in self.stores:
            store.release()

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Prepare `batch` for layer `k`; return its decoder and KV store, given that of the whole model."""
        raise NotImplementedError

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        """Run layer `k`; return the logits `[R, V]` of `batch.logit_rows`."""
        decoder, store = self.enter(k, batch, store)
        return decoder.run(batch, store, hooks=self.hooks).logits

    def chain(
        self, k: int, batch: Batch, store: KVStore, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        """Draw several tokens of each sequence by layer `k`, as `Decoder.chain` does."""
        decoder, store = self.enter(k, batch, store)
        return decoder.chain(batch, store, rows, lengths, hooks=self.hooks)


class MtpLayer(OwnModel):
    """One MTP layer as a model, with the embedding and the head of the model that it drafts for.

    Its hidden states are `Batch.entering`, or in trials the embeddings of the ids. Slots serve as positions,
    as rotary embeddings depend on distances only. The modules of `mtp`, transformers' `MtpModel`, are used in
    place.
    """

    is_first, is_last = False, True  # see `ModelPart`

    def __init__(self, mtp: Any, k: int) -> None:
        super().__init__()
        self.config = mtp.config
        self.embed_tokens, self.rotary_emb = mtp.embed_tokens, mtp.rotary_emb
        self.layer, self.head = mtp.layers[k], mtp.shared_head
        self._shares_norm: bool = mtp.use_shared_post_norm
        self.norm = mtp.shared_post_norm if self._shares_norm else self.layer.post_norm
        self._logits = mtp._project_to_logits
        self._rope: dict[str, Any] = {}
        if getattr(mtp, "has_per_layer_rope", False):  # not in older versions
            self._rope = {"layer_type": mtp.config.layer_types[k]}

    @property
    def entry(self) -> Entry:
        """See `ModelPart`."""
        layer: Any = self.layer
        hidden_first = getattr(self.config, "mtp_hidden_states_first", False)
        return Entry(self.embed_tokens, layer.enorm, layer.hnorm, layer.eh_proj, hidden_first)

    def get_decoder(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        use_cache: bool = False,
    ) -> Any:
        embedded = self.embed_tokens(input_ids)
        batch = getattr(active_context(), "batch", None)  # None in an inspection
        hidden = embedded
        if batch is not None and batch.entering is not None:
            hidden = batch.entering[None]
        cos_sin = None
        if self.rotary_emb is not None:
            cos_sin = rotary(self.rotary_emb, embedded, position_ids, **self._rope)
        mask, cache = None, None  # passed by position: transformers 5.24 renamed the cache argument
        out = self.layer(embedded, hidden, cos_sin, mask, position_ids, cache)
        if self._shares_norm:
            out = self.norm(out)
        logits = self._logits(out[:, logits_to_keep])
        return SimpleNamespace(logits=logits, last_hidden_state=out)


class MtpLayers(DraftLayers):
    """The MTP layers of a model, with the KV cache and the input hidden states of each.

    Args:
        mtp: transformers' `MtpModel` of the decoder's module; used in place.
        decoder: the decoder of the model itself.

    Attributes:
        count: number of layers, 1 or more.
        hidden: the store of the first layer's input hidden states.

    Raises:
        NotSupported: the layers can't run on flat batches; the message says why.
    """

    def __init__(self, mtp: Any, decoder: Decoder) -> None:
        self.count = len(mtp.layers)
        self._layers: nn.Module = mtp.layers
        self._hidden_size: int = mtp.config.hidden_size
        self._dtype = decoder.spec.dtype
        self._device = next(mtp.parameters()).device
        self._kv_stores: list[KVStore] = []
        self._inputs: list[HiddenStore] = []
        decoder.check_body(self._hidden_size)
        try:
            models = [MtpLayer(mtp, k) for k in range(self.count)]
            self._decoders = [decoder.view(model, model) for model in models]
            for view in self._decoders[:-1]:
                view.check_body(self._hidden_size)
        except UnsupportedModel as reason:
            raise NotSupported(f"draft='mtp': {reason}") from reason.__cause__
        vocab_size = decoder.spec.vocab_size
        for spec in (view.spec for view in self._decoders):
            if spec.states or spec.vocab_size != vocab_size:
                raise NotSupported(
                    f"draft='mtp': the model's MTP layers have {len(spec.states)} recurrent "
                    f"states and a vocabulary of {spec.vocab_size} ids; they must have no states "
                    f"and a vocabulary of {vocab_size} ids"
                )

    # ---- memory

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        states = self.count * self._hidden_size * self._dtype.itemsize
        return states + sum(bytes_per_token(d.spec.layers, kv_dtype) for d in self._decoders)

    def open_stores(self, num_blocks: int, block_size: int, kv_dtype: KVDtype) -> None:
        for view in self._decoders:
            shapes = view.spec.layers
            self._kv_stores.append(KVStore(shapes, num_blocks, block_size, kv_dtype, self._device))
            sizes = self._hidden_size, num_blocks, block_size
            self._inputs.append(HiddenStore(*sizes, self._dtype, self._device))
        self.hidden, self.stores = self._inputs[0], [*self._kv_stores, *self._inputs]

    def info(self) -> dict[str, int]:
        # Embedding and head are shared with the model.
        info = weight_info(self._layers)
        return {
            "mtp_layers": self.count,
            "mtp_parameters": info["parameters"],
            "mtp_weight_bytes": info["weight_bytes"],
        }

    def close(self) -> None:
        super().close()
        self._layers = nn.Module()
        for view in self._decoders:
            view.close()

    # ---- forwards

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        """Run layer `k` on its own KV cache, and return the logits.

        `batch.positions` are slots, and `batch.token_ids` the tokens `k + 1` positions later. The outputs are
        stored as inputs of layer `k + 1`. The last layer's outputs for rows with logits are stored as its own
        inputs at the next slots, in place of the previous layer's outputs.
        """
        decoder, kv_store = self.enter(k, batch, store)
        is_last = batch.wants_hidden = k + 1 == self.count
        above = None if is_last else self._inputs[k + 1]
        # Hooks on embedding and head are the model's, and must not count drafts as its forwards.
        out = decoder.run(batch, kv_store, body=above, hooks=self.hooks)
        if out.hidden is not None and len(out.hidden):
            next_slots = replace(batch, positions=batch.positions + 1).slots(kv_store.block_size)
            self._inputs[k].write(next_slots[batch.logit_rows], out.hidden)
        return out.logits

    def chain(
        self, k: int, batch: Batch, store: KVStore, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        return None if k + 1 < self.count else super().chain(k, batch, store, rows, lengths)

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Set `batch.entering` to the input of layer `k`, and return its decoder and KV cache."""
        inputs = self._inputs[k]
        batch.entering = inputs.read(batch.slots(inputs.block_size))
        return self._decoders[k], self._kv_stores[k]
