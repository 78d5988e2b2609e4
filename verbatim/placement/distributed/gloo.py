"""Tensors between ranks: a gloo process group on this machine."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.nn.functional import pad

from verbatim.errors import TierFailed, first_line

_HOST = "127.0.0.1"


@functools.cache
def _file() -> int:
    """Return a file in memory, never closed: those that met there write to it once more in the end."""
    return os.memfd_create("verbatim-ranks")


def meeting_place() -> str:
    """Return where ranks of this user find each other: a file without a folder, and a name in it."""
    return f"/proc/{os.getpid()}/fd/{_file()} {secrets.token_hex(8)}"


class Gloo:
    """`Ranks` over gloo; not torch.distributed's default group, which may be the user's.

    Args:
        meeting: what `meeting_place` returned on one of them.
        timeout_s: of one exchange, and of meeting.

    Raises:
        TierFailed: the others did not come.
    """

    def __init__(self, meeting: str, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._everywhere = False
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        with _told(rank):
            path, _, name = meeting.partition(" ")
            store = PrefixStore(name, FileStore(path, -1))
            self._group = gloo(store, rank, size, options)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """A block in which all ranks get the results that usually only one needs."""
        before, self._everywhere = self._everywhere, True
        try:
            yield
        finally:
            self._everywhere = before

    def columns(self, own: Tensor, bounds: Sequence[int], to: int | None = None) -> Tensor:
        shape, rows = own.shape[:-1], own.flatten(0, -2)
        widths = [end - first for first, end in pairwise(bounds)]
        to = None if self._everywhere else to
        if not rows.shape[0]:
            return own.new_empty(*shape, bounds[-1])
        more = max(widths) - rows.shape[1]
        found = self._exchange(pad(rows, (0, more)) if more else rows, to)
        if found is None:
            return own.new_zeros(()).expand(*shape, bounds[-1])
        if len(set(widths)) == 1:
            return found.transpose(0, 1).reshape(*shape, bounds[-1])
        parts = [part[:, :width] for part, width in zip(found, widths, strict=True)]
        return torch.cat(parts, dim=-1).view(*shape, bounds[-1])

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        most = max(counts)
        if not most:
            return own
        found = self._exchange(pad(own, (0, 0, 0, most - len(own))), None)
        assert found is not None
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    def _exchange(self, own: Tensor, to: int | None) -> Tensor | None:
        """Return the tensors of all ranks, of one shape, stacked; None on a rank that doesn't need them.

        Those of GPUs go through the memory of the machine.
        """
        device, own = own.device, own.cpu().contiguous()
        sent = own.view(torch.uint8).view(-1)
        if to is not None and to != self.rank:
            self._wait("gather", [], [sent], _gather_to(to))
            return None
        found = own.new_empty(self.size, *own.shape)
        into = found.view(torch.uint8).view(self.size, -1)
        if to is None:
            self._wait("allgather", [list(into)], [sent])
        else:
            self._wait("gather", [list(into)], [sent], _gather_to(to))
        return found.to(device)

    def _wait(self, name: str, *args: Any) -> None:
        with _told(self.rank):
            if self._group is None:
                raise TierFailed(f"rank {self.rank} has let go of the others")
            getattr(self._group, name)(*args).wait()

    def close(self) -> None:
        """Close the group: ranks that wait for this one get an error."""
        self._group = None


def _gather_to(rank: int) -> Any:
    options = dist.GatherOptions()
    options.rootRank = rank
    return options


@contextmanager
def _told(rank: int) -> Iterator[None]:
    """Convert gloo's errors to TierFailed."""
    try:
        yield
    except RuntimeError as error:  # dist.DistError and its kin are RuntimeErrors
        reason = first_line(error).rpartition("] ")[2]
        raise TierFailed(f"rank {rank} lost touch with the others: {reason}") from None
