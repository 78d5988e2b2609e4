"""The stages of a model: their layers, memory and connections."""

from __future__ import annotations

from collections import Counter

from verbatim.batch import Adapter
from verbatim.errors import NotSupported
from verbatim.params import CHOICES
from verbatim.placement.distributed.choice import Cluster
from verbatim.placement.distributed.group import StageGroup, StageHandle
from verbatim.placement.distributed.hosts import Hosts
from verbatim.placement.distributed.plan import LayerSizes, Range
from verbatim.placement.distributed.wire import Message


class StageLine(StageGroup):
    """All stages of a model, in the order of their layers.

    Args:
        layout: of the model's layers.
        model: what a stage is told to open, without its range of layers.
        fingerprint: of the model's files here.

    Attributes:
        adapters: those that stages hold from their opening on, by number.
        epoch: raised whenever the stages are connected anew.
        connected: every stage has its connections in this epoch.
    """

    def __init__(
        self, hosts: Hosts, cluster: Cluster, layout: LayerSizes, model: Message, fingerprint: str
    ) -> None:
        super().__init__(
            hosts, patience_s=cluster.patience_s, step_timeout_s=cluster.step_timeout_s
        )
        self.layout = layout
        self.model = model
        self.epoch = 0
        self.connected = False
        self.adapters: dict[int, Adapter] = {}
        self._fingerprint = fingerprint
        self._blocks: Message | None = None  # what K and V were allocated with
        self._kv_bytes: dict[Range, int] = {}  # by layers

    def open(self, members: list[StageHandle], ranges: list[Range]) -> None:
        """Open the layers of each of these.

        Raises:
            StageGone: one is lost meanwhile.
            VerbatimError: the layers can't be had there, or the bits would differ.
        """
        orders: list[tuple[StageHandle, Message]] = []
        on = Counter(member.facts["machine"] for member in members)
        for member, (first, end) in zip(members, ranges, strict=True):
            member.first, member.end = first, end
            order: Message = {"do": "open", **self.model, "first": first, "end": end}
            order["memory"] = member.facts["memory"] // on[member.facts["machine"]]
            order["kv_bytes"] = self._kv_bytes.get((first, end))
            orders.append((member, {**order, "adapters": list(self.adapters.values())}))
        shapes = self.call_each(orders, patient=True, alone=True)
        for member, shape in zip(members, shapes, strict=True):
            member.shape = shape
            if shape["fingerprint"] != self._fingerprint:
                raise NotSupported(
                    f"{member.host.machine} has another model at {self.model['source'].model!r} than this "
                    "machine: all machines of a cluster need the same files"
                )
        keys = {m.shape["numerics_key"]: m for m in [*self.members, *members] if m.shape}
        if len(keys) > 1:
            (one, first_member), (other, second) = list(keys.items())[:2]
            raise NotSupported(
                f"{first_member.host.machine} computes by the numerics key {one} and "
                f"{second.host.machine} by {other}: their bits would differ"
            )

    def allocate(self, blocks: Message) -> None:
        """Allocate the KV memory of every stage.

        Args:
            blocks: `num_blocks`, `num_states` and `keep_bytes`.
        """
        self._blocks = blocks
        self.allocate_some(self.members, self.members)

    def allocate_some(self, members: list[StageHandle], line: list[StageHandle]) -> None:
        """Run `allocate` for some stages; `line` is all of them, in order."""
        assert self._blocks is not None
        orders: list[tuple[StageHandle, Message]] = []
        for member in members:
            before = line[: line.index(member)]
            first_of = {
                name: sum(other.shape["choices"][name].layers for other in before)
                for name in CHOICES
            }
            orders.append((member, {"do": "allocate", **self._blocks, "first_of": first_of}))
        answers = self.call_each(orders, patient=True, alone=True)
        for member, answer in zip(members, answers, strict=True):
            member.shape.update(answer)
            blocks, shape = self._blocks, member.shape
            size = self.model["options"].block_size
            nbytes = blocks["num_blocks"] * size * shape["kv_bytes_per_token"]
            nbytes += blocks["num_states"] * shape["state_bytes"]
            self._kv_bytes[member.first, member.end] = nbytes

    def connect(self) -> None:
        """Begin a new epoch: every stage closes its connections and gets new ones.

        Raises:
            StageGone: one is lost meanwhile.
        """
        self.connected = False
        self.epoch += 1
        for index, member in enumerate(self.members):
            member.index = index
        self.call_each(
            [
                (m, {"do": "epoch", "epoch": self.epoch, "index": m.index, "restarts": m.restarts})
                for m in self.members
            ]
        )
        self.reports()  # of the epoch before
        orders: list[tuple[StageHandle, Message]] = []
        for member, behind in zip(self.members, self.members[1:], strict=False):
            orders.append(
                (member, {"do": "link", "epoch": self.epoch, "next": behind.host.address})
            )
        for (member, _), answer in zip(orders, self.call_each(orders), strict=True):
            if "unreachable" in answer:
                self.cut_off(member, answer["unreachable"])
        self.check()
        self.connected = True

    def cut_off(self, member: StageHandle, why: object) -> StageHandle:
        """Mark the stage after this one as lost, because it can't be reached from there."""
        behind = self.members[member.index + 1]
        behind.lost = behind.lost or f"{member} can't reach it: {why}"
        return behind
