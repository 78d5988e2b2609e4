"""Messages of hidden states: a header of fixed size, and the states as they are in memory.

They go from stage to stage in every step, right after weights have swept all else out of the processor's
caches: then each piece of code and each object that is touched costs more than moving the states does.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from verbatim.placement.distributed.wire import MAGIC, PREFIX, Buffer, Garbage, bytes_of

_HEADER = struct.Struct("<BBqqqqq")
FIRST = 1  # the first byte of the header; no JSON begins like that
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Mark(NamedTuple):
    """The identity of a piece of work; later ones compare larger."""

    epoch: int  # raised whenever the stages are connected anew
    step: int
    part: int  # micro-batch of the step


class RowsMessage(NamedTuple):
    """Hidden states `[T, H]` on their way from one stage to the next."""

    mark: Mark
    hidden: Tensor


def encode_rows(rows: RowsMessage) -> list[Buffer]:
    """Encode a message as buffers."""
    mark, hidden = rows
    hidden, (count, width) = hidden.contiguous(), hidden.shape
    size, kind = hidden.nbytes, _DTYPES.index(hidden.dtype)
    header = _HEADER.pack(FIRST, kind, *mark, count, width)
    begin = PREFIX.pack(MAGIC, _HEADER.size, size) + header
    return [begin, bytes_of(hidden)] if size else [begin]


def decode_rows(header: bytes | bytearray, states: bytearray) -> RowsMessage:
    """Decode a message, whose hidden states are a view of `states`.

    Raises:
        Garbage: this is no message.
    """
    try:
        _, kind, epoch, step, part, count, width = _HEADER.unpack(header)
        dtype = _DTYPES[kind]
        if count < 0 or width < 0 or count * width * dtype.itemsize != len(states):
            raise ValueError(f"{len(states)} bytes for {count} rows of {width}")
        if states:
            hidden = torch.frombuffer(states, dtype=dtype).view(count, width)
        else:
            hidden = torch.empty(count, width, dtype=dtype)
    except (ValueError, IndexError, RuntimeError, struct.error) as error:
        raise Garbage(f"not a message of Verbatim's cluster: {error}") from None
    return RowsMessage(Mark(epoch, step, part), hidden)
