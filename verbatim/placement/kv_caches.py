"""The runner for modules that are called as `model(tokens, kv_caches=[...])`.

Their K and V are in the engine's own blocks, so prefix reuse, eviction, forks and beams work as for any
model. A module whose steps are all known to be batch-invariant (`model/rowwise.py`), and the same in every
forward, runs sequences of equal length together, in any chunks. Others run one token of
one sequence at a time, on one thread: slow, but with the same logits in every schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import ModelChanged, NotSupported
from verbatim.kv.quantized import Packing
from verbatim.kv.store import bytes_per_token
from verbatim.model.patching import exclusive, threads
from verbatim.model.rowwise import NotRowwise
from verbatim.model.tree import Tree
from verbatim.options import dtype_name, on_cpu
from verbatim.placement.external import ExternalRunner, Piece
from verbatim.placement.kv_protocol import (
    CacheShape,
    Findings,
    call_together,
    run_alone,
    speaks_kv_caches,
    taken,
    try_out,
)
from verbatim.placement.options import EngineOptions

__all__ = ["KVCachesRunner", "open_kv_caches", "speaks_kv_caches"]

_ID_BYTES = 8  # of each token, kept beside its K and V


class KVCachesRunner(ExternalRunner):
    """Runs a `kv_caches` module on the engine's blocks.

    Args:
        found: by a trial.

    Attributes:
        rowwise_reason: why rows can't run together; None: they can.
    """

    placement = "kv_caches"

    def __init__(
        self,
        module: nn.Module,
        shape: CacheShape,
        found: Findings,
        *,
        block_size: int,
        num_blocks: int,
        num_threads: int | None,
        weak: bool,
    ) -> None:
        super().__init__(
            module,
            vocab_size=found.vocab_size,
            block_size=block_size,
            num_blocks=num_blocks,
            num_threads=num_threads,
            weak=weak,
        )
        self.store = shape.store(num_blocks, block_size)
        self.rowwise_reason = found.rowwise_reason
        self._steps = found.steps
        self._shape = shape
        self._tree = Tree(module)

    def refresh(self) -> None:
        """Inspect the module again if it was edited.

        Raises:
            ModelChanged: its layers, their K and V or its `max_seq_len` changed.
        """
        with exclusive, threads(self._num_threads), on_cpu():
            module = self.module
            if CacheShape.of(module) != self._shape:
                raise ModelChanged(
                    "the model's layers or its max_seq_len changed since it was opened; open it again"
                )
            if not self._tree.unchanged():
                now, found = Tree(module), try_out(module, self._shape)
                self._check_width(found.vocab_size)
                self._tree, self._steps = now, found.steps
                self.rowwise_reason = found.rowwise_reason

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self.store.copy_blocks(copies)

    def run(self, pieces: list[Piece]) -> list[Tensor]:
        self.refresh()
        with taken(self.module, hooks=True):
            if self.rowwise_reason is None:
                try:
                    return self._run_together(pieces)
                except NotRowwise as step:  # its K and V are written again, bit-identically
                    if not self._tree.has_hooks():  # a hook may be removed again
                        self.rowwise_reason = str(step)
            logits = [run_alone(self.module, self._shape, self.store, piece) for piece in pieces]
            self._check_width(logits[0].shape[-1])
            return logits

    def _run_together(self, pieces: list[Piece]) -> list[Tensor]:
        """Run sequences of equal length and start as one batch."""
        alike: dict[tuple[int, int], list[int]] = {}
        for i, piece in enumerate(pieces):
            alike.setdefault((len(piece.ids), piece.start), []).append(i)
        logits: dict[int, Tensor] = {}
        watched = self._tree.has_hooks()
        for (_, start), members in alike.items():
            ids = torch.stack([pieces[i].ids[start:] for i in members])
            slots = torch.stack([pieces[i].slots for i in members])
            to = self.module, self._shape, self.store
            rows, _ = call_together(*to, ids, slots, start, self._steps, watched=watched)
            self._check_width(rows.shape[-1])
            for i, row in zip(members, rows, strict=True):
                logits[i] = row[pieces[i].wanted - start]
        return [logits[i] for i in range(len(pieces))]

    def _check_width(self, width: int) -> None:
        if width != self.vocab_size:
            raise ModelChanged(
                f"the model's vocabulary changed from {self.vocab_size} to {width} since it was "
                "opened; open it again"
            )

    def info(self) -> dict[str, Any]:
        together = self.rowwise_reason is None
        return {
            **super().info(),
            "architecture": self._name,
            "layers": self._shape.layers,
            "kv_bytes": self.store.nbytes,
            "kv_dtype": self.store.dtype_name,
            "kv_bytes_per_token": bytes_per_token(self._shape.layer_shapes(), self._shape.dtype),
            "id_bytes": self._ids.nbytes,
            "rows": "together" if together else f"one at a time: {self.rowwise_reason}",
        }

    def sleep(self, weights: bool) -> None:
        super().sleep(weights)
        self.store.release()

    def wake(self) -> None:
        super().wake()
        self.store.allocate()

    def close(self) -> None:
        super().close()
        self.store.release()


def open_kv_caches(
    module: nn.Module, options: EngineOptions, max_length: int | None, *, weak: bool
) -> KVCachesRunner:
    """Return a runner for `module`, held weakly if `weak`.

    Args:
        max_length: prompt and completion together, in tokens.

    Raises:
        UnsupportedModel: it violates the protocol, or its logits depend on later tokens or are random.
        NotSupported: a `kv_dtype` that is not the module's own.
        OutOfBlocks: the memory does not hold one block.
    """
    shape = CacheShape.of(module)
    _check_kv_dtype(options.kv_dtype, shape.dtype)
    per_token = bytes_per_token(shape.layer_shapes(), shape.dtype) + _ID_BYTES
    num_blocks = options.num_blocks(per_token, max_length)
    with threads(options.num_threads), on_cpu():
        found = try_out(module, shape)
    return KVCachesRunner(
        module,
        shape,
        found,
        block_size=options.block_size,
        num_blocks=num_blocks,
        num_threads=options.num_threads,
        weak=weak,
    )


def _check_kv_dtype(wanted: Any, own: torch.dtype) -> None:
    if wanted is None or wanted == own:
        return
    name = wanted.name if isinstance(wanted, Packing) else dtype_name(wanted)
    raise NotSupported(
        f"kv_dtype={name!r}: this module attends by itself, to K and V in its own dtype; leave it at "
        f"'auto', which is {dtype_name(own)}"
    )
