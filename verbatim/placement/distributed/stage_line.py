"""Opening of stages: their layers, memory and connections."""

from __future__ import annotations

from collections import Counter

from verbatim.batch import Adapter
from verbatim.errors import NotSupported
from verbatim.params import CHOICES
from verbatim.placement.distributed.group import StageGroup, StageHandle
from verbatim.placement.distributed.plan import LayerSizes, Range
from verbatim.placement.distributed.wire import Message


class StageOpener:
    """Gives processes layers and memory, and connects them.

    Args:
        layout: of the model's layers.
        model: what a stage is told to open, without its range of layers.
        fingerprint: of the model's files here.

    Attributes:
        adapters: those that stages hold from their opening on, by number.
        connected: every stage of the group has its connections in the group's epoch.
    """

    def __init__(
        self, group: StageGroup, layout: LayerSizes, model: Message, fingerprint: str
    ) -> None:
        self.group = group
        self.layout = layout
        self.model = model
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
        for member, shape in zip(members, self.group.ask_strangers(orders), strict=True):
            member.shape = shape
            if shape["fingerprint"] != self._fingerprint:
                raise NotSupported(
                    f"{member.host.machine} has another model at {self.model['source'].model!r} than this "
                    "machine: all machines of a cluster need the same files"
                )
        keys = {m.shape["numerics_key"]: m for m in [*self.group.members, *members] if m.shape}
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
        self.allocate_some(self.group.members, self.group.members)

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
        for member, answer in zip(members, self.group.ask_strangers(orders), strict=True):
            member.kept_blocks = answer["kept_blocks"]
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
        group = self.group
        self.connected = False
        group.epoch += 1
        for index, member in enumerate(group.members):
            member.index = index
        group.call_each(
            [
                (m, {"do": "epoch", "epoch": group.epoch, "index": m.index, "restarts": m.restarts})
                for m in group.members
            ]
        )
        group.reports()  # of the epoch before
        orders: list[tuple[StageHandle, Message]] = []
        for member, behind in zip(group.members, group.members[1:], strict=False):
            orders.append(
                (member, {"do": "link", "epoch": group.epoch, "next": behind.host.address})
            )
        for (member, _), answer in zip(orders, group.call_each(orders), strict=True):
            if "unreachable" in answer:
                group.cut_off(member, answer["unreachable"])
        group.check()
        self.connected = True
