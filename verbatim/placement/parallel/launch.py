"""Ranks that the user started: detection, and the exchange of an address."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from verbatim.errors import InvalidRequest

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_BYTES = 128
_opened = itertools.count()
_stores: list[Any] = []  # that of torchrun; made once, and kept for as long as others may read it


def launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks that the user started; (0, 1) without ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(name in os.environ for name in _TORCHRUN):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def check_size(size: int, world: int) -> None:
    """Raise InvalidRequest if there are ranks, and not `size` of them."""
    if world not in (1, size):
        raise InvalidRequest(
            f"size={size}: torch.distributed has {world} ranks; they must be as many"
        )


def share_place(rank: int, place: tuple[int, bytes] | None) -> tuple[int, bytes]:
    """Broadcast rank 0's `place`, a port and a key.

    Raises:
        InvalidRequest: the ranks are on several machines.
    """
    said = "" if place is None else f"{socket.gethostname()} {place[0]} {place[1].hex()}"
    if dist.is_initialized():
        said = _broadcast(said)
    else:
        said = _through_store(rank, said)
    host, port, key = said.split()
    if host != socket.gethostname():
        raise InvalidRequest(
            f"rank 0 is on {host} and rank {rank} on {socket.gethostname()}; its ranks are "
            "processes of one machine"
        )
    return int(port), bytes.fromhex(key)


def _broadcast(said: str) -> str:
    group = dist.new_group(backend="gloo")
    tensor: Tensor = torch.zeros(_PLACE_BYTES * 2, dtype=torch.uint8)
    raw = said.encode()
    tensor[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    dist.broadcast(tensor, 0, group=group)
    dist.destroy_process_group(group)
    return bytes(tensor.tolist()).rstrip(b"\0").decode()


def _through_store(rank: int, said: str) -> str:
    if not _stores:
        _stores.append(next(iter(rendezvous("env://")))[0])
    name = f"verbatim/{next(_opened)}"
    if rank == 0:
        _stores[0].set(name, said)
    found: bytes = _stores[0].get(name)
    return found.decode()
