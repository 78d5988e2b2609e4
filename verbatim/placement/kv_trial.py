"""A trial run for `kv_caches` modules: do they keep to the protocol, and may rows run together?

Two short sequences that differ in their last token alone go through the module as it is, token by token,
and together in two cuts. Hooks are silenced: nobody asked for these forwards.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.model.rowwise import NotRowwise, Rowwise
from verbatim.placement.foreign import Piece
from verbatim.placement.kv_protocol import CacheShape, call, run_alone, taken

_LENGTH = 5
_CUT = 2


@dataclass(frozen=True, slots=True)
class Findings:
    """What the trial tells."""

    vocab_size: int  # width of the logits
    rowwise_reason: str | None  # why rows can't run together; None: they can


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
            return Findings(logits.shape[-1], trial.why_not_together(logits))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None


class _Trial:
    """Both sequences, and memory for their K and V."""

    def __init__(self, module: nn.Module, shape: CacheShape) -> None:
        config: Any = module.config
        size = getattr(config, "vocab_size", None)
        size = size if isinstance(size, int) and size > 0 else 2  # ids 0 and 1 are there anyway
        self._length = length = min(_LENGTH, config.max_seq_len)
        self._ids = torch.stack([torch.arange(length) * 37 % size] * 2)
        self._ids[1, -1] = (self._ids[0, -1] + 1) % size
        # A block each; block 0 stays free, as in an engine.
        self._slots = torch.arange(length) + torch.tensor([[length], [2 * length]])
        self._store = shape.store(3, length)
        self._module, self._shape = module, shape

    def alone(self) -> Tensor:
        """Logits `[2, T, V]`, each token of each sequence by itself."""
        every = torch.arange(self._length)
        rows = [
            run_alone(self._module, self._shape, self._store, Piece(ids, 0, slots, every))
            for ids, slots in zip(self._ids, self._slots, strict=True)
        ]
        return torch.stack(rows)

    def _run(self, rows: slice, first: int, stop: int) -> Tensor:
        ids, slots = self._ids[rows, first:stop], self._slots[rows, :stop]
        return call(self._module, self._shape, self._store, ids, slots, first)

    def compare(self, logits: Tensor, name: str) -> None:
        """Hold `alone()`'s logits against themselves, and against the module as it is."""
        scale = float(logits.abs().max())
        if not math.isfinite(scale):  # a matter of weights
            return
        slack = scale * (1e-3 if logits.dtype == torch.float32 else 1e-1)
        if not torch.equal(logits, self.alone()):
            raise UnsupportedModel("in a trial the same tokens got other logits when run again")
        # One sequence after the other: some modules share something out among all rows.
        own = torch.cat([self._run(slice(row, row + 1), 0, self._length) for row in range(2)])
        if _apart(own[0, :-1], own[1, :-1]) > slack:
            raise UnsupportedModel(
                "in a trial the last token changed the logits before it; a causal model is needed"
            )
        if (error := _apart(own, logits)) > slack:
            warnings.warn(
                f"{name}: its logits in one piece are off by {error:.2g} (largest logit: {scale:.2g}) "
                "from those token by token, which are the ones used here; what it makes of a token "
                "depends on those beside it, as with a capacity of experts",
                RuntimeWarning,
                stacklevel=6,  # where the LLM is made
            )

    def why_not_together(self, logits: Tensor) -> str | None:
        """What keeps both sequences from running in one batch, in any cut, on the bits of `alone()`."""
        both, cut = slice(None), min(_CUT, self._length - 1)
        try:
            with Rowwise(strict=True):
                found = [self._run(both, 0, self._length)]
                if cut:
                    cuts = self._run(both, 0, cut), self._run(both, cut, self._length)
                    found.append(torch.cat(cuts, dim=1))
        except NotRowwise as step:
            return str(step)
        if logits.isfinite().all() and not all(torch.equal(rows, logits) for rows in found):
            return "in a trial its logits changed with the rows beside them"
        return None


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; in half precision that of the median row, where a rounding may send a
    token to another expert.
    """
    if not a.numel():
        return 0.0
    rows = (a - b).abs().amax(-1).float()
    return float(rows.max() if a.dtype == torch.float32 else rows.median())
