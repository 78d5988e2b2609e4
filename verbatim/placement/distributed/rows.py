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

_HEADER = struct.Struct("<BBqqqII")
_BEGIN = struct.Struct(PREFIX.format + _HEADER.format[1:])
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
    data, kind = bytes_of(hidden.contiguous()), _DTYPES.index(hidden.dtype)
    begin = _BEGIN.pack(MAGIC, _HEADER.size, len(data), FIRST, kind, *mark, *hidden.shape)
    return [begin, data]


def decode_rows(header: bytes | bytearray, states: bytearray) -> RowsMessage:
    """Decode a message, whose hidden states are a view of `states`.

    Raises:
        Garbage: this is no message.
    """
    try:
        _, kind, epoch, step, part, count, width = _HEADER.unpack(header)
        dtype = _DTYPES[kind]
        flat = torch.frombuffer(states, dtype=dtype) if states else torch.empty(0, dtype=dtype)
        return RowsMessage(Mark(epoch, step, part), flat.view(count, width))
    except (ValueError, IndexError, RuntimeError, struct.error) as error:
        raise Garbage(f"not a message of Verbatim's cluster: {error}") from None
