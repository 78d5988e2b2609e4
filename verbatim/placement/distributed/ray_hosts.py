"""Stages on several machines: Ray's actors.

Ray starts the processes, on this machine or another, and ends them. What they say to each other goes over
connections of their own (`link.py`).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verbatim.errors import NotSupported, first_line
from verbatim.placement.distributed.contact import (
    NAMESPACE,
    answers,
    begin_ray,
    import_ray,
    listens,
)
from verbatim.placement.distributed.hosts import Hosts, NoHost
from verbatim.placement.distributed.link import Address
from verbatim.placement.distributed.stage_share import StageShare
from verbatim.placement.distributed.wire import Message

_LOOK_S = 2.0  # between two looks at whether a machine is there, while a process comes up on it


class StageActor(StageShare):
    """The actor that Ray runs: a process with one stage."""

    def __init__(self, key: bytes, name: str) -> None:
        import ray

        super().__init__()
        self._name = name
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.listen(key, here, lambda: os._exit(0))

    def listens_at(self) -> Address:
        """Return the address of the stage."""
        return self.address

    def status(self) -> Message:
        """See `StageShare`; for `verbatim cluster status`."""
        return {"cluster": self._name, **super().status()}


class RayHost:
    """An actor of Ray."""

    def __init__(self, actor: Any, daemon: Address) -> None:
        self.actor = actor
        self.machine = daemon[0]
        self.daemon = daemon  # where Ray listens on that machine
        self.asked = (
            actor.listens_at.remote()
        )  # early: it needs Ray's head, which may be lost later
        self.killed = False
        self.address: Address = ("", 0)

    def kill(self) -> None:
        import ray

        if not self.killed:
            self.killed = True
            try:
                ray.kill(self.actor, no_restart=True)
            except Exception:
                pass  # it is gone, or Ray is


class RayHosts(Hosts):
    """Actors on the machines that Ray knows.

    Args:
        address: of the Ray cluster. None: the one that this process is connected to, or `RAY_ADDRESS`.
        key: the stages' secret.
        name: of the cluster, which `verbatim cluster status` shows.

    Raises:
        NotSupported: Ray is not installed.
        NoHost: there is no Ray at `address`.
    """

    start_s = 60.0  # for a process to come up, imports included

    def __init__(self, address: str | None, key: bytes, name: str) -> None:
        super().__init__(key)
        ray = import_ray()
        self._name = name
        self._own = not ray.is_initialized()
        if self._own:
            begin_ray(address or os.environ["RAY_ADDRESS"])
        elif address is not None and address != ray.get_runtime_context().gcs_address:
            raise NotSupported(
                f"address={address!r}: this process is connected to the Ray cluster at "
                f"{ray.get_runtime_context().gcs_address}"
            )
        self._head: str = ray.get_runtime_context().gcs_address
        self._actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(StageActor)

    def _wait(self, host: RayHost, deadline: float) -> None:
        import ray

        try:
            while True:
                left = max(0.1, deadline - time.monotonic())
                try:
                    host.address = ray.get(host.asked, timeout=min(left, _LOOK_S))
                    break
                except ray.exceptions.GetTimeoutError:
                    if time.monotonic() >= deadline or not self.reachable(host):
                        raise
                    self._check_head()
            if not answers(host.address):
                raise NoHost(f"{host.machine}: the process has ended")
        except NoHost:
            raise
        except Exception as error:  # Ray has many ways to say that an actor is gone
            raise NoHost(f"{host.machine}: no process came up: {first_line(error)}") from None

    def _create(self, count: int, avoid: set[str], model: dict[str, Any] | None) -> list[RayHost]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = {node: at for node, at in self._nodes().items() if at[0] not in avoid}
        if not nodes:
            raise NoHost("there is no machine left for another stage")
        hosts = []
        for _ in range(count):
            node = self._emptiest(nodes)
            actor = self._actor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                name=f"verbatim-{self._name}-{os.urandom(4).hex()}",
                namespace=NAMESPACE,
                runtime_env={"env_vars": {"OMP_WAIT_POLICY": "passive"}},
            ).remote(self.key, self._name)
            hosts.append(RayHost(actor, nodes[node]))
            self._hosts.append(hosts[-1])
            if model is not None:
                actor.warm.remote(model)
        return hosts

    def _emptiest(self, nodes: dict[str, Address]) -> str:
        """Return the machine with the fewest of our processes; among equals, this one."""
        import ray

        self._hosts = [host for host in self._hosts if not host.killed]
        here = ray.get_runtime_context().get_node_id()
        on = Counter(host.daemon for host in self._hosts)
        return min(nodes, key=lambda node: (on[nodes[node]], node != here))

    def machines(self) -> list[str]:
        return list(dict.fromkeys(machine for machine, _ in self._nodes().values()))

    def _nodes(self) -> dict[str, Address]:
        """Return Ray's id of each reachable machine, and Ray's address on it.

        Ray itself takes a minute to see that a machine is gone.
        """
        import ray

        self._check_head()
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        except Exception as error:
            raise NoHost(f"Ray can't be asked for machines: {first_line(error)}") from None
        daemons = {n["NodeID"]: (n["NodeManagerAddress"], n["NodeManagerPort"]) for n in alive}
        if not daemons:
            return {}
        with ThreadPoolExecutor(min(32, len(daemons))) as pool:
            there = list(pool.map(answers, daemons.values()))
        return {node: daemons[node] for node, yes in zip(daemons, there, strict=True) if yes}

    def _check_head(self) -> None:
        """Raise NoHost if Ray's head is lost: Ray itself would try for minutes."""
        if not listens(self._head):
            raise NoHost(f"Ray's head at {self._head} can't be reached")

    def reachable(self, host: RayHost) -> bool:
        return answers(host.daemon)

    def close(self) -> None:
        super().close()  # also those that Ctrl-C has kept from coming into use
        if self._own:
            import ray

            ray.shutdown()
