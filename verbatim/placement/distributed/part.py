"""A part of a model: a contiguous range of its layers, which runs batches bit for bit as the model does.

The module is whole but for its layers: those of other parts are shells. Its own code runs around them, so
that rotary embeddings, masks and whatever else it makes of ids and positions are the model's own. The
hidden states from the part before are put in the place of those that enter the first own layer; those that
would enter the first layer of the part behind leave, and the forward ends there. What is computed from
weights of other parts on the way is NaN, and thrown away.
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
from verbatim.device import CPU, Device
from verbatim.errors import UnsupportedModel
from verbatim.heap import give_back_freed
from verbatim.model.context import active_context
from verbatim.model.decoder import Decoder
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit, copy_path, open_draft_layers
from verbatim.model.loader import Checkpoint, LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.packed import drop_weights, weight_bytes
from verbatim.model.spec import inner_model
from verbatim.options import dtype_name
from verbatim.placement.distributed.split import Split, hidden_of, hollow_copy
from verbatim.placement.offload.tiers import Tiers
from verbatim.weights.files import read_whole
from verbatim.weights.load import load_weights

_ALIGNED = 64  # bytes; what torch's own products may round differently without
_STAND_INS = 64  # rows of made-up hidden states for trials


class _Left(BaseException):
    """Carries hidden states out of a forward; a `BaseException`, so that no model's code catches it."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Part:
    """Layers `first` to `end` (exclusive) of a skeleton, with their own weights read.

    Args:
        skeleton: of the whole model; left as it is, so that other parts can be made of it.
        split: of this skeleton, where it is there already.
        device: where it computes, and holds its weights.
        draft: layers of the model that draft, if they are here: MTP layers are behind the last layer, and
            need the embedding; the first layers exit early, and need what follows the last one.
        place: reads its weights, with these MTP layers beside them, into the tiers of a plan; None: into
            memory.

    Attributes:
        is_first, is_last: it begins with the embedding; it ends with the head.
        decoder: runs it.
        num_parameters: that it holds; those of several parts count on each.
        drafts: the layers that draft here, without their stores.
        tiers: where its weights are; None: in memory.
        own: its module with its weights.

    Raises:
        InvalidRequest: there are no such layers.
        UnsupportedModel: the model can't be cut there, or its own layers need something of other parts.
        TierFailed: a file can't be read, or changed since the skeleton was opened.
        NotSupported, ModelError: the layers that draft can't be opened.
    """

    def __init__(
        self,
        skeleton: LoadedModel,
        first: int,
        end: int,
        *,
        split: Split | None = None,
        device: Device = CPU,
        draft: Mtp | EarlyExit | None = None,
        place: Callable[[LoadedModel, Mtp | None], Tiers] | None = None,
    ) -> None:
        assert skeleton.lazy_weights is not None, (
            "a skeleton has a lazy weight for each of its weights"
        )
        split = split or Split(skeleton)
        split.check(first, end)
        self.first, self.end = first, end
        self.is_first, self.is_last = first == 0, end == split.num_layers
        self._split = split
        self._ids = torch.empty(0, dtype=torch.int64)  # of the forward that began last
        self.tiers: Tiers | None = None
        self.drafts = DraftLayers()
        mtp = draft if isinstance(draft, Mtp) and self.is_last else None
        exit_ = draft if isinstance(draft, EarlyExit) and self.is_first else None
        lazy_weights, kept = skeleton.lazy_weights, split.running[first:end]
        parameters = split.parameters(first, end, draft)
        self.num_parameters = sum(p.numel() for p in parameters)

        def copied() -> tuple[nn.ModuleList, LoadedModel]:
            module, layers, copies = hollow_copy(skeleton.module, split.layers, kept)
            own = {copies[p]: lazy_weights[p] for p in parameters}
            return layers, replace(skeleton, module=module, lazy_weights=own, layers=kept)

        def read(own: LoadedModel) -> nn.Module:
            weights, own.lazy_weights = dict(own.lazy_weights or {}), None
            own.packed = load_weights(own.module, weights, own.quantization, read=read_whole)
            return own.module

        layers, self.own = copied()
        module = self.own.module
        with ExitStack() as undo:
            undo.callback(self.close)
            if place is not None:
                for index in {*range(len(layers))}.difference(kept):  # a plan needs its own shapes
                    layers[index].__dict__["forward"] = self._pass
                self.tiers = place(self.own, mtp)
            else:
                read(self.own)
                self.own.move(device.torch)
                if skeleton.folder is not None:
                    self.own.checkpoint = Checkpoint(self.own, lambda: read(copied()[1]))
            whole = copy_path(module, layers)  # with the forwards of the whole model
            for index in split.running[:first]:
                layers[index].__dict__["forward"] = self._pass
            if first in split.direct:  # so that all own layers can be fused
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
                    module, unseen=True, batch_invariant=device.batch_invariant, part=self
                )
            else:
                self.decoder = self.tiers.inspect(part=self)
            if not self.decoder.spec.finite:
                raise UnsupportedModel(
                    f"{type(inner).__name__}: layers {first} to {end} alone give numbers that are none: "
                    "their weights hold NaN or infinities, or they need weights of other layers"
                )
            with device.current():
                self.drafts = open_draft_layers(mtp or exit_, self.decoder, skeleton, whole)
            undo.pop_all()

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights; what several parts hold counts on each."""
        return weight_bytes(self.own.module) if self.tiers is None else self.tiers.nbytes

    def enter(self, batch: Batch, received: Tensor | None) -> None:
        """Prepare a batch for a forward of `decoder`, whose logits are the hidden states that leave.

        Args:
            batch: as the whole model would get it, but for `forced_experts` and `forced_keys`, which are
                of this part's layers alone. It is changed.
            received: `[T, hidden_size]` in `hidden_dtype` from the part before; None on the first one.
        """
        assert (received is None) == self.is_first
        if received is not None:
            expected = (batch.num_tokens, self._split.hidden_size)
            assert received.shape == expected, (received.shape, expected)
            assert received.dtype == self._split.hidden_dtype, received.dtype
            batch.entering = received.contiguous()
        if not self.is_last:
            batch.logit_rows, batch.wants_hidden = torch.arange(batch.num_tokens), False

    def close(self) -> None:
        """Free the weights; a second call does nothing."""
        self.drafts.close()
        if self.tiers is not None:
            self.tiers.close()
        drop_weights(self.own.module)
        if hasattr(self, "decoder"):
            self.decoder.close()
            give_back_freed()

    def _forward_of(self, inner: Any) -> Any:
        """Return the model's forward, which ends where the hidden states leave."""
        plain = inner.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._ids = kwargs["input_ids"]
            try:
                return plain(*args, **kwargs)
            except _Left as left:
                # In the place of logits: what is read of them is true of hidden states as well.
                return SimpleNamespace(logits=left.hidden)

        return forward

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        """Pass hidden states through, in place of a layer of an earlier part."""
        return self._split.passing(hidden_of(args, kwargs))

    def _receive(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was received, in the place of the last layer of the part before."""
        return self._split.passing(self._received_as(hidden_of(args, kwargs)))

    def _enter(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the first own layer on what was received."""
        received = self._received_as(hidden_of(args, kwargs))
        if args:
            return type(layer).forward(layer, received, *args[1:], **kwargs)
        return type(layer).forward(layer, **{**kwargs, "hidden_states": received})

    def _received_as(self, hidden: Tensor) -> Tensor:
        batch = getattr(active_context(), "batch", None)  # an inspection has none
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
                f"layer {self.end} is given {dtype_name(hidden.dtype)}, and others "
                f"{dtype_name(self._split.hidden_dtype)}"
            )
        outer = self._split.outer_dims
        raise _Left(_to_rows(hidden, outer).view(*hidden.shape[outer : outer + 2], -1))

    def entry(self, token_ids: Tensor) -> Tensor:
        """Return hidden states for a trial: the same for the same id at any position; see `ModelPart`."""
        split = self._split
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(_STAND_INS, split.hidden_size, generator=generator)
        return table.to(token_ids.device, split.hidden_dtype)[token_ids.flatten() % _STAND_INS]


def _to_rows(hidden: Tensor, outer: int) -> Tensor:
    """Copy hidden states with `outer` dimensions in front of `[B, T]` to `[B * T, hidden_size]`."""
    rows = hidden.flatten(outer, outer + 1).movedim(outer, 0)
    return rows.flatten(1).clone(memory_format=torch.contiguous_format)


def _from_rows(rows: Tensor, shape: torch.Size, outer: int) -> Tensor:
    """Reverse `_to_rows`."""
    return rows.view(-1, *shape[:outer], *shape[outer + 2 :]).movedim(0, outer).reshape(shape)
