"""Ranks that the user started: detection, the exchange of addresses, and their stages."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from verbatim.errors import InvalidRequest
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.link import Address
from verbatim.placement.distributed.served import Served

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_opened = itertools.count()
_TEXT_BYTES = 256
_stores: list[Any] = []  # that of torchrun; made once, and kept for as long as others may read it


def launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks that the user started; (0, 1) without ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(name in os.environ for name in _TORCHRUN):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


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
    own = torch.zeros(
        _TEXT_BYTES, dtype=torch.uint8
    )  # `all_gather_object` would unpickle the others'
    raw = text.encode()[:_TEXT_BYTES]
    own[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    return [bytes(each).rstrip(b"\0").decode() for each in gather(own, group).tolist()]


def gather(own: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks of a group, of one shape, stacked."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return torch.stack(found)


def _through_store(rank: int, world: int, text: str) -> list[str]:
    if not _stores:
        _stores.append(next(iter(rendezvous("env://")))[0])
    name = f"verbatim/{next(_opened)}"
    _stores[0].set(f"{name}/{rank}", text)
    return [_stores[0].get(f"{name}/{each}").decode() for each in range(world)]


def meet(size: int) -> tuple[int, int, bytes]:
    """Return this rank, the number of ranks that the user started, and a secret of all, made by rank 0.

    Raises:
        InvalidRequest: there are ranks, and not `size` of them, or they are on several machines.
    """
    rank, world = launched()
    if world == 1:
        return rank, world, secrets.token_bytes(32)
    if world != size:
        raise InvalidRequest(
            f"size={size}: torch.distributed has {world} ranks; they must be as many"
        )
    found = exchange(rank, world, f"{secrets.token_hex(32)} {socket.gethostname()}")
    hosts = [each.split(" ", 1)[1] for each in found]
    other = next((r for r, host in enumerate(hosts) if host != hosts[0]), None)
    if other is not None:
        raise InvalidRequest(
            f"rank 0 is on {hosts[0]} and rank {other} on {hosts[other]}; its ranks are "
            "processes of one machine"
        )
    return rank, world, bytes.fromhex(found[0].split()[0])


def other_ranks(world: int) -> list[RankHost]:
    """Return the ranks 1 to `world` - 1, which tell their ports by `exchange`."""
    ports = exchange(0, world, "-")
    return [RankHost(rank, (HOST, int(ports[rank]))) for rank in range(1, world)]


class RankHost:
    """A rank that the user started; `share` is that of this process."""

    def __init__(self, rank: int, address: Address, share: Served | None = None) -> None:
        self.machine = f"rank {rank}"
        self.address = address
        self._share = share

    def kill(self) -> None:
        """Close this process's share; those of others are closed with their programs."""
        if self._share is not None:
            self._share.hang_up()
