"""Records of choices: the experts, or the keys, of each token, stored beside its K and V, and replayed.

Keys are recorded for requests that ask for it only, as there are thousands of them for each token and layer.

A layer counts as routed if `flat_experts` runs its experts, and its choice can be replaced if its router is
of a known form (`router.py`). Layers are numbered in the order of their calls: dense layers
and shared experts have no number.

The record lies at the slots of K and V and is written in the same forward, so a cached prefix, a
forked block and a request that was evicted and computed again carry theirs without bookkeeping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from verbatim.batch import Choices
from verbatim.errors import NotSupported, OutOfBlocks
from verbatim.kv.flat import BlockStore


class RouterCall(NamedTuple):
    """One call of a routed layer."""

    module: int  # id of the experts module
    num_rows: int
    kind: tuple[int, int]  # experts of a token, and of the layer


UNKNOWN_ROUTER = "its router is of no form that is known here, so its choice can't be replaced"
_NONE = {
    "routing": "no layer of it sends its tokens to experts through transformers' experts interface",
    "indices": "no layer of it chooses its keys by an indexer",
}


def choices_of(name: str, kinds: Sequence[tuple[int, int]]) -> Choices:
    """Return the choices of layers of these kinds: `k` and `count` of `Choices`."""
    if not kinds:
        return Choices(reason=_NONE[name])
    if len(set(kinds)) == 1:
        return Choices(len(kinds), *kinds[0])
    if name == "routing":
        listed = ", ".join(f"{k} of {count}" for k, count in sorted(set(kinds)))
        return Choices(reason=f"its layers send a token to different numbers of experts ({listed})")
    listed = ", ".join(str(k) for k, _ in sorted(set(kinds)))
    return Choices(reason=f"its layers choose different numbers of keys ({listed})")


def indexed_layers_of(widths: list[int]) -> Choices:
    """Return the choices of indexers that each choose so many keys; 0 for one that chooses records."""
    if 0 in widths:
        return Choices(reason="its indexers choose records of windows, not keys")
    return choices_of("indices", [(width, 0) for width in widths])


def routed_layers_of(calls: list[RouterCall], num_rows: int) -> Choices:
    """Return the choices of the routed layers of a forward of `num_rows` tokens."""
    if any(call.num_rows != num_rows for call in calls):
        return Choices(reason="a layer of it sends only some of its tokens to experts")
    return choices_of("routing", [call.kind for call in calls])


def joined(name: str, parts: Sequence[Choices]) -> Choices:
    """Return the choices of a model in parts."""
    kinds = [(part.k, part.count) for part in parts for _ in range(part.layers)]
    reasons = {part.reason for part in parts} - {None, _NONE[name]}
    if reasons and len(set(kinds)) <= 1:
        return Choices(reason=next(iter(reasons)))
    replay_reason = next((p.replay_reason for p in parts if p.replay_reason), None)
    return replace(choices_of(name, kinds), replay_reason=replay_reason)


class ChoiceStore(BlockStore):
    """The choices for every token whose K and V are kept, `[block, token, layer, k]`.

    Memory is reserved when something is recorded first, and touched only where it is written: keys take more
    of it than K and V, and few requests record them.
    """

    token_axis = 1

    def __init__(self, choices: Choices, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._shape = (num_blocks, block_size, choices.layers, choices.k)
        self._dtype = choices.dtype
        self._ids: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """All choices.

        Raises:
            OutOfBlocks: there is no memory for them.
        """
        if self._ids is None:
            try:
                with torch.inference_mode(False):  # as for K and V
                    self._ids = torch.empty(self._shape, dtype=self._dtype)
            except RuntimeError:
                raise OutOfBlocks(
                    f"there is no memory for {self.nbytes} bytes of recorded choices, which have room for as "
                    "many tokens as K and V; choose a smaller kv_memory"
                ) from None
        return self._ids

    @property
    def nbytes(self) -> int:
        return math.prod(self._shape) * self._dtype.itemsize

    @property
    def tensors(self) -> list[Tensor]:
        """A tensor `[blocks, block_size, k]` for each layer, as for K and V; views of `ids`."""
        return [*self.ids.unbind(2)]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to)."""
        if copies and self._ids is not None:
            self.ids[[b for _, b in copies]] = self.ids[[a for a, _ in copies]]

    def write(self, slots: Tensor, ids: Tensor, layers: slice = slice(None)) -> None:
        """Put `ids` `[T, layers, k]`, or those of some layers, at `slots` `[T]`."""
        self.ids.flatten(0, 1)[slots.to(self.ids.device), layers] = ids.to(self.ids)

    def read(self, block_table: Sequence[int], num_tokens: int) -> Tensor:
        """Copy the first `num_tokens` tokens of a sequence: `[num_tokens, layers, k]`, int16 or int32."""
        blocks = list(block_table[: -(-num_tokens // self.block_size)])
        with torch.inference_mode(False):
            ids = self.ids[blocks].flatten(0, 1)[:num_tokens]
            return ids.short() if ids.dtype == torch.uint8 else ids


Records = Mapping[str, ChoiceStore]  # by `CHOICES`


def open_records(choices: Mapping[str, Choices], num_blocks: int, block_size: int) -> Records:
    """Open the stores for all that a model chooses."""
    return {
        name: ChoiceStore(made, num_blocks, block_size)
        for name, made in choices.items()
        if made.layers
    }


class Routing:
    """The routing of one forward: what each layer chose, and what it is made to choose.

    Args:
        layers: the routed layers of this model.
        modules: the id of each layer's experts module, in the order of the calls.
        num_rows: of the forward.
        forced: `[T, layers, k]`, the experts of each token in the order of its slots, -1 where the
            router is free; None leaves all of them free.
        device: where the forward runs.

    Attributes:
        chosen: `[T, layers, k]` int16, those layers filled that ran.
        forced: as given, int16 on `device`.
    """

    def __init__(
        self,
        layers: Choices,
        modules: Sequence[int],
        num_rows: int,
        forced: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self._modules = layers, modules
        shape = (num_rows, layers.layers, layers.k)
        with torch.inference_mode(False):  # whatever the caller has on: it is written to in place
            self.chosen = torch.empty(shape, dtype=torch.int16, device=device)
        self.forced = None
        if forced is not None:
            assert forced.shape == shape, (forced.shape, shape)
            assert int(forced.max()) < layers.count, int(forced.max())
            self.forced = forced.to(device, torch.int16).contiguous()
        self._done = 0  # layers

    @property
    def is_complete(self) -> bool:
        return self._done == self.layers.layers

    def forced_experts(self) -> Tensor | None:
        """Return the forced experts of the next layer, `[T, k]`."""
        if self.forced is None or self.is_complete:
            return None
        return self.forced[:, self._done]

    def note(self, experts: nn.Module, index: Tensor) -> None:
        """`experts` serve `index` `[T, k]`.

        Raises:
            NotSupported: the tokens go elsewhere than where they were to be sent.
        """
        if not self._is_next(experts):
            return  # a hook that calls a layer once more
        forced = self.forced_experts()
        if forced is not None and not torch.equal(torch.where(forced >= 0, forced, index), index):
            raise NotSupported(UNKNOWN_ROUTER)
        self.chosen[:, self._done] = index
        self._done += 1

    def addresses(self, experts: nn.Module) -> tuple[int | None, int | None, int]:
        """Return the addresses of the next layer's record and of its forced experts, and the row stride."""
        if not self._is_next(experts):
            return None, None, 0
        offset = 2 * self._done * self.layers.k
        self._done += 1
        forced = None if self.forced is None else self.forced.data_ptr() + offset
        return self.chosen.data_ptr() + offset, forced, self.chosen.stride(0)

    def all_addresses(self) -> tuple[int, int | None]:
        """Return `addresses` of all layers at once."""
        self._done = self.layers.layers
        return self.chosen.data_ptr(), None if self.forced is None else self.forced.data_ptr()

    def record(self) -> Tensor:
        """Return the experts of all layers, `[T, layers, k]`."""
        if not self.is_complete:
            raise NotSupported(
                f"{self._done} layers sent their tokens to experts in this forward, and "
                f"{self.layers.layers} when the model was opened, so the routing can't be recorded"
            )
        return self.chosen

    def _is_next(self, experts: nn.Module) -> bool:
        return not self.is_complete and id(experts) == self._modules[self._done]
