"""Messages of hidden states: the piece of work that they are for, and the states as they are in memory.

They go from stage to stage in every step, right after weights have swept all else out of the processor's
caches: then each piece of code and each object that is touched costs more than moving the states does.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from torch import Tensor

from verbatim.placement.distributed.wire import MAGIC, PREFIX, Buffer, Garbage, bytes_of

_HEADER = struct.Struct("<Bqqq")
_BEGIN = struct.Struct(PREFIX.format + _HEADER.format[1:])
FIRST = 1  # the first byte of the header; no JSON begins like that


class Mark(NamedTuple):
    """The identity of a piece of work; later ones compare larger."""

    epoch: int  # raised whenever the stages are connected anew
    step: int
    part: int  # micro-batch of the step


def encode_rows(mark: Mark, hidden: Tensor) -> list[Buffer]:
    """Encode the hidden states `[T, H]` of a piece of work as buffers."""
    data = bytes_of(hidden.contiguous())
    return [_BEGIN.pack(MAGIC, _HEADER.size, len(data), FIRST, *mark), data]


def decode_mark(header: bytes | bytearray) -> Mark:
    """Decode what stands in front of hidden states.

    Raises:
        Garbage: this is no message.
    """
    try:
        _, *mark = _HEADER.unpack(header)
    except struct.error as error:
        raise Garbage(f"not a message of Verbatim's cluster: {error}") from None
    return Mark(*mark)
