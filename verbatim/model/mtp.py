"""A model's layers for multi-token prediction, run on flat batches one by one.

Layer k, given at slot i a hidden state and the token i + 1 + k, predicts the token i + 2 + k. The hidden
state is what the model's body made of position i, for layer 0, and what layer k - 1 made at slot i, for
those above (DeepSeek-V3, section 2.2). So a slot is to these layers what a position is to the model, and
all they keep of one lies in the same blocks: what loses, shares or copies those loses, shares or
copies this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import Batch
from verbatim.errors import NotSupported, first_line
from verbatim.kv.hidden import HiddenStore
from verbatim.kv.quantized import KVDtype
from verbatim.kv.store import KVStore, LayerShape, bytes_per_token
from verbatim.model.angles import rotary
from verbatim.model.context import activate
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.flat import FlatContext
from verbatim.model.invariant import InvariantMode, Recorder
from verbatim.model.patching import configs_of, exclusive, patched, replaced_forwards
from verbatim.model.spec import InspectionContext
from verbatim.model.tree import Tree
from verbatim.model.weights import weight_info

_INSPECTED_TOKENS = 4


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
        self._mtp = mtp
        self._layers = list(mtp.layers)
        self._hidden_size: int = mtp.config.hidden_size
        self._dtype = decoder.spec.dtype
        self._device = next(mtp.parameters()).device
        self._rope: list[dict[str, Any]] = [{} for _ in self._layers]
        if getattr(mtp, "has_per_layer_rope", False):  # older versions know of none
            self._rope = [{"layer_type": kind} for kind in mtp.config.layer_types]
        decoder.check_body(self._hidden_size)
        with exclusive:
            self._prepare()
            self._shapes, self._slots, self._override = self._inspect(decoder.spec.vocab_size)
        self._store: KVStore | None = None
        self._inputs: list[HiddenStore] = []

    # ---- memory

    def bytes_per_token(self, kv_dtype: KVDtype) -> int:
        states = self.count * self._hidden_size * self._dtype.itemsize
        return bytes_per_token(self._shapes, kv_dtype) + states

    def open_stores(self, num_blocks: int, block_size: int, kv_dtype: KVDtype) -> None:
        self._store = KVStore(self._shapes, num_blocks, block_size, kv_dtype, self._device)
        self._inputs = [
            HiddenStore(self._hidden_size, num_blocks, block_size, self._dtype, self._device)
            for _ in self._layers
        ]
        self.hidden = self._inputs[0]

    @property
    def stores(self) -> list[KVStore | HiddenStore]:
        return [] if self._store is None else [self._store, *self._inputs]

    def info(self) -> dict[str, int]:
        # Embedding and head are the model's own.
        found = weight_info(self._mtp.layers)
        return {
            "mtp_layers": self.count,
            "mtp_parameters": found["parameters"],
            "mtp_weight_bytes": found["weight_bytes"],
        }

    def close(self) -> None:
        super().close()
        self._mtp, self._layers = None, []
        self._forwards.clear()
        self._configs.clear()

    # ---- forwards

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Enter once per draft, as it costs a tenth of a layer.

        The owner's hooks are silenced, also those on embedding and head, which are the model's own: a
        draft must not be seen by what counts the model's forwards, or changes them by their number.
        """
        with exclusive:
            if not self._tree.unchanged():  # embedding and head may be edited
                self._prepare()
            with patched(self._tree, self._forwards, self._configs, hooks=False):
                yield

    def run(self, k: int, batch: Batch, store: KVStore) -> Tensor:
        """Run layer `k`, inside of `patched`, on K and V of its own.

        Row by row, `batch.positions` are slots and `batch.token_ids` the tokens `k + 1` behind. What it
        makes of each slot goes to layer `k + 1`, which must find it there. What the last layer makes of
        a row with logits goes to its own next slot, where it stands in for the layer before it.
        """
        assert self._store is not None
        inputs = self._inputs[k]
        context = FlatContext(self._slots, batch, self._store)
        with activate(context), InvariantMode() if self._override else nullcontext():
            out = self._through(k, batch.token_ids, inputs.read(context.rows), batch.positions)
            last = out[batch.logit_rows]
            logits = self._logits(last)
        if k + 1 < self.count:
            self._inputs[k + 1].write(context.rows, out)
        elif len(last):
            behind = replace(batch, positions=batch.positions + 1)
            inputs.write(behind.slots(inputs.block_size)[batch.logit_rows], last)
        return logits

    def _through(self, k: int, token_ids: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
        """Run layer `k` on `token_ids` `[T]` and `hidden` `[T, H]` at `slots` `[T]`: `[T, H]`."""
        mtp = self._mtp
        embedded = mtp.embed_tokens(token_ids[None])
        positions = slots[None] + (k + 1)  # those of the tokens
        turns = None
        if mtp.rotary_emb is not None:
            turns = rotary(mtp.rotary_emb, embedded, positions, **self._rope[k])
        mask, cache = None, None  # in place: the name of the cache changed with transformers 5.24
        out = self._layers[k](embedded, hidden[None], turns, mask, positions, cache)
        if mtp.use_shared_post_norm:
            out = mtp.shared_post_norm(out)
        made: Tensor = out[0]
        return made

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._mtp._project_to_logits(hidden[None])[0]
        return logits

    def _prepare(self) -> None:
        mtp: nn.Module = self._mtp
        self._tree = Tree(mtp)
        self._forwards = replaced_forwards(mtp)
        self._configs = configs_of(mtp)

    def _inspect(
        self, vocab_size: int
    ) -> tuple[list[LayerShape], dict[tuple[int, int], int], bool]:
        """Run a few tokens through all layers, and return what each call of attention stores, and whether
        functions are called that are not batch-invariant.
        """
        context, recorder = InspectionContext(), Recorder()
        slots = torch.arange(_INSPECTED_TOKENS, device=self._device)
        hidden = torch.ones(
            _INSPECTED_TOKENS, self._hidden_size, dtype=self._dtype, device=self._device
        )
        try:
            with (
                patched(self._tree, self._forwards, self._configs, hooks=False),
                activate(context),
                recorder,
            ):
                for k in range(self.count):
                    hidden = self._through(k, slots, hidden, slots)
                logits = self._logits(hidden)
        except Exception as error:  # a layer of any architecture, called by itself
            raise NotSupported(
                "draft='mtp': the model's MTP layers can't be run on flat batches: a forward of a few "
                f"tokens raised {type(error).__name__}: {first_line(error)}"
            ) from error
        if not context.layers or logits.shape != (_INSPECTED_TOKENS, vocab_size):
            raise NotSupported(
                f"draft='mtp': the model's MTP layers attend {len(context.layers)} times and give logits of "
                f"shape {list(logits.shape)}; they must attend, and speak of {vocab_size} ids"
            )
        return context.layers, context.slots, bool(recorder.swapped)
