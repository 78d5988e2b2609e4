"""A part of a model: a contiguous range of its layers, with outputs bit-identical to those in the model.

The module is complete except for the layers of other parts, which are empty shells. The model's own code runs
around the layers, and computes rotary embeddings, masks and anything else that depends on ids and positions.
The input of the first layer is replaced by the hidden states received from the previous part. The forward
ends at the first layer of the next part; the input of that layer is the output. Values computed from weights
of other parts are NaN, and discarded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import Batch
from verbatim.common.heap import release_free_memory
from verbatim.errors import UnsupportedModel
from verbatim.model.context import active_context
from verbatim.model.decoder import Decoder
from verbatim.model.device import CPU, Device
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit, copy_path, open_draft_layers
from verbatim.model.loader import Checkpoint, LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.quantized import drop_weights, weight_bytes
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.distributed.split import Split, hidden_of, hollow_copy
from verbatim.placement.offload.runner import Tiers
from verbatim.weights.files import read_whole
from verbatim.weights.load import load_weights

_ALIGNED = 64  # bytes; without this alignment, torch's matrix products may round differently
_TRIAL_ROWS = 64  # rows of random hidden states for trials


class _ForwardEnd(BaseException):
    """Ends a forward and carries its hidden states; a `BaseException`, so that model code can't catch it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Part:
    """Layers `first` to `end` (exclusive) of a model, with their weights.

    Args:
        split: the split of the whole model; its skeleton is unchanged, so that it serves other parts, too.
        first, end: 0, the number of layers, or an element of `split.cuts`.
        device: the device of the computation and the weights.
        draft: draft layers of the model: MTP layers, opened by the last part, which then also holds the
            embedding; or early exit, by the first part, which then also holds the final norm and head.
        place: function that reads the weights of this part and its MTP layers into the tiers of a plan;
            None: they are read into memory.

    Raises:
        UnsupportedModel: the layers need weights of other parts.
        TierFailed: a file can't be read, or changed since the skeleton was opened.
        NotSupported, ModelError: the draft layers can't be opened.
    """

    def __init__(
        self,
        split: Split,
        first: int,
        end: int,
        *,
        device: Device = CPU,
        draft: Mtp | EarlyExit | None = None,
        place: Callable[[LoadedModel, Mtp | None], Tiers] | None = None,
    ) -> None:
        skeleton = split.skeleton
        assert skeleton.lazy_weights is not None, (
            "a skeleton has a lazy weight for each of its weights"
        )
        assert first < end and {first, end} <= {0, *split.cuts, split.num_layers}, (first, end)
        self.first, self.end = first, end
        self.is_first, self.is_last = first == 0, end == split.num_layers
        self._split = split
        self._ids = torch.empty(0, dtype=torch.int64)  # token ids of the current forward
        self.tiers: Tiers | None = None  # of the weights; None: they are in memory
        self.drafts = DraftLayers()  # of this part, without their stores
        mtp = draft if isinstance(draft, Mtp) and self.is_last else None
        exit_ = draft if isinstance(draft, EarlyExit) and self.is_first else None
        lazy_weights, kept = skeleton.lazy_weights, split.running[first:end]
        parameters = split.parameters(first, end, draft)
        # Other parts hold some of them, too.
        self.num_parameters = sum(p.numel() for p in parameters)

        def copied() -> tuple[nn.ModuleList, LoadedModel]:
            module, layers, copies = hollow_copy(skeleton.module, split.layers, kept)
            own_weights = {copies[p]: lazy_weights[p] for p in parameters}
            return layers, replace(skeleton, module=module, lazy_weights=own_weights, layers=kept)

        def read(loaded: LoadedModel) -> LoadedModel:
            weights, loaded.lazy_weights = dict(loaded.lazy_weights or {}), None
            loaded.packed = load_weights(
                loaded.module, weights, loaded.quantization, read=read_whole
            )
            return loaded

        layers, self.loaded = copied()
        module = self.loaded.module
        with ExitStack() as undo:
            undo.callback(self.close)
            if place is not None:
                for index in {*range(len(layers))}.difference(kept):  # a plan must ignore them
                    layers[index].__dict__["forward"] = self._pass
                self.tiers = place(self.loaded, mtp)
            else:
                read(self.loaded)
                self.loaded.move(device.torch)
                if skeleton.folder is not None:
                    self.loaded.checkpoint = Checkpoint(self.loaded, lambda: read(copied()[1]))
            whole = copy_path(module, layers)  # copied before forwards are replaced
            for index in split.running[:first]:
                layers[index].__dict__["forward"] = self._pass
            if first in split.direct:  # so that all layers of this part can be fused
                layers[split.running[first - 1]].__dict__["forward"] = self._receive
            elif not self.is_first:
                layer = layers[split.running[first]]
                layer.__dict__["forward"] = partial(self._enter, layer)
            if not self.is_last:
                layers[split.running[end]].__dict__["forward"] = self._leave
            inner = inner_model(module)
            inner.__dict__["forward"] = self._forward_of(inner)
            if self.tiers is None:
                self.decoder = Decoder(
                    module,
                    latent=device.stores_latent,
                    is_private=True,
                    batch_invariant=device.batch_invariant,
                    part=self,
                )
            else:
                self.decoder = self.tiers.inspect(part=self)
            if not self.decoder.spec.finite:
                raise UnsupportedModel(
                    f"{type(inner).__name__}: layers {first} to {end} alone produce NaN or "
                    "infinite values: their weights hold NaN or infinities, or they need weights "
                    "of other layers"
                )
            with device.current():
                self.drafts = open_draft_layers(mtp or exit_, self.decoder, skeleton, whole)
            undo.pop_all()

    @property
    def weight_bytes(self) -> int:
        """The bytes of the held weights; other parts hold some of them, too."""
        return weight_bytes(self.loaded.module) if self.tiers is None else self.tiers.nbytes

    def enter(self, batch: Batch, received: Tensor | None) -> None:
        """Prepare a batch for a forward of `decoder`, which returns hidden states in place of logits.

        Args:
            batch: the batch of the whole model, with `forced_experts` and `forced_keys` of this part's
                layers only; changed in place.
            received: hidden states from the previous part, `[T, hidden_size]` in `hidden_dtype`; None on the
                first part.
        """
        assert (received is None) == self.is_first
        if received is not None:
            batch.entering = received.contiguous()
        if not self.is_last:
            batch.logit_rows, batch.wants_hidden = torch.arange(batch.num_tokens), False

    def close(self) -> None:
        """Free the weights. May be called again."""
        self.drafts.close()
        if self.tiers is not None:
            self.tiers.close()
        drop_weights(self.loaded.module)
        if hasattr(self, "decoder"):
            self.decoder.close()
            release_free_memory()

    def _forward_of(self, inner: Any) -> Any:
        """Return the model's forward, which ends early on `_ForwardEnd` and returns its hidden states."""
        original = inner.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._ids = kwargs["input_ids"]
            try:
                return original(*args, **kwargs)
            except _ForwardEnd as left:
                # In place of logits: everything done with logits later works for hidden states, too.
                return SimpleNamespace(logits=left.hidden)

        return forward

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        """Pass hidden states through, in place of a layer of an earlier part."""
        return self._split.layer_output(hidden_of(args, kwargs))

    def _receive(self, *args: Any, **kwargs: Any) -> Any:
        """Return the received hidden states, in place of the last layer of the previous part."""
        return self._split.layer_output(self._received_as(hidden_of(args, kwargs)))

    def _enter(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the first layer of this part on the received hidden states."""
        received = self._received_as(hidden_of(args, kwargs))
        if args:
            return type(layer).forward(layer, received, *args[1:], **kwargs)
        return type(layer).forward(layer, **{**kwargs, "hidden_states": received})

    def _received_as(self, hidden: Tensor) -> Tensor:
        batch = getattr(active_context(), "batch", None)  # None in an inspection
        rows = None if batch is None else batch.entering
        if rows is None:
            rows = self.entry(self._ids)
        elif rows.data_ptr() % _ALIGNED:
            rows = rows.clone()
        return _from_rows(rows, hidden.shape, self._split.outer_dims)

    def _leave(self, *args: Any, **kwargs: Any) -> Any:
        """End the forward, in place of the first layer of the next part."""
        hidden = hidden_of(args, kwargs)
        if hidden.dtype != self._split.hidden_dtype:
            raise UnsupportedModel(
                f"layer {self.end} receives {dtype_name(hidden.dtype)}, but other layers "
                f"{dtype_name(self._split.hidden_dtype)}"
            )
        outer = self._split.outer_dims
        raise _ForwardEnd(_to_rows(hidden, outer).view(*hidden.shape[outer : outer + 2], -1))

    def entry(self, token_ids: Tensor) -> Tensor:
        """Return hidden states for a trial, which depend only on the token ids; see `ModelPart`."""
        split = self._split
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(_TRIAL_ROWS, split.hidden_size, generator=generator)
        return table.to(token_ids.device, split.hidden_dtype)[token_ids.flatten() % _TRIAL_ROWS]


def _to_rows(hidden: Tensor, outer: int) -> Tensor:
    """Return a copy of hidden states with `outer` dimensions before `[B, T]`, as `[B * T, hidden_size]`."""
    rows = hidden.flatten(outer, outer + 1).movedim(outer, 0)
    return rows.flatten(1).clone(memory_format=torch.contiguous_format)


def _from_rows(rows: Tensor, shape: torch.Size, outer: int) -> Tensor:
    """Reverse `_to_rows`."""
    return rows.view(-1, *shape[:outer], *shape[outer + 2 :]).movedim(0, outer).reshape(shape)
