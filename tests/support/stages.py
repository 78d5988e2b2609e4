"""Stages without Ray: threads of this process that use the same connections as processes."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable
from typing import Any

from support.poison import poison
from support.programs import PATIENCE_S, until
from verbatim import Cluster
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.link import Address
from verbatim.placement.distributed.stage_share import StageShare

_MOST_BLOCKS = 512  # the most that a test uses
_opening = threading.Lock()
_inspected: list[StageShare] = []  # the stage that inspected a model last


class ThreadHost:
    """A stage in threads of this process. `kill` closes its connections at once, like the end of a process.

    All stages share the last inspection of a model, which is the slowest part of a test. `Served` checks
    whether it is still valid.

    Attributes:
        before: called with each batch before it is computed; may be set by a test.
    """

    def __init__(self, key: bytes, machine: str) -> None:
        self.stage = layers = StageShare()
        layers.listen(key, "127.0.0.1")
        self.machine = machine
        self.address: Address = self.stage.address
        self.killed = False
        self.before: Callable[[Any], object] = lambda batch: None
        run, allocate, skeleton = layers.run, layers.allocate, layers.skeleton
        layers._inspecting = _opening

        def noted_run(batch: Any, hidden: Any) -> Any:
            self.before(batch)
            return run(batch, hidden)

        def poisoned_allocate(**sizes: Any) -> Any:
            answer = allocate(**sizes)
            held = layers.running.store
            for store in (held, *layers.running.draft_layers.stores):
                if held.nbytes < 64 * 2**20:
                    poison(store, range(min(held.num_blocks, _MOST_BLOCKS)))
            return answer

        def shared_skeleton(message: Any) -> Any:
            for other in _inspected:
                layers._loaded, layers._split = other._loaded, other._split
                layers._loaded_from = other._loaded_from
            loaded = skeleton(message)
            _inspected[:] = [layers]
            return loaded

        layers.run, layers.allocate = noted_run, poisoned_allocate  # type: ignore[method-assign]
        layers.skeleton = shared_skeleton  # type: ignore[method-assign]

    def kill(self) -> None:
        self.killed = True
        self.stage.hang_up()

    def __repr__(self) -> str:
        return f"ThreadHost({self.machine})"


class ThreadHosts(Hosts):
    """Stages in threads; machines are only names.

    Attributes:
        hosts: all hosts started so far, in order.
        room: number of hosts that may still be started; None for no limit.
    """

    def __init__(self, *machines: str) -> None:
        super().__init__(secrets.token_bytes(32))
        self.names = list(machines or ("one",))
        self.hosts: list[ThreadHost] = []
        self.room: int | None = None
        self.on_start: Callable[[ThreadHost], object] = lambda host: None

    def _create(self, count: int, avoid: set[str], model: Any) -> list[Any]:
        names = [name for name in self.names if name not in avoid]
        if not names or (self.room is not None and count > self.room):
            raise NoHost("there is no machine left for another stage")
        if self.room is not None:
            self.room -= count
        first = len(self.hosts)
        made = [ThreadHost(self.key, names[(first + i) % len(names)]) for i in range(count)]
        self.hosts += made
        for host in made:
            self.on_start(host)
        return made

    def prepare(self, count: int, model: dict[str, Any]) -> None:
        """Do nothing: a thread starts at once."""

    def machines(self) -> list[str]:
        return self.names

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
            host.stage.join(
                PATIENCE_S
            )  # a thread that still computes at interpreter exit would abort it


def staged(**settings: Any) -> Cluster:
    """Return a placement in two stages, patient enough that a busy machine loses none."""
    return Cluster(**{"stages": 2, "hosts": ThreadHosts(), "patience_s": PATIENCE_S} | settings)


def serving(llm: Any) -> list[ThreadHost]:
    """Return the hosts of an engine's stages, in order."""
    return [member.host for member in llm.engine.runner.group.members]


def at_batch(host: ThreadHost, number: int, do: Callable[[ThreadHost, Any], object]) -> None:
    """Call `do` before a stage computes its `number`th batch from now on, counted from 0."""
    numbers = itertools.count()
    host.before = lambda batch: next(numbers) == number and do(host, batch)


def kill(host: ThreadHost, batch: Any) -> None:
    host.kill()


def num_threads() -> int:
    """Count Verbatim's live threads."""
    return sum(thread.name.startswith("verbatim-") for thread in threading.enumerate())


def check_threads_end(before: int) -> None:
    """Wait until Verbatim has at most `before` threads; those of killed stages end late."""
    until(lambda: num_threads() <= before)
