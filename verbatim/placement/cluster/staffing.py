"""Processes for stages: where they come from, what they are given to hold, how they are connected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verbatim.errors import NotSupported
from verbatim.placement.cluster.contact import NoHost
from verbatim.placement.cluster.crew import Crew, Member, Message, StageGone
from verbatim.placement.cluster.hosts import Hosts
from verbatim.placement.cluster.link import LinkLost, Refused
from verbatim.placement.cluster.plan import Layout, Range

_AGREED = ("verbatim", "torch", "transformers")  # versions that all stages must have in common


class Staffing:
    """Hires processes, gives them layers and memory, and connects them.

    Args:
        layout: of the model's layers.
        model: what a stage is told to open, without its range of layers.
        fingerprint: of the model's files here.

    Attributes:
        connected: every stage of the crew has its connections in the crew's epoch.
    """

    def __init__(
        self, crew: Crew, hosts: Hosts, layout: Layout, model: Message, fingerprint: str
    ) -> None:
        self.crew = crew
        self.hosts = hosts
        self.layout = layout
        self.model = model
        self.connected = False
        self._fingerprint = fingerprint
        self._blocks: Message | None = None  # what K and V were allocated with

    def hire(self, count: int, avoid: Iterable[str] = ()) -> list[Member]:
        """Processes that hold nothing yet, of the same versions as this one.

        Args:
            avoid: machines that are of no use.

        Raises:
            NoHost: there is no machine for them.
            NotSupported: one of them runs other versions.
        """
        found: list[Member] = []
        hosts = self.hosts.start(count, set(avoid))
        try:
            for host in hosts:
                found.append(self.crew.meet(host))  # noqa: PERF401, who was met is let go below
            orders: list[tuple[Member, Message]] = [(m, {"do": "facts"}) for m in found]
            for member, facts in zip(found, self._ask_strangers(orders), strict=True):
                member.facts = facts
                self._check_versions(member)
        except BaseException as error:
            for member in found:
                member.give_up()
            for host in hosts:
                host.kill()
            if isinstance(error, LinkLost | Refused | StageGone):
                raise NoHost(str(error)) from None
            raise
        return found

    def _ask_strangers(self, orders: list[tuple[Member, Message]]) -> list[Any]:
        """`call_each` of those who aren't members yet: who is lost among the members doesn't matter."""
        members, self.crew.members = self.crew.members, []
        try:
            return self.crew.call_each(orders, patient=True)
        finally:
            self.crew.members = members

    def _check_versions(self, member: Member) -> None:
        ours = self.hosts.versions()
        for name in _AGREED:
            theirs = member.facts.get(name)
            if theirs != ours[name]:
                raise NotSupported(
                    f"{member.host.machine} has {name} {theirs}, and this machine has {ours[name]}: all "
                    "machines of a cluster need the same"
                )

    def open(self, members: list[Member], ranges: list[Range]) -> None:
        """Give each of these its layers.

        Raises:
            StageGone: one is lost meanwhile.
            VerbatimError: the layers can't be had there, or the bits would differ.
        """
        orders: list[tuple[Member, Message]] = []
        for member, (first, end) in zip(members, ranges, strict=True):
            member.first, member.end = first, end
            orders.append((member, {"do": "open", **self.model, "first": first, "end": end}))
        for member, shape in zip(members, self._ask_strangers(orders), strict=True):
            member.shape = shape
            if shape["fingerprint"] != self._fingerprint:
                raise NotSupported(
                    f"{member.host.machine} has another model at {self.model['model']!r} than this "
                    "machine: all machines of a cluster need the same files"
                )
        keys = {m.shape["numerics_key"]: m for m in [*self.crew.members, *members] if m.shape}
        if len(keys) > 1:
            (one, first_member), (other, second) = list(keys.items())[:2]
            raise NotSupported(
                f"{first_member.host.machine} computes by the numerics key {one} and "
                f"{second.host.machine} by {other}: their bits would differ"
            )

    def allocate(self, blocks: Message) -> None:
        """Give every stage its memory for K and V.

        Args:
            blocks: `num_blocks`, `block_size`, `kv_dtype` and `keep_bytes`.
        """
        self._blocks = blocks
        self.allocate_some(self.crew.members, self.crew.members)

    def allocate_some(self, members: list[Member], line: list[Member]) -> None:
        """The same for some of them, with `line` all that there will be, in order."""
        assert self._blocks is not None
        orders: list[tuple[Member, Message]] = []
        for member in members:
            before = line[: line.index(member)]
            routed = sum((other.shape["routed"] or [0])[0] for other in before)
            orders.append((member, {"do": "allocate", **self._blocks, "first_routed": routed}))
        for member, answer in zip(members, self._ask_strangers(orders), strict=True):
            member.kept_blocks = answer["kept_blocks"]

    def connect(self) -> None:
        """Begin a new epoch: every stage forgets its connections and gets new ones.

        Raises:
            StageGone: one is lost meanwhile.
        """
        crew = self.crew
        self.connected = False
        crew.epoch += 1
        for index, member in enumerate(crew.members):
            member.index = index
        crew.call_each(
            [
                (m, {"do": "epoch", "epoch": crew.epoch, "index": m.index, "restarts": m.restarts})
                for m in crew.members
            ]
        )
        crew.reports()  # of the epoch before
        orders: list[tuple[Member, Message]] = []
        for member, behind in zip(crew.members, crew.members[1:], strict=False):
            orders.append(
                (member, {"do": "link", "epoch": crew.epoch, "next": behind.host.address})
            )
        for (member, _), answer in zip(orders, crew.call_each(orders), strict=True):
            if "unreachable" in answer:
                crew.cut_off(member, answer["unreachable"])
        crew.check()
        self.connected = True

    def close(self) -> None:
        """Let everybody go."""
        for member in self.crew.members:
            member.give_up()
        self.hosts.close()
