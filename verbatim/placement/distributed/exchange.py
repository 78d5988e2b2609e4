"""Exchange of tensors between the ranks of one machine, through shared memory."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from verbatim.errors import TierFailed
from verbatim.kernels.functions import addresses, kernel
from verbatim.options import processor_limit

_LINE = 64  # bytes of a rank's header, int32: counter, process id, whether the rank has left
_PAGE = 4096
_SLOT = 1 << 20  # bytes that a rank can send in one exchange
_SPINS = 4000  # polls before sleeping, about 0.2 ms; only if each thread has its own core
_CHECK_MS = 50  # interval at which a waiting rank checks that the other ranks are alive


@contextmanager
def meeting_place(size: int) -> Iterator[str]:
    """Create shared memory that `size` ranks of this user can open within the block; yield path and name."""
    name = f"verbatim-ranks-{secrets.token_hex(8)}"
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, _header_bytes(size) + 2 * size * _SLOT)  # allocated on the first write
        yield f"/proc/{os.getpid()}/fd/{fd} {name}"
    finally:
        os.close(fd)


def _open(meeting: str) -> Tensor:
    """Map the memory of a meeting place; check its name, as its path may now lead to another file."""
    path, _, name = meeting.partition(" ")
    fd = os.open(path, os.O_RDWR)
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{name} (deleted)":
            raise FileNotFoundError(errno.ENOENT, "the exchange is closed")
        return torch.frombuffer(mmap(fd, 0), dtype=torch.uint8)
    finally:
        os.close(fd)


def _has_ended(pid: int) -> bool:
    """Return whether a process is known to have ended; 0: one that has not started yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # "PID (NAME) STATE ..."
    except (FileNotFoundError, ProcessLookupError):
        return pid != 0
    except OSError:  # such as too many open files
        return False
    return stat.rpartition(b") ")[2][:1] in (b"Z", b"X")


def _header_bytes(size: int) -> int:
    return -(-size * _LINE // _PAGE) * _PAGE


def _wrapped(turn: int) -> int:
    """Return the value of a counter as int32, with wraparound."""
    return (turn + 2**31) % 2**32 - 2**31


@lru_cache(maxsize=64)  # the bounds of experts differ from step to step
def _spans(bounds: tuple[int, ...], left: int, room: int, itemsize: int) -> Tensor:
    """Return the `spans` of `_exchange` for `room` columns of each rank, starting at its column `left`."""
    ends = torch.tensor(bounds)
    begin, end = (torch.minimum(ends[:-1] + at, ends[1:]) for at in (left, left + room))
    return torch.stack([begin, end - begin], 1) * itemsize


class Exchange:
    """`Ranks` of one machine.

    A rank writes its columns into its slot, increments its counter, and waits until all counters have this
    value or more. Each rank alternates between two slots, so no slot is overwritten while it is read.

    Args:
        meeting: the path and name from `meeting_place`.
        timeout_s: time limit of one exchange, including the first one, in which all ranks meet.

    Raises:
        TierFailed: another rank did not arrive in time.
    """

    def __init__(self, meeting: str, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout_s, self._returns_to_all, self._turn = timeout_s, False, 0
        try:
            self._memory: Tensor | None = _open(meeting)
        except OSError as error:
            raise TierFailed(
                f"rank {rank} can't open the shared memory of the ranks: {error.strerror}"
            ) from error
        self._lines(self._memory)[rank, 1] = os.getpid()
        try:
            self._exchange(torch.empty(1, 0), torch.zeros(size, 2, dtype=torch.int64), None)
        except TierFailed:
            self.close()
            raise

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Within this block, `columns` returns its result on all ranks, whatever its `destination`."""
        before, self._returns_to_all = self._returns_to_all, True
        try:
            yield
        finally:
            self._returns_to_all = before

    def columns(
        self, local: Tensor, bounds: Sequence[int], destination: int | None = None
    ) -> Tensor:
        shape, rows = local.shape[:-1], local.flatten(0, -2).cpu()
        is_needed = destination in (None, self.rank) or self._returns_to_all
        out = rows.new_empty(len(rows), bounds[-1]) if is_needed else None
        widest, capacity = max(b - a for a, b in pairwise(bounds)), _SLOT // rows.itemsize
        for left in range(0, widest, capacity):
            spans = _spans(tuple(bounds), left, capacity, rows.itemsize)
            step = max(1, capacity // (widest - left))
            for first in range(0, len(rows), step):
                chunk = slice(first, first + step)
                part = rows[chunk, left : left + capacity].contiguous()
                self._exchange(part, spans, None if out is None else out[chunk])
        if out is None:
            return local.new_zeros(()).expand(*shape, bounds[-1])
        return out.to(local.device).view(*shape, bounds[-1])

    def rows(self, local: Tensor, counts: Sequence[int]) -> Tensor:
        bounds = [rows * local.shape[1] for rows in (0, *accumulate(counts))]
        return self.columns(local.reshape(1, -1), bounds).view(-1, local.shape[1])

    def _exchange(self, local: Tensor, spans: Tensor, output: Tensor | None) -> None:
        """Send `local`, `[rows, columns]` contiguous, to all ranks, and wait for their columns.

        Args:
            spans: int64 `[size, 2]`, the offset and number of each rank's bytes in a row of `output`.
            output: destination of the columns of all ranks, `[rows, C]`; None: they are not copied.
        """
        memory = self._memory
        if memory is None:
            raise TierFailed(f"rank {self.rank} has left the exchange")
        self._turn += 1
        function, deadline = kernel("vb_exchange"), time.monotonic() + self._timeout_s
        # A rank that polls must not take a core from a rank that it waits for.
        has_own_cores = self.size * torch.get_num_threads() <= processor_limit()
        stride = 0 if output is None else output.shape[1] * output.itemsize
        sent: Tensor | None = local if local.numel() else memory  # an empty tensor has no address
        while True:
            if function is None:
                missing = self._exchange_by_torch(memory, sent, spans, output)
            else:
                area, *data, layout = addresses(memory, sent, output, spans)
                missing = function(
                    area, _SLOT, self.rank, self.size, self._turn & 0xFFFFFFFF, *data, len(local),
                    stride, layout, _SPINS * has_own_cores, _CHECK_MS,
                )  # fmt: skip
            if missing < 0:
                return
            self._check_rank(missing, deadline)
            sent = None  # already written by the first call

    def _exchange_by_torch(
        self, memory: Tensor, local: Tensor | None, spans: Tensor, output: Tensor | None
    ) -> int:
        """Do what the kernel `vb_exchange` does, with torch."""
        counters, turn = self._lines(memory)[:, 0], _wrapped(self._turn)
        slots = memory[_header_bytes(self.size) :].view(2, self.size, _SLOT)[self._turn % 2]
        if local is not None:
            if local is not memory:
                data = local.view(torch.uint8).flatten()
                slots[self.rank, : len(data)] = data
            counters[self.rank] = turn
        end = time.monotonic() + _CHECK_MS / 1000
        while (behind := counters - turn < 0).any():
            if time.monotonic() > end:
                return int(behind.byte().argmax())
            time.sleep(0)
        if output is not None:
            out = output.view(torch.uint8)
            for slot, (begin, width) in zip(slots, spans.tolist(), strict=True):
                part = slot[: len(out) * width].view(len(out), width)
                out[:, begin : begin + width] = part
        return -1

    def _check_rank(self, rank: int, deadline: float) -> None:
        """Raise TierFailed if a rank that this one waits for has left or ended, or the deadline is over."""
        memory = self._memory
        if memory is None:
            raise TierFailed(f"rank {self.rank} has left the exchange")
        line = self._lines(memory)[rank]
        has_left, has_ended = bool(line[2]), _has_ended(int(line[1]))
        if _wrapped(int(line[0]) - self._turn) >= 0:
            return  # it arrived before it left
        if has_left or has_ended:
            how = "ended" if has_ended else "left"
            raise TierFailed(f"rank {self.rank} lost rank {rank}, which has {how}")
        if time.monotonic() > deadline:
            raise TierFailed(f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank}")

    def _lines(self, memory: Tensor) -> Tensor:
        """The headers of all ranks, int32 `[size, 16]`."""
        return memory[: self.size * _LINE].view(torch.int32).view(self.size, -1)

    def close(self) -> None:
        """Leave the exchange; ranks that wait for this one get an error."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._lines(memory)[self.rank, 2] = 1
