"""KempnerForge's protocol: `model(tokens, kv_caches=[...])`, with caches that are views of a `KVStore`.

A trial shows whether a module follows it, and whether rows may run together. Two short sequences that differ
in their last token alone go through the module as it is, and token by token. Three longer ones go through it
together, whole and in cuts; all their forwards must take the same steps. Hooks are silenced: no caller asked
for these forwards.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel, VerbatimError
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.differential import differential_check, largest_error, tolerance
from verbatim.model.patching import patched, threads
from verbatim.model.rowwise import NotRowwise, RecordedCall, Rowwise, Steps, Unseen
from verbatim.placement.external import Piece

_FIELDS = ("n_layers", "n_kv_heads", "head_dim", "max_seq_len")
# Of a trial: the lengths of its sequences, and cuts: an odd number of rows, a single one, and many.
_SHORT = 5
_LONG = 40
_CUTS = (7, 8)


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


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of the trial."""

    vocab_size: int  # width of the logits
    rowwise_reason: str | None  # why rows can't run together; None: they can
    steps: tuple[RecordedCall, ...]  # that every forward takes, where they can


def try_out(module: nn.Module, shape: CacheShape) -> Findings:
    """Run `module` on a few tokens; torch's generators stay where they are.

    A module whose logits depend on how many tokens run together is warned of.

    Raises:
        UnsupportedModel: its logits look ahead, are other ones each time, or are no `[B, T, V]`.
    """
    name = type(module).__name__
    try:
        with taken(module, hooks=False), torch.random.fork_rng(devices=[]):
            trial = _Trial(module, shape)
            logits = trial.alone()
            trial.compare(logits, name)
            reason = trial.why_not_together(logits)
            return Findings(logits.shape[-1], reason, trial.steps)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None


class _Trial:
    """Three sequences, and memory for their K and V. Two of them have a common prefix.

    Attributes:
        steps: of the first forward of all three.
    """

    def __init__(self, module: nn.Module, shape: CacheShape) -> None:
        config: Any = module.config
        size = getattr(config, "vocab_size", None)
        size = size if isinstance(size, int) and size > 0 else 2  # ids 0 and 1 are there anyway
        self.steps: tuple[RecordedCall, ...] = ()
        self._length = length = min(_LONG, shape.max_seq_len)
        self._short = short = min(_SHORT, length)
        at = torch.arange(length)
        self._ids = torch.stack([at * 37, at * 37 + (at >= short - 1), at * 11 + 5]) % size
        # A block each; block 0 stays free, as in an engine.
        self._slots = at + length * torch.tensor([[1], [2], [3]])
        self._store = shape.store(4, length)
        self._module, self._shape = module, shape

    def alone(self) -> Tensor:
        """Return logits `[2, T, V]`, each token of two short sequences by itself."""
        every = torch.arange(self._short)
        pieces = [
            Piece(self._ids[row, : self._short], 0, self._slots[row, : self._short], every)
            for row in range(2)
        ]
        return torch.stack(
            [run_alone(self._module, self._shape, self._store, piece) for piece in pieces]
        )

    def _run(self, row: int) -> Tensor:
        """Run the module as it is on a short sequence in one piece."""
        ids, slots = (x[row : row + 1, : self._short] for x in (self._ids, self._slots))
        return call(self._module, self._shape, self._store, ids, slots, 0)

    def _run_together(self, rows: slice, first: int, stop: int) -> Tensor:
        ids, slots = self._ids[rows, first:stop], self._slots[rows, :stop]
        to = self._module, self._shape, self._store
        logits, steps = call_together(*to, ids, slots, first, self.steps or None, watched=True)
        self.steps = self.steps or steps
        return logits

    def compare(self, logits: Tensor, name: str) -> None:
        """Compare `alone()`'s logits with a second run, and with the module as it is."""
        scale = float(logits.abs().max())
        if not math.isfinite(scale):  # a matter of weights
            return
        slack = tolerance(logits, scale)
        if not torch.equal(logits, self.alone()):
            raise UnsupportedModel("in a trial the same tokens got other logits when run again")
        # One sequence after the other: some modules share something out among all rows.
        own = torch.cat([self._run(row) for row in range(2)])
        if largest_error(own[0, :-1], own[1, :-1]) > slack:
            raise UnsupportedModel(
                "in a trial the last token changed the logits before it; a causal model is needed"
            )
        if (error := largest_error(own, logits)) > slack:
            warnings.warn(
                f"{name}: its logits in one piece are off by {error:.2g} (largest logit: {scale:.2g}) "
                "from those token by token, which are the ones used here; what it makes of a token "
                "depends on those beside it, as with a capacity of experts",
                RuntimeWarning,
                stacklevel=6,  # where the LLM is made
            )

    def why_not_together(self, logits: Tensor) -> str | None:
        """Return why batches of sequences don't give the bits of `alone()`; None if they do."""
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in self._module.modules()):
            return "torch.jit, into which nothing can look"
        every, last, length = slice(None), slice(2, None), self._length
        edges = [0, *(cut for cut in _CUTS if cut < length), length]
        try:
            whole = self._run_together(every, 0, length)
            cuts = [self._run_together(every, *edge) for edge in itertools.pairwise(edges)]
            single = self._run_together(last, 0, length)
        except NotRowwise as step:
            return str(step)
        ours = [whole[:2, : self._short], torch.cat(cuts, dim=1), single]
        theirs = [logits, whole, whole[last]]
        same = differential_check(lambda _: ours, lambda _: theirs, [0], torch.equal) is None
        if not same and whole.isfinite().all():
            return "in a trial its logits changed with the rows beside them"
        return None
