"""A trial run of `kv_caches` modules: whether they follow the protocol, and whether rows may run together.

Two short sequences that differ in their last token alone go through the module as it is, and token by token.
Three longer ones go through it together, whole and in cuts; all their forwards must take the same steps.
Hooks are silenced: no caller asked for these forwards.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.model.rowwise import NotRowwise
from verbatim.model.steps import RecordedCall
from verbatim.placement.external import Piece
from verbatim.placement.kv_protocol import CacheShape, call, call_together, run_alone, taken

_SHORT = 5
_LONG = 40
_CUTS = (7, 8)  # an odd number of rows, a single one, and many


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
        slack = scale * (1e-3 if logits.dtype == torch.float32 else 1e-1)
        if not torch.equal(logits, self.alone()):
            raise UnsupportedModel("in a trial the same tokens got other logits when run again")
        # One sequence after the other: some modules share something out among all rows.
        own = torch.cat([self._run(row) for row in range(2)])
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
        same = (
            torch.equal(whole[:2, : self._short], logits)
            and torch.equal(whole, torch.cat(cuts, dim=1))
            and torch.equal(whole[last], single)
        )
        if not same and whole.isfinite().all():
            return "in a trial its logits changed with the rows beside them"
        return None


def _apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; in half precision that of the median row, as a rounding may send a
    token to another expert.
    """
    if not a.numel():
        return 0.0
    rows = (a - b).abs().amax(-1).float()
    return float(rows.max() if a.dtype == torch.float32 else rows.median())
