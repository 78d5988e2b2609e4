"""Ranks that the user started: detection, and the exchange of addresses."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from verbatim.errors import InvalidRequest

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TEXT_BYTES = 256
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


def exchange(rank: int, world: int, text: str) -> list[str]:
    """Return the texts of all ranks, in their order; each has at most `_TEXT_BYTES`."""
    if not dist.is_initialized():
        return _through_store(rank, world, text)
    group = dist.new_group(backend="gloo")
    found = gather_text(text, group)
    dist.destroy_process_group(group)
    return found


def gather_text(text: str, group: Any) -> list[str]:
    """Return the texts of all ranks of a gloo group, in their order; of each the first `_TEXT_BYTES`."""
    own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    raw = text.encode()[:_TEXT_BYTES]
    own[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in found]


def _through_store(rank: int, world: int, text: str) -> list[str]:
    if not _stores:
        _stores.append(next(iter(rendezvous("env://")))[0])
    name = f"verbatim/{next(_opened)}"
    _stores[0].set(f"{name}/{rank}", text)
    return [_stores[0].get(f"{name}/{each}").decode() for each in range(world)]


def meet(rank: int, world: int) -> bytes:
    """Return the secret of all ranks, which rank 0 has made.

    Raises:
        InvalidRequest: the ranks are on several machines.
    """
    found = exchange(rank, world, f"{secrets.token_hex(32)} {socket.gethostname()}")
    hosts = [each.split(" ", 1)[1] for each in found]
    other = next((r for r, host in enumerate(hosts) if host != hosts[0]), None)
    if other is not None:
        raise InvalidRequest(
            f"rank 0 is on {hosts[0]} and rank {other} on {hosts[other]}; its ranks are "
            "processes of one machine"
        )
    return bytes.fromhex(found[0].split()[0])
