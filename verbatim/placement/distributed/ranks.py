"""Ranks started by the user, which all make the same calls: detection, exchange of texts, roles, hosts."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from verbatim.batch import Choices
from verbatim.core import Request, Result
from verbatim.errors import InvalidRequest, NotSupported, RequestFailed, TierFailed, VerbatimError
from verbatim.placement.distributed.group import StageGroup, StageHandle
from verbatim.placement.distributed.launcher import HOST
from verbatim.placement.distributed.link import Address, connect
from verbatim.placement.distributed.served import Served
from verbatim.placement.distributed.wire import Message
from verbatim.protocols import Runner

_JOIN_S = 5.0
_CONNECT_S = 1.0
_T = TypeVar("_T")
_ATTRIBUTES = (  # of a runner, needed for admission
    *("vocab_size", "block_size", "num_blocks", "num_states"),
    *("hidden_reason", "choices", "draft_info"),
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_exchange_numbers = itertools.count()  # in the keys of torchrun's store
_stores: list[Any] = []  # torchrun's store; kept open, as other ranks may still read from it


def launched() -> tuple[int, int]:
    """Return this process's rank and the number of ranks started by the user; (0, 1) without ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(name in os.environ for name in _TORCHRUN):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def exchange(rank: int, world: int, text: str) -> list[str]:
    """Return the texts of all ranks, in order."""
    if not dist.is_initialized():
        if not _stores:
            _stores.append(next(iter(rendezvous("env://")))[0])
        name = f"verbatim/{next(_exchange_numbers)}"
        _stores[0].set(f"{name}/{rank}", text)
        return [_stores[0].get(f"{name}/{each}").decode() for each in range(world)]
    group = dist.new_group(backend="gloo")
    texts = gather_text(text, group)
    dist.destroy_process_group(group)
    return texts


def gather_text(text: str, group: Any) -> list[str]:
    """Return the texts of all ranks of a gloo group, in order."""
    raw = torch.tensor(list(text.encode()), dtype=torch.uint8)  # `all_gather_object` would unpickle
    sizes = [int(size) for size in gather(torch.tensor(len(raw)), group)]
    padded = torch.nn.functional.pad(raw, (0, max(sizes) - len(raw)))
    texts = gather(padded, group).tolist()
    return [bytes(each[:size]).decode() for each, size in zip(texts, sizes, strict=True)]


def gather(own: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks of a group, stacked; they have the same shape."""
    tensors = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, own, group=group)
    return torch.stack(tensors)


def meet(size: int) -> tuple[int, int, bytes]:
    """Return this rank, the number of ranks started by the user, and the secret key chosen by rank 0.

    Raises:
        InvalidRequest: the user started ranks, but not `size`, or on several machines.
    """
    rank, world = launched()
    if world == 1:
        return rank, world, secrets.token_bytes(32)
    if world != size:
        raise InvalidRequest(f"size={size}: must equal the {world} ranks of torch.distributed")
    texts = exchange(rank, world, f"{secrets.token_hex(32)} {socket.gethostname()}")
    hosts = [each.split(" ", 1)[1] for each in texts]
    other = next((r for r, host in enumerate(hosts) if host != hosts[0]), None)
    if other is not None:
        raise InvalidRequest(
            f"rank 0 is on {hosts[0]} and rank {other} on {hosts[other]}; all ranks must be on "
            "one machine"
        )
    return rank, world, bytes.fromhex(texts[0].split()[0])


def other_ranks(world: int, key: bytes) -> list[RankHost]:
    """Return the hosts of ranks 1 to `world` - 1, which send their ports by `exchange`."""
    ports = exchange(0, world, "-")
    return [RankHost(rank, (HOST, int(ports[rank])), key) for rank in range(1, world)]


class RankHost:
    """A rank started by the user, as a `Host`."""

    def __init__(self, rank: int, address: Address, key: bytes) -> None:
        self.machine = f"rank {rank}"
        self.address = address
        self._key, self._killed = key, False

    def kill(self) -> None:
        """End the share of this rank; the process is the user's."""
        if not self._killed:
            # One that was never connected still waits; others are closed, or will see their connection end.
            self._killed = True
            with suppress(VerbatimError):
                connect(self.address, self._key, {"role": "head"}, _CONNECT_S).close()


def describe_runner(runner: Runner) -> dict[str, Any]:
    """Return the properties of a runner that `FollowingRunner` needs, as plain data."""
    return {**{name: getattr(runner, name) for name in _ATTRIBUTES}, "info": runner.info()}


class FollowingRunner:
    """A `Runner` for admission only: it checks requests as rank 0 does, which runs them.

    `properties` is the result of `describe_runner` there.
    """

    num_forwards = 0
    choices: Mapping[str, Choices]

    def __init__(self, rank: Following, properties: Mapping[str, Any]) -> None:
        self.__dict__.update({name: properties[name] for name in _ATTRIBUTES})
        self._rank = rank
        self._info: dict[str, Any] = properties["info"]

    def _done_by_rank_0(self, *_: Any, **__: Any) -> None:
        """Do nothing: every rank makes this call, and rank 0 sends its own to the shares of all ranks."""

    load_adapter = unload_adapter = sleep = wake = _done_by_rank_0

    def new_weights(self, *_: Any, **__: Any) -> Callable[[], None]:
        return self._done_by_rank_0

    def info(self) -> dict[str, Any]:
        return self._info

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._rank.close()

    def __getattr__(self, name: str) -> Any:
        """Return a function that raises NotSupported, for every other method of `Runner`."""
        if name not in vars(Runner):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise NotSupported(f"{name}: this rank follows rank 0; call it on rank 0")

        return refuse


class Leading:
    """Rank 0 of ranks started by the user: runs the calls, and sends the results to the other ranks."""

    may_be_empty = False

    def __init__(self, group: StageGroup, members: list[StageHandle]) -> None:
        self._group, self._members = group, members

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Send a message to the programs of the other ranks; raise TierFailed if a rank is gone."""
        self._group.notify("deliver", self._members, message=message)
        for member in self._members:
            if member.lost is not None:
                raise TierFailed(str(member))

    def run(self, handle: Any, admit: Callable[[], list[Request]]) -> list[Result]:
        handle.check_awake()  # on all ranks, without a message
        return self.agree(lambda: handle.run_here(admit()))

    def agree(self, work: Callable[[], _T]) -> _T:
        try:
            result = work()
        except BaseException as error:
            with suppress(TierFailed):  # a rank that is gone must not hide the error
                self.broadcast({"do": "failed", "error": f"{type(error).__name__}: {error}"})
            raise
        self.broadcast({"do": "results", "results": result})
        return result

    def close(self) -> None:
        """Do nothing: the runner closes the other ranks."""


class Following:
    """A rank other than 0: waits for the end of each call of rank 0, and returns the same results."""

    may_be_empty = False

    def __init__(self, share: Served) -> None:
        self._share = share

    def wait(self) -> Message:
        """Return the next message from rank 0; raise TierFailed if it is gone, or has closed its LLM."""
        message = self._share.messages.get()
        if message is None:
            self._share.messages.put(None)  # for the next call
            raise TierFailed("rank 0 is gone")
        if message.get("do") == "close":
            raise TierFailed("rank 0 has closed its LLM in the middle of this call")
        return message

    def run(self, handle: Any, admit: Callable[[], list[Request]]) -> list[Result]:
        handle.check_awake()
        try:
            requests = admit()
        except Exception:
            self.wait()  # rank 0 answers this call, too
            raise
        results: list[Result] = self._outcome()
        if len(results) != len(requests):
            raise InvalidRequest(
                f"this rank has {len(requests)} prompts and rank 0 has {len(results)}: all ranks must make "
                "the same calls"
            )
        return results

    def agree(self, work: Callable[[], _T]) -> _T:
        self._outcome()
        return work()

    def _outcome(self) -> Any:
        """Return the result of rank 0's call, or raise its error."""
        message = self.wait()
        if message["do"] == "failed":
            raise RequestFailed(f"rank 0: {message['error']}")
        return message["results"]

    def close(self) -> None:
        """Close the share, and wait for its end."""
        self._share.hang_up()
        self._share.join(_JOIN_S)
