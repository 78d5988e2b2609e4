"""A model's layers for multi-token prediction (MTP), each of them run as a small model.

Layer k, given at slot i a hidden state and the token i + 1 + k, predicts the token i + 2 + k. The hidden
state is the output of the model's body at position i, for layer 0, and of layer k - 1 at slot i, for
those above (DeepSeek-V3, section 2.2). So a slot is to these layers what a position is to the model, and
all they keep of one lies in the same blocks: what loses, shares or copies those loses, shares or
copies this.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from verbatim.batch import Batch, SampleRow
from verbatim.errors import NotSupported, UnsupportedModel
from verbatim.kv.flat import HiddenStore
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore, bytes_per_token
from verbatim.model.angles import rotary
from verbatim.model.context import active_context
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.packed import weight_info
from verbatim.model.spec import OwnModel
from verbatim.model.whole import Entry


class MtpLayer(OwnModel):
    """One MTP layer as a model, between the embedding and the head of the model that it drafts for.

    Its hidden states are those that enter with the batch; where none do, as in trials, the embeddings of the
    ids. Positions are slots: rotary embeddings depend on distances only.

    Args:
        mtp: transformers' `MtpModel`; its modules are used in place.
        k: number of the layer.
    """

    is_first, is_last = False, True  # as of `ModelPart`

    def __init__(self, mtp: Any, k: int) -> None:
        super().__init__()
        self.config = mtp.config
        self.embed_tokens, self.rotary_emb = mtp.embed_tokens, mtp.rotary_emb
        self.layer, self.head = mtp.layers[k], mtp.shared_head
        self._shares_norm: bool = mtp.use_shared_post_norm
        self.norm = mtp.shared_post_norm if self._shares_norm else self.layer.post_norm
        self._logits = mtp._project_to_logits
        self._rope: dict[str, Any] = {}
        if getattr(mtp, "has_per_layer_rope", False):  # older versions know of none
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
        batch = getattr(active_context(), "batch", None)  # an inspection has none
        hidden = embedded
        if batch is not None and batch.entering is not None:
            hidden = batch.entering[None]
        turns = None
        if self.rotary_emb is not None:
            turns = rotary(self.rotary_emb, embedded, position_ids, **self._rope)
        mask, cache = None, None  # in place: the name of the cache changed with transformers 5.24
        out = self.layer(embedded, hidden, turns, mask, position_ids, cache)
        if self._shares_norm:
            out = self.norm(out)
        logits = self._logits(out[:, logits_to_keep])
        return SimpleNamespace(logits=logits, last_hidden_state=out)


class MtpLayers(DraftLayers):
    """The layers and what they keep: K and V, and the hidden states that go into each of them.

    Args:
        mtp: transformers' `MtpModel` of the decoder's module; used in place.
        decoder: of the model itself.

    Attributes:
        count: how many layers there are, 1 or more.
        hidden: the input of the first of them.

    Raises:
        NotSupported: its layers can't be run on flat batches; the message names the reason.
    """

    def __init__(self, mtp: Any, decoder: Decoder) -> None:
        self.count = len(mtp.layers)
        self._layers: nn.Module = mtp.layers
        self._hidden_size: int = mtp.config.hidden_size
        self._dtype = decoder.spec.dtype
        self._device = next(mtp.parameters()).device
        self._kept: list[KVStore] = []
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
                    f"draft='mtp': the model's MTP layers keep {len(spec.states)} recurrent states and speak "
                    f"of {spec.vocab_size} ids; they must keep none, and speak of {vocab_size} ids"
                )

    # ---- memory

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        states = self.count * self._hidden_size * self._dtype.itemsize
        return states + sum(bytes_per_token(d.spec.layers, kv_dtype) for d in self._decoders)

    def open_stores(self, num_blocks: int, block_size: int, kv_dtype: KVDtype) -> None:
        for view in self._decoders:
            shapes = view.spec.layers
            self._kept.append(KVStore(shapes, num_blocks, block_size, kv_dtype, self._device))
            sizes = self._hidden_size, num_blocks, block_size
            self._inputs.append(HiddenStore(*sizes, self._dtype, self._device))
        self.hidden, self.stores = self._inputs[0], [*self._kept, *self._inputs]

    def info(self) -> dict[str, int]:
        # Embedding and head are the model's own.
        found = weight_info(self._layers)
        return {
            "mtp_layers": self.count,
            "mtp_parameters": found["parameters"],
            "mtp_weight_bytes": found["weight_bytes"],
        }

    def close(self) -> None:
        super().close()
        self._layers = nn.Module()
        for view in self._decoders:
            view.close()

    # ---- forwards

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        """Run layer `k` on K and V of its own.

        Row by row, `batch.positions` are slots and `batch.token_ids` the tokens `k + 1` behind. What it
        makes of each slot goes to layer `k + 1`, which must find it there. What the last layer makes of
        a row with logits goes to its own next slot, where it stands in for the layer before it.
        """
        decoder, kept = self.enter(k, batch, store)
        is_last = batch.wants_hidden = k + 1 == self.count
        above = None if is_last else self._inputs[k + 1]
        # Hooks on embedding and head are the model's: a draft is not seen by what counts its forwards.
        out = decoder.run(batch, kept, body=above, hooks=self.hooks)
        if out.hidden is not None and len(out.hidden):
            behind = replace(batch, positions=batch.positions + 1).slots(kept.block_size)
            self._inputs[k].write(behind[batch.logit_rows], out.hidden)
        return out.logits

    def chain(
        self, k: int, batch: Batch, store: KVStore, rows: list[SampleRow], lengths: list[int]
    ) -> list[list[int]] | None:
        return None if k + 1 < self.count else super().chain(k, batch, store, rows, lengths)

    def enter(self, k: int, batch: Batch, store: KVStore) -> tuple[Decoder, KVStore]:
        """Let the hidden states that layer `k` begins with enter with `batch`."""
        inputs = self._inputs[k]
        batch.entering = inputs.read(batch.slots(inputs.block_size))
        return self._decoders[k], self._kept[k]
