"""Expert parallelism: rows are sent to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.errors import InvalidRequest, NotSupported
from verbatim.model.experts import ExpertShare, run_experts
from verbatim.options import rank_of

_KEY_BYTES = 256


class Group:
    """The user's process group, which only exchanges rows of experts."""

    def __init__(self, group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidRequest(
                "placement=ExpertParallel: torch.distributed is not initialised; start the ranks with "
                "torchrun and call torch.distributed.init_process_group('gloo')"
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank = rank_of(self.group)
        self.size = dist.get_world_size(self.group)
        backend = str(dist.get_backend(self.group))
        if "gloo" not in backend:
            raise NotSupported(
                f"placement=ExpertParallel: the process group's backend is {backend}; tensors on the CPU "
                "need gloo"
            )

    def columns(self, own: Tensor, bounds: Sequence[int], to: int | None = None) -> Tensor:
        raise AssertionError("only experts are shared")

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        raise AssertionError("every rank has rows of its own")

    def close(self) -> None:
        """Release the process group, so that its owner's `destroy_process_group` ends its threads."""
        self.group = None

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, stacked."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return torch.stack(found)

    def send_rows(self, rows: Tensor, counts: list[int], coming: list[int]) -> Tensor:
        """Send `counts[r]` of the rows `[n, H]` to rank r; return `coming[r]` rows from each, `[sum, H]`."""
        rows = rows.contiguous()
        found = rows.new_empty(sum(coming), rows.shape[1])
        width = rows.shape[1] * rows.itemsize
        into, out = (x.view(torch.uint8).view(-1, width) for x in (found, rows))
        dist.all_to_all_single(into, out, coming, counts, group=self.group)
        return found

    def check_equal(self, key: str) -> None:
        """Check that all ranks have the same key.

        Raises:
            NotSupported: they don't, so they would not give the same bits.
        """
        own = torch.zeros(_KEY_BYTES, dtype=torch.uint8)
        raw = key.encode()[:_KEY_BYTES]
        own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        keys = [bytes(k.tolist()).rstrip(b"\0").decode() for k in self.gather(own)]
        for rank, other in enumerate(keys):
            if other != keys[0]:
                raise NotSupported(differing(rank, other, keys[0]))


def differing(rank: int, key: str, first: str) -> str:
    """Return why ranks with these numerics keys can't work together."""
    return (
        f"rank {rank} has the numerics key {key!r} and rank 0 {first!r}: together they would not give the "
        "bits of either; all ranks need the same processor features, kernels and dtypes"
    )


class ExchangedExperts(ExpertShare):
    """Whole experts, some on each rank; each rank has tokens of its own.

    Args:
        bounds: rank r has the experts from `bounds[r]` to `bounds[r + 1]`.
    """

    def __init__(self, group: Group, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)
        self._group = group

    def run(self, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the result of `run_experts` with all experts in one place; all ranks call it together."""
        group, bounds = self._group, self.bounds
        sent = [sum(counts[a:b]) for a, b in pairwise(bounds)]
        everybodys = group.gather(torch.tensor(counts, dtype=torch.int64))  # [ranks, experts]
        here = everybodys[:, bounds[group.rank] : bounds[group.rank + 1]]
        coming = here.sum(1).tolist()
        got = group.send_rows(rows[: sum(counts)], sent, coming)
        # They come rank by rank, each rank's by expert; stably sorted, expert by expert.
        numbers = torch.arange(here.shape[1]).repeat(group.size)
        by_expert = torch.argsort(numbers.repeat_interleave(here.flatten()), stable=True)
        made = torch.empty_like(got)
        made[by_expert] = run_experts(experts, got[by_expert], here.sum(0).tolist())
        return group.send_rows(made, coming, sent)
