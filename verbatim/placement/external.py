"""Base class of runners for external modules: those with another protocol than transformers'.

Their forward can't run flat batches: it takes whole rows, or keeps K and V in its own kind of cache. The ids
of every sequence are kept here, in the engine's blocks, so a runner's other state may be dropped at any time
and recomputed from the ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.batch import Adapter, Batch, Choices, Draws, SamplePlan
from verbatim.errors import EngineClosed, NotSupported
from verbatim.model.patching import exclusive, threads
from verbatim.model.weights import weight_info, writes_to
from verbatim.options import dtype_name, on_cpu
from verbatim.params import CHOICES
from verbatim.protocols import Forward
from verbatim.sampling.sampler import sample_rows
from verbatim.weights.update import NewWeights, WeightWriter


@dataclass(slots=True)
class Piece:
    """The rows of one sequence in a forward.

    Attributes:
        ids: `[L]` int64, all ids of the sequence after this forward.
        start: the first new position.
        slots: `[L]` int64, the slot of each position (block times block size plus offset).
        wanted: int64, ascending: positions with needed logits; often the last alone, and none if a prompt
            is cut in the middle.
    """

    ids: Tensor
    start: int
    slots: Tensor
    wanted: Tensor


class ExternalRunner:
    """A Runner over `run`, which a placement overrides.

    Args:
        module: a `torch.nn.Module`, or any callable.
        vocab_size: width of its logits.
        num_blocks: blocks of ids, scratch included.
        num_threads: of torch's pool while a forward or a draw runs; None leaves torch's setting.
        weak: hold the module only weakly.
    """

    placement = "external"
    has_hidden = False

    def __init__(
        self,
        module: Any,
        *,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        num_threads: int | None = None,
        weak: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_states = 0
        self.num_forwards = 0
        name = type(module).__name__
        self.hidden_reason: str | None = f"{name} is run through its own forward, which hides them"
        reason = f"{name} is run through its own forward, which hides it"
        self.choices: Mapping[str, Choices] = dict.fromkeys(CHOICES, Choices(reason=reason))
        self._name = name
        self._module: Callable[[], Any] = weakref.ref(module) if weak else lambda: module
        self._num_threads = num_threads
        self._ids = self._no_ids()

    def _no_ids(self) -> Tensor:
        with torch.inference_mode(False), on_cpu():
            return torch.zeros(self.num_blocks, self.block_size, dtype=torch.int64)

    @property
    def module(self) -> Any:
        """The module; EngineClosed if it was held weakly and is gone, or the runner is closed."""
        module = self._module()
        if module is None:
            raise EngineClosed("this engine was closed, or the module it was made for is gone")
        return module

    def run(self, pieces: list[Piece]) -> list[Tensor]:
        """Return the logits `[len(wanted), V]` of each piece, in any floating dtype."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Forward:
        self.num_forwards += 1
        with (
            exclusive,
            threads(self._num_threads),
            torch.inference_mode(False),
            torch.no_grad(),
            on_cpu(),
        ):
            for source, target in batch.block_copies:
                self._ids[target] = self._ids[source]
            self.copy_blocks(batch.block_copies)
            self._ids.view(-1)[batch.slots(self.block_size)] = batch.token_ids
            return Forward(torch.cat(self.run(self._pieces(batch))).detach())

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks `(from, to)` of a runner's other state."""

    def _pieces(self, batch: Batch) -> list[Piece]:
        pieces = []
        bounds = batch.query_starts.tolist()
        for s, length in enumerate(batch.context_lens.tolist()):
            first, end = bounds[s], bounds[s + 1]
            start = length - (end - first)
            at = torch.arange(length)
            blocks = batch.block_tables[s].long()[at // self.block_size]
            slots = blocks * self.block_size + at % self.block_size
            rows = batch.logit_rows
            wanted = rows[(rows >= first) & (rows < end)] - first + start
            pieces.append(Piece(self._ids.view(-1)[slots], start, slots, wanted))
        return pieces

    def sample(self, forward: Forward, plan: SamplePlan) -> Draws:
        with threads(self._num_threads):
            return sample_rows(forward.logits, plan)

    def logits(self, forward: Forward, rows: list[int]) -> Tensor:
        return forward.logits[rows].float().cpu()

    def record(self, name: str, block_table: list[int], num_tokens: int) -> Tensor:
        raise NotSupported(f"the model's {name} can't be recorded: {self.choices[name].reason}")

    def check_replay(self, name: str) -> None:
        self.choices[name].check(f"its {name} can't be replayed")

    def read_cache(self, kind: str, numbers: list[int], used: int | None = None) -> Tensor | None:
        raise NotSupported(f"{self._name} keeps K and V itself")

    def write_cache(self, kind: str, numbers: list[int], rows: Tensor) -> bool:
        raise NotSupported(f"{self._name} keeps K and V itself")

    def refresh(self) -> None:
        """Do nothing: the module's own forward is called each time."""

    def info(self) -> dict[str, Any]:
        module = self.module
        weights: dict[str, Any] = {"parameters": 0, "weight_bytes": 0}
        dtype = torch.float32
        if isinstance(module, nn.Module):
            weights = weight_info(module)
            dtype = next((p.dtype for p in module.parameters()), dtype)
        return {
            "architecture": self._name,
            "placement": self.placement,
            **weights,
            "dtype": dtype_name(dtype),
            "layers": 0,
            "kv_bytes": self._ids.nbytes,
            "kv_dtype": "int64",
            "kv_bytes_per_token": 8,
        }

    def stats(self) -> dict[str, Any]:
        return {}

    def new_weights(
        self, tensors: Mapping[str, Tensor], *, check_finite: bool
    ) -> Callable[[], None]:
        if not isinstance(self.module, nn.Module):
            raise NotSupported(f"{self._name} is not a module, so it has no weights to update")
        new = NewWeights(self.module, tensors, check_finite=check_finite)
        writer = WeightWriter(self.module)
        return lambda: writer.write(new.tensors)

    def load_adapter(self, adapter: Adapter) -> None:
        raise NotSupported(
            f"adapters: not supported for {self._name}, whose layers run by its own forward"
        )

    def unload_adapter(self, number: int) -> None:
        """Do nothing: none is held."""

    def stamp(self) -> object:
        module = self.module
        return writes_to(module) if isinstance(module, nn.Module) else None

    def sleep(self, weights: bool) -> None:
        if weights:
            raise NotSupported(
                "sleep(weights=True): not supported for a live module; sleep() "
                "frees only the KV memory"
            )
        self._ids = torch.empty(0, dtype=torch.int64)

    def wake(self) -> None:
        if not self._ids.numel():
            self._ids = self._no_ids()

    def close(self) -> None:
        self._module = lambda: None
        self._ids = torch.empty(0, dtype=torch.int64)
