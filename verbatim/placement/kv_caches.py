"""Modules that are called as `model(tokens, kv_caches=[...])`, as in KempnerForge.

KempnerForge's own modules run through the equivalent transformers architecture, with their own parameters
(`model/kempner/live.py`). Any other module runs through its own forward, one token of one sequence at a time,
on one thread: slow, but its logits do not depend on the schedule. K and V are stored in the engine's blocks,
so prefix reuse, eviction, forks and beam search work as for any model.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from verbatim.errors import ModelChanged, NotSupported, UnsupportedModel
from verbatim.kernels.packing import Packing
from verbatim.kv.store import KVStore, LayerShape
from verbatim.model.decoder import Decoder
from verbatim.model.differential import largest_error, tolerance
from verbatim.model.fingerprint import Tree
from verbatim.model.kempner.live import LiveDecoder, skeleton_of
from verbatim.model.loader import LoadedModel
from verbatim.model.patching import exclusive, patched
from verbatim.model.products import threads
from verbatim.options import dtype_name, on_cpu
from verbatim.placement.external import ExternalDecoder, Piece
from verbatim.placement.options import EngineOptions
from verbatim.placement.resident import Resident, open_resident
from verbatim.placement.wrapped import device_of

_FIELDS = ("n_layers", "n_kv_heads", "head_dim", "max_seq_len")
_TRIAL_TOKENS = 5
_ATTENTION = F.scaled_dot_product_attention  # torch's original, in case it is patched


def takes_kv_caches(module: nn.Module) -> bool:
    """Return whether `module` takes `kv_caches`, and its config has the fields that give their shape."""
    config: Any = getattr(module, "config", None)
    if not all(hasattr(config, field) for field in _FIELDS):
        return False
    return "kv_caches" in inspect.signature(module.forward).parameters


def open_kv_caches(
    loaded: LoadedModel, options: EngineOptions, max_length: int | None, *, weak: bool
) -> Resident:
    """Return a runner for a live module, which is held by a weak reference if `weak`.

    Args:
        max_length: maximum tokens of prompt and completion together.

    Raises:
        UnsupportedModel: the module violates the protocol, or its logits are random or not causal.
        NotSupported: `kv_dtype` is not the module's dtype, and the module runs through its own forward.
        OutOfBlocks: the memory does not hold one block.
    """
    module = loaded.module
    layers, dtype, _ = _shape_of(module)
    with exclusive, threads(options.num_threads), options.device.current(), on_cpu():
        skeleton = skeleton_of(module)
        decoder: Decoder
        if skeleton is not None:
            exact = options.device.batch_invariant
            decoder = LiveDecoder(
                module, skeleton, weak=weak, fused=options.fused, batch_invariant=exact
            )
        else:
            _check_kv_dtype(options.kv_dtype, dtype)
            decoder = TokenDecoder(module, _trial_run(module), layers, weak=weak)
        runner = open_resident(decoder, loaded, options, max_length)
        rows = "one at a time" if skeleton is None else "together"
        runner.placement = {"placement": "kv_caches", "rows": rows}
        return runner


def _check_kv_dtype(kv_dtype: Any, module_dtype: torch.dtype) -> None:
    if kv_dtype is None or kv_dtype == module_dtype:
        return
    name = kv_dtype.name if isinstance(kv_dtype, Packing) else dtype_name(kv_dtype)
    raise NotSupported(
        f"kv_dtype={name!r}: this module computes attention itself, on K and V in its own dtype; "
        f"leave it at 'auto', which is {dtype_name(module_dtype)}"
    )


def _shape_of(module: nn.Module) -> tuple[list[LayerShape], torch.dtype, int]:
    """Check the config; return each layer's cache shape, the parameters' float dtype, and `max_seq_len`."""
    config: Any = module.config
    for field in _FIELDS:
        value = getattr(config, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"{type(module).__name__}: config.{field}={value!r} must be 1 or more"
            )
    layers = [LayerShape(config.n_kv_heads, config.head_dim, config.head_dim)] * config.n_layers
    floating = (p.dtype for p in module.parameters() if p.is_floating_point())
    return layers, next(floating, torch.float32), config.max_seq_len


class BlockCache:
    """A layer's cache as passed to a module, backed by a `KVStore`.

    Args:
        layer: layer number in the store.
        slots: slot of each position of each row, `[B, L]` int64.
        seq_len: number of positions already stored.
    """

    def __init__(self, store: KVStore, layer: int, slots: Tensor, seq_len: int) -> None:
        self.seq_len = seq_len
        self._store = store
        self._layer = layer
        self._slots = slots

    def update(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """Append K and V, `[B, Hkv, T, D]` each; return all K and V, `[B, Hkv, seq_len, D]` each.

        Raises:
            UnsupportedModel: the shapes contradict the module's config.
        """
        rows, length = self._slots.shape
        head = self._store.layer(self._layer)[0]
        expected = (rows, head.shape[1], length - self.seq_len, head.shape[3])
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
        blocks = self._store.layer(self._layer)[which]
        slots, size = self._slots[:, : self.seq_len], self._store.block_size
        return blocks[slots // size, :, slots % size].transpose(1, 2)


class TokenDecoder(ExternalDecoder):
    """Runs the forward of a `kv_caches` module token by token, with K and V in the engine's blocks."""

    def __init__(
        self, module: nn.Module, vocab_size: int, layers: list[LayerShape], *, weak: bool
    ) -> None:
        super().__init__(module, vocab_size, layers, weak=weak)
        self._shape, self._tree = _shape_of(module), Tree(module)

    def refresh(self) -> None:
        """Repeat the trial run of the module if it was edited.

        Raises:
            ModelChanged: the shape of the cache, the vocabulary size or `max_seq_len` changed.
        """
        with exclusive, on_cpu():
            module = self.raw_module
            if _shape_of(module) != self._shape:
                raise ModelChanged(
                    "the model's layers or its max_seq_len changed since it was opened; open it again"
                )
            if not self._tree.unchanged():
                tree = Tree(module)
                self._check_vocab(_trial_run(module))
                self._tree = tree

    def rows(self, pieces: list[Piece], store: KVStore) -> list[Tensor]:
        self.refresh()
        with _prepared(self.raw_module, hooks=True):
            logits = [_run_alone(self.raw_module, store, piece) for piece in pieces]
        self._check_vocab(logits[0].shape[-1])
        return logits

    def _check_vocab(self, width: int) -> None:
        if width != self.spec.vocab_size:
            raise ModelChanged(
                f"the model's vocabulary changed from {self.spec.vocab_size} to {width} since it was "
                "opened; open it again"
            )


@contextmanager
def _prepared(module: nn.Module, *, hooks: bool) -> Iterator[None]:
    """Run the block with `module` in eval mode, eager and without gradients; restore it afterwards."""
    with patched(module, [], hooks=hooks, attention=None), torch.compiler.set_stance("force_eager"):
        yield


def _call(module: nn.Module, store: KVStore, ids: Tensor, slots: Tensor, start: int) -> Tensor:
    """Run one forward of `module`; return its logits `[B, T, V]`.

    Args:
        ids: `[B, T]` token ids.
        slots: `[B, start + T]`, the slot of each position.

    Raises:
        UnsupportedModel: the module violates the protocol.
    """
    caches = [BlockCache(store, layer, slots, start) for layer in range(len(store.shapes))]
    logits = module(ids, kv_caches=caches)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        returned = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UnsupportedModel(
            f"it returns {returned} for tokens {list(ids.shape)}; logits [B, T, V] are needed"
        )
    for layer, cache in enumerate(caches):
        if cache.seq_len != slots.shape[1]:
            raise UnsupportedModel(
                f"it did not append the new K and V to the cache of layer {layer}"
            )
    return logits.detach()


def _run_alone(module: nn.Module, store: KVStore, piece: Piece) -> Tensor:
    """Run one sequence token by token, on one thread; return logits `[len(logit_positions), V]`."""
    slots, positions = piece.slots[None], set(piece.logit_positions.tolist())
    rows: list[Tensor] = []
    with threads(1):
        for p, token in enumerate(piece.ids.split(1), start=piece.start):
            row = _call(module, store, token[None], slots[:, : p + 1], p)[0]
            rows += [row] if p in positions else [row[:0]]
    return torch.cat(rows)


def _trial_run(module: nn.Module) -> int:
    """Run a module on two short sequences that differ in the last token; return its vocabulary size.

    Hooks do not run, as the caller did not request these forwards, and torch's generators are restored. Warns
    if the logits depend on how many tokens run in one forward.

    Raises:
        UnsupportedModel: the logits depend on later tokens, differ between calls, or are not `[B, T, V]`.
    """
    name, config = type(module).__name__, module.config
    layers, dtype, max_seq_len = _shape_of(module)
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) and size > 0 else 2  # any vocabulary has ids 0 and 1
    length, device = min(_TRIAL_TOKENS, max_seq_len), device_of(module)
    pos = torch.arange(length, device=device)
    ids = torch.stack([pos * 37, pos * 37 + (pos == length - 1)]) % size
    slots = pos + length * pos.new_tensor([[1], [2]])  # a block each, after scratch block 0
    store = KVStore(layers, 3, length, dtype, device)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()

    def token_by_token(seed: int) -> Tensor:
        torch.manual_seed(seed)
        pieces = [Piece(row, 0, row_slots, pos) for row, row_slots in zip(ids, slots, strict=True)]
        return torch.stack([_run_alone(module, store, piece) for piece in pieces])

    try:
        with _prepared(module, hooks=False), torch.random.fork_rng(devices=gpus), _SingleQueries():
            logits = token_by_token(0)
            scale = float(logits.abs().max())
            if not math.isfinite(scale):  # the fault of the weights, not of the code
                return logits.shape[-1]
            if not torch.equal(logits, token_by_token(1)):
                raise UnsupportedModel(
                    "in a trial the same tokens gave other logits when run again; it may draw "
                    "random numbers"
                )
            # Each sequence alone: in some modules all rows share a limit, such as expert capacity.
            rows = zip(ids.split(1), slots.split(1), strict=True)
            whole = torch.cat([_call(module, store, *row, 0) for row in rows])
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None
    slack = tolerance(logits.dtype, scale)
    if largest_error(whole[0, :-1], whole[1, :-1]) > slack:
        raise UnsupportedModel(
            f"{name}: in a trial the last token changed the logits before it; a causal model is needed"
        )
    if (off := largest_error(whole, logits)) > slack:
        warnings.warn(
            f"{name}: its logits for a whole sequence are off by {off:.2g} (largest logit: "
            f"{scale:.2g}) from those computed token by token, which are used here; its output "
            "for a token depends on the other tokens of the forward, as with an expert capacity",
            RuntimeWarning,
            stacklevel=7,  # the caller that creates the LLM
        )
    return logits.shape[-1]


class _SingleQueries(TorchFunctionMode):
    """Refuses causal attention with a single query, which torch's causal mask limits to the first key."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION and (kwargs.get("is_causal") or any(x is True for x in args[5:6])):
            query, key, *_ = args
            if query.shape[-2] == 1 and key.shape[-2] > 1:
                raise UnsupportedModel(
                    "it calls scaled_dot_product_attention with is_causal=True for one query and "
                    f"{key.shape[-2]} keys, of which torch lets it attend only to the first"
                )
        return func(*args, **kwargs)
