"""Messages of hidden states, in buffers that are prepared before the states are computed.

They go from stage to stage in every step, right after weights have swept all else out of the processor's
caches: then each piece of code and each object that is touched costs more than moving the states does. So
what is known before is made before, by the stage that waits, and kept by the one that sends.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verbatim.placement.cluster.wire import MARK_AT, rows_begin

_MARK = struct.Struct("<qqq")

Message = dict[str, Any]


class Leaving:
    """The bytes of a message of hidden states, filled in again in every step.

    Args:
        message: one of those that it is for: all have shape, dtype, clock and the number of times in common.

    Attributes:
        raw: what to send.
    """

    def __init__(self, message: Mapping[str, Any]) -> None:
        hidden: Tensor = message["hidden"]
        self._shape, self._dtype, self._nbytes = hidden.shape, hidden.dtype, hidden.nbytes
        self._num_busy, self._num_hops = len(message["busy"]), len(message["hops"])
        self._clock: str = message["sent"][0]
        times = self._num_busy, self._num_hops
        rows, width = hidden.shape
        begin = rows_begin((0, 0, 0), (rows, width), hidden.dtype, times, self._clock)
        self._times, self._times_at = struct.Struct(f"<{1 + sum(times)}d"), len(begin)
        self.raw = bytearray(begin) + bytes(self._times.size + self._nbytes)
        data_at = len(begin) + self._times.size
        # It keeps the bytes where they are.
        self._room = (ctypes.c_char * self._nbytes).from_buffer(self.raw, data_at)
        self._address = ctypes.addressof(self._room)

    def fill(self, message: Mapping[str, Any]) -> bool:
        """Fill the buffer with this message; return False if its layout differs from the first one's."""
        hidden, busy, hops = message["hidden"], message["busy"], message["hops"]
        clock, sent = message["sent"]
        if (
            hidden.shape != self._shape
            or hidden.dtype != self._dtype
            or not hidden.is_contiguous()
            or len(busy) != self._num_busy
            or len(hops) != self._num_hops
            or clock != self._clock
        ):
            return False
        _MARK.pack_into(self.raw, MARK_AT, message["epoch"], message["step"], message["part"])
        self._times.pack_into(self.raw, self._times_at, sent, *busy, *hops)
        ctypes.memmove(self._address, hidden.data_ptr(), self._nbytes)
        return True


class Expected:
    """The buffer for hidden states that have not arrived yet.

    Args:
        mark: its epoch, step and number.
        shape: (rows, width).
        num_busy: how many stages compute before this one, all with this one's clock.
    """

    def __init__(
        self,
        mark: tuple[int, int, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
        num_busy: int,
        clock: str,
    ) -> None:
        times = num_busy, num_busy - 1
        self._begin = rows_begin(mark, shape, dtype, times, clock)
        self._times, self._num_busy = struct.Struct(f"<{1 + sum(times)}d"), num_busy
        self._data_at = len(self._begin) + self._times.size
        hidden = torch.empty(shape, dtype=dtype)
        self._room = memoryview(hidden.view(-1).view(torch.uint8).numpy().data)
        self.nbytes = self._data_at + len(self._room)
        self._clock = clock
        epoch, step, part = mark
        self._message: Message = {
            "do": "rows",
            "epoch": epoch,
            "step": step,
            "part": part,
            "hidden": hidden,
        }

    def read(self, raw: bytearray, nbytes: int) -> Message | None:
        """Return the message in the first bytes of `raw`; None if they are not exactly the expected one."""
        if nbytes != self.nbytes or not raw.startswith(self._begin):
            return None
        sent, *times = self._times.unpack_from(raw, len(self._begin))
        self._room[:] = memoryview(raw)[self._data_at : nbytes]
        message = self._message
        message["busy"], message["hops"] = times[: self._num_busy], times[self._num_busy :]
        message["sent"] = [self._clock, sent]
        return message
