"""KempnerForge's protocol: `model(tokens, kv_caches=[...])`, with caches that are views of a `KVStore`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel, VerbatimError
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.patching import patched, threads
from verbatim.model.rowwise import NotRowwise, Rowwise
from verbatim.model.steps import RecordedCall, Steps, Unseen
from verbatim.placement.external import Piece

_FIELDS = ("n_layers", "n_kv_heads", "head_dim", "max_seq_len")


def speaks_kv_caches(module: nn.Module) -> bool:
    """Return whether `module` takes `kv_caches`, and its config has their shape."""
    config: Any = getattr(module, "config", None)
    if not all(hasattr(config, field) for field in _FIELDS):
        return False
    return "kv_caches" in inspect.signature(module.forward).parameters


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a module's caches, and its maximum length."""

    layers: int
    kv_heads: int
    head_size: int
    max_seq_len: int
    dtype: torch.dtype

    @staticmethod
    def of(module: nn.Module) -> CacheShape:
        """Read it from `module.config`; the dtype is that of its first parameter.

        Raises:
            UnsupportedModel: a field is not a positive integer.
        """
        config: Any = module.config
        for field in _FIELDS:
            value = getattr(config, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UnsupportedModel(
                    f"{type(module).__name__}: config.{field}={value!r} must be 1 or more"
                )
        floating = (p.dtype for p in module.parameters() if p.is_floating_point())
        n_layers, n_kv_heads, head_dim, max_seq_len = (getattr(config, name) for name in _FIELDS)
        dtype = next(floating, torch.float32)
        return CacheShape(n_layers, n_kv_heads, head_dim, max_seq_len, dtype)

    def store(self, num_blocks: int, block_size: int) -> KVStore:
        """Allocate the K and V of `num_blocks` blocks."""
        return KVStore(self.layer_shapes(), num_blocks, block_size, self.dtype, torch.device("cpu"))

    def layer_shapes(self) -> list[LayerShape]:
        """Return the shape of each layer."""
        return [LayerShape(self.kv_heads, self.head_size, self.head_size)] * self.layers


@contextmanager
def _unwatched() -> Iterator[None]:
    """Exclude the engine's own calls from the module's steps."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class BlockCache:
    """One layer's cache as a module sees it, backed by a `KVStore`.

    Args:
        layer: of the store.
        slots: `[B, L]` int64, the slot of each position of each row.
        seq_len: positions in use.
    """

    def __init__(self, store: KVStore, layer: int, slots: Tensor, seq_len: int) -> None:
        self.seq_len = seq_len
        self._store = store
        self._layer = layer
        self._slots = slots

    def update(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """Append `[B, Hkv, T, D]` each; return all K and V, `[B, Hkv, seq_len, D]` each.

        Raises:
            UnsupportedModel: shapes that contradict the module's config.
        """
        with _unwatched():
            rows, length = self._slots.shape
            room = length - self.seq_len
            head = self._store.layers[self._layer][0]
            expected = (rows, head.shape[1], room, head.shape[3])
            if tuple(k_new.shape) != expected or tuple(v_new.shape) != expected:
                raise UnsupportedModel(
                    f"layer {self._layer} puts K {list(k_new.shape)} and V {list(v_new.shape)} into "
                    f"its cache, whose next rows are {list(expected)}"
                )
            k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in (k_new, v_new))
            slots = self._slots[:, self.seq_len :].flatten().contiguous()
            self._store.write(self._layer, k, v, slots)
            self.seq_len = length
        return self.k, self.v

    @property
    def k(self) -> Tensor:
        """Keys so far, `[B, Hkv, seq_len, D]`; a copy."""
        return self._gather(0)

    @property
    def v(self) -> Tensor:
        """Values so far, `[B, Hkv, seq_len, D]`; a copy."""
        return self._gather(1)

    def _gather(self, which: int) -> Tensor:
        with _unwatched():
            blocks = self._store.layers[self._layer][which]
            slots, size = self._slots[:, : self.seq_len], self._store.block_size
            return blocks[slots // size, :, slots % size].transpose(1, 2)


def call(
    module: nn.Module, shape: CacheShape, store: KVStore, ids: Tensor, slots: Tensor, start: int
) -> Tensor:
    """Run one forward of `module` in the active mode; return its logits `[B, T, V]`.

    Args:
        ids: `[B, T]`. slots: `[B, start + T]`.

    Raises:
        UnsupportedModel: it violates the protocol.
    """
    caches = [BlockCache(store, layer, slots, start) for layer in range(shape.layers)]
    logits = module(ids, kv_caches=caches)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(
            f"it returns {found} for tokens {list(ids.shape)}; logits [B, T, V] are needed"
        )
    for layer, cache in enumerate(caches):
        if cache.seq_len != slots.shape[1]:
            raise UnsupportedModel(f"it leaves the cache of layer {layer} without its new rows")
    return logits.detach()


def call_together(
    module: nn.Module,
    shape: CacheShape,
    store: KVStore,
    ids: Tensor,
    slots: Tensor,
    start: int,
    expected: Sequence[RecordedCall] | None,
    *,
    watched: bool,
) -> tuple[Tensor, tuple[RecordedCall, ...]]:
    """Run `call` for rows that must be independent; return the logits and the steps.

    Args:
        expected: the steps it must take; None: any known ones.
        watched: also detect work that is no step; for a trial, and for hooks that no trial has run.

    Raises:
        NotRowwise: rows may depend on each other. Its K and V must be written again.
        UnsupportedModel: as `call`; or it draws random numbers.
    """
    steps = Steps(range(start, slots.shape[1]), expected)
    if not watched:
        with Rowwise(strict=True, steps=steps):
            return call(module, shape, store, ids, slots, start), tuple(steps.taken)
    unseen = Unseen()
    try:
        with unseen, Rowwise(strict=True, steps=steps, unseen=unseen):
            logits = call(module, shape, store, ids, slots, start)
    except (NotRowwise, VerbatimError):
        raise
    except Exception as error:
        # torch.jit often does; anything else will fail again, token by token.
        raise NotRowwise(f"under watch it fails with {type(error).__name__}") from error
    if unseen.found is not None:
        raise NotRowwise(unseen.found)
    return logits, tuple(steps.taken)


@contextmanager
def taken(module: nn.Module, *, hooks: bool) -> Iterator[None]:
    """Run the block with `module` in eval mode, eager and without gradients; restore it afterwards."""
    with patched(module, [], [], hooks=hooks), torch.compiler.set_stance("force_eager"):
        yield


def run_alone(module: nn.Module, shape: CacheShape, store: KVStore, piece: Piece) -> Tensor:
    """Run one sequence, one token at a time, on one thread; return logits `[len(wanted), V]`."""
    ids, slots = piece.ids[None], piece.slots[None]
    wanted = set(piece.wanted.tolist())
    rows: list[Tensor] = []
    with threads(1), Rowwise(strict=False):
        for p in range(piece.start, len(piece.ids)):
            row = call(module, shape, store, ids[:, p : p + 1], slots[:, : p + 1], p)[0]
            rows += [row] if p in wanted else [row[:0]]
    return torch.cat(rows)
