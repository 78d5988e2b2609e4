"""Decoders of external modules: modules that do not follow the protocol of transformers.

Their forward can't run flat batches: it takes whole rows, or has its own kind of KV cache. For a module that
takes whole rows, the engine's blocks hold the token ids of every sequence instead of K and V. All other state
can be dropped at any time and recomputed from the ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.errors import NotSupported
from verbatim.kv.flat import HiddenStore
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.decoder import Decoder
from verbatim.model.fingerprint import writes_to
from verbatim.model.lora import Adapters
from verbatim.model.patching import exclusive
from verbatim.model.routing import Records
from verbatim.model.spec import ModelSpec
from verbatim.options import on_cpu
from verbatim.placement.resident import Resident
from verbatim.placement.wrapped import device_of
from verbatim.protocols import Forward

_ID = LayerShape(1, 1, 0)  # one token id, stored as an int64 key without a value


class Piece(NamedTuple):
    """The rows of one sequence in a forward.

    Attributes:
        ids: token ids of the new positions, `[L - start]` int64; with `run_rows`, of all positions, `[L]`.
        start: first new position.
        slots: slot of each position (block * block size + offset), `[L]` int64.
        logit_positions: positions with needed logits, int64, ascending: usually only the last one; none if
            a prompt chunk ends before the end of the prompt.
    """

    ids: Tensor
    start: int
    slots: Tensor
    logit_positions: Tensor


def pieces_of(batch: Batch, block_size: int) -> list[Piece]:
    """Return the piece of each sequence of a batch, with the ids of the new positions."""
    pieces, bounds = [], batch.query_starts.tolist()
    for s, length in enumerate(batch.context_lens.tolist()):
        first, end = bounds[s], bounds[s + 1]
        pos = torch.arange(length, device=batch.block_tables.device)
        start = length - (end - first)
        slots = batch.block_tables[s].long()[pos // block_size] * block_size + pos % block_size
        rows = batch.logit_rows
        logit_positions = rows[(rows >= first) & (rows < end)] - first + start
        pieces.append(Piece(batch.token_ids[first:end], start, slots, logit_positions))
    return pieces


class ExternalDecoder(Decoder):
    """Runs a module in `rows`, which a subclass overrides; the module is not inspected, patched or fused.

    Args:
        module: a `torch.nn.Module`, or any callable.
        vocab_size: width of the logits.
        layers: shapes of the KV store's layers.
        weak: whether only a weak reference to the module is held.
    """

    fused = None

    def __init__(
        self, module: Any, vocab_size: int, layers: list[LayerShape], *, weak: bool = False
    ) -> None:
        self._module = weakref.ref(module) if weak else lambda: module
        name = type(module).__name__
        reason = f"{name} is run through its own forward, which hides "
        floating = (p.dtype for p in self.owner.parameters() if p.is_floating_point())
        self.spec = ModelSpec(
            layers=layers,
            dtype=next(floating, torch.float32),
            vocab_size=vocab_size,
            torch_functions=frozenset({f"those of {name}"}),
            routed=Choices(reason=f"{reason}it"),
            indexed=Choices(reason=f"{reason}it"),
            hidden_reason=f"{reason}them",
        )
        self.adapters = Adapters(self.spec.dtype)

    @property
    def architecture(self) -> str:
        return type(self.raw_module).__name__

    @property
    def module(self) -> Any:
        return self.raw_module

    @property
    def owner(self) -> nn.Module:
        module: Any = self.raw_module
        return module if isinstance(module, nn.Module) else nn.Module()

    def refresh(self) -> None:
        """Do nothing: the module's own forward is called each time."""

    def stamp(self) -> object:
        return writes_to(self.owner)

    def weights_moved(self) -> None:
        """Do nothing: no addresses of weights are stored."""

    def how_experts_run(self) -> dict[str, int]:
        return {}

    def load_adapter(self, adapter: Adapter) -> list[str]:
        raise NotSupported(
            f"adapters: not supported for {self.architecture}, whose layers run by its own forward"
        )

    def run(
        self,
        batch: Batch,
        store: KVStore,
        records: Records = MappingProxyType({}),
        body: HiddenStore | None = None,
        *,
        hooks: bool = True,
    ) -> Forward:
        with exclusive, torch.inference_mode(False), torch.no_grad(), on_cpu():
            store.copy_blocks(batch.block_copies)
            rows = self.rows(pieces_of(batch.to(store.device), store.block_size), store)
            return Forward(torch.cat(rows).detach())

    def rows(self, pieces: list[Piece], store: KVStore) -> list[Tensor]:
        """Return the logits `[len(logit_positions), V]` of each piece, in any floating dtype."""
        raise NotImplementedError


class RowsDecoder(ExternalDecoder):
    """Runs a module on whole rows in `run_rows`, which a subclass overrides.

    Attributes:
        placement: the value for `Runner.info`.
        device: the device of the module and of the ids.
    """

    placement = "external"

    def __init__(self, module: Any, vocab_size: int) -> None:
        super().__init__(module, vocab_size, [_ID])
        self.device = device_of(module)

    def rows(self, pieces: list[Piece], store: KVStore) -> list[Tensor]:
        ids = store.tensors[0].view(-1)
        for piece in pieces:
            ids[piece.slots[piece.start :]] = piece.ids
        return self.run_rows([piece._replace(ids=ids[piece.slots]) for piece in pieces])

    def run_rows(self, pieces: list[Piece]) -> list[Tensor]:
        """Return the result of `rows` for pieces with the `ids` of all positions."""
        raise NotImplementedError

    def on_drawn(self, plan: SamplePlan, ids: list[int]) -> None:
        """Receive the ids drawn from the logits of the last forward."""


class RowsRunner(Resident):
    """A `Resident` that stores the token ids of sequences instead of K and V.

    Args:
        num_blocks: number of blocks of ids, including the scratch block.
    """

    def __init__(self, decoder: RowsDecoder, *, block_size: int, num_blocks: int) -> None:
        store = KVStore([_ID], num_blocks, block_size, torch.int64, decoder.device)
        super().__init__(decoder, store, None)
        self.placement: Mapping[str, Any] = {"placement": decoder.placement}
        self._on_drawn = decoder.on_drawn

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        draws = super().sample(forward, plan)
        self._on_drawn(plan, [draw.id for draw in draws])
        return draws
